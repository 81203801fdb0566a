"""The hindsight bound is below what any policy pays, and on tiny cases equal to the best of all that can be done."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import product

import pytest

from carpool.core.model import Lane
from carpool.sim.money.billing import MULTIPLIERS, PriceTable, bill
from carpool.sim.money.bound import Hindsight
from carpool.sim.money.coding import coding_fleet
from carpool.sim.money.fleet import simulate
from carpool.sim.money.model import ROOT, Node, RunPurchase, Trace, TraceSession, TraceTurn, Ttl
from carpool.sim.money.policies import POLICIES, find_policy
from carpool.sim.money.worlds import WORLDS, Latencies

TRUE = PriceTable()
LIFE = {"5m": 300.0, "1h": 3600.0}
JUST = 1e-4  # seconds before the end of a life
LANES = (Lane.NOW, Lane.BATCH)
TTLS: tuple[Ttl | None, ...] = (None, "5m", "1h")
MARKS = ("claude-opus-5", TTLS)
DECLINES = ("gpt-5.6-terra", TTLS[:2])


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


def bought(
    trace: Trace, batch_s: Sequence[float], lanes: Sequence[Lane], ttls: Sequence[Ttl | None]
) -> list[RunPurchase]:
    clock, purchases = 0.0, []
    for number, (turn, lane, ttl) in enumerate(zip(trace.sessions[0].turns, lanes, ttls, strict=True)):
        clock += turn.think_s
        ends = clock + (turn.sync_s if lane is Lane.NOW else batch_s[number])
        purchases.append(
            RunPurchase(
                0, number, lane, "purchase", ends - turn.sync_s, ends - 1, ends, turn.node, turn.output_tokens, ttl
            )
        )
        clock = ends
    return purchases


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


def exhaustive(trace: Trace, batch_s: Sequence[float], marks: Sequence[Ttl | None], *, pings: bool) -> int:
    best = None
    for lanes in product(LANES, repeat=3):
        for ttls in product(marks, repeat=3):
            purchases = bought(trace, batch_s, lanes, ttls)
            for more in ping_plans(purchases) if pings else [[]]:
                ordered = sorted([*purchases, *more], key=lambda one: one.starts)
                cost = bill(trace, ordered, [TRUE])[0].cost
                best = cost if best is None else min(best, cost)
    assert best is not None
    return best


@pytest.mark.parametrize("seed", range(12))
def test_equals_the_best_of_all_choices(seed: int) -> None:
    print(f"seed {seed}")
    model, marks = MARKS
    trace, batch_s = tiny(random.Random(seed), model)
    assert Hindsight(trace, Draws(batch_s), TRUE).bound().cost == exhaustive(trace, batch_s, marks, pings=True)


@pytest.mark.parametrize("seed", range(12))
def test_equals_the_best_of_all_choices_where_caching_is_implicit(seed: int) -> None:
    print(f"seed {seed}")
    model, marks = DECLINES
    trace, batch_s = tiny(random.Random(seed), model)
    cost = Hindsight(trace, Draws([min(60.0, one) for one in batch_s]), TRUE).bound().cost
    assert cost == exhaustive(trace, [60.0] * 3, marks, pings=False)


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
