"""The log: one line per request, and one per event of the engine, as JSON or as text. It never contains a body or a
secret. `RequestLog` completes the line of a request and hands it over once, when the request ends.

For the call, logging is only an append to a list. A separate thread formats and writes the lines. If the reader of the
log is too slow, lines are dropped and counted; calls never wait.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from queue import SimpleQueue
from typing import Any, TextIO

import msgspec

from carpool.core.errors import CarpoolError, Closed, safe_traceback
from carpool.core.model import Entry
from carpool.core.ports import Clock
from carpool.dialects.keep_alive import Client, recognise
from carpool.engine import Event, StreamedResponse, events
from carpool.frontends.proxy.http.responses import Disconnected, RequestRefused
from carpool.frontends.proxy.parse_head import CALLS, PREFIX, Scope, request_headers
from carpool.planners.access.providers import Hosts
from carpool.planners.ledger import dollars

GATHER_S = 0.05  # lines are handed to the thread in groups
MAX_WAITING = 100_000  # queued lines; more are dropped
LONGEST_MODEL = 18  # characters of its name in a text line
LONGEST_PATH = 100  # characters of it
FAILED = 400  # lowest status of a failed request
CLIENT_LEFT = 499  # its client disconnected early
CRASHED = 500  # the server's status after an exception in the application

_KEY = re.compile(r"\b(sk|cpk|gsk|xai|csk|key)-[\w*.-]{6,}")
_OPTIONS = re.compile(r"^/@[^/]*")
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


class LogEvent(msgspec.Struct):
    """The log line of an event: a call that starts to wait, a batch, and so on. `words` in text, `facts` in JSON."""

    at: float
    event: str
    words: str
    facts: Mapping[str, Any]


Note = Callable[[LogLine], None]
WriteLogEvent = Callable[[LogEvent], None]
Noted = LogLine | LogEvent


def no_log(line: Noted) -> None:
    """For a proxy without a log."""


class RequestLog:
    """Logs every request once: as a call, or as refused, passed through, or abandoned by its client."""

    def __init__(self, clock: Clock, hosts: Hosts, note: Note) -> None:
        self._clock = clock
        self._hosts = hosts
        self._note = note

    def begin(self, scope: Scope) -> LogLine:
        """The line of a request, which the code that answers it completes."""
        return LogLine(at=self._clock.now(), request=_shown(scope["method"], scope["raw_path"]))

    def ended(
        self, line: LogLine, scope: Scope, sent: int, error: CarpoolError | RequestRefused | Disconnected | None
    ) -> None:
        """Logs the request unless its line is logged already. `sent` is the status of the response, if it had begun."""
        if line.status:
            return
        line.status = sent or CRASHED
        if isinstance(error, Disconnected):
            line.status = CLIENT_LEFT
        elif error is not None:
            line.status, line.error = sent or error.status, str(error)
        # Of carpool's own pages, which are polled all the time, only refusals and `/carpool/calls/` are logged.
        path = _bare(scope["raw_path"])
        if not path.startswith(PREFIX) or path.startswith(CALLS) or 400 <= line.status < CLIENT_LEFT:
            address = self._hosts.client(scope.get("client"), scope["headers"])
            self._write(line, recognise(request_headers(scope["headers"])), address)

    def call_ended(self, line: LogLine, status: int, entry: Entry | None = None, size: int = 0) -> None:
        """Completes the line of a call, with usage and costs from its ledger entry, and logs it."""
        line.status, line.bytes_out, line.duration_s = status, size, self._clock.now() - line.at
        if entry is not None:
            if (usage := entry.usage) is not None:
                line.input_tokens, line.output_tokens = usage.input_tokens, usage.output_tokens
                line.cache_read_tokens = usage.cache_read_tokens
                line.cache_write_tokens = usage.cache_write_5m_tokens + usage.cache_write_1h_tokens
            if entry.paid is not None:
                line.cost_usd = entry.paid / 1e9
                if entry.would_have_paid is not None:
                    line.saved_usd = (entry.would_have_paid - entry.paid) / 1e9
        self._note(line)

    def call_failed(
        self, line: LogLine, error: BaseException, left: bool, streamed: StreamedResponse | None = None
    ) -> None:
        """Logs a call without a complete response: client disconnected (`left`), carpool shutting down, or provider
        unreachable. `streamed` is the response, if it had begun."""
        status = CLIENT_LEFT if left else Closed.status
        if isinstance(error, CarpoolError):
            line.error, status = redacted(str(error)), error.status
        if streamed is None:
            self.call_ended(line, status)
        else:
            chunks = streamed.chunks
            self.call_ended(line, streamed.status if chunks.answered else status, chunks.entry, chunks.size)

    def left(
        self, method: str, path: str, provider: str, client: Client, address: str, refused: RequestRefused | None
    ) -> None:
        """The client disconnected, or was refused, before the request was complete."""
        line = LogLine(at=self._clock.now(), request=_shown(method, path.encode("latin-1")), provider=provider)
        line.status = CLIENT_LEFT if refused is None else refused.status
        line.error = "" if refused is None else str(refused)
        self._write(line, client, address)

    def refused(
        self,
        refused: RequestRefused,
        method: str,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        peer: tuple[str, int] | None,
    ) -> None:
        """The server refused the request itself. Logs as much of it as was read."""
        at, shown = self._clock.now(), _shown(method, target)
        line = LogLine(at=at, request=shown, status=refused.status, error=str(refused))
        self._write(line, recognise(request_headers(headers)), self._hosts.client(peer, headers))

    def _write(self, line: LogLine, client: Client, address: str) -> None:
        line.client = f"{client.kind} {client.name}".rstrip()
        line.address = address
        line.error = redacted(line.error)
        line.duration_s = self._clock.now() - line.at
        self._note(line)


def _shown(method: str, target: bytes) -> str:
    """Method and path, without the query and the leading options, which may be private."""
    return redacted(f"{method} {_bare(target)[:LONGEST_PATH]}".strip()) or "?"


def _bare(target: bytes) -> str:
    return _OPTIONS.sub("", target.decode("latin-1").partition("?")[0])


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
        if self._waiting + len(self._pending) >= MAX_WAITING:
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
        return msgspec.json.encode({"event": line.event, "at": moment(line.at), **line.facts}).decode() + "\n"
    _, _, rest = msgspec.json.encode(line).decode().partition(",")  # the time is the first field
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


# ------------------------------------------------------------ events


upstream_log = logging.getLogger("carpool.upstream")

WAITING = "waiting"


def waiting(line: LogLine, deadline: float | None) -> LogEvent:
    """The line of a call that starts to wait for its batch."""
    until = "" if deadline is None else f" until {clock_time(deadline)}"
    names = ("ticket", "provider", "model", "lane", "reason", "client", "tags")
    facts: dict[str, Any] = {name: getattr(line, name) for name in names}
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
    """A hook of the engine."""

    def __init__(self, write_event: WriteLogEvent) -> None:
        self._write_event = write_event

    def __call__(self, event: Event) -> None:
        kind = type(event)
        if kind in NOT_LOGGED:
            return
        name, describe = DESCRIBED.get(kind) or WARNED[kind]
        words, fields = redacted(describe(event)), msgspec.to_builtins(event)
        del fields["at"]
        fields["credential"] = event.credential[:8]
        facts = {key: redacted(value) if isinstance(value, str) else value for key, value in fields.items()}
        facts = {key: value for key, value in facts.items() if value != ""}
        if kind in WARNED:
            upstream_log.warning("%s", words, extra={"event": name, "facts": facts})
        else:
            self._write_event(LogEvent(event.at, name, words, facts))


def _calls(count: int) -> str:
    return f"{count:,} call" if count == 1 else f"{count:,} calls"


def _collected(event: events.BatchCollected) -> str:
    results = ", ".join(f"{count:,} {name}" for name, count in event.results.items()) or "nothing"
    return f"batch {event.batch} collected: {results}"


def _rescued(event: events.CallRescued) -> str:
    batch = "" if event.batch is None else f" of batch {event.batch}"
    return f"rescued {event.ticket}{batch} ({event.reason})"


def _began(event: events.TroubleBegan) -> str:
    since, why = clock_time(event.since), event.reason.rstrip(".")
    tries = f", {event.tries} tries" if event.tries > 1 else ""
    who = event.provider or "carpool"
    what = f"{who}: {event.doing} fails" if event.doing else f"{who} can't be reached"
    return f"{what} since {since}{tries}: {why}. {event.then or 'It is tried again.'}"


def _recovered(event: events.TroubleOver) -> str:
    tries = f"{event.tries} tries" if event.tries > 1 else "1 try"
    who, lasted = event.provider or "carpool", span(event.at - event.since)
    what = f"{who}: {event.doing} works again" if event.doing else f"{who} can be reached again"
    return f"{what} after {lasted}, {tries}."


def _unknown(event: events.BatchUnknown) -> str:
    return (
        f"batch {event.batch} with {_calls(event.count)} may have been bought, or not: {event.reason.rstrip('.')}. "
        "carpool looks for it at the provider before anything is bought again."
    )


def _lost(event: events.BatchLost) -> str:
    lost = f"batch {event.batch} ({event.provider_id}) is lost: {event.reason.rstrip('.')}"
    return f"{lost}. {_calls(event.count)} of it {'is' if event.count == 1 else 'are'} bought again."


def _abandoned(event: events.BatchAbandoned) -> str:
    return f"batch {event.batch} is given up: {event.reason.rstrip('.')}. Its calls ({event.count:,}) go elsewhere."


def _retention(event: events.RetentionNear) -> str:
    return (
        f"batch {event.batch} ({event.provider_id}) is not collected, and the provider drops it on "
        f"{moment(event.drops_at)}. Where its key is missing here, let its client call again."
    )


def _failures(event: events.FailureRateHigh) -> str:
    return f"{event.rate:.0%} of the {_calls(event.calls)} of a batch failed, more than {event.limit:.0%}."


def _slowed(event: events.AccountSlowed) -> str:
    return f"{event.provider} asks for less ({event.status}): {event.model} waits {event.pause_s:.1f}s"


Words = Mapping[type[Event], tuple[str, Callable[[Any], str]]]

DESCRIBED: Words = {
    events.BatchSubmitted: ("bought", lambda e: f"batch {e.batch} bought: {_calls(e.count)}, {e.provider_id}"),
    events.BatchFound: ("found", lambda e: f"batch {e.batch} found, {e.state}: {_calls(e.count)} {e.provider_id}"),
    events.BatchLate: ("late", lambda e: f"batch {e.batch} late: urgent calls go now, {e.provider_id}"),
    events.BatchEnded: ("ended", lambda e: f"batch {e.batch} ended after {span(e.took_s)}, {e.provider_id}"),
    events.BatchCollected: ("collected", _collected),
    events.CallRescued: ("rescued", _rescued),
    events.AccountSlowed: ("slowed", _slowed),
}
WARNED: Words = {
    events.TroubleBegan: ("trouble", _began),
    events.TroubleOver: ("recovered", _recovered),
    events.BatchUnknown: ("unknown", _unknown),
    events.BatchAbandoned: ("abandoned", _abandoned),
    events.BatchLost: ("lost", _lost),
    events.RetentionNear: ("retention", _retention),
    events.FailureRateHigh: ("failures", _failures),
}
# Logged elsewhere: calls have separate lines, and single attempts are part of the trouble they belong to.
NOT_LOGGED = frozenset({events.CallAdmitted, events.CallSettled, events.BatchRefused, events.Trouble})
NOT_LOGGED |= {events.BreakerOpened, events.BreakerClosed}
