from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.planners.pressure.quota import BatchQuota, TokenBucket, create_rate

NOW = 1_800_000_000.0  # a real epoch: floating point is coarse there


def test_a_bucket_fills_up_to_its_burst() -> None:
    bucket = TokenBucket(rate_per_s=2, burst=5, tokens=0, at=NOW)
    assert bucket.available(NOW + 1) == 2
    assert bucket.available(NOW + 100) == 5
    assert bucket.wait_until(NOW, 4) == NOW + 2


def test_debt_is_paid_before_the_next() -> None:
    bucket = TokenBucket(1, 3, 3, NOW).take(NOW, 5)
    assert bucket.tokens == -2
    assert bucket.wait_until(NOW) == NOW + 3


def test_a_clock_set_back_takes_nothing_away_and_stops_nothing() -> None:
    bucket = TokenBucket(1, 3, 2, NOW)
    assert bucket.available(NOW - 3600) == 2
    spent = bucket.take(NOW - 3600, 2)
    assert spent.available(NOW - 3600) == 0
    assert spent.available(NOW - 3599) == 1  # it refills on the new clock, not an hour later


def test_a_look_moves_the_creates_to_the_new_clock_too() -> None:
    road = BatchQuota.new(60, 60, NOW)
    for _ in range(3):
        road = road.spend_create(NOW)
    back = NOW - 3600
    road = road.spend(back)
    assert road.create_ready_at(back) < back + 10


@given(
    rate=st.floats(0.001, 1000),
    steps=st.lists(st.tuples(st.floats(-100, 100), st.booleans()), max_size=40),
)
def test_a_bucket_never_exceeds_its_burst_and_never_loses_to_the_clock(
    rate: float, steps: list[tuple[float, bool]]
) -> None:
    bucket, now = TokenBucket(rate, 3, 3, NOW), NOW
    for delta, take in steps:
        before = bucket.tokens
        now += delta
        assert before <= bucket.available(now) <= 3
        ready = bucket.wait_until(now)
        assert ready >= now
        assert bucket.wait_until(ready) == ready  # when it says "then", then it is
        if take and ready == now:
            bucket = bucket.take(now)


def test_the_rate_of_creates() -> None:
    assert create_rate(130, 2) == pytest.approx(50)
    assert create_rate(50, 60) == pytest.approx(24.5)
    assert create_rate(50, 2) == create_rate(50, 1) == pytest.approx(15)  # polls become rarer, buying goes on


@pytest.mark.parametrize("rpm", [10, 50, 100])
def test_both_waits_together_are_short(rpm: int) -> None:
    """For a create, and for a poll after the end."""

    def waits(creates: float) -> float:
        return 30 / creates + 30 / (rpm - 2 * creates)

    assert waits(create_rate(rpm, 1)) <= 1.01 * min(waits(rpm * share / 1000) for share in range(1, 500))


def test_a_burst_of_three_creates_then_the_rate() -> None:
    road = BatchQuota.new(50, 2, NOW)
    for _ in range(3):
        assert road.can_create(NOW)
        road = road.spend_create(NOW)
    assert not road.can_create(NOW)
    assert road.create_ready_at(NOW) == pytest.approx(NOW + 4, abs=1e-3)
    assert road.can_create(road.create_ready_at(NOW))


def test_creates_and_looks_share_the_minute() -> None:
    road = BatchQuota.new(6, 60, NOW)
    while road.can_ask(NOW):
        road = road.spend(NOW)
    road = road.spend(NOW)  # what had to go out
    assert not road.can_create(NOW)
    assert road.create_ready_at(NOW) > NOW + 5


def test_polling_leaves_the_last_token_to_a_create() -> None:
    road = BatchQuota.new(50, 2, NOW)
    while road.can_ask(NOW):
        road = road.spend(NOW)
    assert road.can_create(NOW)
    assert road.ask_ready_at(NOW) > NOW


def test_with_no_create_allowed_polling_uses_everything() -> None:
    road = BatchQuota.new(50, 2, NOW)
    for _ in range(3):
        road = road.spend_create(NOW)
    for _ in range(2):  # the last token too
        assert road.can_ask(NOW)
        road = road.spend(NOW)
    assert not road.can_ask(NOW)


@given(rpm=st.integers(1, 4000), poll=st.floats(0.01, 100), greedy=st.booleans())
def test_the_minute_is_never_overdrawn_and_nobody_starves(rpm: int, poll: float, greedy: bool) -> None:
    road, now, creates, asks = BatchQuota.new(rpm, poll, NOW), NOW, 0, 0
    burst = road.requests.burst
    for _ in range(int(burst) + 200):
        if greedy and road.can_ask(now):
            road, asks = road.spend(now), asks + 1
        elif road.can_create(now):
            road, creates = road.spend_create(now), creates + 1
        elif road.can_ask(now):
            road, asks = road.spend(now), asks + 1
        else:
            later = min(road.create_ready_at(now), road.ask_ready_at(now))
            assert later > now
            now = later
    assert creates + asks <= (now - NOW) * rpm / 60 + burst + 1e-3
    assert creates >= 3
    assert asks > 0


def test_a_pause_stops_everything_and_is_never_shortened() -> None:
    road = BatchQuota.new(50, 2, NOW).paused(NOW + 30).paused(NOW + 10)
    assert road.create_ready_at(NOW) == NOW + 30
    assert road.ask_ready_at(NOW) == NOW + 30
    assert not road.can_create(NOW)
    assert not road.can_ask(NOW + 29)
    assert road.can_create(NOW + 30)


def test_a_learned_limit_changes_the_pace_and_forgives_nothing() -> None:
    road = BatchQuota.new(50, 2, NOW)
    for _ in range(3):
        road = road.spend_create(NOW)
    faster = road.learned(4000)
    assert faster.rpm == 4000
    assert not faster.can_create(NOW)
    assert faster.create_ready_at(NOW) < road.create_ready_at(NOW)
    slower = BatchQuota.new(4000, 2, NOW).learned(50)
    assert slower.requests.tokens == slower.requests.burst == 5
    assert road.learned(50) is road
    assert road.learned(0) is road


def test_a_refusal_that_names_no_limit_halves_the_pace_and_what_is_taken_in_restores_it() -> None:
    road = BatchQuota.new(50, 2, NOW).slowed(NOW)
    assert (road.rpm, road.requests.rate_per_s) == (25, 25 / 60)
    assert road.slowed(NOW).slowed(NOW).slowed(NOW).slowed(NOW).slowed(NOW).slowed(NOW).rpm == 1
    assert road.eased().rpm == 26
    for _ in range(100):
        road = road.eased()
    assert road.rpm == 50


def test_the_refusals_of_one_burst_count_once() -> None:
    road = BatchQuota.new(50, 2, NOW).slowed(NOW).paused(NOW + 5)
    assert road.slowed(NOW + 1).rpm == 25
    assert road.slowed(NOW + 6).rpm == 12


def test_a_limit_that_is_named_ends_the_guessing() -> None:
    assert BatchQuota.new(50, 2, NOW).slowed(NOW).learned(50).rpm == 50
