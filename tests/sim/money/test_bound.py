"""The hindsight bound is below what any policy pays, and on tiny cases equal to the best of all that can be done."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product

import pytest

from carpool.core.model import Lane
from carpool.sim.money.billing import MULTIPLIERS, PriceTable, bill
from carpool.sim.money.bound import Hindsight
from carpool.sim.money.coding import coding_fleet
from carpool.sim.money.fleet import simulate
from carpool.sim.money.model import ROOT, Node, RunPurchase, Trace, TraceSession, TraceTurn, Ttl
from carpool.sim.money.policies import POLICIES, find_policy
from carpool.sim.money.traces import PauseMode
from carpool.sim.money.worlds import WORLDS, Latencies, ProviderWorld, Slowdown
from tests.support.deep import quick_and_deep

TRUE = PriceTable()
LIFE = {"5m": 300.0, "1h": 3600.0}
ALL = 1000  # labels: so none are merged, which would lower the bound
JUST = 1e-4  # seconds before the end of a life
TTLS: tuple[Ttl | None, ...] = (None, "5m", "1h")
MARKS = ("claude-opus-5", TTLS)
DECLINES = ("gpt-5.6-terra", TTLS[:2])  # a request may do without the cache
FREE: tuple[str, Sequence[Ttl | None]] = ("gpt-5.4", (None,))  # writes cost nothing
NOT_IN_BATCHES: tuple[str, Sequence[Ttl | None]] = ("gpt-4.1", (None,))
MODES: tuple[PauseMode, ...] = ("attended", "unattended")
Times = Mapping[Lane, Sequence[float]]  # of each turn, from the request to the answer


class Draws:
    def __init__(self, batch_s: Sequence[float]) -> None:
        self._batch_s = batch_s

    def batch_s(self, session: int, turn: int, at: float) -> float:
        return self._batch_s[turn]


def tiny(rng: random.Random, model: str) -> tuple[Trace, list[float]]:
    """One session of three turns, which continue each other or branch."""
    nodes: list[Node] = []
    turns = []
    for number in range(3):
        parent = rng.choice([number - 1, number - 1, rng.randint(-1, number - 1)])
        tokens = (nodes[parent].tokens if parent != ROOT else 0) + rng.choice([300, 2000, 2000, 9000])
        nodes.append(Node(parent, tokens))
        think = rng.choice([10.0, 350.0]) if number else 0.0
        turns.append(TraceTurn(number, rng.choice([10, 500]), think, rng.choice([5.0, 20.0])))
    provider = "openai" if model.startswith("gpt") else "anthropic"
    session = TraceSession("tiny", 0.0, model, tuple(turns))
    return Trace("tiny", nodes, (session,), provider), [rng.choice([60.0, 4000.0]) for _ in turns]


def bought(trace: Trace, times: Times, lanes: Sequence[Lane], ttls: Sequence[Ttl | None]) -> list[RunPurchase]:
    clock, purchases = 0.0, []
    for number, (turn, lane, ttl) in enumerate(zip(trace.sessions[0].turns, lanes, ttls, strict=True)):
        asked = clock + turn.think_s
        clock = asked + times[lane][number]
        starts = clock - turn.sync_s if lane is Lane.BATCH else asked
        purchases.append(
            RunPurchase(0, number, lane, "purchase", starts, clock - 1, clock, turn.node, turn.output_tokens, ttl)
        )
    return purchases


def of_lanes(trace: Trace, batch_s: Sequence[float]) -> Times:
    return {Lane.NOW: [turn.sync_s for turn in trace.sessions[0].turns], Lane.BATCH: batch_s}


def ping_plans(purchases: Sequence[RunPurchase]) -> Iterable[list[RunPurchase]]:
    """Up to two pings for each marked prompt on `now`, each at the end of the life that the one before gave it."""
    marked = [one for one in purchases if one.lane is Lane.NOW and one.ttl]
    options = [
        [(one, since.starts, count) for since in marked if since.starts >= one.starts for count in (1, 2)]
        for one in marked
    ]
    for plan in product(*([(one, 0.0, 0), *more] for one, more in zip(marked, options, strict=True))):
        yield [
            RunPurchase(0, one.turn, Lane.NOW, "ping", at, at, at, one.node, 0, one.ttl)
            for one, since, count in plan
            for number in range(1, count + 1)
            for at in (since + number * (LIFE[str(one.ttl)] - JUST),)
        ]


def exhaustive(
    trace: Trace,
    times: Times,
    marks: Sequence[Ttl | None],
    *,
    pings: bool,
    budget_s: float = math.inf,
    task_s: float = math.inf,
) -> int:
    """The least of everything that can be done. Who can't be in time goes on `now`, or does the whole task there."""
    turns = trace.sessions[0].turns
    offered = [[lane for lane in times if lane is Lane.NOW or times[lane][at] <= budget_s] for at in range(len(turns))]
    quickest = sum(turn.think_s + min(times[lane][at] for lane in offered[at]) for at, turn in enumerate(turns))
    best = None
    for lanes in product(*offered):
        for ttls in product(marks, repeat=3):
            purchases = bought(trace, times, lanes, ttls)
            if purchases[-1].ends > max(task_s, quickest) + JUST:
                continue
            for more in ping_plans(purchases) if pings else [[]]:
                ordered = sorted([*purchases, *more], key=lambda one: one.starts)
                cost = bill(trace, ordered, [TRUE])[0].cost
                best = cost if best is None else min(best, cost)
    assert best is not None
    return best


