from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from carpool.core.model import PoolKey, PoolView
from carpool.core.ports import BatchLimits
from carpool.planners.policy import RoutingPolicy
from carpool.planners.pooling import PATIENCE, Flush, FlushPlan, plan
from carpool.planners.pressure.quota import BatchQuota, create_rate
from carpool.planners.pressure.turns import FRESH
from tests.support.cost import calls_made_by

NOW = 1_800_000_000.0
LIMITS = BatchLimits(max_count=100_000, max_bytes=256_000_000, window=86_400, retention=29 * 86_400)
KEY = PoolKey("anthropic", "anthropic", "c1", "/v1/messages", (), "", "s", "patient")


def a_pool(
    pool: int = 1,
    count: int = 1,
    *,
    age: float = 10.0,
    size: int = 1000,
    rescue: float | None = None,
    credential: str = "c1",
) -> PoolView:
    oldest = NOW - age
    return PoolView(pool, structs.replace(KEY, credential=credential), count, count * size, oldest, NOW, rescue)


def planned(
    *pools: PoolView,
    policy: RoutingPolicy | None = None,
    roads: dict[str, BatchQuota] | None = None,
    limits: BatchLimits = LIMITS,
    unresolved: dict[str, frozenset[int]] | None = None,
    now: float = NOW,
    draining: bool = False,
) -> FlushPlan:
    known = {"c1": BatchQuota.new(50, 2, NOW)} if roads is None else roads
    taken = unresolved or {}
    return plan(pools, known, policy or RoutingPolicy(), limits, taken, now, overhead=100, draining=draining)


def counts(made: FlushPlan) -> list[int]:
    return [flush.max_count for flush in made.flushes]


def spent_road(creates: int = 3) -> BatchQuota:
    road = BatchQuota.new(50, 2, NOW)
    for _ in range(creates):
        road = road.spend_create(NOW)
    return road


# ---------------------------------------------------------------- linger


def test_nothing_waits() -> None:
    assert planned() == FlushPlan((), None)
    assert planned(a_pool(count=0)) == FlushPlan((), None)


def test_a_single_call_goes_after_the_linger() -> None:
    assert planned(a_pool(age=0.2)) == FlushPlan((), NOW - 0.2 + 0.5)
    made = planned(a_pool(age=0.5))
    assert made.flushes == (Flush(1, "c1", 1, 243_200_000 - 100),)
    assert made.wake is None


def test_the_linger_counts_from_the_oldest() -> None:
    # newcomers keep arriving, and still it goes
    assert counts(planned(replace(a_pool(count=40, age=0.6), newest=NOW))) == [40]


def test_a_full_pool_does_not_linger() -> None:
    assert counts(planned(a_pool(count=100_000, age=0, size=10))) == [100_000]
    assert counts(planned(a_pool(count=99_999, age=0, size=10))) == []
    assert counts(planned(a_pool(count=5, age=0), policy=RoutingPolicy(batch_max_size=5))) == [5]


def test_a_pool_full_by_bytes_does_not_linger() -> None:
    full = a_pool(count=243, age=0, size=1_000_800)  # with the overhead just over 95 %
    assert counts(planned(full)) == [242]
    assert counts(planned(replace(full, bytes=243_000_000))) == []


def test_a_clock_set_back_does_not_hold_a_pool() -> None:
    assert counts(planned(a_pool(age=-3600))) == [1]


# ---------------------------------------------------------------- sizes


def test_a_huge_pool_gives_several_flushes() -> None:
    assert counts(planned(a_pool(count=250_000, size=10))) == [100_000, 100_000, 50_000]


def test_tokens_bound_the_flushes() -> None:
    made = planned(a_pool(count=900_000, size=10))
    assert counts(made) == [100_000] * 3
    assert made.wake is not None
    assert abs(made.wake - (NOW + 4)) < 0.01


def test_the_rest_of_a_full_pool_lingers() -> None:
    made = planned(a_pool(count=100_007, age=0.1, size=10))
    assert counts(made) == [100_000]
    assert made.wake == NOW - 0.1 + 0.5


def test_bytes_and_overhead_fit_into_the_limit() -> None:
    for size in (10, 5_000, 1_000_000):
        for flush in planned(a_pool(count=100_000, size=size)).flushes:
            assert flush.max_bytes + flush.max_count * 100 <= LIMITS.max_bytes


