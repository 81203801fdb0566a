"""The lane `batch` in a run: what the engine's buyer, follower, collector and rescuer do, in virtual time.

A member of a batch is executed at the end of its latency, for as long as its answer would take on `now`: `Latencies`
says when it ends, and what it wrote into the cache counts from its start. A cancel stops what has not started.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace as changed
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Final, Protocol

from carpool.core.lifecycle import BatchState, TicketState
from carpool.core.model import Batch, Lane, OpenCalls, PoolView, TicketView
from carpool.engine.batch.api import DEFAULT_PACE, DEFAULT_RPM
from carpool.engine.batch.follow import MAX_PAGES
from carpool.engine.context import HURRY_S
from carpool.planners.forecast import BatchClass
from carpool.planners.pooling import Flush, plan
from carpool.planners.pressure.quota import BatchQuota
from carpool.planners.routing import pool_key, pool_wait
from carpool.planners.tracking import retry_lane
from carpool.sim.money.agenda import Alarm
from carpool.sim.money.model import PurchaseKind
from carpool.sim.money.poll_times import PollTimes
from carpool.sim.money.pools import Pools
from carpool.sim.money.rescues import Rescues
from carpool.sim.money.run import FleetRun, RunCall
from carpool.sim.money.sync_lane import SyncLane
from carpool.sim.money.worlds import FIRST_TOKEN_SHARE

UNLIMITED_RPM: Final = 1_000_000
PAGE: Final = 20  # batches of a page beyond twice those in flight, as the engine asks for
LONGEST_PAGE: Final = 1000
POLLS: Final = 2 / 3  # the largest share of the requests that polls at a fixed pace may take
OWNER: Final = "run"
SHORTEST_INTERVAL_S: Final = 0.5  # between polls
FIRST_COUNT_S: Final = 15.0
COUNT_EVERY: Final = 0.3  # of its age
ADMISSION_S: Final = 0.001  # what is left of a budget of 4 minutes when its call is pooled is less than 4 minutes


class Answered(Protocol):
    def __call__(self, call: RunCall, lane: Lane, *, rescued: bool) -> None: ...


@dataclass(slots=True, eq=False)
class Member:
    call: RunCall
    starts: float
    ends: float


@dataclass(slots=True, eq=False)
class RunBatch:
    """A batch at the provider, and its row."""

    row: Batch
    members: list[Member]
    bought_at: float
    expires: float
    ends_at: float
    cancelled_at: float = math.inf
    counted_until: float = 0.0  # age

    def cancel(self, now: float, takes: float) -> None:
        running = (member.ends for member in self.members if member.starts <= now)
        self.cancelled_at = now
        self.ends_at = min(self.expires, max(now + takes, max(running, default=0.0)))
        self.row = changed(self.row, state=BatchState.CANCELLING)

    def executes(self, member: Member) -> bool:
        return member.starts <= self.cancelled_at and member.starts < self.expires

    def open_calls(self) -> OpenCalls:
        rescues = [member.call.rescue_at for member in self.members if not member.call.settled]
        pressed = [at for at in rescues if at < math.inf]
        return OpenCalls(len(rescues), len(rescues) - len(pressed), max(pressed, default=None))


class BatchLane:
    def __init__(self, run: FleetRun, sync: SyncLane, answered: Answered) -> None:
        self._run = run
        self._answered = answered
        settings = run.policy.settings
        rpm, pace = settings.batch_rpm or DEFAULT_RPM, settings.poll_interval_s or DEFAULT_PACE
        self._quota = BatchQuota.new(rpm, pace, run.began)
        self._stated = min(run.world.batch_rpm or UNLIMITED_RPM, settings.batch_rpm or UNLIMITED_RPM)
        poll_s = run.policy.poll_s  # slower where creates and results need the requests
        self._pace = None if poll_s is None else max(poll_s, 60 / (self._stated * POLLS))
        self._pools = Pools()
        self._batches: dict[int, RunBatch] = {}  # in flight
        self._ends: list[tuple[float, int]] = []
        self._requests: deque[tuple[int, Callable[[], None]]] = deque()
        self._poll_times = PollTimes(settings.poll_interval_s or run.dialect.limits.pace, run.forecast)
        self._polls_at = math.inf
        self._polled_at: float | None = None
        self._polling = False
        self._passed_over = 0  # polls that would have found nothing
        self._ended: dict[int, RunBatch] = {}  # not collected yet
        self._to_count: list[tuple[float, int]] = []  # when batches in flight are counted again
        self._window_from = 0.0  # where one batch is in flight at a time: when the last one was collected
        self._step_alarm = Alarm(run.agenda, self._step)
        self._request_alarm = Alarm(run.agenda, self._serve)
        self._rescues = Rescues(run, sync, self)

    # ------------------------------------------------------------ calls

    def admit(self, call: RunCall, rescue_at: float | None) -> None:
        call.lane = Lane.BATCH
        if self._run.policy.classes:
            call.pool = pool_key(call.call, self._run.dialect.mixes_models, self._run.agenda.now + ADMISSION_S)
        if self._run.policy.rescues and rescue_at is not None:
            call.rescue_at = rescue_at
            self._rescues.add(call)
        self._queue(call)

    def _queue(self, call: RunCall) -> None:
        call.state = TicketState.QUEUED
        self._pools.add(call)
        self.wake_by(self._run.agenda.now + min(self._run.policy.settings.linger_ms / 1000, HURRY_S))

    def leave_pool(self, call: RunCall) -> None:
        """A call that waits in its pool is bought elsewhere."""
        self._pools.left(call)

    def settle(self, call: RunCall, lane: Lane, *, rescued: bool) -> None:
        call.settled, call.state = True, TicketState.SETTLED
        self._answered(call, lane, rescued=rescued)

    # ------------------------------------------------------------ one step, as the engine's

    def wake_by(self, at: float) -> None:
        self._step_alarm.by(at)

    def _step(self) -> None:
        now = self._run.agenda.now
        self._step_alarm.by(min(self._rescues.step(now), self._buy(now), self._poll(now)))

    def find(self, number: int) -> RunBatch:
        """A batch that is in flight, or ended and not collected."""
        return self._batches.get(number) or self._ended[number]

    # ------------------------------------------------------------ buying

    def _buy(self, now: float) -> float:
        views = self._pools.views()
        if not views:
            return math.inf
        if self._run.policy.one_batch:
            return self._buy_alone(views[0], now)
        plans = plan(
            views,
            {views[0].key.credential: self._quota},
            self._run.policy.settings,
            self._run.dialect.limits,
            {},
            now,
            overhead=self._run.dialect.line_overhead(""),
        )
        for flush in plans.flushes:
            self._create(flush, now)
        return math.inf if plans.wake is None else plans.wake

    def _buy_alone(self, view: PoolView, now: float) -> float:
        """One batch at a time, from a window that begins when the last batch is done, even if nobody waits yet."""
        settings = self._run.policy.settings
        if self._batches or self._ended:
            return math.inf
        most, opens_at = settings.batch_max_size or view.count, self._window_from + pool_wait(settings)
        ready_at = self._quota.create_ready_at(now)
        if view.count < most and view.oldest < opens_at:
            ready_at = max(ready_at, opens_at)
        if ready_at > now:
            return ready_at
        count = most if view.oldest < opens_at else 1
        self._create(Flush(view.pool, view.key.credential, count, self._run.dialect.limits.max_bytes), now)
        return math.inf

    def _create(self, flush: Flush, now: float) -> None:
        run = self._run
        calls = self._pools.claim(flush.pool, flush.max_count, flush.max_bytes, now)
        if not calls:
            return
        self._quota = self._quota.spend_create(now).learned(self._stated)
        run.api_calls += 1
        run.batches += 1
        key, number = calls[0].pool, run.batches
        members = [self._member(call, now) for call in calls]
        expires = now + run.world.expiry_s
        ends_at = min(expires, max(member.ends for member in members))
        size = sum(call.bytes for call in calls)
        row = Batch(number, flush.pool, key, "", BatchState.OPEN, OWNER, len(calls), size, now, now, now, str(number))
        self._batches[number] = RunBatch(row, members, now, expires, ends_at)
        heappush(self._to_count, (now + FIRST_COUNT_S, number))
        for call in calls:
            call.batch = number
        self._rescues.changed()
        if not self._ends and self._pace is not None:
            self._polled_at = now  # nothing was polled while nothing was in flight
        heappush(self._ends, (ends_at, number))
        self._poll_times.add(now, BatchClass.of(key))
        self._polls_at = min(self._polls_at, self._poll_time(now))

    def _member(self, call: RunCall, now: float) -> Member:
        latency = self._run.latencies.batch_s(call.session, call.turn, now, call.requeues)
        takes = min(latency, self._run.latencies.sync_s(call.session, call.turn, now + latency))
        return Member(call, now + latency - takes if latency < math.inf else math.inf, now + latency)

    # ------------------------------------------------------------ polling

    def _poll_time(self, now: float) -> float:
        if self._pace is not None:
            return self._useful_poll(self._pace, now)
        at = self._poll_times.next(self._polled_at, self._quota.requests, now)
        return at if self._run.every_poll else self._near_end(at)

    def _near_end(self, at: float) -> float:
        """In place of the next poll, that which finds the next end, about. Those before it are only counted: a run of
        hours has tens of thousands."""
        self._passed_over = 0
        if not self._ends or at >= self._ends[0][0]:
            return at
        end = self._ends[0][0]
        interval = max(SHORTEST_INTERVAL_S, self._poll_times.next(end, self._quota.requests, end) - end)
        self._passed_over = math.ceil((end - at) / interval)
        return at + self._passed_over * interval

    def _useful_poll(self, pace: float, now: float) -> float:
        """The next poll at a fixed pace that finds something. Those before it are only counted: they decide nothing."""
        if not self._ends:
            return math.inf
        last = now if self._polled_at is None else self._polled_at
        return last + pace * max(1, math.ceil((self._ends[0][0] - last) / pace))

    def _poll(self, now: float) -> float:
        if self._polling or not self._batches:
            return math.inf
        if self._polls_at <= now and self._pace is None:  # others may have taken the requests since it was planned
            self._polls_at = self._poll_time(now)
        if self._polls_at > now:
            return self._polls_at
        if not self._quota.can_ask(now):
            return self._quota.ask_ready_at(now)
        self._polling = True
        if self._pace is not None and self._polled_at is not None:
            self._run.api_calls += max(0, round((now - self._polled_at) / self._pace) - 1)
        self._run.api_calls += self._passed_over
        self.request(self._pages(), partial(self._polled, self._run.batches))
        return math.inf

    def _pages(self) -> int:
        """Requests of one poll: a single batch is asked for by its id; a list goes back to the oldest of ours."""
        if len(self._batches) == 1:
            return 1
        newer = self._run.batches - next(iter(self._batches)) + 1
        page = min(LONGEST_PAGE, 2 * len(self._batches) + PAGE) if self._pace is None else LONGEST_PAGE
        return min(MAX_PAGES, math.ceil(newer / page))

    def _polled(self, newest: int) -> None:
        """The answer to a poll that was planned when `newest` was the newest batch: it is about no later one."""
        now = self._run.agenda.now
        ended: list[tuple[float, int]] = []
        later: list[tuple[float, int]] = []
        while self._ends and self._ends[0][0] <= now:
            end = heappop(self._ends)
            (ended if end[1] <= newest else later).append(end)
        for end in later:
            heappush(self._ends, end)
        for number in sorted(number for _, number in ended):
            self._end(self._batches.pop(number))
        self.count_in_flight(now)
        self._polling, self._polled_at = False, now
        self._polls_at = self._poll_time(now)
        self.wake_by(now)

    def count_in_flight(self, now: float) -> None:
        """The forecast counts batches in flight too: seldom enough that many of them cost little."""
        while self._run.policy.learns and self._to_count and self._to_count[0][0] <= now:
            number = heappop(self._to_count)[1]
            batch = self._batches.get(number)
            if batch is not None:
                age = now - batch.bought_at
                self._run.forecast.batch_passed(BatchClass.of(batch.row.key), batch.counted_until, age, now)
                batch.counted_until = age
                heappush(self._to_count, (now + age * COUNT_EVERY, number))

    def _learn_end(self, batch: RunBatch, now: float) -> None:
        forecast, of, age = self._run.forecast, BatchClass.of(batch.row.key), now - batch.bought_at
        if batch.cancelled_at == math.inf and batch.ends_at < batch.expires:
            forecast.batch_ended(of, batch.counted_until, age, now)
            return
        forecast.batch_passed(of, batch.counted_until, min(age, batch.cancelled_at - batch.bought_at), now)
        if batch.cancelled_at < math.inf:
            billed = sum(batch.executes(member) for member in batch.members)
            seconds = now - batch.cancelled_at
            forecast.cancel_ended(of.provider, seconds, billed, len(batch.members) - billed, now)

    def _end(self, batch: RunBatch) -> None:
        if self._run.policy.learns:
            self._learn_end(batch, self._run.agenda.now)
        batch.row = changed(batch.row, state=BatchState.ENDED)
        self._poll_times.remove(batch.bought_at, BatchClass.of(batch.row.key))
        self._ended[batch.row.id] = batch
        self._rescues.changed()
        self.request(1, partial(self._collect, batch))

    # ------------------------------------------------------------ requests, in turn

    def request(self, count: int, then: Callable[[], None]) -> None:
        """Send so many requests to the batch API when it is their turn, and go on."""
        self._requests.append((count, then))
        self._serve()

    def _serve(self) -> None:
        now = self._run.agenda.now
        while self._requests:
            if not self._quota.can_ask(now):
                self._request_alarm.by(self._quota.ask_ready_at(now))
                return
            count, then = self._requests.popleft()
            quota = self._quota
            several = count if quota.requests.available(now) > count else 1  # the same as spending one by one
            self._quota = changed(
                quota, requests=quota.requests.take(now, several), creates=quota.creates.take(now, 0)
            ).learned(self._stated)
            self._run.api_calls += several
            if count > several:
                self._requests.appendleft((count - several, then))
            else:
                then()

    # ------------------------------------------------------------ results

    def _collect(self, batch: RunBatch) -> None:
        del self._ended[batch.row.id]
        self._window_from = self._run.agenda.now
        self._rescues.changed()
        for member in batch.members:
            if batch.executes(member):
                self._bought(batch, member)
            elif not member.call.settled and member.call.batch == batch.row.id:
                self._again(member.call, pressed=batch.cancelled_at < math.inf)
        self.wake_by(self._run.agenda.now)

    def _bought(self, batch: RunBatch, member: Member) -> None:
        call, takes = member.call, member.ends - member.starts
        begins = member.starts + takes * FIRST_TOKEN_SHARE
        kind: PurchaseKind = "duplicate" if call.settled else "purchase"
        self._run.buy(
            call, Lane.BATCH, kind, member.starts, begins, member.ends, batch=batch.row.id, sent=batch.bought_at
        )
        if not call.settled:
            self.settle(call, Lane.BATCH, rescued=False)

    def _again(self, call: RunCall, *, pressed: bool) -> None:
        """A batch gave the call back: cancelled or expired."""
        call.batch = None
        if call.state is TicketState.SENDING:
            return
        now, rescue_at = self._run.agenda.now, None if call.rescue_at == math.inf else call.rescue_at
        deadline = call.call.deadline if self._run.policy.rescues else None
        view = TicketView(call.ticket, call.state, call.requeues, rescue_at, deadline, awaited=True)
        lane = retry_lane(view, self._run.policy.settings, now, pressed=pressed)
        call.requeues += 1
        if lane is Lane.NOW:
            call.lane, call.state, call.rescue_at = Lane.NOW, TicketState.QUEUED, min(call.rescue_at, now)
            self._rescues.add(call)
        else:
            self._queue(call)

    # ------------------------------------------------------------ cancelling

    def cancel(self, batch: RunBatch) -> None:
        if batch.row.state is not BatchState.OPEN or batch.ends_at <= self._run.agenda.now:
            self.wake_by(self._run.agenda.now)
            return  # the provider refuses to cancel what has ended
        self._ends.remove((batch.ends_at, batch.row.id))
        batch.cancel(self._run.agenda.now, self._run.world.cancel_s)
        self._ends.append((batch.ends_at, batch.row.id))
        heapify(self._ends)
        if not self._run.every_poll:
            self._polls_at = min(self._polls_at, self._poll_time(self._run.agenda.now))
        self._rescues.changed()
        self.wake_by(self._run.agenda.now)
