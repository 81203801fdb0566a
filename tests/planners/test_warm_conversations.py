from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from carpool.core.model import Call, Lane, Turn
from carpool.planners.routing import Decision, WarmConversations, kept_warm

TURN = Turn(conversation=7, cache_life=300.0, opening=False)
CALL = Call(
    ticket=1, provider="p", dialect="d", endpoint="/e", body=b"", headers=(), credential="c", model="m", arrived=0.0,
    turn=TURN,
)  # fmt: skip
BATCH = Decision(Lane.BATCH, "It pays.", 60.0)
NOW = Decision(Lane.NOW, "No budget.")
WARM = Decision(Lane.NOW, "Its conversation is warm on now.")


def after_now(at: float = 0.0, **turn: Any) -> WarmConversations:
    warmth = WarmConversations()
    assert kept_warm(replace(CALL, turn=replace(TURN, **turn)), NOW, warmth, at) is NOW
    return warmth


def test_a_conversation_stays_on_now_while_its_cache_lives() -> None:
    assert kept_warm(CALL, BATCH, after_now(), 299.0) == WARM
    assert kept_warm(CALL, BATCH, after_now(), 300.0) is BATCH
    assert kept_warm(CALL, BATCH, after_now(cache_life=3600.0), 3599.0) == WARM


def test_every_turn_on_now_renews_it() -> None:
    warmth = after_now()
    assert kept_warm(CALL, BATCH, warmth, 290.0) == WARM
    assert kept_warm(CALL, BATCH, warmth, 580.0) == WARM
    assert kept_warm(CALL, BATCH, warmth, 900.0) is BATCH


def test_an_hour_is_not_shortened_by_a_turn_that_asks_for_less() -> None:
    warmth = after_now(cache_life=3600.0)
    assert kept_warm(CALL, NOW, warmth, 10.0) is NOW
    assert kept_warm(CALL, BATCH, warmth, 3000.0) == WARM


@pytest.mark.parametrize(
    "other",
    [
        replace(CALL, credential="another"),
        replace(CALL, turn=replace(TURN, conversation=8)),
        replace(CALL, turn=None),
        replace(CALL, turn=replace(TURN, opening=True)),  # an equal beginning is another conversation
        replace(CALL, lane=Lane.BATCH),
        replace(CALL, lane=Lane.BATCH, insists=False),
    ],
)
def test_what_is_not_kept(other: Call) -> None:
    assert kept_warm(other, BATCH, after_now(), 1.0) is BATCH


def test_batches_do_not_warm() -> None:
    warmth = WarmConversations()
    assert kept_warm(CALL, BATCH, warmth, 0.0) is BATCH
    assert kept_warm(CALL, BATCH, warmth, 1.0) is BATCH
    assert len(warmth) == 0


def test_an_opening_on_now_warms_what_follows() -> None:
    assert kept_warm(CALL, BATCH, after_now(opening=True), 1.0) == WARM


@given(st.lists(st.tuples(st.integers(0, 6), st.floats(0, 100)), max_size=40))
def test_it_is_bounded_and_forgets_the_most_silent_first(turns: list[tuple[int, float]]) -> None:
    warmth, now = WarmConversations(most=3), 0.0
    order: list[int] = []
    for conversation, pause in turns:
        now += pause
        warmth.record("c", conversation, 1e9, now)
        order = [*(one for one in order if one != conversation), conversation][-3:]
        assert {one for one in range(7) if warmth.is_warm("c", one, now)} == set(order)
        assert len(warmth) == len(order)
