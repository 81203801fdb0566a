"""The planners together: whatever arrives, leaves, fails or takes its time, the rules hold.

A small loop does with the plans what the engine does: it creates, looks, resends, gives up, and jumps from wake to
wake. The world around it is drawn: arrivals, cancels, replies to creates, how long batches take, steps of the clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.core.lifecycle import BatchState, TicketState
from carpool.core.model import Batch, Due, Lane, OpenCalls, PoolKey, PoolView
from carpool.core.ports import BatchLimits
from carpool.planners import pooling, tracking
from carpool.planners.forecast import BatchClass, Forecast
from carpool.planners.policy import RoutingPolicy
from carpool.planners.poll_pace import QUICK, InFlight, next_poll
from carpool.planners.pressure.quota import CREATE_BURST, BatchQuota, TokenBucket, create_rate
from carpool.planners.routing import pool_wait
from tests.support.hypothesis_settings import STEADY

NOW = 1_800_000_000.0
OVERHEAD = 70
GRACE = 20.0
CANCEL_S = 5.0
LIMITS = BatchLimits(max_count=40, max_bytes=20_000, window=86_400, retention=29 * 86_400)
ENDS_WITHIN = partial(Forecast().ends_within, of=BatchClass("anthropic", "m", "s"))
END = 20_000.0  # a run that is not over by then starves somebody


@dataclass
class Ride:
    """One call on its way."""

    pool: int
    size: int
    arrived: float
    rescue_at: float | None
    deadline: float | None
    batch: int | None = None
    done: float | None = None


@dataclass
class Trip:
    """One create: what the provider says to it, when, and what we make of it."""

    batch: Batch
    tickets: list[int]
    reply: str
    ends_at: float
    looked: float


@dataclass(frozen=True)
class Arrival:
    delay: float
    pool: int
    size: int
    budget: float | None
    leaves_after: float | None  # the caller cancels, where the call still waits in its pool


@dataclass
class World:
    policy: RoutingPolicy
    rpm: int
    replies: list[str]
    durations: list[float]
    now: float = NOW
    rides: dict[int, Ride] = field(default_factory=dict)
    trips: dict[int, Trip] = field(default_factory=dict)
    creates: dict[str, list[float]] = field(default_factory=dict)
    quotas: dict[str, BatchQuota] = field(default_factory=dict)
    leaving: list[tuple[float, int]] = field(default_factory=list)
    shift: float = 0.0  # how far the clock was set back in all: true time is now + shift
    news: bool = False

    def __post_init__(self) -> None:
        self.poll = self.policy.poll_interval_s or QUICK
        self.quotas = {credential: BatchQuota.new(self.rpm, self.poll, self.now) for credential in ("c0", "c1")}

    # ------------------------------------------------------------ what waits

    def queued(self, pool: int) -> list[int]:
        mine = [(ticket, ride) for ticket, ride in self.rides.items() if ride.pool == pool]
        waiting = [ticket for ticket, ride in mine if ride.batch is None and ride.done is None]
        return sorted(waiting, key=lambda t: (self.rides[t].rescue_at or math.inf, self.rides[t].arrived))

    def views(self) -> list[PoolView]:
        views = []
        for pool in sorted({ride.pool for ride in self.rides.values()}):
            rides = [self.rides[ticket] for ticket in self.queued(pool)]
            if rides:
                rescues = [ride.rescue_at for ride in rides if ride.rescue_at is not None]
                arrived = [ride.arrived for ride in rides]
                size = sum(ride.size for ride in rides)
                views.append(
                    PoolView(pool, key(pool), len(rides), size, min(arrived), max(arrived), min(rescues, default=None))
                )
        return views

    def unresolved(self) -> dict[str, frozenset[int]]:
        unknown = [trip.batch for trip in self.trips.values() if trip.batch.state is BatchState.UNKNOWN]
        return {c: frozenset(batch.count for batch in unknown if batch.key.credential == c) for c in self.quotas}

    # ------------------------------------------------------------ one step, as the engine makes it

    def step(self) -> float | None:
        self.leave()
        self.news = False
        wakes = [self.rescue(), self.flush(), self.look()]
        wakes += [at for at, _ in self.leaving]
        if self.news:  # something came back to its pool: the engine plans again at once
            wakes.append(math.nextafter(self.now, math.inf))
        coming = [wake for wake in wakes if wake is not None]
        assert all(wake > self.now for wake in coming), (self.now, wakes)
        return min(coming, default=None)

    def leave(self) -> None:
        for at, ticket in list(self.leaving):
            if at <= self.now:
                self.leaving.remove((at, ticket))
                ride = self.rides[ticket]
                if ride.batch is None and ride.done is None:
                    ride.done = self.now

    def flush(self) -> float | None:
        views = {view.pool: view for view in self.views()}
        taken = self.unresolved()
        plan = pooling.plan(list(views.values()), self.quotas, self.policy, LIMITS, taken, self.now, overhead=OVERHEAD)
        assert (plan.wake is not None) >= (not plan.flushes and bool(views))
        for flush in plan.flushes:
            self.check_turn(views[flush.pool], flush, taken[flush.credential])
            assert self.quotas[flush.credential].can_create(self.now)
            self.quotas[flush.credential] = self.quotas[flush.credential].spend_create(self.now)
        for flush in plan.flushes:
            self.buy(flush)
        return plan.wake

    def check_turn(self, view: PoolView, flush: pooling.Flush, taken: frozenset[int]) -> None:
        """Nobody goes before the time that the settings name, unless the pool is full."""
        assert 1 <= flush.max_count <= min(self.policy.batch_max_size or LIMITS.max_count, LIMITS.max_count)
        assert flush.max_count not in taken
        waited = self.now - view.oldest
        least = pool_wait(self.policy)
        cap = min(self.policy.batch_max_size or LIMITS.max_count, LIMITS.max_count)
        full = view.count >= cap or view.bytes + view.count * OVERHEAD >= LIMITS.max_bytes * pooling.FILL
        minimum = self.policy.batch_min_size
        if minimum is not None and view.count >= minimum:
            least = min(least, self.policy.linger_ms / 1000)
        assert full or waited < 0 or waited >= least - 1e-6, (waited, least)

    def buy(self, flush: pooling.Flush) -> None:
        self.creates.setdefault(flush.credential, []).append(self.now + self.shift)
        tickets, size = [], 0
        for ticket in self.queued(flush.pool)[: flush.max_count]:
            if tickets and size + self.rides[ticket].size > flush.max_bytes:
                break  # as the store claims: at least one, else within the bytes
            tickets.append(ticket)
            size += self.rides[ticket].size
        assert tickets
        assert len(tickets) == 1 or size + len(tickets) * OVERHEAD <= LIMITS.max_bytes
        number = len(self.trips)
        reply = self.replies[number % len(self.replies)]
        for ticket in tickets:
            self.rides[ticket].batch = number
        state = {"bought": BatchState.OPEN, "refused": BatchState.REFUSED}.get(reply, BatchState.UNKNOWN)
        batch = Batch(
            number, flush.pool, key(flush.pool), "n" * 10, state, "me", len(tickets), size, self.now, self.now, self.now
        )
        ends_at = self.now + self.durations[number % len(self.durations)]
        self.trips[number] = Trip(batch, tickets, reply, ends_at, self.now)
        if reply == "refused":
            self.quotas[flush.credential] = self.quotas[flush.credential].paused(self.now + 3)
            self.release(number)

    def release(self, number: int) -> None:
        self.news = True
        for ticket in self.trips[number].tickets:
            ride = self.rides[ticket]
            if ride.done is None:
                ride.batch = None

    # ------------------------------------------------------------ batches under way

    def open_rides(self, trip: Trip) -> list[tuple[int, Ride]]:
        mine = [(ticket, self.rides[ticket]) for ticket in trip.tickets]
        return [(ticket, ride) for ticket, ride in mine if ride.done is None and ride.batch == trip.batch.id]

    def look(self) -> float | None:
        wakes: list[float] = []
        for number, trip in self.trips.items():
            if trip.batch.state is BatchState.UNKNOWN:
                wakes += self.reconcile(number, trip)
            elif trip.batch.state in (BatchState.OPEN, BatchState.CANCELLING):
                wakes += self.follow(number, trip)
        return min(wakes, default=None)

    def follow(self, number: int, trip: Trip) -> list[float]:
        quota = self.quotas[trip.batch.key.credential]
        at = self.next_poll(trip, quota)
        assert at >= self.now
        if at > self.now:
            return [at]
        if not quota.can_ask(self.now):
            return [quota.ask_ready_at(self.now)]
        self.quotas[trip.batch.key.credential] = quota.spend(self.now)
        trip.looked = self.now
        if self.now < trip.ends_at:
            after = self.next_poll(trip, self.quotas[trip.batch.key.credential])
            assert after > self.now
            return [after]
        trip.batch = replace(trip.batch, state=BatchState.COLLECTED)
        for _, ride in self.open_rides(trip):
            ride.done = self.now
        return []

    def next_poll(self, trip: Trip, quota: BatchQuota) -> float:
        in_flight = InFlight(ENDS_WITHIN, [trip.batch.intended_at])
        return next_poll([in_flight], trip.looked, self.policy.poll_interval_s, quota.requests, self.now)

    def reconcile(self, number: int, trip: Trip) -> list[float]:
        plan = tracking.reconcile(
            trip.batch,
            [],
            set(),
            {},
            self.now,
            0.0,
            grace=GRACE,
        )
        if plan.give_up:
            trip.batch = replace(trip.batch, state=BatchState.ABANDONED, abandoned=True)
            self.release(number)
            return []
        return [self.now + QUICK]

    def rescue(self) -> float | None:
        wakes: list[float] = []
        for ride in self.rides.values():  # those that no batch carries
            if ride.done is None and ride.batch is None and ride.rescue_at is not None:
                if ride.rescue_at <= self.now:
                    ride.done = self.now
                else:
                    wakes.append(ride.rescue_at)
        for trip in self.trips.values():
            if trip.batch.state in (BatchState.OPEN, BatchState.CANCELLING, BatchState.UNKNOWN):
                wakes += self.rescue_from(trip)
        return min(wakes, default=None)

    def rescue_from(self, trip: Trip) -> list[float]:
        rides = self.open_rides(trip)
        pressed = [(ticket, ride.rescue_at, ride.deadline) for ticket, ride in rides if ride.rescue_at is not None]
        due = [Due(ticket, TicketState.BOARDED, Lane.BATCH, trip.batch.id, at, until) for ticket, at, until in pressed]
        calls = OpenCalls(len(rides), len(rides) - len(pressed), max((at for _, at, _ in pressed), default=None))
        plan = tracking.rescue_plan(trip.batch, due, calls, self.now, CANCEL_S)
        assert plan.wake is None or plan.wake > self.now
        assert set(plan.resend) <= {ticket for ticket, _ in rides}
        if plan.cancel:
            assert calls.unpressed == 0
            assert trip.batch.state is BatchState.OPEN
            trip.batch = replace(trip.batch, state=BatchState.CANCELLING)
        for ticket in plan.resend:
            self.rides[ticket].done = self.now
        return [] if plan.wake is None else [plan.wake]

    # ------------------------------------------------------------ time

    def admit(self, arrival: Arrival) -> None:
        deadline = None if arrival.budget is None else self.now + arrival.budget
        rescue_at = None if deadline is None else deadline - 15
        ticket = len(self.rides)
        self.rides[ticket] = Ride(arrival.pool, arrival.size, self.now, rescue_at, deadline)
        if arrival.leaves_after is not None:
            self.leaving.append((self.now + arrival.leaves_after, ticket))

    def advance(self, until: float) -> None:
        while (wake := self.step()) is not None and wake <= until:
            assert wake < NOW + END, "somebody waits for ever"
            self.now = wake

    def set_back(self, seconds: float) -> None:
        """The host's clock is corrected: it shows again what it showed before."""
        self.now -= seconds
        self.shift += seconds


