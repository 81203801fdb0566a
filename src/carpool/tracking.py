"""What to do about batches that were bought, or may have been: when to look, whom to rescue, whose a batch is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from carpool.lifecycle import BatchState
from carpool.model import Batch, Due, Lane, OpenCalls
from carpool.policy import RoutingPolicy
from carpool.ports import BatchReport
from carpool.routing import RESCUE_MARGIN

QUICK: Final = 2.0  # between looks around the expected end
SLOW: Final = 60.0  # between looks in the tail
GRACE_CAP: Final = 30.0  # how long the calls of an ended batch wait for their results at most
CLOCK_SLACK: Final = 60.0  # how far the provider's clock is trusted
WATCH: Final = 86_400.0  # how long an abandoned create is watched
WATCH_SLACK: Final = 3_600.0  # a suspect of the last moment ends a little after its day
RETRY_ROOM: Final = 120.0  # less than this is no time for another batch

# ---------------------------------------------------------------- when to look


def next_look(age: float, expected_end: float, poll_interval: float | None) -> float:
    """Seconds from a look at this age to the next. `age` and `expected_end` both count from the purchase.

    Looks double at first (1, 3, 7, 15 s), since small batches may end within seconds; come close together around
    the expected end; and grow apart again after it. An explicit interval is the quickest pace.
    """
    quick = QUICK if poll_interval is None else poll_interval
    age = max(0.0, age)
    early = age + min(1.0, quick)
    near = max(quick, abs(age - expected_end) / 4)
    return max(min(early, near, SLOW), poll_interval or 0.0)


def next_poll(batches: Sequence[tuple[float, float, float]], poll_interval: float | None, now: float) -> float:
    """When to LIST next for a credential with these batches, as (bought_at, last_look, expected_end), all absolute
    times; a batch not looked at yet has its purchase as the last look. Infinite when there is nothing to look at.
    A last look up to a minute ahead is a delay after a failure, and is kept."""
    return max(now, min((_look_at(*batch, poll_interval, now) for batch in batches), default=math.inf))


def _look_at(bought_at: float, last_look: float, expected_end: float, poll_interval: float | None, now: float) -> float:
    since = max(bought_at, last_look)
    if since <= now + SLOW:
        return since + next_look(since - bought_at, expected_end - bought_at, poll_interval)
    # The clock was set back: look at once rather than wait until it has caught up, and then at the slowest pace.
    return now if last_look > now + SLOW or last_look == bought_at else last_look + SLOW


# ---------------------------------------------------------------- rescue


@dataclass(frozen=True, slots=True)
class RescuePlan:
    cancel: bool
    resend: tuple[int, ...]  # tickets to be sent on `now` at once, the most pressing first
    wake: float | None


def rescue_plan(
    batch: Batch, due: Sequence[Due], open_calls: OpenCalls, now: float, cancel_seconds: float, *, early: float = 0.0
) -> RescuePlan:
    """What becomes of a batch with calls that come due; `due` are those due within `cancel_seconds`.

    Where every open call must be rescued the batch is cancelled first, so that what was not done is not billed.
    A call whose time has come is resent whatever the batch does. `early` moves every rescue forward (see
    `early_start`).
    """
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
    # The answer is paid for and being fetched. Fetching is quicker than asking again, so it gets half of the time
    # that was set aside for asking again, and never more than there is.
    if call.deadline is None:
        return call.rescue_at + RESCUE_MARGIN
    grace = min(GRACE_CAP, max(RESCUE_MARGIN, (call.deadline - call.rescue_at) / 2))
    return min(call.rescue_at + grace, call.deadline)


def _cancel_at(batch: Batch, open_calls: OpenCalls, lead: float) -> float | None:
    """When the batch should be cancelled; None when somebody still wants it to finish, or it can't be."""
    if batch.state is not BatchState.OPEN or open_calls.count == 0 or open_calls.unpressed > 0:
        return None
    return None if open_calls.latest_rescue is None else open_calls.latest_rescue - lead


