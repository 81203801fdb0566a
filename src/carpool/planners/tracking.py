"""Plan what to do about batches that were bought or may have been bought. Pure: no I/O, no clock.

Rescue. Every call with a deadline has a rescue time: the deadline minus a synchronous call and a margin. At that time
it is resent on `now`, whatever its batch does. If *every* open call of a batch has to be rescued, the batch is
cancelled `cancel_seconds` before the last of them, because calls that it has not processed by then are not billed. Once
a batch has ended its results are being downloaded, so its calls get some extra time. With a `sync_rpm`, rescues start
early enough that the last one is still sent in time at that rate.

Suspects. A create whose outcome is unknown (crash, timeout, 5xx) may have been bought. A listed batch with our nonce is
ours. Where the list shows no nonce, a batch with the same number of calls and a creation time within the clock slack is
a *suspect*: it is watched, never cancelled, and its results prove or disprove that it is ours. Without any suspect the
create is abandoned after `grace`. An abandoned batch is watched for a day more, because late proof still has to be
entered in the ledger.

Denials. A provider may answer 404 or 410 for a batch that it sold, for example right after the purchase or during an
outage. That is believed only after `DENIALS_TO_BELIEVE` denials in a row over at least `DOUBT_S` seconds (`Denials`);
the engine also requires that the provider's list is available and does not show the batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from carpool.core.lifecycle import BatchState, TicketState
from carpool.core.model import Batch, Due, Lane, OpenCalls, TicketView
from carpool.core.ports import BatchReport
from carpool.planners.policy import RoutingPolicy
from carpool.planners.poll_pace import QUICK
from carpool.planners.routing import RESCUE_MARGIN

GRACE_CAP: Final = 30.0  # the longest time that the calls of an ended batch wait for their results
CLOCK_SLACK: Final = 60.0  # tolerance for the provider's clock
WATCH: Final = 86_400.0  # how long an abandoned batch is watched
UNRESOLVED_PACE: Final = 15.0  # the longest interval between lists while the outcome of a create is unknown
WATCH_PACE: Final = 300.0  # the first interval between polls of an abandoned batch
WATCH_SLACK: Final = 3_600.0  # a suspect created at the last moment ends a little after its day
RETRY_ROOM: Final = 120.0  # with less time left, another batch is not tried

# ---------------------------------------------------------------- rescue


@dataclass(frozen=True, slots=True)
class RescuePlan:
    cancel: bool
    resend: tuple[int, ...]  # tickets to send on `now` at once, the most urgent first
    wake: float | None


def rescue_plan(
    batch: Batch, due: Sequence[Due], open_calls: OpenCalls, now: float, cancel_seconds: float, *, early: float = 0.0
) -> RescuePlan:
    """Plan cancels and rescues for a batch. `due` are the calls that come due within `cancel_seconds`; `early` moves
    every rescue forward (see `early_start`)."""
    times = sorted((_resend_at(batch, call) - early, call.ticket) for call in due)
    resend = tuple(ticket for at, ticket in times if at <= now)
    cancel_at = _cancel_at(batch, open_calls, cancel_seconds + early)
    cancel = cancel_at is not None and cancel_at <= now
    later = [at for at, _ in times if at > now]
    if cancel_at is not None and not cancel:
        later.append(cancel_at)
    return RescuePlan(cancel, resend, min(later, default=None))


def _resend_at(batch: Batch, call: Due) -> float:
    if batch.state is not BatchState.ENDED:
        return call.rescue_at
    # The response is paid for and being downloaded. A download is faster than a new request, so it gets half of the
    # time that was reserved for the new request, and never goes past the deadline.
    if call.deadline is None:
        return call.rescue_at + RESCUE_MARGIN
    grace = min(GRACE_CAP, max(RESCUE_MARGIN, (call.deadline - call.rescue_at) / 2))
    return min(call.rescue_at + grace, call.deadline)


def _cancel_at(batch: Batch, open_calls: OpenCalls, lead: float) -> float | None:
    """When to cancel the batch; None when it can't be cancelled, or some call can still wait for it."""
    if batch.state is not BatchState.OPEN or open_calls.count == 0 or open_calls.unpressed > 0:
        return None
    return None if open_calls.latest_rescue is None else open_calls.latest_rescue - lead


def early_start(due_times: Sequence[float], now: float, sync_rpm: float | None) -> float:
    """When to start rescuing so that all of these rescues are sent in time, one after the other at this rate.

    Without a rate that is the time of the first rescue. Never before `now`; infinite when there are none.
    """
    gap = 0.0 if sync_rpm is None else 60 / sync_rpm
    latest = min((at - gap * ahead for ahead, at in enumerate(sorted(due_times))), default=math.inf)
    return max(now, latest)


# ---------------------------------------------------------------- reconcile


@dataclass(frozen=True, slots=True)
class ReconcilePlan:
    new_suspects: tuple[str, ...]
    inspect: tuple[str, ...]  # ended suspects: their results prove whose they are
    give_up: bool  # an unknown batch becomes abandoned, an abandoned one void
    proven: str | None = None  # the batch whose nonce proves that it is ours


