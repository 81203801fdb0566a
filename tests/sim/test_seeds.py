"""A fixed set of simulated worlds. `make sim SEEDS=2000` runs more, `make sim SEED=17` tells the story of one."""

from __future__ import annotations

import pytest

from carpool.sim import draw, simulate

# Worlds that once broke a promise stay here for ever; the rest is a plain sample.
BROKE_ONCE = (3, 15, 30, 47, 49, 77, 1028, 1082, 1806, 2324, 3006, 3038)
SAMPLE = tuple(range(100, 124))


@pytest.mark.parametrize("seed", BROKE_ONCE + SAMPLE)
def test_a_world_keeps_the_promises(seed: int) -> None:
    report = simulate(seed)
    assert not report.problems, f"make sim SEED={seed}\n" + "\n".join(report.problems)


def test_a_seed_replays_exactly() -> None:
    assert simulate(15).story == simulate(15).story


def test_the_sample_has_everything_in_it() -> None:
    """A simulation in which nothing goes wrong proves nothing."""
    plans = [draw(seed) for seed in BROKE_ONCE + SAMPLE]
    assert any(plan.crashes for plan in plans)
    assert any(plan.engines > 1 for plan in plans)
    assert any(plan.clock_offset for plan in plans)
    assert any(plan.calm for plan in plans)
    assert any(plan.mock.faults.stranger and plan.mock.faults.create_accepted_cut for plan in map(draw, range(300)))
