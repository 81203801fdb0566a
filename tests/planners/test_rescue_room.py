from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.planners.rescue_room import (
    BATCHED,
    EVERYTHING,
    GRAIN,
    SNAPSHOT_S,
    UNLIMITED,
    USABLE,
    FreeRate,
    OpenRescues,
    RescueLoad,
    RescueRoom,
)

NOW = 1_800_000_000.0
ONE_A_SECOND = FreeRate(1.0)
MODEL = "account", "model"
OTHER = "account", "another model"


def room(*loads: tuple[float, int], free: FreeRate = ONE_A_SECOND, tokens: float = 0.0) -> RescueRoom:
    return RescueRoom([RescueLoad(NOW + at, calls, calls * tokens) for at, calls in loads], free)


# ---------------------------------------------------------------- the rule


def test_what_fits_is_what_may_be_sent_by_then() -> None:
    for calls in (100, 101):
        assert room((100, calls)).fits(NOW + 100, 0, 0, NOW)
    assert not room((100, 102)).fits(NOW + 100, 0, 0, NOW)  # one may be sent at once, and one each second


def test_a_lone_call_always_fits() -> None:
    assert room().fits(NOW + 0.001, 1, 1e9, NOW)
    assert not room().fits(NOW - 0.001, 1, 0, NOW)


def test_later_calls_count_and_earlier_trouble_does_not() -> None:
    assert not room((100, 101)).fits(NOW + 50, 1, 0, NOW)  # it would be sent before them
    assert room((10, 50)).fits(NOW + 100, 1, 0, NOW)  # they are late already, but it is not
    assert not room((10, 50), (99, 60)).fits(NOW + 100, 1, 0, NOW)


def test_without_a_limit_everything_fits() -> None:
    assert room((1, 1_000_000), free=UNLIMITED).fits(NOW + 1, 1_000_000, 1e12, NOW)


def test_tokens_are_limited_like_requests() -> None:
    free = FreeRate(tokens_per_s=1000.0, tokens=0.0)
    assert room((100, 10), free=free, tokens=9000).fits(NOW + 100, 1, 10_000, NOW)
    assert not room((100, 10), free=free, tokens=9000).fits(NOW + 100, 1, 10_001, NOW)


def test_nothing_is_sent_before_the_limit_opens() -> None:
    closed = FreeRate(1.0, opens_at=NOW + 60)
    assert room((100, 40), free=closed).fits(NOW + 100, 0, 0, NOW)
    assert not room((100, 42), free=closed).fits(NOW + 100, 0, 0, NOW)


def test_the_latest_start_is_that_of_the_tightest() -> None:
    assert room((100, 11)).latest_start == NOW + 90
    assert room((100, 11), (110, 50)).latest_start == NOW + 50
    assert room((100, 11), (1000, 50)).latest_start == NOW + 90
    assert room().latest_start == math.inf


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=20),
    st.integers(0, 60),
    st.integers(1, 5),
    st.floats(0.05, 3),
)
def test_what_fits_is_sent_in_time(loads: list[tuple[int, int]], at: int, calls: int, per_s: float) -> None:
    """Sent one by one at the usable rate, in the order of their rescue times."""
    free = FreeRate(per_s)
    fits = room(*sorted(loads), free=free).fits(NOW + at, calls, 0, NOW)
    due = sorted([(one, 0) for one, count in loads for _ in range(count)] + [(at, 1)] * calls)
    sent = [number / per_s for number in range(len(due))]
    in_time = all(when <= one + 1e-6 for when, (one, _) in zip(sent, due, strict=True) if one >= at)
    if fits:
        assert in_time
    elif calls == 1 and not loads:
        raise AssertionError("a lone call always fits")


# ---------------------------------------------------------------- the calendar


def many(count: int, rescue_in: float, *, start: int = 0, limited: tuple[str, str] = MODEL) -> OpenRescues:
    rescues = OpenRescues()
    for ticket in range(start, start + count):
        rescues.add(ticket, limited, NOW + rescue_in, 1000.0)
    return rescues


