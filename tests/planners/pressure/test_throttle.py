"""The planners of pressure: no clock, no I/O; time is told."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.ports import Allowance, Allowances
from carpool.planners.pressure.throttle import GUESS_S, MAX_CLOSED_S, RECOVERY_S, Meter, Throttle

NOW = 1_794_000_000.0


class Sent(NamedTuple):
    at: float
    requests: float
    tokens: float


def send(throttle: Throttle, now: float, tokens: float = 1.0, *, waited: bool = False) -> Sent:
    throttle.take(now, tokens, waited=waited)
    return Sent(now, throttle.requests.spent, throttle.tokens.spent)


def allowed(limit: int, remaining: int, full_in: float | None = None) -> Allowances:
    return Allowances(requests=Allowance(limit, remaining, full_in))


# ---------------------------------------------------------------- the meter


def test_without_a_word_from_the_provider_everything_is_allowed() -> None:
    meter = Meter()
    meter.spent += 1_000_000
    assert meter.allows(NOW, 1.0)
    assert meter.ready_at(NOW, 1.0) == NOW


def test_what_was_sent_since_is_subtracted_and_what_was_refilled_is_added() -> None:
    meter = Meter()
    meter.spent = 130.0
    meter.update(Allowance(600, 100), NOW, 100.0)  # 30 were sent after the one that was answered
    assert meter.level(NOW + 2.0) == pytest.approx(100 + 20 - 30)


def test_answers_that_never_came_hold_nobody_back_for_ever() -> None:
    meter = Meter()
    meter.update(Allowance(2, 2, 4.0), NOW, 0.0)
    for number in range(10):
        now = NOW + 300.0 * number
        assert meter.allows(now, 1.0)
        meter.spend(now, 1.0)  # and nothing is heard


def test_a_full_bucket_takes_no_more() -> None:
    meter = Meter()
    meter.update(Allowance(60, 60), NOW, 0.0)
    for _ in range(60):
        meter.spend(NOW + 3600.0, 1.0)
    assert not meter.allows(NOW + 3600.0, 1.0)


def test_limits_need_not_be_per_minute() -> None:
    meter = Meter()
    meter.update(Allowance(200, 0, 86_400.0), NOW, 0.0)
    assert meter.rate == pytest.approx(200 / 86_400)
    meter.update(Allowance(1000, 0, 1.0), NOW, 0.0)
    assert meter.rate == pytest.approx(1000)
    meter.update(Allowance(1200, 1199, 0.4), NOW, 0.0)  # too little to tell
    assert meter.rate == pytest.approx(20)


def test_an_estimate_holds_nobody_for_long() -> None:
    meter = Meter()
    meter.update(Allowance(200, 0, 86_400.0), NOW, 0.0)
    assert meter.ready_at(NOW, 1.0) == NOW + GUESS_S


def test_a_call_larger_than_the_limit_waits_for_the_whole_limit_and_no_longer() -> None:
    meter = Meter()
    meter.update(Allowance(1000, 1000), NOW, 0.0)
    assert meter.allows(NOW, 50_000.0)


# ---------------------------------------------------------------- the throttle


def test_a_calm_account_never_waits() -> None:
    throttle = Throttle(NOW)
    for number in range(10_000):
        assert throttle.can_send(NOW, 1000.0)
        send(throttle, NOW, 1000.0)
        if number % 2:
            throttle.answered(NOW)
    assert not throttle.pressed
    assert throttle.limit == math.inf


def test_heads_that_show_no_room_hold_calls_back_before_anything_is_refused() -> None:
    throttle = Throttle(NOW)
    throttle.update(NOW, allowed(600, 0), send(throttle, NOW))
    assert not throttle.can_send(NOW, 1.0)
    assert NOW < throttle.ready_at(NOW, 1.0) <= NOW + GUESS_S
    throttle.update(NOW, allowed(600, 500), send(throttle, NOW))
    assert throttle.can_send(NOW, 1.0)


def test_the_first_of_many_heads_is_old_news_so_the_next_is_read_too() -> None:
    throttle = Throttle(NOW)
    marks = [send(throttle, NOW) for _ in range(200)]  # before any answer
    throttle.update(NOW + 0.2, allowed(200, 199, 0.03), marks[0])
    assert throttle.needs_update(NOW + 0.2)
    throttle.update(NOW + 0.2, allowed(200, 0, 6.0), marks[-1])
    assert throttle.requests.rate == pytest.approx(200 / 6)


def test_a_low_estimate_is_found_out_by_using_what_is_left() -> None:
    throttle = Throttle(NOW)
    throttle.update(NOW, allowed(200, 199, 0.03), send(throttle, NOW))
    assert throttle.requests.rate < 4  # taken for a limit per minute
    assert throttle.pace(NOW) > 40


def test_tokens_count_as_requests_do() -> None:
    throttle = Throttle(NOW)
    said = Allowances(requests=Allowance(600, 600), tokens=Allowance(100_000, 5000))
    throttle.update(NOW, said, send(throttle, NOW))
    assert throttle.can_send(NOW, 1000.0)
    assert not throttle.can_send(NOW, 20_000.0)


def test_a_refusal_closes_the_gate_for_as_long_as_was_asked_and_it_opens_gradually() -> None:
    throttle = Throttle(NOW)
    marks = [send(throttle, NOW) for _ in range(100)]
    for mark in marks[:20]:
        throttle.update(NOW + 0.1, allowed(600, 0, 60.0), mark)
        throttle.refused(NOW + 0.1, mark, 3.0, 0.0)
    assert throttle.ready_at(NOW + 0.2, 1.0) >= NOW + 3.1
    for _ in range(80):
        throttle.answered(NOW + 1.0)
    throttle.requests.update(Allowance(600, 600), NOW + 1.0, throttle.requests.spent)  # there is all the room again
    now, gone = NOW + 1.0, 0
    while (ready := throttle.ready_at(now, 1.0)) < NOW + 4.1:
        now = ready
        send(throttle, now)
        throttle.answered(now)
        gone += 1
    assert 4 <= gone <= 10  # of ten a second: at first half of that


def test_many_refusals_of_one_moment_are_one_refusal() -> None:
    throttle = Throttle(NOW)
    marks = [send(throttle, NOW) for _ in range(50)]
    news = [throttle.refused(NOW + 0.1, mark, 1.0, 0.0) for mark in marks]
    assert news == [True] + [False] * 49
    assert throttle.limit == 40.0
    assert throttle.in_flight == 0


def test_without_a_word_on_how_long_the_pauses_grow_with_every_refusal_in_a_row() -> None:
    throttle, now, pauses = Throttle(NOW), NOW, []
    for _ in range(9):
        mark = send(throttle, now)
        throttle.refused(now, mark, None, 0.0)
        pauses.append(throttle.paused_until - now)
        now = throttle.ready_at(now, 1.0) + 0.1
    assert pauses[:4] == pytest.approx([0.5, 1.0, 2.0, 4.0])
    assert pauses[-1] == pytest.approx(30.0)


def test_hours_of_refusals_in_a_row_do_no_harm() -> None:
    throttle, now = Throttle(NOW), NOW
    for _ in range(10_000):
        throttle.refused(now, send(throttle, now), None, 0.0)
        assert now < throttle.paused_until <= now + 30.0
        now = throttle.ready_at(now, 1.0) + 0.1
    assert now < NOW + 10_000 * 60.0


def test_a_pause_of_an_hour_is_asked_about_sooner() -> None:
    throttle = Throttle(NOW)
    throttle.refused(NOW, send(throttle, NOW), 3600.0, 1.0)
    assert throttle.ready_at(NOW, 1.0) <= NOW + MAX_CLOSED_S * 1.25


def test_an_account_that_was_not_refused_for_a_while_is_calm_again() -> None:
    throttle = Throttle(NOW)
    throttle.refused(NOW, send(throttle, NOW), 1.0, 0.0)
    assert not throttle.reset_if_idle(NOW + 5.0)
    assert throttle.reset_if_idle(NOW + 1.0 + RECOVERY_S)
    assert throttle.can_send(NOW + 1.0 + RECOVERY_S, 1.0)


def test_the_limit_grows_without_any_answer() -> None:
    """Calls may take minutes: what is not refused in that time was taken."""
    throttle = Throttle(NOW)
    marks = [send(throttle, NOW) for _ in range(10)]
    throttle.refused(NOW, marks[0], 1.0, 0.0)
    now, sent = NOW, 0
    while now < NOW + 20.0:
        now = max(throttle.ready_at(now, 1.0), now + 0.001)
        send(throttle, now)
        sent += 1
    assert sent > 20


def test_the_return_after_an_outage_is_gradual() -> None:
    throttle = Throttle(NOW)
    throttle.reopened(NOW)
    sent = 0
    while throttle.ready_at(NOW, 1.0) <= NOW:
        send(throttle, NOW)
        sent += 1
    assert sent <= 4


steps = st.lists(
    st.tuples(
        st.sampled_from(["go", "answer", "refuse", "lose", "look"]),
        st.floats(0.0, 3.0),
        st.one_of(st.none(), st.floats(0.0, 100.0)),
        st.integers(0, 300),
    ),
    max_size=120,
)


@given(steps)
def test_slots_are_never_negative_and_never_above_the_limit(script: list[tuple[str, float, float | None, int]]) -> None:
    throttle, now, out = Throttle(NOW), NOW, []
    for verb, passed, pause, number in script:
        now += passed
        if verb == "go" and throttle.ready_at(now, 10.0) <= now:
            before = throttle.in_flight
            out.append(send(throttle, now, 10.0, waited=bool(number % 2)))
            assert before < throttle.limit  # with its growth up to now, which sending records
        elif out and verb == "answer":
            out.pop(number % len(out))
            throttle.answered(now)
        elif out and verb == "refuse":
            throttle.refused(now, out.pop(number % len(out)), pause, 0.5)
            assert throttle.pressed
            assert throttle.ready_at(now, 10.0) > now
        elif out and verb == "lose":
            out.pop(number % len(out))
            throttle.left()
        elif out and verb == "look":
            throttle.update(now, allowed(300, number, pause), out[0])
        assert throttle.in_flight == len(out) >= 0
        assert throttle.limit >= 1.0
        assert throttle.pace(now) > 0.0


@given(steps, st.integers(1, 60))
def test_all_who_wait_get_their_turn(script: list[tuple[str, float, float | None, int]], waiting: int) -> None:
    """Whatever happened before: with answers or without any, everybody goes out within minutes."""
    throttle, now, out = Throttle(NOW), NOW, []
    for verb, passed, pause, number in script:
        now += passed
        if verb == "go":
            out.append(send(throttle, now, 10.0))
        elif out and verb == "refuse":
            throttle.refused(now, out.pop(), pause, 0.5)
        elif out and verb == "look":
            throttle.update(now, allowed(300, number, pause), out[0])
    start = now
    for _ in range(waiting):
        ready = throttle.ready_at(now, 10.0)
        assert now <= ready < now + 300.0
        while (again := throttle.ready_at(ready, 10.0)) > ready:  # as the gate asks again when it wakes
            assert again < start + 3600.0
            ready = again
        now = ready
        send(throttle, now, 10.0, waited=True)


# ---------------------------------------------------------------- what is left for rescues


def stated(limit: int, remaining: int, tokens: int = 0) -> Throttle:
    throttle = Throttle(NOW)
    sizes = Allowance(tokens, tokens, None) if tokens else None
    throttle.update(NOW, Allowances(Allowance(limit, remaining, None), sizes), Sent(NOW, 0.0, 0.0))
    return throttle


def test_without_a_stated_limit_rescues_are_free() -> None:
    free = Throttle(NOW).free_rate(NOW)
    assert (free.requests_per_s, free.tokens_per_s) == (math.inf, math.inf)


def test_rescues_may_use_what_the_headers_state() -> None:
    free = stated(600, 100, tokens=60_000).free_rate(NOW)
    assert (free.requests_per_s, free.requests) == (10.0, 100.0)
    assert (free.tokens_per_s, free.tokens) == (1000.0, 60_000.0)


def test_what_other_calls_use_is_not_free() -> None:
    throttle = stated(600, 600, tokens=60_000)
    for number in range(90):  # three a second
        send(throttle, NOW + number / 3, 100.0)
    free = throttle.free_rate(NOW + 30)
    assert free.requests_per_s == pytest.approx(7.0, abs=0.5)
    assert free.tokens_per_s == pytest.approx(700.0, abs=50)
    assert throttle.free_rate(NOW + 600).requests_per_s == pytest.approx(10.0, abs=0.2)


def test_half_of_the_limit_is_left_to_rescues() -> None:
    throttle = stated(600, 600)
    for number in range(600):
        send(throttle, NOW + number / 20)
    assert throttle.free_rate(NOW + 30).requests_per_s == 5.0


def test_after_a_refusal_rescues_wait_for_the_end_of_the_pause() -> None:
    throttle = stated(600, 600)
    sent = send(throttle, NOW)
    throttle.refused(NOW, sent, 30.0, 0.0)
    free = throttle.free_rate(NOW)
    assert free.opens_at == NOW + 30
    assert free.requests_per_s < 5.0
