from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.planners.forecast.histogram import SIZE, STEPS, bin_of, quantile


@given(st.floats(0.02, 50), st.floats(0.02, 50))
def test_a_bin_holds_times_that_differ_by_ten_per_cent(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert bin_of(low) <= bin_of(high)
    counts = [0.0] * SIZE
    counts[bin_of(one)] = 1.0
    assert one * 0.999 <= quantile(counts, 1.0, 0.5, prior_weight=0.0) <= one * 1.101


def test_extremes_count_in_the_outermost_bins() -> None:
    assert [bin_of(relative) for relative in (-1.0, 0.0, 1e-9, 1.0, 1e9)] == [0, 0, 0, STEPS, SIZE - 1]


def test_the_prior_is_one() -> None:
    assert quantile([0.0] * SIZE, 1.0, 0.5, prior_weight=1.0) == 1
    assert quantile([0.0] * SIZE, 7.0, 0.998, prior_weight=1.0) == 1


@pytest.mark.parametrize(("count", "expected"), [(498, 1.0), (500, 0.5)])
def test_the_prior_holds_until_enough_was_observed(count: int, expected: float) -> None:
    counts = [0.0] * SIZE
    counts[bin_of(0.5)] = count
    assert quantile(counts, 1.0, 0.998, prior_weight=1.0) == pytest.approx(expected, rel=0.1)


def test_a_few_slow_calls_raise_a_high_quantile_at_once() -> None:
    counts = [0.0] * SIZE
    counts[bin_of(0.5)] = 1000
    counts[bin_of(6.0)] = 3
    assert quantile(counts, 1.0, 0.998, prior_weight=1.0) == pytest.approx(6, rel=0.1)
    assert quantile(counts, 1.0, 0.5, prior_weight=1.0) == pytest.approx(0.5, rel=0.1)