def test_one_call_over_the_limit_still_goes() -> None:
    made = planned(a_pool(count=1, size=300_000_000))
    assert counts(made) == [1]
    assert made.flushes[0].max_bytes > 0


@given(st.integers(1, 300_000), st.integers(0, 10**7), st.integers(1, 10**6), st.integers(1000, 10**9))
def test_every_flush_keeps_every_limit(count: int, size: int, max_count: int, max_bytes: int) -> None:
    limits = BatchLimits(max_count, max_bytes, 86_400, 86_400)
    made = planned(a_pool(count=count, size=size), limits=limits)
    assert made.flushes
    assert sum(counts(made)) <= count
    for flush in made.flushes:
        assert 1 <= flush.max_count <= max_count
        assert flush.max_count == 1 or flush.max_bytes + flush.max_count * 100 <= max_bytes


# ---------------------------------------------------------------- what is set is obeyed

TEN_OR_THIRTY = RoutingPolicy(batch_min_size=10, batch_window_ms=30_000, batch_max_size=100)


def test_a_minimum_is_waited_for() -> None:
    assert planned(a_pool(count=9, age=29), policy=TEN_OR_THIRTY) == FlushPlan((), NOW + 1)
    assert counts(planned(a_pool(count=10, age=1), policy=TEN_OR_THIRTY)) == [10]


def test_after_the_window_whatever_is_there_goes() -> None:
    assert counts(planned(a_pool(count=3, age=30), policy=TEN_OR_THIRTY)) == [3]


def test_a_minimum_alone_waits_thirty_seconds() -> None:
    alone = RoutingPolicy(batch_min_size=10)
    assert planned(a_pool(count=9, age=1), policy=alone) == FlushPlan((), NOW + 29)
    assert counts(planned(a_pool(count=9, age=30), policy=alone)) == [9]


def test_a_minimum_reached_still_lingers_so_that_a_burst_travels_whole() -> None:
    assert planned(a_pool(count=10, age=0.1), policy=TEN_OR_THIRTY) == FlushPlan((), NOW + 0.4)
    assert counts(planned(a_pool(count=25, age=0.5), policy=TEN_OR_THIRTY)) == [25]


def test_the_window_starts_with_the_first_call_so_a_burst_is_not_split() -> None:
    # an idle hour went by before: the first call of a burst must not go alone
    assert counts(planned(a_pool(count=1, age=0.001), policy=TEN_OR_THIRTY)) == []
    assert counts(planned(a_pool(count=50, age=0.5), policy=TEN_OR_THIRTY)) == [50]


def test_a_window_alone_is_waited_out() -> None:
    window = RoutingPolicy(batch_window_ms=5000)
    assert planned(a_pool(count=500, age=4), policy=window) == FlushPlan((), NOW + 1)
    assert counts(planned(a_pool(count=500, age=5), policy=window)) == [500]
    assert counts(planned(a_pool(count=1, age=0), policy=RoutingPolicy(batch_window_ms=0))) == [1]


def test_a_maximum_caps_each_batch() -> None:
    made = planned(a_pool(count=250, age=1), policy=TEN_OR_THIRTY)
    assert counts(made) == [100, 100, 50]
    assert counts(planned(a_pool(count=205, age=1), policy=TEN_OR_THIRTY)) == [100, 100]  # five wait for company


def test_draining_waits_for_nothing_but_the_road() -> None:
    assert counts(planned(a_pool(count=1, age=0), policy=TEN_OR_THIRTY, draining=True)) == [1]
    held = planned(a_pool(age=0), roads={"c1": spent_road()}, draining=True)
    assert held.flushes == ()
    assert held.wake is not None
    assert held.wake > NOW


# ---------------------------------------------------------------- order and roads


def test_the_most_pressing_pool_goes_first() -> None:
    road = {"c1": spent_road(2)}  # one token left
    calm, pressed, older = a_pool(1), a_pool(2, rescue=NOW + 60), a_pool(3, age=20)
    assert [flush.pool for flush in planned(calm, pressed, older, roads=road).flushes] == [2]
    assert [flush.pool for flush in planned(calm, older, roads=road).flushes] == [3]
    assert [flush.pool for flush in planned(calm, pressed, older).flushes] == [2, 3, 1]


