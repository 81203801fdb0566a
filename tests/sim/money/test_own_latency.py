"""A world from one's own batches: slow ones that were cancelled count, and so does how many calls a batch had."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from carpool.core.model import TimedBatch
from carpool.sim.money.own_latency import ENOUGH, call_times, own_world
from carpool.sim.money.worlds import DAY, WORLDS


def timed(seconds: float, *, whole: bool = True, count: int = 1, model: str = "") -> TimedBatch:
    return TimedBatch("anthropic", "c", model, count, seconds, whole)


def median_of(batches: Sequence[TimedBatch]) -> float:
    return call_times(batches).quantile(0.0, 0.5)


def test_whole_batches_are_taken_as_they_are() -> None:
    batches = [timed(float(second)) for second in range(1, 101)]
    times = call_times(batches)
    assert [times.quantile(0.0, p) for p in (0.0, 0.5, 0.999)] == [1.0, 51.0, 100.0]


def test_cancelled_batches_would_have_taken_longer() -> None:
    rng = random.Random(4)
    true = [rng.expovariate(1 / 100) for _ in range(4000)]
    batches = [timed(min(one, 120.0), whole=one <= 120.0) for one in true]
    assert median_of(batches) == pytest.approx(69.3, rel=0.08)
    assert median_of([one for one in batches if one.whole]) < 50  # to leave them out would flatter
    assert call_times(batches).quantile(0.0, 0.99) == DAY  # nobody saw one end later


def test_a_batch_is_as_slow_as_its_slowest_call() -> None:
    rng = random.Random(5)
    batches = [timed(max(rng.expovariate(1 / 100) for _ in range(8)), count=8) for _ in range(4000)]
    assert median_of(batches) == pytest.approx(69.3, rel=0.1)


def test_few_batches_are_no_world() -> None:
    assert own_world([timed(5.0)] * (ENOUGH - 1), WORLDS["economics"]) is None
    world = own_world([timed(5.0)] * ENOUGH + [timed(50.0, model="slow-model")] * ENOUGH, WORLDS["economics"])
    assert world is not None
    assert (list(world.batch), world.batch["slow-model"].quantile(0.0, 0.5)) == (["slow-model", "*"], 50.0)
    assert world.batch_rpm == WORLDS["economics"].batch_rpm
