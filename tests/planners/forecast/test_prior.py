from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.planners.forecast import BatchClass, Forecast, Prior
from carpool.planners.forecast.curve import HORIZON
from carpool.planners.forecast.prior import PARTS

FORECAST, PRIOR = Forecast(), Prior()
S, M, L = (BatchClass("p", "m", size) for size in "sml")


def test_the_shares_sum_to_one() -> None:
    assert sum(part.share for part in PARTS) == pytest.approx(1)


def test_the_prior_is_near_what_was_measured() -> None:
    assert FORECAST.batch_cdf(30, S) < 0.02
    assert 0.2 < FORECAST.batch_cdf(120, S) < 0.6
    assert 0.85 < FORECAST.batch_cdf(3600, S) < 0.97


def test_the_tail_is_heavy() -> None:
    assert 0.001 < 1 - FORECAST.batch_cdf(86_400, S) < 0.02
    assert FORECAST.batch_quantile(0.99, S) > 20 * FORECAST.batch_quantile(0.5, S)


def test_a_quantile_that_is_never_reached_is_the_horizon() -> None:
    assert FORECAST.batch_quantile(1.0, L) == HORIZON


def test_long_answers_take_longer() -> None:
    small, middle, large = (1000 + FORECAST.batch_quantile(0.5, of) for of in (S, M, L))
    assert 1000 < small < middle < large


def test_the_synchronous_time() -> None:
    assert PRIOR.sync_seconds(0) == 5
    assert PRIOR.sync_seconds(200) == pytest.approx(9)
    assert PRIOR.sync_seconds(4096) == pytest.approx(86.92)
    assert PRIOR.sync_seconds(32_000) < 300  # an agent's habitual allowance leaves room in ten minutes
    assert PRIOR.sync_seconds(10**9) == 600


@given(st.integers(0, 300_000), st.integers(0, 1000))
def test_more_tokens_never_take_less(tokens: int, more: int) -> None:
    assert PRIOR.sync_seconds(tokens) <= PRIOR.sync_seconds(tokens + more) <= 600


def test_without_observations_the_prior_holds() -> None:
    assert FORECAST.sync_seconds("p", "m", 4096) == PRIOR.sync_seconds(4096)
    assert FORECAST.sync_typical("p", "m", 4096) == PRIOR.sync_seconds(4096) / 2
    assert FORECAST.cancel_seconds("p") == 20
    assert FORECAST.billed_chance("p") == 0.25
    assert FORECAST.flex_refusal("p", "m") == 0.1
    assert FORECAST.observed(S) == 0