def key(pool: int) -> PoolKey:
    return PoolKey("anthropic", "anthropic", f"c{pool % 2}", "/v1/messages", (), "", "s", f"{pool}m")


ARRIVALS = st.builds(
    Arrival,
    delay=st.sampled_from([0.0, 0.0, 0.001, 0.2, 3.0, 40.0]),
    pool=st.integers(0, 3),
    size=st.sampled_from([10, 400, 5_000, 19_500, 60_000]),
    budget=st.none() | st.sampled_from([16.0, 60.0, 600.0]),
    leaves_after=st.none() | st.sampled_from([0.001, 0.3, 30.0]),
)
POLICIES = st.builds(
    RoutingPolicy,
    batch_window_ms=st.none() | st.sampled_from([0.0, 100.0, 5_000.0, 60_000.0]),
    batch_min_size=st.none() | st.integers(1, 12),
    batch_max_size=st.none() | st.integers(12, 60),
    linger_ms=st.sampled_from([0.0, 50.0, 2_000.0]),
    poll_interval_s=st.none() | st.sampled_from([0.05, 2.0, 30.0]),
)
REPLIES = st.lists(st.sampled_from(["bought", "bought", "refused", "unknown"]), min_size=1, max_size=6).filter(
    lambda replies: "bought" in replies
)
DURATIONS = st.lists(st.sampled_from([0.0, 1.0, 90.0, 1_500.0]), min_size=1, max_size=4)


