"""A what-if of recorded traffic predicts the bill of the same fleet when it really gets that budget."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import MappingProxyType

import pytest

from carpool.mock import MockConfig
from carpool.mock.core.latency import LogNormal, Mixture
from carpool.planners.forecast import Forecast
from carpool.sim.money.planned import taught
from carpool.sim.money.record_source import read_record
from carpool.sim.money.recorded import conversations
from carpool.sim.money.recorded_trace import RecordHabits
from carpool.sim.money.what_if import ReplayedAccount, accounts, parse_what_if
from carpool.sim.money.what_if_report import answer, group_of, replayed_share
from carpool.sim.money.worlds import WORLDS, LogNormalTimes, MixedTimes
from carpool.sim.timeline import START
from tests.support.deep import quick_and_deep

from .mock_fleet import HAIKU, SONNET, FleetAgent, MockFleet

SEED = 20  # of the fleet
BUDGETS = ("4m", "20m", "2h")
FORESEEN_SEEDS, REAL_SEEDS = 10, 3  # of latencies, in the replay and at the mock
SYNC = LogNormal(4.0, 0.4)
BATCHES = Mixture(((0.97, LogNormal(40.0, 0.4)), (0.03, LogNormal(600.0, 0.6))))
TIMES = MixedTimes(LogNormalTimes(40.0, 0.4), LogNormalTimes(600.0, 0.6), 0.03)
WORLD = replace(WORLDS["economics"], name="the mock's", batch=MappingProxyType({"*": TIMES}), cancel_s=20.0)


def mock_config(seed: int) -> MockConfig:
    return MockConfig(
        seed=seed,
        sync_latency=SYNC,
        batch_latency=BATCHES,
        batch_execution=SYNC,
        per_request=True,
        mean_output_tokens=400,
    )


def coders(count: int, rng: random.Random) -> list[FleetAgent]:
    """Agents that keep a cache warm, with tools that take a while, and now and then a person who takes longer."""
    system = "tools and rules " * 1500
    return [
        FleetAgent(
            f"coder {number}",
            rng.uniform(0, 1800),
            [rng.choice([2.0, 5.0, 20.0, 60.0, 200.0]) if rng.random() < 0.9 else 900.0 for _ in range(12)],
            system,
            words=rng.choice([100, 400, 900]),
            tags={"team": "coding"},
            client="claude-cli/2.0 (external)",
        )
        for number in range(count)
    ]


def judges(count: int, rng: random.Random) -> list[FleetAgent]:
    """Calls that stand alone, with nothing to cache, paid by another key."""
    return [
        FleetAgent(
            f"judge {number}",
            rng.uniform(0, 3600),
            [0.0],
            "You judge.",
            words=rng.choice([500, 2000]),
            model=HAIKU,
            tags={"team": "evals"},
            key="sk-evals",
            ttl=None,
        )
        for number in range(count)
    ]


def agents() -> list[FleetAgent]:
    rng = random.Random(SEED)
    return [*coders(20, rng), *judges(150, rng)]


def knowing() -> Forecast:
    """As what-if assumes: carpool has been running for a while, so it knows how long batches take."""
    return taught(WORLD, "anthropic", (SONNET, HAIKU), START)


def run(folder: Path, budget: float | None, seed: int = SEED) -> MockFleet:
    return MockFleet(folder / f"{budget} {seed}.db", agents(), mock_config(seed), budget, knowing()).go()


def recorded(folder: Path) -> tuple[Sequence[ReplayedAccount], RecordHabits]:
    record = read_record(str(folder / f"{None} {SEED}.db"), 0.0)
    found, left_out = accounts(conversations(record.calls), {"anthropic": "anthropic"}, lambda _: WORLD)
    assert not left_out
    return found, RecordHabits(record.calls)


@pytest.mark.parametrize("budget", quick_and_deep(BUDGETS, ["20m"]))
def test_the_bill_of_the_same_fleet_with_a_budget(tmp_path: Path, budget: str) -> None:
    on_now = run(tmp_path, None)
    found, habits = recorded(tmp_path)
    asked = parse_what_if(f"budget={budget}")
    foreseen = answer(found, habits, asked, group_of("team"), FORESEEN_SEEDS)
    fleets = [run(tmp_path, asked.budget_s, seed) for seed in range(REAL_SEEDS)]
    bill = fmean(fleet.bill for fleet in fleets)
    assert foreseen.total.paid == on_now.bill
    assert foreseen.total.would_pay == pytest.approx(bill, rel=0.05), f"seed {SEED}"
    assert bill < 0.85 * on_now.bill  # there was something to be predicted
    for team, model in (("coding", SONNET), ("evals", HAIKU)):
        [group] = [one for one in foreseen.groups if one.name == team]
        own = [charge for fleet in fleets for charge in fleet.mock.bill.charges if charge.model.startswith(model)]
        assert group.would_pay == pytest.approx(sum(one.nano_usd for one in own) / REAL_SEEDS, rel=0.08), team
        batched = sum(one.kind == "batch" for one in own) / REAL_SEEDS
        assert group.by_batch == pytest.approx(batched, rel=0.05)
    assert not foreseen.total.late


def test_the_check_of_a_replay(tmp_path: Path) -> None:
    """What was paid on `now` comes out of the replay, to the cent."""
    run(tmp_path, None)
    assert replayed_share(*recorded(tmp_path)) == pytest.approx(1.0, abs=0.001)
