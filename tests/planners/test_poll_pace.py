from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.planners.forecast import BatchClass, Forecast, Part, Prior
from carpool.planners.poll_pace import QUICK, RESERVE, SLOW, InFlight, next_poll
from carpool.planners.pressure.quota import TokenBucket

NOW = 1_800_000_000.0
DAY = 86_400.0
FULL = TokenBucket(50 / 60, 5.0, 5.0, NOW - DAY)
EMPTY = TokenBucket(0.0, 5.0, 0.0, NOW)
PRIOR = Prior(parts=(Part(0.60, 110.0, 0.5), Part(0.37, 900.0, 1.0), Part(0.03, 21_600.0, 1.0)))
FORECAST = partial(Forecast(PRIOR).ends_within, of=BatchClass("anthropic", "m", "s"))

Chance = Callable[[float, float], float]


def around(end: float, width: float) -> Chance:
    """Batches end evenly within `width` seconds on both sides of an age."""

    def cdf(age: float) -> float:
        return min(1.0, max(0.0, (age - end + width) / (2 * width)))

    def ends_within(seconds: float, age: float) -> float:
        return 1.0 if cdf(age) >= 1 else (cdf(age + seconds) - cdf(age)) / (1 - cdf(age))

    return ends_within


def interval(
    *ages: float,
    ends: Chance = FORECAST,
    requests: TokenBucket = FULL,
    pace: float | None = None,
) -> float:
    """From a poll now to the next, with batches of these ages in flight."""
    return next_poll([InFlight(ends, sorted(NOW - age for age in ages))], NOW, pace, requests, NOW) - NOW


def polls(end: float, pace: float | None = None, requests: TokenBucket = FULL) -> list[float]:
    """The ages at which a batch is polled that ends at this age, by the forecast's own pace."""
    bought, ages, last, now = NOW, [], None, NOW
    while not ages or ages[-1] < end:
        now = next_poll([InFlight(FORECAST, [bought])], last, pace, requests, now)
        ages.append(now - bought)
        last = now
    return ages


def scarce(tokens: float) -> TokenBucket:
    return TokenBucket(0.0, 5.0, tokens, NOW)


# ---------------------------------------------------------------- with requests to spare


@pytest.mark.parametrize("age", [0, 1, 9, 70, 300])
def test_a_young_batch_is_polled_at_the_quickest_pace(age: float) -> None:
    assert interval(age) == QUICK


def test_whatever_the_forecast_says() -> None:
    """A batch that is expected in an hour may end now: what was learned may be about other times."""
    assert interval(60, ends=around(3600, 10)) < 2.5
    assert interval(5 * 3600, ends=around(3600, 10)) < SLOW


def test_an_old_batch_is_polled_rarely() -> None:
    assert QUICK < interval(900) < 4 < interval(3600) < 10 < interval(6 * 3600)
    assert interval(2 * DAY) == SLOW
    assert len(polls(DAY)) < 3500


def test_an_end_is_seen_soon_in_proportion_to_the_age() -> None:
    for end in (9.0, 30.0, 70.0, 300.0, 3600.0, 20_000.0):
        seen = polls(end)
        assert max(after - before for before, after in zip([0.0, *seen], seen, strict=False)) <= max(2.1, end / 150)


def test_many_old_batches_are_worth_a_quick_pace() -> None:
    assert interval(6 * 3600) > 10
    assert interval(*[6 * 3600.0] * 1000) == QUICK


# ---------------------------------------------------------------- an explicit pace


def test_a_pace_is_the_quickest() -> None:
    assert interval(30, pace=0.1) == pytest.approx(0.1)
    assert interval(30, pace=5) == pytest.approx(5)
    assert interval(30, pace=60) == pytest.approx(60)
    assert interval(30, pace=300) == pytest.approx(300)
    assert interval(3 * DAY, pace=300) == pytest.approx(300)


