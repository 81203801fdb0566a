"""The request log: one line per request, as JSON or as text. It never contains a body or a secret.

For the call, logging is only an append to a list. A separate thread formats and writes the lines. If the reader of the
log is too slow, lines are dropped and counted; calls never wait.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from queue import SimpleQueue
from typing import Any, TextIO

import msgspec

from carpool.core.model import Entry
from carpool.core.tracebacks import safe_traceback
from carpool.planners.ledger import dollars

GATHER_S = 0.05  # lines are handed to the thread in groups
MOST_WAITING = 100_000  # queued lines; more are dropped
LONGEST_MODEL = 18  # characters of its name in a text line
FAILED = 400  # lowest status of a failed request
LEFT = 499  # its client disconnected early

_ENCODER = msgspec.json.Encoder()
_KEY = re.compile(r"\b(sk|cpk|gsk|xai|csk|key)-[\w*.-]{6,}")
_QUOTED = re.compile(r"(?<!\w)'(?:[^']|(?<=\w)'(?=\w)){25,}'")  # an apostrophe inside a word is not a quotation mark


class LogLine(msgspec.Struct, omit_defaults=True):
    """The log line of one request, whether it became a call or not. Unknown fields are omitted."""

    at: float  # must be the first field, and a number: `as_json` relies on it
    ticket: str = ""
    provider: str = ""
    model: str = ""
    lane: str = ""
    reason: str = ""
    error: str = ""  # carpool's own error, if there is no response of the provider
    status: int = 0  # 499: the client disconnected early; 0: not logged yet
    duration_s: float = 0.0
    request: str = ""  # method and path, if it is not a call that carpool understood
    client: str = ""
    address: str = ""  # empty if local
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

    def bought(self, entry: Entry | None) -> LogLine:
        """Fills in usage and costs from the ledger entry."""
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


class LogEvent(msgspec.Struct):
    """The log line of an event: a call that starts to wait, a batch, and so on. `words` in text, `facts` in JSON."""

    at: float
    event: str
    words: str
    facts: Mapping[str, Any]


Note = Callable[[LogLine], None]
Tell = Callable[[LogEvent], None]
Noted = LogLine | LogEvent


class LogWriter:
    """Accepts lines on the event loop and writes them in a thread."""

    def __init__(self, write: Callable[[str], object], words: Callable[[Noted], str]) -> None:
        self._write = write
        self._format = words
        self._pending: list[Noted] = []
        self._queue: SimpleQueue[list[Noted] | None] = SimpleQueue()
        self._waiting = 0
        self.dropped = 0
        self._thread = threading.Thread(target=self._write_lines, name="carpool-log", daemon=True)
        self._thread.start()

    def note(self, line: Noted) -> None:
        if self._waiting + len(self._pending) >= MOST_WAITING:
            self.dropped += 1
            return
        self._pending.append(line)
        if len(self._pending) == 1:
            asyncio.get_running_loop().call_later(GATHER_S, self._hand_over)

    def _hand_over(self) -> None:
        lines, self._pending = self._pending, []
        if lines:
            self._waiting += len(lines)
            self._queue.put(lines)

    def _write_lines(self) -> None:
        while (lines := self._queue.get()) is not None:
            try:
                self._write("".join(map(self._format, lines)))
            except (OSError, ValueError):  # the reader is gone; calls continue
                self.dropped += len(lines)
            self._waiting -= len(lines)

    def close(self, timeout: float = 1.0) -> None:
        """Writes the remaining lines, within the timeout."""
        self._hand_over()
        self._queue.put(None)
        self._thread.join(timeout)


def to_stream(stream: TextIO) -> Callable[[str], object]:
    def write(text: str) -> None:
        stream.write(text)
        stream.flush()

    return write


# ------------------------------------------------------------ formatting


def as_json(line: Noted) -> str:
    if isinstance(line, LogEvent):
        return _ENCODER.encode({"event": line.event, "at": moment(line.at), **line.facts}).decode() + "\n"
    _, _, rest = _ENCODER.encode(line).decode().partition(",")  # the time is the first field
    return f'{{"event":"call","at":"{moment(line.at)}",{rest}\n'


def as_text(line: Noted, width: int | None = None) -> str:
    """The important fields come first and fit 80 columns. The line of a success is cut at `width`, which drops
    provider, tags and reason; the line of a failure is never cut, since it ends with what went wrong."""
    failed = isinstance(line, LogLine) and line.status >= FAILED and (line.status != LEFT or line.error)
    text = _printable(_request_text(line) if isinstance(line, LogLine) else f"{clock_time(line.at)} ... {line.words}")
    if width is not None and len(text) > width and not failed:
        text = text[: width - 1] + "…"
    return text + "\n"


def _request_text(line: LogLine) -> str:
    parts = [clock_time(line.at + line.duration_s), str(line.status), f"{line.lane or '-':<5}"]
    parts += [line.request or shortened(line.model), _seconds(line.duration_s)]
    if line.input_tokens is not None:
        parts.append(f"{_all_input_tokens(line)}+{line.output_tokens} tok")
    if line.cost_usd is not None:
        parts.append(dollars(round(line.cost_usd * 1e9)))
    parts += [line.ticket, line.provider, *(f"{name}={value}" for name, value in line.tags.items())]
    why = line.error or line.reason
    return " ".join([part for part in parts if part] + ([f"({why})"] if why else []))


def shortened(model: str) -> str:
    """A model name, shortened for a text line."""
    return model if len(model) <= LONGEST_MODEL else model[: LONGEST_MODEL - 1] + "…"


def _seconds(span: float) -> str:
    return f"{span:.2f}s" if span < 10 else f"{span:.0f}s"


def _all_input_tokens(line: LogLine) -> int:
    return (line.input_tokens or 0) + (line.cache_read_tokens or 0) + (line.cache_write_tokens or 0)


def redacted(text: str) -> str:
    """A message or a path without possible secrets: what looks like a key, and long quotations."""
    return _QUOTED.sub("'…'", _KEY.sub(r"\1-…", text))


def _printable(text: str) -> str:
    """Replaces unprintable characters: tags and models come from clients, and must not break lines or terminals."""
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in text)


def moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def clock_time(at: float) -> str:
    """In local time."""
    return _clock(int(at))


@lru_cache(maxsize=4)  # lines of the same second share it
def _clock(at: int) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%H:%M:%S")


class JsonFormatter(logging.Formatter):
    """Formats the warnings of the process like the other lines."""

    def format(self, record: logging.LogRecord) -> str:
        event, facts = getattr(record, "event", "log"), getattr(record, "facts", {})
        fields = {"event": event, "at": moment(record.created), "level": record.levelname.lower(), **facts}
        if record.exc_info and record.exc_info[1] is not None:
            fields["trace"] = safe_traceback(record.exc_info[1])
        return msgspec.json.encode({**fields, "logger": record.name, "message": record.getMessage()}).decode()