def limits(rng: random.Random, trace: Trace) -> tuple[float, float]:
    """A budget of each call and of the task, either of which may be missing, or too tight to be kept."""
    pauses = sum(turn.think_s for turn in trace.sessions[0].turns)
    return rng.choice([math.inf, 3.0, 30.0, 100.0]), pauses + rng.choice([math.inf, 10.0, 90.0, 160.0, 4500.0])


def given(limit: float) -> float | None:
    return None if limit == math.inf else limit


@pytest.mark.parametrize("bounded", [False, True], ids=["free", "with deadlines"])
@pytest.mark.parametrize("seed", quick_and_deep(range(200), range(12)))
def test_equals_the_best_of_all_choices(seed: int, bounded: bool) -> None:
    print(f"seed {seed}")
    model, marks = MARKS
    rng = random.Random(seed)
    trace, batch_s = tiny(rng, model)
    budget, task = limits(rng, trace) if bounded else (math.inf, math.inf)
    least = exhaustive(trace, of_lanes(trace, batch_s), marks, pings=True, budget_s=budget, task_s=task)
    assert Hindsight(trace, Draws(batch_s), TRUE, most_labels=ALL).bound(given(budget), given(task)).cost == least


@pytest.mark.parametrize("bounded", [False, True], ids=["free", "with deadlines"])
@pytest.mark.parametrize(
    ("model", "marks", "flex"),
    [(*DECLINES, False), (*DECLINES, True), (*FREE, False), (*FREE, True), (*NOT_IN_BATCHES, False)],
    ids=["declines", "declines, flex", "free", "free, flex", "not in batches"],
)
@pytest.mark.parametrize("seed", quick_and_deep(range(200), range(6)))
def test_equals_the_best_of_all_choices_where_caching_is_implicit(
    seed: int, model: str, marks: Sequence[Ttl | None], flex: bool, bounded: bool
) -> None:
    """Batches take a minute here. After a longer one, exhaustive search has fewer choices than the bound, which may
    keep the cache alive by requests without a mark."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    trace, _ = tiny(rng, model)
    flex_s = [rng.choice([20.0, 90.0]) for _ in range(3)]
    times = of_lanes(trace, [60.0] * 3) | ({Lane.FLEX: flex_s} if flex else {})
    budget, task = limits(rng, trace) if bounded else (math.inf, math.inf)
    takes = (lambda _session, turn: flex_s[turn]) if flex else None
    hindsight = Hindsight(trace, Draws([60.0] * 3), TRUE, flex_s=takes, most_labels=ALL)
    assert hindsight.bound(given(budget), given(task)).cost == exhaustive(
        trace, times, marks, pings=False, budget_s=budget, task_s=task
    )


def test_a_deadline_keeps_turns_off_the_batch() -> None:
    trace, _ = tiny(random.Random(1), "claude-opus-5")
    hindsight = Hindsight(trace, Draws([60.0, 60.0, 60.0]), TRUE)
    free, held, hurried = (hindsight.bound(budget).cost for budget in (None, 60.0, 59.0))
    assert free == held < hurried


def test_a_task_has_time_for_some_batches_only() -> None:
    trace, _ = tiny(random.Random(1), "claude-opus-5")
    hindsight = Hindsight(trace, Draws([60.0, 60.0, 60.0]), TRUE)
    pauses = sum(turn.think_s for turn in trace.sessions[0].turns)
    costs = [hindsight.bound(None, pauses + seconds).cost for seconds in (20.0, 130.0, 180.0)]
    assert costs[0] > costs[1] > costs[2] == hindsight.bound().cost


@pytest.mark.parametrize("budget_s", [None, 60.0, 300.0, 3600.0])
@pytest.mark.parametrize("world", sorted(WORLDS))
def test_is_below_every_policy(world: str, budget_s: float | None) -> None:
    seed = len(world)
    print(f"seed {seed}")
    trace = coding_fleet(4, 8, seed)
    draws = Latencies(WORLDS[world], trace, seed)
    tables = [TRUE, PriceTable(MULTIPLIERS[-1])]
    bounds = [Hindsight(trace, draws, table) for table in tables]
    for name in [*POLICIES, "now+5m+pings(2)"]:
        for task_budget_s in (None, 1800.0) if budget_s else (None,):
            run = simulate(
                trace, WORLDS[world], find_policy(name), seed, budget_s=budget_s, task_budget_s=task_budget_s
            )
            for hindsight, billed in zip(bounds, bill(trace, run.purchases, tables), strict=True):
                bound = hindsight.bound(budget_s, task_budget_s, run)
                assert 0 < bound.cost <= billed.cost, (name, task_budget_s, billed.table)


def any_world(rng: random.Random) -> ProviderWorld:
    """A known one, in which the provider may also limit, refuse and slow down."""
    world = WORLDS[rng.choice(sorted(WORLDS))]
    slow = Slowdown(300.0, 4000.0, 5.0) if rng.random() < 0.3 else world.slow_sync
    return replace(
        world,
        stuck=rng.choice([world.stuck, 0.1]),
        batch_rpm=rng.choice([30, 300, 1000]),
        sync_rpm=rng.choice([None, None, 20]),
        refusal=rng.choice([0.0, 0.0, 0.3]),
        slow_sync=slow,
    )


@pytest.mark.parametrize("seed", quick_and_deep(range(300), range(12)))
def test_is_below_every_policy_whatever_the_world_does(seed: int) -> None:
    """Limits, refusals, slow answers; both providers, prompts in a dearer tier; deadlines of calls and of tasks."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    model = rng.choice(["claude-opus-5", "claude-haiku-5-5", "gpt-5.6-terra", "gpt-5.4", "gpt-4.1"])
    fleet = coding_fleet(rng.choice([2, 5]), rng.choice([1, 6]), seed, mode=rng.choice(MODES), model=model)
    trace, world = replace(fleet, provider="openai" if model.startswith("gpt") else "anthropic"), any_world(rng)
    budget, task = rng.choice([None, 20.0, 90.0, 600.0, 3600.0]), rng.choice([None, None, 200.0, 3600.0])
    table = PriceTable(rng.choice([None, MULTIPLIERS[-1]]))
    hindsight = Hindsight(trace, Latencies(world, trace, seed), table, slowest=world.slow_sync.factor)
    for name in [*POLICIES, "now+5m+pings(3)"]:
        run = simulate(trace, world, find_policy(name), seed, budget_s=budget, task_budget_s=task)
        [billed] = bill(trace, run.purchases, [table])
        assert 0 < hindsight.bound(budget, task, run).cost <= billed.cost, name
