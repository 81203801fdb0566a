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

from carpool.core.errors import safe_traceback
from carpool.core.model import Entry
from carpool.engine import Event
from carpool.engine.events import (
    AccountSlowed,
    BatchAbandoned,
    BatchCollected,
    BatchEnded,
    BatchFound,
    BatchLate,
    BatchLost,
    BatchRefused,
    BatchSubmitted,
    BatchUnknown,
    BreakerClosed,
    BreakerOpened,
    CallAdmitted,
    CallRescued,
    CallSettled,
    FailureRateHigh,
    RetentionNear,
    Trouble,
    TroubleBegan,
    TroubleOver,
)
from carpool.planners.ledger import dollars

GATHER_S = 0.05  # lines are handed to the thread in groups
MOST_WAITING = 100_000  # queued lines; more are dropped
LONGEST_MODEL = 18  # characters of its name in a text line
FAILED = 400  # lowest status of a failed request
CLIENT_LEFT = 499  # its client disconnected early

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

    def ended(self, now: float, status: int, entry: Entry | None, size: int) -> LogLine:
        """Completes the line of a call, with usage and costs from its ledger entry."""
        self.status, self.bytes_out, self.duration_s = status, size, now - self.at
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
    failed = isinstance(line, LogLine) and line.status >= FAILED and (line.status != CLIENT_LEFT or line.error)
    text = _request_text(line) if isinstance(line, LogLine) else f"{clock_time(line.at)} ... {line.words}"
    if not text.isprintable():  # tags and models come from clients, and must not break lines or terminals
        text = "".join(letter if letter.isprintable() else "?" for letter in text)
    if width is not None and len(text) > width and not failed:
        text = text[: width - 1] + "…"
    return text + "\n"


def _request_text(line: LogLine) -> str:
    parts = [clock_time(line.at + line.duration_s), str(line.status), f"{line.lane or '-':<5}"]
    parts += [line.request or shortened(line.model), f"{line.duration_s:.{2 if line.duration_s < 10 else 0}f}s"]
    if line.input_tokens is not None:
        read = line.input_tokens + (line.cache_read_tokens or 0) + (line.cache_write_tokens or 0)
        parts.append(f"{read}+{line.output_tokens} tok")
    if line.cost_usd is not None:
        parts.append(dollars(round(line.cost_usd * 1e9)))
    parts += [line.ticket, line.provider, *(f"{name}={value}" for name, value in line.tags.items())]
    why = line.error or line.reason
    return " ".join([part for part in parts if part] + ([f"({why})"] if why else []))


def shortened(model: str) -> str:
    """A model name, shortened for a text line."""
    return model if len(model) <= LONGEST_MODEL else model[: LONGEST_MODEL - 1] + "…"


def redacted(text: str) -> str:
    """A message or a path without possible secrets: what looks like a key, and long quotations."""
    return _QUOTED.sub("'…'", _KEY.sub(r"\1-…", text))


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


# ------------------------------------------------------------ engine events


upstream_log = logging.getLogger("carpool.upstream")

Words = Mapping[type[Event], tuple[str, Callable[[Any], str]]]

WAITING = "waiting"
# Logged elsewhere: calls have lines of their own, and single attempts are part of the trouble they belong to.
UNTOLD = frozenset({CallAdmitted, CallSettled, BatchRefused, BreakerOpened, BreakerClosed, Trouble})


def waiting(line: LogLine, deadline: float | None) -> LogEvent:
    """The line of a call that starts to wait for its batch."""
    until = "" if deadline is None else f" until {clock_time(deadline)}"
    facts: dict[str, Any] = {name: getattr(line, name) for name in ("ticket", "provider", "model", "lane", "reason")}
    facts |= {"client": line.client, "tags": line.tags}
    if deadline is not None:
        facts["deadline"] = moment(deadline)
    text = f"{line.lane:<5} {shortened(line.model)} waits{until} {line.ticket} {line.provider} ({line.reason})"
    return LogEvent(line.at, WAITING, text, facts)


def span(seconds: float) -> str:
    """`3m12s`"""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m{rest:02}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02}m"


