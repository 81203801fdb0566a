"""A bounded map keeps the keys that were set last."""

from __future__ import annotations

from carpool.core.bounded import BoundedMap


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
