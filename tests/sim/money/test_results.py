"""Rows and summaries: counted by hand from small records."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from carpool.core.model import Lane
from carpool.sim.money.model import Answer, MissReason, RunRecord
from carpool.sim.money.results import (
    Estimate,
    PricedRun,
    RunKey,
    RunResult,
    as_row,
    compared,
    quantile,
    summarised,
    summary_row,
    timing,
)

KEY = RunKey("coding", "unattended", "usual", "0.1", 600.0)


def answer(session: int, turn: int, asked: float, answered: float, miss: MissReason | None = None) -> Answer:
    lane = Lane.NOW if miss else Lane.BATCH
    return Answer(
        session, turn, asked, answered, asked + 600, lane, miss is not None, miss, wait_s=answered - asked - 1
    )


def record(*answers: Answer) -> RunRecord:
    return RunRecord("carpool", 1, (), answers, batches=2, api_calls=7)


def run(seed: int, policy: str, cost: int) -> PricedRun:
    return PricedRun(KEY, policy, seed, cost, 0.9, None if policy == "bound" else timing(record()))


def result(seed: int, cost: int, *, baseline: int | None = 100, bound: int | None = 50, policy: str = "x") -> RunResult:
    counted = timing(record(answer(0, 0, 0.0, 10.0), answer(0, 1, 20.0, 40.0, "the batch was late")))
    return RunResult(KEY, policy, seed, cost, bound, baseline, False, 0.9, counted)


def test_a_record_is_counted() -> None:
    seen = timing(
        record(
            answer(0, 0, 0.0, 10.0),
            answer(0, 1, 20.0, 50.0),
            answer(1, 0, 5.0, 705.0, "the batch was late"),
            answer(1, 1, 710.0, 1410.0, "the batch was late"),
            answer(2, 0, 9.0, 709.0, "no time for a rescue"),
        )
    )
    assert (seen.calls, seen.tasks, seen.misses, seen.by_batch, seen.rescues) == (5, 3, 3, 2, 3)
    assert seen.miss_reasons == {"the batch was late": 2, "no time for a rescue": 1}
    assert (seen.batches, seen.api_calls) == (2, 7)
    assert (seen.turn_p50_s, seen.turn_p95_s) == (700.0, 700.0)  # 10, 30, 700, 700, 700
    assert (seen.task_p50_s, seen.task_p95_s) == (700.0, 1405.0)  # 50, 700, 1405
    assert seen.added_wait_s == pytest.approx((9 + 29 + 699 + 699 + 699) / 5)


def test_a_run_without_answers_is_counted() -> None:
    seen = timing(record())
    assert (seen.calls, seen.misses, seen.turn_p50_s, seen.added_wait_s) == (0, 0, 0.0, 0.0)


@pytest.mark.parametrize(("share", "value"), [(0.5, 5), (0.95, 10), (0.9, 9), (0.91, 10), (0.0, 1), (1.0, 10)])
def test_a_quantile_is_a_value_that_was_seen(share: float, value: int) -> None:
    assert quantile(range(1, 11), share) == value


def test_runs_stand_beside_those_of_their_own_seed() -> None:
    runs = [run(seed, policy, 10 * seed + cost) for seed in (1, 2) for cost, policy in ((2, "x"), (5, "now+5m"))]
    seen = compared([*runs, run(2, "bound", 1)])
    assert [(one.policy, one.seed, one.cost, one.baseline, one.bound) for one in seen] == [
        ("x", 1, 12, 15, None),
        ("now+5m", 1, 15, 15, None),
        ("x", 2, 22, 25, 1),
        ("now+5m", 2, 25, 25, 1),
    ]


# ---------------------------------------------------------------- over seeds


def test_the_bound_is_told_of_every_policy() -> None:
    [summary] = summarised([result(1, 80), result(2, 80, bound=70)])
    assert summary.bound == 60
    assert summary.bound_to_baseline is not None
    assert summary.bound_to_baseline.ratio == pytest.approx(0.6)


def test_ratios_are_paired_by_seed() -> None:
    """Seed 2 has dearer sessions. Its ratio is the same, so there is nothing uncertain about it."""
    [summary] = summarised([result(1, 80), result(2, 800, baseline=1000, bound=500)])
    assert summary.to_baseline == pytest.approx((0.8, 0.8, 0.8))
    assert summary.to_bound == pytest.approx((1.6, 1.6, 1.6))
    assert summary.cost == 440


def test_the_interval_is_students() -> None:
    """Over equal costs it is that of a mean: 0.6, 0.8, 1.0, deviation 0.2, t with 2 degrees of freedom 4.303."""
    half = 4.303 * 0.2 / 3**0.5
    estimate = Estimate.of([60, 80, 100], [100, 100, 100])
    assert estimate == pytest.approx((0.8, 0.8 - half, 0.8 + half))
    assert str(estimate) == "0.80 ±0.50"


def test_large_seeds_count_as_much_as_they_cost() -> None:
    assert Estimate.of([10, 900], [100, 1000]).ratio == pytest.approx(910 / 1100)


def test_one_seed_has_no_interval() -> None:
    assert Estimate.of([7], [10]) == (0.7, None, None)
    assert str(Estimate.of([7], [10])) == "0.70"


def test_many_seeds_take_the_normal_quantile() -> None:
    estimate = Estimate.of([0, 1] * 50, [1] * 100)
    assert estimate.high == pytest.approx(0.5 + 1.96 * 0.50252 / 10, abs=1e-4)


def test_nothing_to_compare_with_stays_blank() -> None:
    [summary] = summarised([result(1, 80), result(2, 80, bound=None)])
    assert summary.to_bound is None
    assert summary.to_baseline is not None
    assert summary_row(summary)["to_bound"] is None


def test_whoever_misses_deadlines_is_not_compared_with_the_bound() -> None:
    """The bound keeps them. What even `now` misses is nobody's fault."""
    on_time, late = record(answer(0, 0, 0.0, 10.0)), record(answer(0, 0, 0.0, 900.0, "the batch was late"))

    def seen(policy: RunRecord, on_now: RunRecord) -> Estimate | None:
        runs = [PricedRun(KEY, "x", 1, 80, 0.0, timing(policy)), PricedRun(KEY, "now+5m", 1, 100, 0.0, timing(on_now))]
        return summarised(compared([*runs, PricedRun(KEY, "bound", 1, 40)]))[0].to_bound

    assert seen(late, on_time) is None
    assert seen(on_time, on_time) == (2.0, None, None)
    assert seen(late, late) == (2.0, None, None)