def early_start(due_times: Sequence[float], now: float, sync_rpm: float | None) -> float:
    """When rescuing must start so that each of these rescues, one after the other at this rate, is sent by its time.

    Without a rate that is the first rescue's own time. Never before `now`; infinite when there is none.
    """
    gap = 0.0 if sync_rpm is None else 60 / sync_rpm
    latest = min((at - gap * ahead for ahead, at in enumerate(sorted(due_times))), default=math.inf)
    return max(now, latest)


# ---------------------------------------------------------------- reconcile


@dataclass(frozen=True, slots=True)
class ReconcilePlan:
    new_suspects: tuple[str, ...]
    inspect: tuple[str, ...]  # ended suspects: their results tell whose they are
    give_up: bool  # abandon the unknown batch; let the abandoned one become void
    wake: float | None
    found: str | None = None  # a batch whose metadata prove it to be ours


def reconcile(
    batch: Batch,
    listed: Sequence[BatchReport],
    known_ids: set[str],
    suspects: Mapping[str, str],
    now: float,
    offset: float,
    *,
    grace: float,
    pressed: bool,
) -> ReconcilePlan:
    """What the provider's LIST says about a create with unknown outcome. Nothing here ever cancels: a suspect may be
    a stranger's. `offset` is the provider's clock minus ours; `pressed` says that the batch's calls can't wait."""
    found = next((report.provider_id for report in listed if report.nonce == batch.nonce), None)
    if found is not None:
        return ReconcilePlan((), (), False, None, found)
    new = tuple(
        report.provider_id
        for report in listed
        if report.nonce is None  # where batches tell their nonce, one with another is never ours
        and report.provider_id not in suspects
        and report.provider_id not in known_ids
        and _fits(batch, report, now, offset)
    )
    watched = {provider_id for provider_id, verdict in suspects.items() if verdict == "watched"}.union(new) - known_ids
    ended = [report for report in listed if report.provider_id in watched and report.ended]
    inspect = tuple(report.provider_id for report in ended if _readable(report))
    # A suspect that ended without results can prove nothing any more.
    left = watched.difference(report.provider_id for report in ended if not _readable(report))
    end = _give_up_at(batch, bool(left), bool(inspect), grace, pressed)
    if end <= now:
        return ReconcilePlan(new, inspect, True, None)
    pace = min(SLOW, max(QUICK, (now - _declared(batch)) / 4))
    return ReconcilePlan(new, inspect, False, min(end, now + pace))


def _fits(batch: Batch, report: BatchReport, now: float, offset: float) -> bool:
    start = batch.intended_at if batch.sent_at is None else batch.sent_at
    end = now if batch.resolved_at is None else batch.resolved_at
    in_time = start - CLOCK_SLACK <= report.created_at - offset <= end + CLOCK_SLACK
    return in_time and report.count == batch.count


def _readable(report: BatchReport) -> bool:
    return report.results is not None and not report.archived


def _declared(batch: Batch) -> float:
    if batch.resolved_at is not None:
        return batch.resolved_at
    return batch.intended_at if batch.sent_at is None else batch.sent_at


def _give_up_at(batch: Batch, suspected: bool, readable: bool, grace: float, pressed: bool) -> float:
    since = _declared(batch)
    if batch.state is BatchState.ABANDONED:
        return since + WATCH + (WATCH_SLACK if suspected else 0.0)
    if readable:  # the proof is one request away, and giving up now could buy everything twice
        return since + WATCH + WATCH_SLACK
    if pressed:
        return -math.inf
    return since + (WATCH + WATCH_SLACK if suspected else grace)


# ---------------------------------------------------------------- retry


def must_retry(
    retryable: bool,
    attempts: int,
    policy: RoutingPolicy,
    deadline: float | None,
    now: float,
    sync_seconds: float,
    *,
    awaited: bool = True,
) -> Lane | None:
    """Where a call goes whose line failed after so many attempts; None when the error is given back."""
    if not retryable:
        return None
    if attempts >= policy.max_attempts:  # enough of batches; somebody who waits may still be answered on `now`
        return Lane.NOW if awaited and deadline is not None and now < deadline else None
    # A call that nobody waits for has no hurry: the cheap lane, also past its deadline.
    if deadline is None or not awaited or deadline - sync_seconds - RETRY_ROOM > now:
        return Lane.BATCH
    return Lane.NOW if now < deadline else None
