"""The planners of pressure: no clock, no I/O; time is told."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.ports import Allowance, Allowances
from carpool.planners.pressure.fair_queue import FairQueue, tag_set
from carpool.planners.pressure.throttle import (
    CALM_S,
    CLOSED_MOST_S,
    FAILURES,
    GUESS_S,
    OPEN_MAX_S,
    PROBE_S,
    Breaker,
    Meter,
    RetryBudget,
    Throttle,
)

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
    meter.heard(Allowance(600, 100), NOW, 100.0)  # 30 were sent after the one that was answered
    assert meter.level(NOW + 2.0) == pytest.approx(100 + 20 - 30)


def test_answers_that_never_came_hold_nobody_back_for_ever() -> None:
    meter = Meter()
    meter.heard(Allowance(2, 2, 4.0), NOW, 0.0)
    for number in range(10):
        now = NOW + 300.0 * number
        assert meter.allows(now, 1.0)
        meter.spend(now, 1.0)  # and nothing is heard


def test_a_full_bucket_takes_no_more() -> None:
    meter = Meter()
    meter.heard(Allowance(60, 60), NOW, 0.0)
    for _ in range(60):
        meter.spend(NOW + 3600.0, 1.0)
    assert not meter.allows(NOW + 3600.0, 1.0)


def test_limits_need_not_be_per_minute() -> None:
    meter = Meter()
    meter.heard(Allowance(200, 0, 86_400.0), NOW, 0.0)
    assert meter.rate == pytest.approx(200 / 86_400)
    meter.heard(Allowance(1000, 0, 1.0), NOW, 0.0)
    assert meter.rate == pytest.approx(1000)
    meter.heard(Allowance(1200, 1199, 0.4), NOW, 0.0)  # too little to tell
    assert meter.rate == pytest.approx(20)


def test_an_estimate_holds_nobody_for_long() -> None:
    meter = Meter()
    meter.heard(Allowance(200, 0, 86_400.0), NOW, 0.0)
    assert meter.ready_at(NOW, 1.0) == NOW + GUESS_S


def test_a_call_larger_than_the_limit_waits_for_the_whole_limit_and_no_longer() -> None:
    meter = Meter()
    meter.heard(Allowance(1000, 1000), NOW, 0.0)
    assert meter.allows(NOW, 50_000.0)


# ---------------------------------------------------------------- the throttle


def test_a_calm_account_never_waits() -> None:
    throttle = Throttle(NOW)
    for number in range(10_000):
        assert throttle.may_go(NOW, 1000.0)
        send(throttle, NOW, 1000.0)
        if number % 2:
            throttle.answered(NOW)
    assert not throttle.pressed
    assert throttle.limit == math.inf


def test_heads_that_show_no_room_hold_calls_back_before_anything_is_refused() -> None:
    throttle = Throttle(NOW)
    throttle.looked(NOW, allowed(600, 0), send(throttle, NOW))
    assert not throttle.may_go(NOW, 1.0)
    assert NOW < throttle.ready_at(NOW, 1.0) <= NOW + GUESS_S
    throttle.looked(NOW, allowed(600, 500), send(throttle, NOW))
    assert throttle.may_go(NOW, 1.0)


def test_the_first_of_many_heads_is_old_news_so_the_next_is_read_too() -> None:
    throttle = Throttle(NOW)
    marks = [send(throttle, NOW) for _ in range(200)]  # before any answer
    throttle.looked(NOW + 0.2, allowed(200, 199, 0.03), marks[0])
    assert throttle.wants_look(NOW + 0.2)
    throttle.looked(NOW + 0.2, allowed(200, 0, 6.0), marks[-1])
    assert throttle.requests.rate == pytest.approx(200 / 6)


def test_a_low_estimate_is_found_out_by_using_what_is_left() -> None:
    throttle = Throttle(NOW)
    throttle.looked(NOW, allowed(200, 199, 0.03), send(throttle, NOW))
    assert throttle.requests.rate < 4  # taken for a limit per minute
    assert throttle.pace(NOW) > 40


def test_tokens_count_as_requests_do() -> None:
    throttle = Throttle(NOW)
    said = Allowances(requests=Allowance(600, 600), tokens=Allowance(100_000, 5000))
    throttle.looked(NOW, said, send(throttle, NOW))
    assert throttle.may_go(NOW, 1000.0)
    assert not throttle.may_go(NOW, 20_000.0)


def test_a_refusal_closes_the_gate_for_as_long_as_was_asked_and_it_opens_gradually() -> None:
    throttle = Throttle(NOW)
    marks = [send(throttle, NOW) for _ in range(100)]
    for mark in marks[:20]:
        throttle.looked(NOW + 0.1, allowed(600, 0, 60.0), mark)
        throttle.refused(NOW + 0.1, mark, 3.0, 0.0)
    assert throttle.ready_at(NOW + 0.2, 1.0) >= NOW + 3.1
    for _ in range(80):
        throttle.answered(NOW + 1.0)
    throttle.requests.heard(Allowance(600, 600), NOW + 1.0, throttle.requests.spent)  # there is all the room again
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
    assert throttle.ready_at(NOW, 1.0) <= NOW + CLOSED_MOST_S * 1.25


def test_an_account_that_was_not_refused_for_a_while_is_calm_again() -> None:
    throttle = Throttle(NOW)
    throttle.refused(NOW, send(throttle, NOW), 1.0, 0.0)
    assert not throttle.rest(NOW + 5.0)
    assert throttle.rest(NOW + 1.0 + CALM_S)
    assert throttle.may_go(NOW + 1.0 + CALM_S, 1.0)


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
            throttle.looked(now, allowed(300, number, pause), out[0])
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
            throttle.looked(now, allowed(300, number, pause), out[0])
    start = now
    for _ in range(waiting):
        ready = throttle.ready_at(now, 10.0)
        assert now <= ready < now + 300.0
        while (again := throttle.ready_at(ready, 10.0)) > ready:  # as the gate asks again when it wakes
            assert again < start + 3600.0
            ready = again
        now = ready
        send(throttle, now, 10.0, waited=True)


# ---------------------------------------------------------------- the line


def call_all(line: FairQueue[str], now: float = 0.0) -> list[str]:
    called = []
    while line:
        place = line.next(now)
        line.called(place, now)
        called.append(place.item)
    return called


def test_turns_go_round_the_tag_sets_and_first_come_first_served_within_one() -> None:
    line: FairQueue[str] = FairQueue()
    for number in range(4):
        line.join(f"a{number}", tag_set({"team": "a"}), None)
    line.join("b0", tag_set({"team": "b"}), None)
    line.join("none0", tag_set(None), None)
    line.join("b1", tag_set({"team": "b"}), None)
    assert call_all(line) == ["a0", "b0", "none0", "a1", "b1", "a2", "a3"]


def test_tags_are_a_set_whatever_their_order() -> None:
    assert tag_set({"a": "1", "b": "2"}) == tag_set({"b": "2", "a": "1"})
    assert tag_set({}) == tag_set(None)


def test_a_deadline_that_presses_goes_first_and_its_tag_set_pays() -> None:
    line: FairQueue[str] = FairQueue()
    for number in range(3):
        line.join(f"a{number}", tag_set({"team": "a"}), None)
        line.join(f"b{number}", tag_set({"team": "b"}), 100.0 if number == 2 else None)
    assert call_all(line, now=99.0)[:2] == ["a0", "b0"]
    for number in range(3):
        line.join(f"a{number}", tag_set({"team": "a"}), None)
        line.join(f"b{number}", tag_set({"team": "b"}), 100.0 if number == 2 else None)
    assert call_all(line, now=100.0) == ["b2", "a0", "a1", "b0", "a2", "b1"]


def test_deadlines_take_at_most_every_other_turn() -> None:
    line: FairQueue[str] = FairQueue()
    for number in range(50):
        line.join(f"hurry{number}", tag_set({"team": "h"}), 0.0)
        line.join(f"wait{number}", tag_set({"team": "w"}), None)
    called = call_all(line, now=1.0)
    assert sum(name.startswith("wait") for name in called[:40]) >= 19


def test_who_leaves_is_not_called_and_is_forgotten() -> None:
    line: FairQueue[str] = FairQueue()
    first = line.join("stays", (), None)
    for _ in range(1000):
        line.leave(line.join("leaves", (), 5.0))
    assert len(line) == 1
    assert sum(map(len, line._queues.values())) < 100
    assert len(line._pressing) < 100
    line.leave(first)
    line.leave(first)
    assert len(line) == 0
    assert not line._queues


moves = st.lists(
    st.tuples(
        st.sampled_from(["join", "join", "call", "leave"]), st.integers(0, 4), st.one_of(st.none(), st.floats(0, 50))
    ),
    max_size=200,
)


@given(moves)
def test_everybody_who_joins_is_called_once_or_leaves(script: list[tuple[str, int, float | None]]) -> None:
    line: FairQueue[int] = FairQueue()
    waiting, called, joined, now = {}, [], 0, 0.0
    for verb, number, press_at in script:
        now += 0.5
        if verb == "join":
            waiting[joined] = line.join(joined, (("t", str(number)),), press_at)
            joined += 1
        elif waiting and verb == "leave":
            line.leave(waiting.pop(sorted(waiting)[number % len(waiting)]))
        elif waiting and verb == "call":
            place = line.next(now)
            assert line.next(now) is place
            line.called(place, now)
            del waiting[place.item]
            called.append(place.item)
        assert len(line) == len(waiting)
        assert {place.item for place in line} == set(waiting)
    called += call_all(line, now)  # type: ignore[arg-type]
    assert sorted(called) == sorted(set(called))
    assert len(line) == 0


@given(st.lists(st.integers(2, 40), min_size=3, max_size=6), st.integers(0, 1))
def test_tag_sets_without_deadlines_share_alike_and_have_half_of_all_turns(counts: list[int], hurried: int) -> None:
    line: FairQueue[str] = FairQueue()
    for tag, count in enumerate(counts):
        for _ in range(count):
            line.join(str(tag), tag_set({"t": str(tag)}), 0.0 if tag < hurried else None)
    called = call_all(line, now=1.0)[: min(counts) * len(counts)]
    shares = [called.count(str(tag)) for tag in range(hurried, len(counts))]
    assert max(shares) - min(shares) <= 1
    assert sum(shares) >= len(called) // 2


# ---------------------------------------------------------------- the breaker


def broken(now: float = NOW) -> Breaker:
    breaker = Breaker()
    for _ in range(FAILURES):
        breaker.failed(now, False, 0.5)
    return breaker


def test_it_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker()
    for _ in range(100):
        for _ in range(FAILURES - 1):
            assert not breaker.failed(NOW, False, 0.5)
        breaker.answered()
    assert breaker.closed
    opened = [breaker.failed(NOW, False, 0.5) for _ in range(FAILURES)]
    assert opened == [False] * (FAILURES - 1) + [True]
    assert breaker.ready_at(NOW) > NOW


def test_failures_of_long_ago_do_not_count() -> None:
    breaker = Breaker()
    for number in range(3 * FAILURES):
        breaker.failed(NOW + 100.0 * number, False, 0.5)
    assert breaker.closed


def test_one_probe_at_a_time() -> None:
    breaker = broken()
    now = breaker.ready_at(NOW)
    assert breaker.take(now)
    assert breaker.ready_at(now) == now + PROBE_S  # nobody else meanwhile
    breaker.left(probe=True)
    assert breaker.ready_at(now) == now
    assert breaker.take(now)
    assert breaker.answered()
    assert breaker.ready_at(now) == now
    assert not breaker.take(now)


def test_probes_that_fail_come_more_and_more_rarely_and_never_end() -> None:
    breaker, now, pauses = broken(), NOW, []
    for _ in range(12):
        now = breaker.ready_at(now)
        breaker.take(now)
        assert not breaker.failed(now, True, 0.5)
        pauses.append(breaker.ready_at(now) - now)
    assert pauses == sorted(pauses)
    assert pauses[-1] <= OPEN_MAX_S


def test_others_that_fail_late_do_not_prolong_it() -> None:
    breaker = broken()
    until = breaker.open_until
    breaker.failed(NOW + 0.5, False, 0.5)
    assert breaker.open_until == until


# ---------------------------------------------------------------- retries


def test_retries_are_a_share_of_the_calls_and_a_few_more() -> None:
    retries, made = RetryBudget(NOW), 0
    for number in range(1000):
        if retries.wait(NOW, number) == 0.0:
            retries.spend()
            made += 1
    assert 200 <= made <= 220


def test_beyond_the_budget_they_wait_longer_and_longer() -> None:
    retries = RetryBudget(NOW)
    waits = []
    for _ in range(30):
        waits.append(retries.wait(NOW, 0))
        retries.spend()
    assert waits[0] == 0.0
    assert waits == sorted(waits)
    assert waits[-1] > 30.0
    assert retries.wait(NOW + 3600.0, 0) == 0.0


def test_a_clock_that_is_set_back_earns_nothing() -> None:
    retries = RetryBudget(NOW)
    for _ in range(30):
        retries.wait(NOW, 0)
        retries.spend()
    before = retries.wait(NOW, 0)
    assert retries.wait(NOW - 1000.0, 0) == before