def test_a_patient_pool_does_not_starve_behind_pressing_ones() -> None:
    road = {"c1": spent_road(2)}
    patient, pressing = a_pool(1, age=PATIENCE + 61), a_pool(2, rescue=NOW + 60)
    assert [flush.pool for flush in planned(pressing, patient, roads=road).flushes] == [1]


def test_a_huge_pool_leaves_its_neighbour_a_token() -> None:
    made = planned(a_pool(1, 900_000, size=10, rescue=NOW + 60), a_pool(2))
    assert [flush.pool for flush in made.flushes] == [1, 2, 1]


def test_credentials_have_roads_of_their_own() -> None:
    roads = {"c1": spent_road(), "c2": BatchQuota.new(50, 2, NOW)}
    made = planned(a_pool(1), a_pool(2, credential="c2"), roads=roads)
    assert [(flush.pool, flush.credential) for flush in made.flushes] == [(2, "c2")]
    assert made.wake == roads["c1"].create_ready_at(NOW)


def test_a_pool_whose_credential_is_not_held_is_left_alone() -> None:
    assert planned(a_pool(credential="stranger")) == FlushPlan((), None)


def test_a_paused_road_waits_for_the_end_of_the_pause() -> None:
    paused = {"c1": BatchQuota.new(50, 2, NOW).paused(NOW + 33)}
    assert planned(a_pool(count=100_000), roads=paused, draining=True) == FlushPlan((), NOW + 33)


# ---------------------------------------------------------------- tenants of an account


SHARED = dict.fromkeys(("c1", "alice", "bob", "carol"), "c1")


def creates(pools: dict[str, list[PoolView]], count: int) -> list[str]:
    """Whose pools get the next creates of one account, one token at a time, while none of these pools runs empty."""
    road, got = spent_road(2), []
    for _ in range(count):
        made = plan(
            [view for views in pools.values() for view in views],
            {"c1": road},
            RoutingPolicy(),
            LIMITS,
            {},
            NOW,
            overhead=100,
            accounts=SHARED,
        )
        [flush] = made.flushes
        got.append(flush.credential)
        road = replace(spent_road(2), turns=flush.turns)
    return got


def test_tenants_get_equal_shares_however_many_pools_they_have() -> None:
    many = [a_pool(number, credential="alice", age=100) for number in range(50)]
    got = creates({"alice": many, "bob": [a_pool(60, credential="bob")], "carol": [a_pool(70, credential="carol")]}, 30)
    assert Counter(got) == {"alice": 10, "bob": 10, "carol": 10}


def test_a_tenant_that_is_always_in_a_hurry_gets_no_more_than_its_share() -> None:
    hasty = [a_pool(number, credential="alice", rescue=NOW + 20) for number in range(9)]
    got = creates({"alice": hasty, "bob": [a_pool(60, credential="bob", age=1)]}, 40)
    assert got[:2] == ["alice", "alice"]
    assert 19 <= Counter(got)["bob"] <= 20


def test_a_pool_near_its_rescue_goes_before_the_turn_of_its_tenant() -> None:
    road = replace(spent_road(2), turns=FRESH.taken("alice", ["alice", "bob"]))
    pools = [a_pool(1, credential="alice", rescue=NOW + 20), a_pool(2, credential="bob", rescue=NOW + 4000)]
    pools += [a_pool(3, credential="alice", rescue=NOW + 3000)]
    quotas, keys = {"c1": road}, {"overhead": 100, "accounts": SHARED}
    assert [one.pool for one in plan(pools, quotas, RoutingPolicy(), LIMITS, {}, NOW, **keys).flushes] == [1]
    assert [one.pool for one in plan(pools[1:], quotas, RoutingPolicy(), LIMITS, {}, NOW, **keys).flushes] == [2]


def test_of_one_tenant_the_least_slack_goes_first() -> None:
    pools = [a_pool(number, rescue=NOW + 50 * number, age=number) for number in (5, 3, 4, 1, 2)]
    assert [flush.pool for flush in planned(*pools).flushes] == [1, 2, 3]