def test_counts_are_summed_and_times_averaged() -> None:
    late = replace(result(2, 80), timing=replace(result(2, 80).timing, turn_p50_s=30.0, misses=3))
    [summary] = summarised([result(1, 80), late])
    assert summary.timing.calls == 4
    assert summary.timing.misses == 1 + 3
    assert summary.timing.miss_reasons == {"the batch was late": 2}
    assert summary.timing.turn_p50_s == (10.0 + 30.0) / 2


def test_policies_and_keys_are_kept_apart() -> None:
    other = replace(result(1, 70), key=replace(KEY, deadline_s=60.0))
    found = summarised([result(1, 80), result(1, 90, policy="y"), other])
    assert [(one.key.deadline_s, one.policy, one.cost) for one in found] == [
        (600.0, "x", 80),
        (600.0, "y", 90),
        (60.0, "x", 70),
    ]


# ---------------------------------------------------------------- JSON


def test_rows_are_flat_and_survive_json() -> None:
    rows = [as_row(result(seed, 80 + seed)) for seed in range(3)]
    read = json.loads(json.dumps(rows))
    assert read == rows
    assert sum(row["cost"] for row in read) == 80 + 81 + 82
    asked = {"trace", "mode", "regime", "read_multiplier", "deadline_s", "policy", "seed", "cost", "bound", "misses"}
    assert asked | {"calls", "added_wait_s"} <= set(read[0])
    assert json.loads(json.dumps(summary_row(summarised([result(1, 80)])[0])))["to_baseline"] == [0.8, None, None]
