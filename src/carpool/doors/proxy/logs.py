"""One line a call, as JSON or as text: what it was, which way it took, what became of it. Never a body or a secret.

A line costs its call no more than a place in a list. A thread of its own puts lines into words and writes them; when
whoever reads them is too slow, lines are dropped and counted, and no call waits.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from queue import SimpleQueue
from typing import TextIO

import msgspec

from carpool.crashes import told
from carpool.ledger import dollars
from carpool.model import Entry

GATHER_S = 0.05  # lines of one moment are handed over together
MOST_WAITING = 100_000  # lines, before they are dropped


_ENCODER = msgspec.json.Encoder()


class Line(msgspec.Struct, omit_defaults=True):
    """What is said of one call. Tokens and money stand there when they are known."""

    at: float  # first, and a number: `as_json` counts on it
    ticket: str
    provider: str
    model: str
    lane: str
    reason: str
    status: int  # 499: its client left before the answer
    duration_s: float
    client: str
    address: str = ""  # empty on this machine
    bytes_in: int = 0
    bytes_out: int = 0
    batch: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_tokens: int | None = None
    cache_write_tokens: int | None = None
    cost_usd: float | None = None
    saved_usd: float | None = None
    tags: Mapping[str, str] = {}

    def bought(self, entry: Entry | None) -> Line:
        """Completed from the ledger."""
        if entry is None:
            return self
        if (usage := entry.usage) is not None:
            self.input_tokens, self.output_tokens = usage.input_tokens, usage.output_tokens
            self.cache_read_tokens = usage.cache_read_tokens
            self.cache_write_tokens = usage.cache_write_5m_tokens + usage.cache_write_1h_tokens
        if entry.paid is not None:
            self.cost_usd = entry.paid / 1e9
            if entry.would_have_paid is not None:
                self.saved_usd = (entry.would_have_paid - entry.paid) / 1e9
        return self


class Journal:
    """Takes lines on the event loop, and writes them from a thread."""

    def __init__(self, write: Callable[[str], object], words: Callable[[Line], str]) -> None:
        self._write = write
        self._words = words
        self._gathered: list[Line] = []
        self._queue: SimpleQueue[list[Line] | None] = SimpleQueue()
        self._waiting = 0
        self.dropped = 0
        self._thread = threading.Thread(target=self._work, name="carpool-log", daemon=True)
        self._thread.start()

    def note(self, line: Line) -> None:
        if self._waiting + len(self._gathered) >= MOST_WAITING:
            self.dropped += 1
            return
        self._gathered.append(line)
        if len(self._gathered) == 1:
            asyncio.get_running_loop().call_later(GATHER_S, self._hand_over)

    def _hand_over(self) -> None:
        lines, self._gathered = self._gathered, []
        if lines:
            self._waiting += len(lines)
            self._queue.put(lines)

    def _work(self) -> None:
        while (lines := self._queue.get()) is not None:
            try:
                self._write("".join(map(self._words, lines)))
            except (OSError, ValueError):  # whoever read them is gone; the calls go on
                self.dropped += len(lines)
            self._waiting -= len(lines)

    def close(self, timeout: float = 1.0) -> None:
        """Writes what is left, as far as somebody reads it."""
        self._hand_over()
        self._queue.put(None)
        self._thread.join(timeout)


def to_stream(stream: TextIO) -> Callable[[str], object]:
    def write(text: str) -> None:
        stream.write(text)
        stream.flush()

    return write


# ------------------------------------------------------------ words


def as_json(line: Line) -> str:
    _, _, rest = _ENCODER.encode(line).decode().partition(",")  # the time stands first
    return f'{{"event":"call","at":"{_moment(line.at)}",{rest}\n'


def as_text(line: Line) -> str:
    parts = [_clock(int(line.at)), str(line.status), f"{line.lane:<5}", line.provider, line.model]
    parts.append(f"{line.duration_s:.3f}s")
    if line.input_tokens is not None:
        parts.append(f"{_input(line)}+{line.output_tokens} tokens")
    if line.cost_usd is not None:
        parts.append(dollars(round(line.cost_usd * 1e9)))
    parts += [line.ticket, *(f"{name}={value}" for name, value in line.tags.items())]
    return _plain(" ".join(part for part in parts if part)) + f" ({_plain(line.reason)})\n"


def _input(line: Line) -> int:
    return (line.input_tokens or 0) + (line.cache_read_tokens or 0) + (line.cache_write_tokens or 0)


def _plain(text: str) -> str:
    """A tag or a model is a client's word: it must not end the line or paint the terminal."""
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in text)


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


@lru_cache(maxsize=4)  # the lines of a second share their time
def _clock(at: int) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%H:%M:%S")


class JsonFormatter(logging.Formatter):
    """Warnings of the process, in the form of the other lines."""

    def format(self, record: logging.LogRecord) -> str:
        said = {"event": "log", "at": _moment(record.created), "level": record.levelname.lower()}
        if record.exc_info and record.exc_info[1] is not None:
            said["trace"] = told(record.exc_info[1])
        return msgspec.json.encode({**said, "logger": record.name, "message": record.getMessage()}).decode()