def test_one_key_in_two_forms_is_one_tenant() -> None:
    pools = [a_pool(1, credential="alice"), a_pool(2, credential="bob"), a_pool(3, credential="carol")]
    forms = {"alice": "alice", "bob": "alice"}
    quotas = {"c1": replace(spent_road(2), turns=FRESH.taken("alice", ["alice", "carol"]))}
    made = plan(pools, quotas, RoutingPolicy(), LIMITS, {}, NOW, overhead=100, accounts=SHARED, tenants=forms)
    assert [flush.pool for flush in made.flushes] == [3]


# ---------------------------------------------------------------- unresolved creates


def test_a_count_in_doubt_is_not_used_again() -> None:
    one_token = {"c1": spent_road(2)}
    assert counts(planned(a_pool(count=5), roads=one_token, unresolved={"c1": frozenset({5})})) == [4]
    assert counts(planned(a_pool(count=5), roads=one_token, unresolved={"c1": frozenset({5, 4, 3})})) == [2]
    assert counts(planned(a_pool(count=5), roads=one_token, unresolved={"c2": frozenset({5})})) == [5]


def test_the_cap_in_doubt_is_undercut_too() -> None:
    made = planned(a_pool(count=300), policy=TEN_OR_THIRTY, unresolved={"c1": frozenset({100})})
    assert counts(made) == [99, 99, 99]


def test_a_single_call_waits_while_a_single_create_is_in_doubt() -> None:
    made = planned(a_pool(count=1), unresolved={"c1": frozenset({1})}, draining=True)
    assert made.flushes == ()
    assert made.wake is not None
    assert made.wake > NOW


@given(st.integers(1, 12), st.frozensets(st.integers(1, 12)))
def test_no_flush_has_a_count_in_doubt(count: int, taken: frozenset[int]) -> None:
    made = planned(a_pool(count=count), unresolved={"c1": taken})
    assert not taken.intersection(counts(made))
    assert bool(made.flushes) == any(number not in taken for number in range(1, count + 1))


# ---------------------------------------------------------------- over time


@dataclass
class World:
    """Applies plans to pools of calls, as an engine would, and jumps from wake to wake."""

    policy: RoutingPolicy
    road: BatchQuota
    now: float = NOW
    waiting: dict[int, list[float]] = field(default_factory=dict)
    sent: list[tuple[int, int]] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    plans: int = 0

    def views(self) -> list[PoolView]:
        return [
            PoolView(pool, KEY, len(calls), 100 * len(calls), min(calls), max(calls), None if pool % 2 else NOW + 1e6)
            for pool, calls in self.waiting.items()
            if calls
        ]

    def step(self) -> float | None:
        self.plans += 1
        made = plan(self.views(), {"c1": self.road}, self.policy, LIMITS, {}, self.now, overhead=100)
        assert made.wake is None or made.wake > self.now
        for flush in made.flushes:
            assert self.road.can_create(self.now)
            self.road = self.road.spend_create(self.now)
            calls = self.waiting[flush.pool]
            self.waits += [self.now - at for at in calls[: flush.max_count]]
            self.waiting[flush.pool] = calls[flush.max_count :]
            self.sent.append((flush.pool, flush.max_count))
        return made.wake

    def run(self, arrivals: list[tuple[float, int]]) -> None:
        for delay, pool in arrivals:
            until = self.now + delay
            self.advance(until)
            self.now = until
            self.waiting.setdefault(pool, []).append(self.now)
        self.advance(math.inf)

    def advance(self, until: float) -> None:
        while (wake := self.step()) is not None and wake <= until:
            self.now = wake


POLICIES = st.builds(
    RoutingPolicy,
    batch_window_ms=st.none() | st.floats(0, 60_000),
    batch_min_size=st.none() | st.integers(1, 20),
    batch_max_size=st.none() | st.integers(20, 50),
    linger_ms=st.floats(0, 2000),
)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.001, 0.3, 7.0, 100.0]), st.integers(1, 4)), max_size=60),
    POLICIES,
    st.integers(5, 1000),
)
def test_whatever_arrives_is_sent_once_and_soon(
    arrivals: list[tuple[float, int]], policy: RoutingPolicy, rpm: int
) -> None:
    world = World(policy, BatchQuota.new(rpm, 2, NOW))
    world.run(arrivals)
    assert not any(world.waiting.values())
    assert len(world.waits) == len(arrivals)
    turn = 60 / (rpm / 6)  # the slowest pace at which creates are allowed
    assert max(world.waits, default=0) <= 60 + 2 + turn * (len(world.sent) + 4)
    assert world.plans <= 4 * len(arrivals) + 4  # it sleeps between changes