def test_calls_are_counted_by_their_limit_and_together() -> None:
    rescues = many(70, 100)
    for ticket in range(100, 130):
        rescues.add(ticket, OTHER, NOW + 100, 1000.0)
    assert rescues.room_for(MODEL, NOW + 100, 0, ONE_A_SECOND, NOW)
    assert not rescues.room_for(EVERYTHING, NOW + 100, 0, ONE_A_SECOND, NOW)
    assert sorted(rescues.limits()) == sorted([MODEL, OTHER])
    assert (rescues.limited_by(5), rescues.limited_by(105), rescues.limited_by(999)) == (MODEL, OTHER, EVERYTHING)


def test_what_is_settled_makes_room() -> None:
    rescues = many(110, 100)
    assert not rescues.room_for(MODEL, NOW + 100, 0, ONE_A_SECOND, NOW)
    for ticket in range(40):
        rescues.remove(ticket)
        rescues.remove(ticket)
    assert len(rescues) == 70
    assert rescues.room_for(MODEL, NOW + 100, 0, ONE_A_SECOND, NOW + SNAPSHOT_S)


def test_calls_of_one_moment_see_each_other() -> None:
    rescues, batched = OpenRescues(), 0
    for ticket in range(200):
        if rescues.room_for(MODEL, NOW + 100, 1000, ONE_A_SECOND, NOW):
            rescues.add(ticket, MODEL, NOW + 100, 1000)
            batched += 1
    assert BATCHED * 100 - 3 <= batched <= BATCHED * 100 + 1


def test_a_call_that_is_added_again_counts_once() -> None:
    rescues = many(5, 100)
    rescues.add(3, OTHER, NOW + 50, 0)
    assert len(rescues) == 5
    assert rescues.limited_by(3) == OTHER


def test_rescues_start_early_when_it_gets_tight() -> None:
    rescues = many(300, 400)
    assert rescues.early(MODEL, ONE_A_SECOND, NOW) == 0
    start = rescues.starts_at(MODEL, ONE_A_SECOND)
    assert start == pytest.approx(NOW + 400 - 299 / USABLE, abs=GRAIN)
    early = rescues.early(MODEL, ONE_A_SECOND, start)
    assert NOW + 400 - early <= start  # so the first of them is sent now
    assert rescues.early(MODEL, UNLIMITED, start) == 0
    assert rescues.early(OTHER, ONE_A_SECOND, start) == 0
    assert rescues.starts_at(OTHER, ONE_A_SECOND) == math.inf


def test_rescues_that_fit_anyway_are_not_early() -> None:
    rescues = many(50, 20)
    calm = FreeRate(1.0, requests=50.0)
    assert rescues.starts_at(MODEL, calm) == math.inf
    assert rescues.early(MODEL, calm, NOW + 30) == 0


@pytest.mark.parametrize("seed", range(10))
def test_whatever_comes_and_goes_the_sums_are_right(seed: int) -> None:
    rng, rescues, known = random.Random(seed), OpenRescues(), dict[int, tuple[float, float]]()
    for step in range(400):
        ticket = rng.randrange(60)
        if rng.random() < 0.6:
            known[ticket] = NOW + rng.randrange(0, 300, 5), float(rng.randrange(5000))
            rescues.add(ticket, MODEL, *known[ticket])
        else:
            known.pop(ticket, None)
            rescues.remove(ticket)
        loads = [RescueLoad(at, 1, tokens) for at, tokens in sorted(known.values())]
        expected = RescueRoom(loads, FreeRate(USABLE)).latest_start
        tight = expected < min((load.at for load in loads), default=math.inf)
        found = rescues.starts_at(MODEL, ONE_A_SECOND)
        assert found == pytest.approx(expected if tight else math.inf), f"seed {seed}, step {step}"
        assert len(rescues) == len(known)
