"""Rescues in a run: the calls that come due, planned by `planners.tracking` and sent as the engine's rescuer does."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Generic, Protocol, TypeVar

from carpool.core.lifecycle import TicketState
from carpool.core.model import Batch, Due, Lane, OpenCalls
from carpool.engine.batch.rescue import AT_ONCE, CANCEL_AGAIN_S, DUE_PER_STEP, UNDER_WAY_S
from carpool.planners.pressure.quota import TokenBucket
from carpool.planners.tracking import early_start, rescue_plan
from carpool.sim.money.run import FleetRun, RunCall
from carpool.sim.money.sync_lane import SyncLane


class RescuedBatch(Protocol):
    row: Batch

    def open_calls(self) -> OpenCalls: ...


B = TypeVar("B", bound=RescuedBatch)


class BatchOwner(Protocol[B]):
    """What rescues need of the lane `batch`."""

    def find(self, number: int) -> B: ...
    def cancel(self, batch: B) -> None: ...
    def request(self, count: int, then: Callable[[], None]) -> None: ...
    def leave_pool(self, call: RunCall) -> None: ...
    def settle(self, call: RunCall, lane: Lane, *, rescued: bool) -> None: ...
    def wake_by(self, at: float) -> None: ...


class Rescues(Generic[B]):
    def __init__(self, run: FleetRun, sync: SyncLane, lane: BatchOwner[B]) -> None:
        self._run = run
        self._sync = sync
        self._lane = lane
        self._later: list[tuple[float, int, RunCall]] = []
        self._near: dict[int, RunCall] = {}  # within the horizon
        self._under_way: set[int] = set()
        self._changed = False
        self._wake = math.inf
        self._cancelling: set[int] = set()
        self._cancel_after: dict[int, float] = {}
        self._cancel_seconds = run.forecast.cancel_seconds(run.trace.provider)
        rpm = run.policy.settings.sync_rpm
        self._gap = 0.0 if rpm is None else 60 / rpm
        self._pace = None if rpm is None else TokenBucket(rpm / 60, max(1.0, rpm / 60), 1.0, run.began)

    def add(self, call: RunCall) -> None:
        heappush(self._later, (call.rescue_at, call.ticket, call))

    def step(self, now: float) -> float:
        """Send what is due. Returns when to plan again. Until then the plan stands, unless something changes."""
        horizon = self._cancel_seconds + DUE_PER_STEP * self._gap
        self._bring_near(now + horizon)
        if not self._near:
            return self._later[0][0] - horizon if self._later else math.inf
        if self._changed or now >= self._wake:
            self._changed = False
            self._wake = self._send_due(now)
        return min(self._wake, self._later[0][0] - horizon) if self._later else self._wake

    def changed(self) -> None:
        """A batch was bought, was cancelled or has ended, or a rescue was answered."""
        self._changed = True

    def _send_due(self, now: float) -> float:
        due = [call for call in self._near.values() if call.ticket not in self._under_way]
        if not due:
            return now + UNDER_WAY_S
        due.sort(key=lambda call: (call.rescue_at, call.ticket))
        times = [call.rescue_at for call in due]
        shift = max(0.0, times[0] - early_start(times, now, self._run.policy.settings.sync_rpm))
        groups: dict[int | None, list[RunCall]] = defaultdict(list)
        for call in due:
            groups[call.batch].append(call)
        wakes = [self._plan(number, calls, now, shift) for number, calls in groups.items()]
        return min((wake for wake in wakes if wake > now), default=math.inf)

    def _bring_near(self, until: float) -> None:
        while self._later and self._later[0][0] <= until:
            call = heappop(self._later)[-1]
            self._near[call.ticket] = call
            self._changed = True
        if self._changed:
            for call in [one for one in self._near.values() if one.settled]:
                del self._near[call.ticket]

    def _plan(self, number: int | None, calls: list[RunCall], now: float, shift: float) -> float:
        if number is None:
            ready = [call for call in calls if call.lane is Lane.NOW or call.rescue_at - shift <= now]
            self._send(ready, now)
            rest = (call.rescue_at - shift for call in calls[len(ready) :] if call.lane is not Lane.NOW)
            return min(rest, default=math.inf)
        batch = self._lane.find(number)
        due = [
            Due(call.ticket, call.state, call.lane, number, call.rescue_at, call.call.deadline, "run") for call in calls
        ]
        plan = rescue_plan(batch.row, due, batch.open_calls(), now, self._cancel_seconds, early=shift)
        if plan.cancel and number not in self._cancelling and self._cancel_after.get(number, 0.0) <= now:
            self._cancelling.add(number)
            self._lane.request(1, partial(self._cancel, number, batch))
        resend = set(plan.resend)
        self._send([call for call in calls if call.ticket in resend], now)
        wake = math.inf if plan.wake is None else plan.wake
        again = self._cancel_after.get(number, 0.0)
        return min(wake, again) if plan.cancel and again > now else wake

    def _cancel(self, number: int, batch: B) -> None:
        self._cancelling.discard(number)
        self._cancel_after[number] = self._run.agenda.now + CANCEL_AGAIN_S
        self.changed()
        self._lane.cancel(batch)

    def _send(self, calls: Sequence[RunCall], now: float) -> None:
        for call in calls[: AT_ONCE - len(self._under_way)]:
            if self._pace is not None:
                if self._pace.available(now) < 1:
                    self._lane.wake_by(self._pace.wait_until(now))
                    return
                self._pace = self._pace.take(now)
            self._under_way.add(call.ticket)
            bought_before = call.batch is not None or call.requeues > 0
            if call.batch is None and call.lane is Lane.BATCH:
                self._lane.leave_pool(call)
            call.state = TicketState.SENDING
            self._sync.send(call, "rescue" if bought_before else "purchase", self._sent)

    def _sent(self, call: RunCall) -> None:
        self._under_way.discard(call.ticket)
        self.changed()
        if not call.settled:
            self._lane.settle(call, Lane.NOW, rescued=True)
        self._lane.wake_by(self._run.agenda.now)
