"""Engine events as log lines: batches go to the request log, problems to standard error."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

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
from carpool.frontends.proxy.log import LogEvent, LogLine, Tell, clock_time, moment, redacted, shortened

log = logging.getLogger("carpool.upstream")

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
            log.warning("%s", redacted(describe(event)), extra={"event": name, "facts": _facts(event)})
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


def _results(event: BatchCollected) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in event.results.items()) or "nothing"


def _rescued(event: CallRescued) -> str:
    batch = "" if event.batch is None else f" of batch {event.batch}"
    return f"rescued {event.ticket}{batch} ({event.reason})"


HAPPENINGS: Words = {
    BatchSubmitted: ("bought", lambda e: f"batch {e.batch} bought: {_calls(e.count)}, {e.provider_id}"),
    BatchFound: ("found", lambda e: f"batch {e.batch} found, {e.state}: {_calls(e.count)} {e.provider_id}"),
    BatchLate: ("late", lambda e: f"batch {e.batch} late: what presses goes on now, {e.provider_id}"),
    BatchEnded: ("ended", lambda e: f"batch {e.batch} ended after {span(e.took_s)}, {e.provider_id}"),
    BatchCollected: ("collected", lambda e: f"batch {e.batch} collected: {_results(e)}"),
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
    return f"{lost}. {_calls(event.count)} of it are bought again."


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