def reconcile(
    batch: Batch,
    listed: Sequence[BatchReport],
    known_ids: set[str],
    suspects: Mapping[str, str],
    now: float,
    offset: float,
    *,
    grace: float,
) -> ReconcilePlan:
    """Compare a create with unknown outcome with the provider's LIST. The plan never cancels: a suspect may belong to
    somebody else. `offset` is the provider's clock minus ours."""
    proven = next((report.provider_id for report in listed if report.nonce == batch.nonce), None)
    if proven is not None:
        return ReconcilePlan((), (), False, proven)
    new = tuple(
        report.provider_id
        for report in listed
        if report.nonce is None  # a batch with another nonce is never ours
        and report.provider_id not in suspects
        and report.provider_id not in known_ids
        and _fits(batch, report, now, offset)
    )
    watched = {provider_id for provider_id, verdict in suspects.items() if verdict == "watched"}.union(new) - known_ids
    ended = [report for report in listed if report.provider_id in watched and report.ended]
    inspect = tuple(report.provider_id for report in ended if _readable(report))
    # A suspect that ended without results can no longer prove anything.
    undecided = watched.difference(report.provider_id for report in ended if not _readable(report))
    return ReconcilePlan(new, inspect, _give_up_at(batch, bool(undecided), bool(inspect), grace) <= now)


def _fits(batch: Batch, report: BatchReport, now: float, offset: float) -> bool:
    start = batch.intended_at if batch.sent_at is None else batch.sent_at
    end = now if batch.resolved_at is None else batch.resolved_at
    in_time = start - CLOCK_SLACK <= report.created_at - offset <= end + CLOCK_SLACK
    return in_time and report.count == batch.count


def _readable(report: BatchReport) -> bool:
    return report.results is not None and not report.archived


def _give_up_at(batch: Batch, suspected: bool, readable: bool, grace: float) -> float:
    since = next(at for at in (batch.resolved_at, batch.sent_at, batch.intended_at) if at is not None)
    if batch.state is BatchState.ABANDONED:
        return since + WATCH + (WATCH_SLACK if suspected else 0.0)
    if readable:  # one request gives the proof; giving up now could buy every call twice
        return since + WATCH + WATCH_SLACK
    return since + (WATCH + WATCH_SLACK if suspected else grace)


def reconcile_delay(age: float, grace: float, poll_interval: float | None) -> float:
    """Seconds until the next list for a create with unknown outcome. Quick at first, because it probably shows up
    within seconds, and around the end of the grace time."""
    quick = QUICK if poll_interval is None else poll_interval
    age = max(0.0, age)
    near = max(quick, abs(age - grace) / 4)
    return max(min(age + min(1.0, quick), near, UNRESOLVED_PACE), poll_interval or 0.0)


def watch_pace(age: float) -> float:
    """Seconds between polls of an abandoned batch."""
    return max(WATCH_PACE, age / 10)


# ---------------------------------------------------------------- retry


def retry_lane(view: TicketView, policy: RoutingPolicy, now: float, *, pressed: bool = False) -> Lane | None:
    """The lane for another attempt of a call whose result line failed; None when the client gets the error. `pressed`:
    its batch was cancelled because its calls had no more time."""
    if view.state is TicketState.SENDING:
        return Lane.NOW  # where it is: that answer is paid for, even if it comes late
    deadline, awaited = view.deadline, view.awaited
    if view.requeues + 1 >= policy.max_attempts:  # no more batches; a client that still waits may get it on `now`
        return Lane.NOW if awaited and deadline is not None and now < deadline else None
    # A call without a waiting client is not urgent: it takes the cheap lane, even past its deadline.
    rescue_at = deadline if view.rescue_at is None else view.rescue_at
    has_time = rescue_at is None or (rescue_at - RETRY_ROOM > now and not pressed)
    if deadline is None or not awaited or has_time:
        return Lane.BATCH
    return Lane.NOW if now < deadline else None


# ------------------------------------------------------------ denials
# Bought batches that the provider answers with 404 or 410, or whose results it does.

DOUBT_S = 45.0  # a batch may be too new to be visible everywhere, and an outage may answer 404
DENIALS_TO_BELIEVE = 3
DENIED_PACE_S = 10.0  # between polls while a denial is doubted


class Denials:
    """Counts denials in memory: an engine that takes a batch over starts at zero."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, int]] = {}  # batch → time of the first denial, denials in a row

    def __contains__(self, batch: int) -> bool:
        return batch in self._seen

    def add(self, batch: int, now: float) -> bool:
        """Count a denial. Returns whether the denials are now to be believed."""
        since, count = self._seen.get(batch, (now, 0))
        self._seen[batch] = since, count + 1
        return count + 1 >= DENIALS_TO_BELIEVE and now - since >= DOUBT_S

    def clear(self, batch: int) -> None:
        self._seen.pop(batch, None)