class EventLogger:
    """A hook of the engine. Logs an unknown event by its name and fields."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def __call__(self, event: Event) -> None:
        kind = type(event)
        if kind in UNTOLD:
            return
        if kind in WARNED:
            name, describe = WARNED[kind]
            upstream_log.warning("%s", redacted(describe(event)), extra={"event": name, "facts": _facts(event)})
            return
        name, describe = HAPPENINGS.get(kind, (_event_name(kind), _generic_text))
        self._tell(LogEvent(event.at, name, redacted(describe(event)), _facts(event)))


def _facts(event: Event) -> dict[str, Any]:
    fields = msgspec.to_builtins(event)
    del fields["at"]
    fields["credential"] = event.credential[:8]
    return {name: redacted(value) if isinstance(value, str) else value for name, value in fields.items() if value != ""}


def _event_name(kind: type[Event]) -> str:
    """`BatchMislaid` is `batch_mislaid`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()


def _generic_text(event: Event) -> str:
    return " ".join([_event_name(type(event)), *(f"{name}={value}" for name, value in _facts(event).items())])


def _calls(count: int) -> str:
    return f"{count:,} call" if count == 1 else f"{count:,} calls"


def _collected(event: BatchCollected) -> str:
    results = ", ".join(f"{count:,} {name}" for name, count in event.results.items()) or "nothing"
    return f"batch {event.batch} collected: {results}"


def _rescued(event: CallRescued) -> str:
    batch = "" if event.batch is None else f" of batch {event.batch}"
    return f"rescued {event.ticket}{batch} ({event.reason})"


HAPPENINGS: Words = {
    BatchSubmitted: ("bought", lambda e: f"batch {e.batch} bought: {_calls(e.count)}, {e.provider_id}"),
    BatchFound: ("found", lambda e: f"batch {e.batch} found, {e.state}: {_calls(e.count)} {e.provider_id}"),
    BatchLate: ("late", lambda e: f"batch {e.batch} late: what presses goes on now, {e.provider_id}"),
    BatchEnded: ("ended", lambda e: f"batch {e.batch} ended after {span(e.took_s)}, {e.provider_id}"),
    BatchCollected: ("collected", _collected),
    CallRescued: ("rescued", _rescued),
    AccountSlowed: ("slowed", lambda e: f"{e.provider} asks for less ({e.status}): {e.model} waits {e.pause_s:.1f}s"),
}


def _began(event: TroubleBegan) -> str:
    since, why = clock_time(event.since), event.reason.rstrip(".")
    tries = f", {event.tries} tries" if event.tries > 1 else ""
    who = event.provider or "carpool"
    what = f"{who}: {event.doing} fails" if event.doing else f"{who} can't be reached"
    then = event.then or "It is tried again."
    return f"{what} since {since}{tries}: {why}. {then}"


def _recovered(event: TroubleOver) -> str:
    tries = f"{event.tries} tries" if event.tries > 1 else "1 try"
    who, lasted = event.provider or "carpool", span(event.at - event.since)
    what = f"{who}: {event.doing} works again" if event.doing else f"{who} can be reached again"
    return f"{what} after {lasted}, {tries}."


def _unknown(event: BatchUnknown) -> str:
    return (
        f"batch {event.batch} with {_calls(event.count)} may have been bought, or not: {event.reason.rstrip('.')}. "
        "carpool looks for it at the provider before anything is bought again."
    )


def _abandoned(event: BatchAbandoned) -> str:
    return f"batch {event.batch} is given up: {event.reason.rstrip('.')}. Its calls ({event.count:,}) go elsewhere."


def _lost(event: BatchLost) -> str:
    lost = f"batch {event.batch} ({event.provider_id}) is lost: {event.reason.rstrip('.')}"
    return f"{lost}. {_calls(event.count)} of it {'is' if event.count == 1 else 'are'} bought again."


def _retention(event: RetentionNear) -> str:
    return (
        f"batch {event.batch} ({event.provider_id}) is not collected, and the provider drops it on "
        f"{moment(event.drops_at)}. Where its key is missing here, let its client call again."
    )


def _failures(event: FailureRateHigh) -> str:
    return f"{event.rate:.0%} of the {_calls(event.calls)} of a batch failed, more than {event.limit:.0%}."


WARNED: Words = {
    TroubleBegan: ("trouble", _began),
    TroubleOver: ("recovered", _recovered),
    BatchUnknown: ("unknown", _unknown),
    BatchAbandoned: ("abandoned", _abandoned),
    BatchLost: ("lost", _lost),
    RetentionNear: ("retention", _retention),
    FailureRateHigh: ("failures", _failures),
}
