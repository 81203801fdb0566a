from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.planners.forecast.curve import (
    BINS,
    EDGES,
    HORIZON,
    PLACES,
    HazardCurve,
    observations,
    position,
    seconds_at,
)

curves = st.lists(st.floats(0, 3), min_size=PLACES, max_size=PLACES).map(HazardCurve)
ages = st.floats(0, 2 * HORIZON)


def test_the_bins_are_logarithmic() -> None:
    assert EDGES[:2] == (0.0, 1.0)
    assert EDGES[-1] == pytest.approx(HORIZON)
    factors = [later / earlier for earlier, later in pairwise(EDGES[1:])]
    assert factors == pytest.approx([HORIZON ** (1 / BINS)] * BINS)


@given(ages)
def test_a_position_leads_back_to_its_age(age: float) -> None:
    assert seconds_at(position(age)) == pytest.approx(min(age, HORIZON))


@given(ages, ages, ages)
def test_passages_add_up(first: float, second: float, third: float) -> None:
    """However often a batch is polled, it counts once in every bin that it passed."""
    start, middle, end = sorted((first, second, third))

    def total(*pieces: tuple[float, float]) -> list[float]:
        counts = [0.0] * (2 * PLACES)
        for piece in pieces:
            for place, amount in observations(*piece, ended=False):
                counts[place] += amount
        return counts

    at_once = total((start, end))
    assert total((start, middle), (middle, end)) == pytest.approx(at_once)
    assert at_once[:PLACES] == [0.0] * PLACES
    assert max(at_once) <= 1 + 1e-9
    assert sum(at_once) == pytest.approx(position(end) - position(start))


@pytest.mark.parametrize(("age", "place"), [(0.0, 0), (0.5, 0), (1.2, 1), (HORIZON, BINS), (1e9, BINS)])
def test_an_end_counts_in_its_bin(age: float, place: int) -> None:
    assert (place, 1.0) in observations(0.0, age, ended=True)


@given(curves, ages, ages)
def test_the_distribution_grows_from_zero_to_one(curve: HazardCurve, seconds: float, more: float) -> None:
    assert 0 <= curve.cdf(seconds) <= curve.cdf(seconds + more) <= 1
    assert curve.cdf(-seconds) == 0


@given(curves, st.floats(0.001, 0.999))
def test_a_quantile_inverts_the_distribution(curve: HazardCurve, p: float) -> None:
    seconds = curve.quantile(p)
    if seconds < HORIZON:
        assert curve.cdf(seconds) == pytest.approx(p, abs=1e-6)
    else:
        assert curve.cdf(HORIZON) <= p + 1e-6


@given(curves, ages, ages)
def test_what_is_in_flight_ends_as_the_distribution_says(curve: HazardCurve, age: float, more: float) -> None:
    alive = 1 - curve.cdf(age)
    if alive > 1e-6:
        expected = (curve.cdf(age + more) - curve.cdf(age)) / alive
        assert curve.ends_within(more, age) == pytest.approx(expected, abs=1e-6)


@given(curves, st.floats(0.01, 1e6))
def test_the_mean_is_the_area_under_survival(curve: HazardCurve, most: float) -> None:
    steps = [seconds_at(position(most) * step / 4000) for step in range(4001)]
    steps[-1] = min(most, HORIZON)
    heights = [1 - curve.cdf(step) for step in steps]
    area = sum(
        (end - start) * (left + right) / 2
        for (start, end), (left, right) in zip(pairwise(steps), pairwise(heights), strict=True)
    )
    assert curve.mean(most) == pytest.approx(area, rel=1e-3)


def test_a_mean_under_a_hazard_that_is_hardly_there() -> None:
    assert HazardCurve([5e-324] * PLACES).mean(0.5) == pytest.approx(0.5)


def test_a_certain_mean() -> None:
    never = HazardCurve([0.0] * PLACES)
    assert never.mean(500) == pytest.approx(500)
    assert never.quantile(0.5) == HORIZON
    assert never.mean(-1) == 0
    rate = 1 / position(HORIZON) + math.log(HORIZON) / BINS  # a hazard in time of about 1/t: a power of exactly 0
    assert HazardCurve([rate] * PLACES).mean(HORIZON) > 0
    exact = HazardCurve([0.0] + [math.log(HORIZON) / BINS] * BINS)  # survival is 1/t from 1 s on
    assert exact.mean(math.e) == pytest.approx(2)