def test_light_load_waits_for_nothing_but_the_linger() -> None:
    world = World(RoutingPolicy(), BatchQuota.new(50, 2, NOW))
    world.run([(20.0, 1)] * 50)
    assert max(world.waits) < 0.51
    assert len(world.sent) == 50


def test_heavy_load_widens_the_batches() -> None:
    world = World(RoutingPolicy(), BatchQuota.new(50, 2, NOW))
    world.run([(0.01, 1)] * 6000)  # a hundred calls a second, fifteen creates a minute
    widths = [count for _, count in world.sent[5:-1]]
    assert 350 <= min(widths) <= max(widths) <= 450
    assert sum(world.waits) / len(world.waits) < 3.5


def group_commit(per_s: float, per_minute: float) -> float:
    """The mean wait of a call for its create, if whatever waits is taken whenever a create is allowed."""
    turn = 60 / per_minute
    return per_s * turn**2 / 2 / (per_s * turn + math.exp(-per_s * turn))


def mean_wait(per_s: float, rpm: int, linger_ms: float, poll_interval: float = 2.0) -> tuple[float, float]:
    """The mean wait of calls that arrive at random, and the mean size of their batches."""
    rng = random.Random(f"{per_s} {rpm}")
    world = World(RoutingPolicy(linger_ms=linger_ms), BatchQuota.new(rpm, poll_interval, NOW))
    world.run([(rng.expovariate(per_s), 1) for _ in range(int(min(12_000, max(400, 400 * per_s))))])
    return statistics.fmean(world.waits), statistics.fmean(count for _, count in world.sent[5:-1])


@pytest.mark.parametrize("per_s", [0.1, 1, 10, 100, 1000])
def test_with_50_creates_a_minute_calls_wait_less_than_a_second(per_s: float) -> None:
    assert create_rate(130, 2) == 50
    assert mean_wait(per_s, 130, 500)[0] <= 1.0


@pytest.mark.parametrize(
    ("per_minute", "per_s", "wait", "size"),
    [
        (5, 0.1, 4.8, 1.5),
        (5, 10, 6.0, 120),
        (50, 0.1, 0.07, 1.0),
        (50, 1, 0.48, 1.5),
        (50, 100, 0.60, 120),
        (50, 1000, 0.60, 1200),
    ],
)
def test_the_wait_for_a_create_is_that_of_group_commit(per_minute: int, per_s: float, wait: float, size: float) -> None:
    """Without a linger. Three creates in advance make a light load wait less than the theory says."""
    rpm, pace = {5: (15, 12.0), 50: (130, 2.0)}[per_minute]
    assert create_rate(rpm, pace) == pytest.approx(per_minute)
    assert group_commit(per_s, per_minute) == pytest.approx(wait, rel=0.03)
    waited, batch = mean_wait(per_s, rpm, 0, pace)
    assert waited <= 1.05 * wait
    if size > 100:
        assert waited >= 0.85 * wait
        assert batch == pytest.approx(size, rel=0.15)


def test_a_patient_pool_travels_under_a_flood_of_pressing_ones() -> None:
    world = World(RoutingPolicy(), BatchQuota.new(6, 60, NOW))
    flood = [(1.0, pool) for _ in range(200) for pool in (2, 4, 6, 8)]
    world.run([(0.0, 1), *flood])
    assert (1, 1) in world.sent
    assert max(world.waits) < PATIENCE + 300


def test_planning_is_linear() -> None:
    def cost(pools: int) -> int:
        views = [a_pool(number, 10, rescue=NOW + number) for number in range(pools)]
        return calls_made_by(lambda: planned(*views))

    assert cost(8000) < 9 * cost(1000)


def test_the_cost_of_planning_does_not_grow_with_the_count() -> None:
    def cost(count: int) -> int:
        return calls_made_by(lambda: planned(a_pool(count=count, size=10)))

    assert cost(500_000_000) == cost(5_000_000)  # both spend all tokens of the account
