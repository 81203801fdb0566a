"""A bounded map keeps the keys that were set last; a backoff doubles up to its limit."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from carpool.core.bounded import BoundedMap, backoff


def test_a_new_key_removes_the_one_set_longest_ago() -> None:
    bounded: BoundedMap[str, int] = BoundedMap(2)
    bounded["a"], bounded["b"] = 1, 2
    bounded["a"] = 3  # and is the newest now
    bounded["c"] = 4
    assert dict(bounded) == {"a": 3, "c": 4}


def test_reading_keeps_nothing_alive() -> None:
    bounded: BoundedMap[str, int] = BoundedMap(2)
    bounded["a"], bounded["b"] = 1, 2
    assert bounded.get("a") == 1
    bounded["c"] = 3
    assert list(bounded) == ["b", "c"]


def test_it_never_holds_more_than_its_limit() -> None:
    bounded: BoundedMap[int, int] = BoundedMap(10)
    bounded.update({number: number for number in range(100)})
    assert bounded.setdefault(200, 1) == 1
    assert len(bounded) == 10


def test_a_backoff_doubles_up_to_its_limit() -> None:
    assert [backoff(failures, 0.5, 30.0) for failures in range(9)] == [0.5, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_ten_thousand_failures_in_a_row_wait_no_longer_than_the_limit() -> None:
    assert {backoff(failures, 0.5, 30.0) for failures in range(8, 10_001)} == {30.0}


def test_luck_spreads_it_by_a_quarter_to_either_side() -> None:
    assert [backoff(1, 4.0, 60.0, jitter) for jitter in (0.0, 0.5, 1.0)] == [3.0, 4.0, 5.0]


@given(st.integers(-10, 10**9), st.floats(0.001, 1e6), st.floats(0.001, 1e6), st.floats(0.0, 1.0))
def test_a_backoff_is_bounded_for_any_number_of_failures(
    failures: int, first: float, most: float, jitter: float
) -> None:
    pause = backoff(failures, first, most, jitter)
    assert math.isfinite(pause)
    assert 0.75 * min(first, most) <= pause <= 1.25 * most
    assert pause <= backoff(failures + 1, first, most, jitter) <= 2 * pause