def play(world: World, arrivals: list[Arrival], steps_back: dict[int, float]) -> None:
    for number, arrival in enumerate(arrivals):
        until = world.now + arrival.delay
        world.advance(until)
        world.now = until
        world.admit(arrival)
        if number in steps_back:
            world.set_back(steps_back[number])
    world.advance(math.inf)


def check_pace(world: World) -> None:
    """Creates of one credential never outrun the bucket: its burst, then its rate, over any stretch of true time."""
    rate = create_rate(world.rpm, world.poll) / 60
    for times in world.creates.values():
        for first in range(len(times)):
            for last in range(first, len(times)):
                assert last - first + 1 <= CREATE_BURST + (times[last] - times[first]) * rate + 1e-6


@settings(STEADY, max_examples=300)
@given(st.lists(ARRIVALS, max_size=30), POLICIES, st.integers(5, 1000), REPLIES, DURATIONS)
def test_whatever_happens_everybody_arrives(
    arrivals: list[Arrival], policy: RoutingPolicy, rpm: int, replies: list[str], durations: list[float]
) -> None:
    world = World(policy, rpm, replies, durations)
    play(world, arrivals, {})
    assert all(ride.done is not None for ride in world.rides.values())
    for ride in world.rides.values():  # on time: a rescue is never late
        assert ride.rescue_at is None or ride.done is None or ride.done <= ride.rescue_at + 1e-6
    check_pace(world)


@settings(STEADY, max_examples=150)
@given(
    st.lists(ARRIVALS, min_size=1, max_size=20),
    POLICIES,
    st.integers(5, 1000),
    st.dictionaries(st.integers(0, 19), st.sampled_from([0.5, 10.0, 15.0]), max_size=3),
)
def test_a_clock_that_is_set_back_stops_nobody(
    arrivals: list[Arrival], policy: RoutingPolicy, rpm: int, steps_back: dict[int, float]
) -> None:
    world = World(policy, rpm, ["bought", "unknown"], [1.0, 90.0])
    play(world, arrivals, steps_back)
    assert all(ride.done is not None for ride in world.rides.values())
    check_pace(world)


@settings(STEADY)
@given(st.floats(61, 86_400), st.sampled_from([0.5, 2.0, 30.0]))
def test_after_a_long_step_back_looks_still_keep_their_pace(back: float, interval: float) -> None:
    """One look at once is right, since nothing is known; the next one has the first as its last look."""
    bought, now = NOW, NOW - back
    assert next_poll([InFlight(ENDS_WITHIN, [bought])], now, interval, TokenBucket(1, 5, 5, now), now) > now
