from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.planners.forecast import HORIZON, PRIOR, Forecast

FORECAST = Forecast()


def test_the_shares_sum_to_one() -> None:
    assert sum(part.share for part in PRIOR) == pytest.approx(1)


def test_the_prior_is_near_what_was_measured() -> None:
    assert FORECAST.batch_cdf(30, "m", "s") < 0.02
    assert 0.2 < FORECAST.batch_cdf(120, "m", "s") < 0.6
    assert 0.85 < FORECAST.batch_cdf(3600, "m", "s") < 0.97


def test_the_tail_is_heavy() -> None:
    assert 0.001 < 1 - FORECAST.batch_cdf(86_400, "m", "s") < 0.02
    assert FORECAST.batch_quantile(0.99, "m", "s") > 20 * FORECAST.batch_quantile(0.5, "m", "s")


def test_nothing_ends_before_it_begins() -> None:
    assert FORECAST.batch_cdf(0, "m", "s") == 0
    assert FORECAST.batch_cdf(-5, "m", "s") == 0
    assert [FORECAST.batch_cdf(5e-324, "m", size) for size in "sml"] == [0, 0, 0]  # so small that dividing makes it 0


@settings(deadline=None)
@given(st.floats(-10, 1e6), st.floats(0, 1e6), st.sampled_from(["s", "m", "l", "other"]))
def test_the_distribution_grows_from_zero_to_one(seconds: float, more: float, size: str) -> None:
    first, second = FORECAST.batch_cdf(seconds, "m", size), FORECAST.batch_cdf(seconds + more, "m", size)
    assert 0 <= first <= second <= 1


@settings(deadline=None)
@given(st.floats(0.001, 0.995), st.sampled_from(["s", "m", "l"]))
def test_a_quantile_turns_the_distribution_round(p: float, size: str) -> None:
    seconds = FORECAST.batch_quantile(p, "m", size)
    assert FORECAST.batch_cdf(seconds, "m", size) == pytest.approx(p, abs=1e-3)


def test_a_quantile_that_is_never_reached_is_the_horizon() -> None:
    assert FORECAST.batch_quantile(1.0, "m", "l") == HORIZON


def test_long_answers_take_longer() -> None:
    small, middle, large = (1000 + FORECAST.batch_quantile(0.5, "m", size) for size in "sml")
    assert 1000 < small < middle < large


def test_the_synchronous_time() -> None:
    assert FORECAST.sync_seconds(0) == 5
    assert FORECAST.sync_seconds(200) == pytest.approx(9)
    assert FORECAST.sync_seconds(4096) == pytest.approx(86.92)
    assert FORECAST.sync_seconds(32_000) < 300  # an agent's habitual allowance leaves room in ten minutes
    assert FORECAST.sync_seconds(10**9) == 600


@settings(deadline=None)
@given(st.integers(0, 300_000), st.integers(0, 1000))
def test_more_tokens_never_take_less(tokens: int, more: int) -> None:
    assert FORECAST.sync_seconds(tokens) <= FORECAST.sync_seconds(tokens + more) <= 600
