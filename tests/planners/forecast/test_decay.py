from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.planners.forecast.decay import DecayedCounts

HALF_LIFE = 100.0


def values(counts: DecayedCounts) -> list[float]:
    return [count / counts.scale for count in counts.raw()]


def test_half_the_weight_is_lost_in_a_half_life() -> None:
    counts = DecayedCounts(2, HALF_LIFE)
    counts.add([(0, 8)], now=1000)
    for now in (1025, 1050, 1075, 1100):
        counts.add([(1, 0)], now)
    assert values(counts) == pytest.approx([4, 0])


def test_a_gap_counts_as_one_half_life_at_most() -> None:
    counts = DecayedCounts(2, HALF_LIFE)
    counts.add([(0, 8)], now=1000)
    counts.add([(1, 1)], now=1000 + 30 * HALF_LIFE)
    assert values(counts) == pytest.approx([4, 1])


def test_a_clock_that_is_set_back_changes_nothing() -> None:
    counts = DecayedCounts(1, HALF_LIFE)
    counts.add([(0, 8)], now=1000)
    counts.add([(0, 1)], now=500)
    assert values(counts) == pytest.approx([9])


@given(st.lists(st.tuples(st.floats(0, 90), st.floats(0, 10)), max_size=200))
def test_the_weights_never_overflow(steps: list[tuple[float, float]]) -> None:
    counts, now, expected = DecayedCounts(1, HALF_LIFE), 0.0, 0.0
    for gap, amount in [*steps, *[(90.0, 1.0)] * 60]:
        now += gap
        expected = expected * 0.5 ** (gap / HALF_LIFE) + amount
        counts.add([(0, amount)], now)
    assert values(counts) == pytest.approx([expected])
    assert counts.scale <= 2e9


def test_loading_keeps_what_was_learned_since_the_last_save() -> None:
    counts = DecayedCounts(1, HALF_LIFE)
    counts.add([(0, 5)], now=0)
    counts.dump()
    counts.add([(0, 1)], now=0)
    counts.saved()  # the dump, without what came after it
    counts.load([20], at=0)
    assert values(counts) == pytest.approx([21])
    counts.load([20], at=0)
    assert values(counts) == pytest.approx([21])


def test_a_save_that_failed_is_repeated() -> None:
    counts = DecayedCounts(1, HALF_LIFE)
    counts.add([(0, 5)], now=0)
    counts.dump()
    counts.load([20], at=0)
    assert counts.dump() == pytest.approx([25])


@pytest.mark.parametrize(("at", "expected"), [(0.0, 4 + 1), (100.0, 8 + 0.5)])
def test_the_older_of_two_states_has_decayed(at: float, expected: float) -> None:
    counts = DecayedCounts(1, HALF_LIFE)
    counts.add([(0, 1)], now=100.0 - at)
    counts.load([8], at)
    assert values(counts) == pytest.approx([expected])
