from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from carpool.planners.pressure.turns import AHEAD, FRESH, Turns


def served(turns: Turns, waiting: Sequence[str], creates: int) -> tuple[list[str], Turns]:
    """Who gets the next creates while these tenants always wait."""
    order = []
    for _ in range(creates):
        tenant = min(waiting, key=lambda one: (turns.place(one), one))
        order.append(tenant)
        turns = turns.taken(tenant, waiting)
    return order, turns


def test_tenants_take_turns() -> None:
    assert "".join(served(FRESH, "abc", 6)[0]) == "abcabc"


def test_who_was_alone_makes_up_for_nothing() -> None:
    _, turns = served(FRESH, "a", 100)
    assert Counter(served(turns, "ab", 20)[0]) == {"a": 10, "b": 10}


def test_time_off_earns_nothing() -> None:
    _, turns = served(FRESH, "abc", 3)
    _, turns = served(turns, "ab", 100)
    assert Counter(served(turns, "abc", 30)[0]) == {"a": 10, "b": 10, "c": 10}


def test_a_tenant_in_a_hurry_gets_ahead_but_not_far() -> None:
    turns, ahead = FRESH, 0
    while turns.may_press("a", "ab"):
        turns, ahead = turns.taken("a", "ab"), ahead + 1
    assert ahead == AHEAD
    assert served(turns, "ab", 4)[0] == ["b", "b", "a", "b"]


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sets(st.sampled_from("abcd"))), max_size=60))
def test_places_never_go_back_and_only_those_ahead_are_kept(creates: list[tuple[str, set[str]]]) -> None:
    turns = FRESH
    for tenant, others in creates:
        waiting = others | {tenant}
        before = {one: turns.place(one) for one in "abcd"}
        turns = turns.taken(tenant, waiting)
        assert turns.place(tenant) >= before[tenant] + 1
        assert all(turns.place(one) >= place for one, place in before.items())
        assert all(turns.place(one) == turns.first for one in "abcd" if one not in turns._places)