@given(st.lists(st.floats(0, 2 * DAY), min_size=1, max_size=20), st.none() | st.floats(0.01, 600), st.floats(0, 5))
def test_the_interval_is_never_outside_its_bounds(ages: list[float], pace: float | None, tokens: float) -> None:
    quick = QUICK if pace is None else pace
    assert quick - 1e-6 <= interval(*ages, pace=pace, requests=scarce(tokens)) <= max(SLOW, quick) + 1e-6


# ---------------------------------------------------------------- requests are scarce


def test_the_emptier_the_bucket_the_rarer_the_polls() -> None:
    waits = [interval(60, requests=scarce(tokens)) for tokens in (5, 4, 3.5, 3, 2.7, 2.2)]
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (QUICK, SLOW)


def test_polls_leave_the_last_requests_to_others() -> None:
    assert interval(60, requests=scarce(RESERVE)) == SLOW
    assert interval(60, requests=EMPTY) == SLOW


def test_a_poll_waits_until_the_bucket_has_filled_a_little() -> None:
    filling = TokenBucket(50 / 60, 5.0, RESERVE, NOW)
    assert QUICK < interval(60, requests=filling) < 5


def test_where_requests_are_scarce_the_hazard_decides() -> None:
    """A batch is polled when it is expected, and rarely before."""
    few = scarce(3.3)
    before, during = (interval(age, ends=around(600, 20), requests=few) for age in (300, 590))
    assert during < before / 3


def test_the_more_batches_the_more_a_poll_is_worth() -> None:
    few = scarce(3.0)
    assert interval(60, requests=few) > interval(*[60.0] * 4, requests=few) > interval(*[60.0] * 16, requests=few)


# ---------------------------------------------------------------- clocks and bounds


def test_nothing_in_flight_is_never_polled() -> None:
    assert next_poll([], NOW, None, FULL, NOW) == math.inf
    assert next_poll([InFlight(FORECAST, [])], NOW, None, FULL, NOW) == math.inf


def test_a_poll_before_the_first_purchase_does_not_count() -> None:
    assert next_poll([InFlight(FORECAST, [NOW])], NOW - 900, None, FULL, NOW) == NOW + QUICK
    assert next_poll([InFlight(FORECAST, [NOW])], None, None, FULL, NOW) == NOW + QUICK


def test_an_overdue_poll_is_due_now() -> None:
    assert next_poll([InFlight(FORECAST, [NOW - 500])], NOW - 400, None, FULL, NOW) == NOW


def test_a_clock_set_back_polls_at_once_and_then_keeps_its_pace() -> None:
    assert next_poll([InFlight(FORECAST, [NOW])], NOW + 3600, None, FULL, NOW + 1) == NOW + 1
    assert next_poll([InFlight(FORECAST, [NOW + 3600])], None, None, FULL, NOW) == NOW
    assert next_poll([InFlight(FORECAST, [NOW + 3600])], NOW, None, FULL, NOW) == NOW + QUICK


def test_the_forecast_is_asked_a_few_times_however_many_batches() -> None:
    asked = 0

    def counted(seconds: float, age: float) -> float:
        nonlocal asked
        asked += 1
        return FORECAST(seconds, age)

    interval(*(1.003**step for step in range(4000)), ends=counted, requests=scarce(RESERVE + 0.01))
    assert asked < 400
    asked = 0
    interval(*(1.003**step for step in range(4000)), ends=counted)
    assert asked < 10


def test_a_plan_does_not_depend_on_when_it_is_made() -> None:
    filling = TokenBucket(0.1, 5.0, 0.5, NOW)
    in_flight = [InFlight(FORECAST, [NOW - 1000, NOW - 30])]
    planned = next_poll(in_flight, NOW, None, filling, NOW)
    assert {next_poll(in_flight, NOW, None, filling, at) for at in (NOW + 1, NOW + 2, planned)} == {planned}
