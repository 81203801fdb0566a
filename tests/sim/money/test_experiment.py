"""Policies side by side, on traces that are small enough to be reckoned by hand."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from carpool.core.errors import ConfigError
from carpool.sim.money.experiment import CODING, Experiment, TraceSource, WorldSource, judged, run_experiment
from carpool.sim.money.fleet import simulate
from carpool.sim.money.policies import POLICIES, find_policy
from carpool.sim.money.results import RunResult
from carpool.sim.money.worlds import find_world

ONE_CALL = "TIMESTAMP,ContextTokens,GeneratedTokens\n2026-11-16 18:17:03.9799600,1000,100\n"
FULL = 1000 * 3_000 + 100 * 15_000  # nano-dollars: $3 and $15 per million tokens
ECONOMICS = WorldSource("economics")
SMALL = TraceSource(CODING, agents=3, turns=4)


@pytest.fixture
def one_call(tmp_path: Path) -> TraceSource:
    (tmp_path / "one.csv").write_text(ONE_CALL)
    return TraceSource(str(tmp_path / "one.csv"), model="claude-sonnet-4-5")


def experiment(source: TraceSource, *policies: str, **changes: object) -> Experiment:
    settings: dict[str, object] = {
        "worlds": [WorldSource("economics")],
        "read_multipliers": [None],
        "deadlines": [3600.0],
        "seeds": [0],
        "bound": False,
    }
    return Experiment(sources=[source], policies=policies, **(settings | changes))  # type: ignore[arg-type]


def costs(results: list[RunResult]) -> dict[str, int]:
    return {result.policy: result.cost for result in results}


def test_one_call_costs_what_the_price_table_says(one_call: TraceSource) -> None:
    results = run_experiment(experiment(one_call, "now", "now+1h", "batch"), 1)
    assert costs(results) == {"now": FULL, "now+1h": FULL, "batch": FULL // 2}  # nobody comes back for what is cached
    assert {result.baseline for result in results} == {FULL}
    assert {result.key.trace for result in results} == {"one"}


def test_the_baseline_is_run_but_not_shown_unasked(one_call: TraceSource) -> None:
    assert {one.policy for one in run_experiment(experiment(one_call, "batch"), 1)} == {"batch"}


def test_results_come_in_the_order_of_the_policies(one_call: TraceSource) -> None:
    asked = ("window", "now+5m", "now")
    assert [one.policy for one in run_experiment(experiment(one_call, *asked), 1)] == list(asked)


def test_cheaper_reads_make_a_warm_cache_cheaper() -> None:
    shares = [Fraction(1, 10), Fraction(1, 40), None]
    results = run_experiment(experiment(SMALL, "now+5m", "now", read_multipliers=shares), 1)
    seen = {(one.policy, one.key.read_multiplier): one.cost for one in results}
    assert seen["now+5m", "0.025"] < seen["now+5m", "0.1"] == seen["now+5m", "true"]
    assert seen["now", "0.025"] == seen["now", "0.1"]


def test_the_bound_of_one_call_is_the_cheaper_lane_that_is_in_time(one_call: TraceSource) -> None:
    """The bound of a price with fractions of a nano-dollar is half of one lower."""
    results = run_experiment(experiment(one_call, "now", deadlines=[10.0, 7200.0], bound=True), 1)
    bounds = {one.key.deadline_s: one.bound for one in results}
    assert bounds[10.0] == pytest.approx(FULL, abs=1)
    assert bounds[7200.0] == pytest.approx(FULL // 2, abs=1)


@pytest.mark.parametrize("world", ["economics", "anthropic", "quick"])
def test_nobody_who_is_in_time_pays_less_than_the_bound(world: str) -> None:
    plan = experiment(SMALL, *POLICIES, bound=True, deadlines=[60.0, 1200.0, 86_400.0], worlds=[WorldSource(world)])
    results = run_experiment(plan, 1)
    assert all(one.bound is not None for one in results)
    kept = [one for one in results if not one.avoidable]
    assert {"carpool", "now+5m", "batch+1h"} <= {one.policy for one in kept}
    assert all(one.cost >= (one.bound or 0) for one in kept)
    assert any(one.avoidable for one in results if one.key.deadline_s == 60.0) or world == "quick"


def test_every_combination_is_there_once() -> None:
    worlds = [WorldSource("quick"), WorldSource("slow")]
    plan = experiment(SMALL, "now", "carpool", deadlines=[60.0, None], seeds=[0, 1], worlds=worlds)
    told: list[int] = []
    results = run_experiment(plan, 1, lambda: told.append(1))
    seen = [(one.policy, one.seed, one.key.regime, one.key.deadline_s) for one in results]
    assert len(seen) == len(set(seen)) == 2 * 2 * 2 * 2
    assert len(told) == len(plan.jobs()) == 3 * 2 * 2  # with the baseline, for all deadlines at once


def test_processes_do_not_change_the_results() -> None:
    plan = experiment(SMALL, "now+5m", "batch+1h", "carpool", seeds=[0, 1])
    assert run_experiment(plan, 2) == run_experiment(plan, 1)


@pytest.mark.parametrize("policy", [*(name for name in POLICIES if name != "carpool"), "now+5m+pings(2)"])
@pytest.mark.parametrize("deadline", [6.0, 60.0, 600.0])
def test_a_run_is_judged_as_if_it_had_had_the_deadline(policy: str, deadline: float) -> None:
    trace, world = SMALL.read(0), find_world("economics")
    without = simulate(trace, world, find_policy(policy), 0)
    assert judged(without, trace, deadline) == simulate(trace, world, find_policy(policy), 0, budget_s=deadline)


def test_only_now_is_in_time_for_tight_deadlines() -> None:
    """At five seconds the pooling policies go on `now`, so the shared run must not be taken for that deadline."""
    results = run_experiment(experiment(SMALL, "window", "now", deadlines=[5.0, 3600.0]), 1)
    seen = {(one.policy, one.key.deadline_s): one.cost for one in results}
    assert seen["window", 5.0] == seen["now", 5.0] > seen["window", 3600.0]


def test_each_seed_samples_its_own_sessions() -> None:
    first, second = SMALL.read(0), SMALL.read(1)
    assert first.sessions != second.sessions
    assert first == SMALL.read(0)


def test_unattended_agents_pause_a_minute_at_most() -> None:
    pauses = [turn.think_s for one in SMALL.read(0).sessions for turn in one.turns]
    calm = TraceSource(CODING, "unattended", agents=3, turns=4).read(0)
    assert max(turn.think_s for one in calm.sessions for turn in one.turns) <= 60.0 < max(pauses)


def test_a_task_budget_is_kept_in_mind() -> None:
    [result] = run_experiment(experiment(SMALL, "batch", deadlines=[None], task_budget_s=30.0), 1)
    assert result.key.task_budget_s == 30.0
    assert "the task ran out of time" in result.timing.miss_reasons


def test_another_provider_bills_by_its_own_rules() -> None:
    """OpenAI caches without a mark, so marking for the cache changes nothing."""
    source = TraceSource(CODING, agents=3, turns=4, model="gpt-5.4", provider="openai")
    seen = costs(run_experiment(experiment(source, "now", "now+5m", "now+1h"), 1))
    assert seen["now"] == seen["now+5m"] == seen["now+1h"] > 0
    assert SMALL.read(0).provider == "anthropic"


def test_a_world_may_limit_and_refuse() -> None:
    limited = WorldSource("economics", sync_rpm=3, batch_rpm=40, refusal=0.2)
    world = limited.read()
    assert (world.sync_rpm, world.batch_rpm, world.refusal) == (3, 40, 0.2)
    assert world.name == "economics batch_rpm=40 sync_rpm=3 refusal=0.2"
    assert WorldSource("economics").read() == find_world("economics")
    [free, slow] = (run_experiment(experiment(SMALL, "now+5m", worlds=[one]), 1)[0] for one in (ECONOMICS, limited))
    assert slow.timing.added_wait_s > 1.0 > 0.001 > free.timing.added_wait_s


def test_an_unknown_world_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not a world"):
        WorldSource("nowhere").read()
