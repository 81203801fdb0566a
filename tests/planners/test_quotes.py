"""Quotes agree with the formulas of cache and batch economics."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.model import Lane
from carpool.planners.quotes import (
    LONG_LIFE,
    SHORT_LIFE,
    BatchOdds,
    Outlook,
    PricedCall,
    Quote,
    Stored,
    TokenPrices,
    quotes,
)

NOW_PRICES = TokenPrices()
BETA = 0.5
LIVES = (0.0, SHORT_LIFE, LONG_LIFE)
chance = st.floats(0.0, 1.0)


def priced(**changes: Any) -> PricedCall:
    lanes = {Lane.NOW: NOW_PRICES, Lane.BATCH: NOW_PRICES.times(BETA)}
    given: dict[str, Any] = {"tokens": 100_000, "output": 0.0, "prices": lanes, "sync_s": 0.0, "now": 1000.0}
    return PricedCall(**({"lives": dict.fromkeys(lanes, LIVES)} | given | changes))


def on(lane: Lane, found: list[Quote], life: float | None = None) -> Quote:
    return next(quote for quote in found if quote.lane is lane and life in (None, quote.life))


def outlook(turns: float, growth: float, within: dict[float, float]) -> Outlook:
    """The chance of the next turn within a life, given that one comes."""
    returns = turns / (1 + turns)

    def back(seconds: float) -> float:
        return returns * within.get(seconds, 1.0)

    return Outlook(turns, growth, back, back)


# ------------------------------------------------------------ calls that stand alone


@given(on_time=chance, billed=chance)
def test_a_call_alone_goes_to_a_batch_above_the_break_even(on_time: float, billed: float) -> None:
    break_even = BETA * billed / (1 - BETA * (1 - billed))
    found = quotes(priced(lives=dict.fromkeys((Lane.NOW, Lane.BATCH), (0.0,)), odds=BatchOdds(on_time, billed=billed)))
    if abs(on_time - break_even) > 1e-6:
        assert found[0].lane is (Lane.BATCH if on_time > break_even else Lane.NOW)


def test_a_call_alone_marks_nothing() -> None:
    assert quotes(priced())[0].life == 0


def test_an_output_counts_at_the_price_of_the_lane() -> None:
    without, found = quotes(priced()), quotes(priced(output=100.0))
    assert on(Lane.NOW, found, 0).cost - on(Lane.NOW, without, 0).cost == pytest.approx(500)
    assert on(Lane.BATCH, found, 0).cost - on(Lane.BATCH, without, 0).cost == pytest.approx(250)


def test_flex_is_bought_on_now_where_it_is_refused() -> None:
    lanes = {Lane.NOW: NOW_PRICES, Lane.FLEX: NOW_PRICES.times(BETA)}
    found = quotes(priced(prices=lanes, lives=dict.fromkeys(lanes, (0.0,)), flex_refusal=0.4))
    assert on(Lane.FLEX, found).cost == pytest.approx(100_000 * (0.6 * 0.505 + 0.4))


def test_flex_that_is_refused_may_still_ride_a_batch() -> None:
    lanes = {Lane.NOW: NOW_PRICES, Lane.FLEX: NOW_PRICES.times(BETA), Lane.BATCH: NOW_PRICES.times(BETA)}
    odds = BatchOdds(0.8, billed=0.0)
    found = quotes(priced(prices=lanes, lives=dict.fromkeys(lanes, (0.0,)), odds=odds, flex_refusal=0.4))
    assert on(Lane.FLEX, found).cost == pytest.approx(100_000 * (0.6 * 0.505 + 0.4 * (0.8 * 0.5 + 0.2)))
    assert found[0].lane is Lane.FLEX


# ------------------------------------------------------------ what is stored


def test_a_read_costs_a_tenth_and_only_where_it_is_stored() -> None:
    found = quotes(priced(on_sync=Stored(90_000, 1100.0)))
    assert on(Lane.NOW, found, SHORT_LIFE).cost == pytest.approx(9_000 + 12_500)
    assert on(Lane.BATCH, found, SHORT_LIFE).cost == pytest.approx(62_500)


def test_more_stored_than_the_prompt_seems_to_have_is_no_gain() -> None:
    found = quotes(priced(on_sync=Stored(130_000, 1100.0)))
    assert on(Lane.NOW, found, SHORT_LIFE).cost == pytest.approx(10_000)


def test_what_has_expired_is_written_again() -> None:
    found = quotes(priced(on_sync=Stored(90_000, 1000.0)))
    assert on(Lane.NOW, found, SHORT_LIFE).cost == pytest.approx(125_000)


def test_what_may_expire_before_the_batch_reads_it_counts_by_chance() -> None:
    odds = BatchOdds(ends_within=lambda seconds: 0.7 if seconds == 400 else 1.0)
    found = quotes(priced(on_batch=Stored(90_000, 1400.0), odds=odds))
    warm, cold = BETA * (9_000 + 12_500), BETA * 125_000
    assert on(Lane.BATCH, found, SHORT_LIFE).cost == pytest.approx(0.7 * warm + 0.3 * cold)


# ------------------------------------------------------------ turns to come


@given(short=chance, long=chance, share=st.floats(0.0, 0.2), r=st.sampled_from([0.1, 0.05, 0.025]))
def test_the_longer_life_is_chosen_where_it_pays(short: float, long: float, share: float, r: float) -> None:
    """1h beats 5m on `now` iff (1 - h5)(1.25 - r) - (1 - h60)(2 - r) > 0.75 · fresh/context."""
    short = min(short, long)
    prices, tokens = NOW_PRICES._replace(read=r), 100_000
    fresh = share * tokens
    comes = outlook(1000.0, fresh, {SHORT_LIFE: short, LONG_LIFE: long})
    stored = Stored(tokens, math.inf)
    call = priced(prices={Lane.NOW: prices}, lives={Lane.NOW: LIVES[1:]}, outlook=comes, on_sync=stored)
    context = tokens + fresh * 1000 / 2
    difference = (1 - short) * (1.25 - r) - (1 - long) * (2 - r) - 0.75 * fresh / context
    if abs(difference) > 1e-6:
        assert quotes(call)[0].life == (LONG_LIFE if difference > 0 else SHORT_LIFE)


def test_a_warm_conversation_moves_to_batches_only_for_enough_turns() -> None:
    """It saves half of a turn's price, and writes the context again: (w - r) · context of the batch."""
    lives = dict.fromkeys((Lane.NOW, Lane.BATCH), (SHORT_LIFE,))

    def chosen(turns: float) -> Lane:
        comes = outlook(turns, 0.0, {})
        return quotes(priced(lives=lives, outlook=comes, on_sync=Stored(100_000, math.inf)))[0].lane

    a_turn, moving = (1 - BETA) * 0.1, BETA * (1.25 - 0.1)
    needed = moving / a_turn - 1  # this turn saves too
    assert chosen(needed * 0.9) is Lane.NOW
    assert chosen(needed * 1.1) is Lane.BATCH


def test_a_conversation_that_just_began_goes_where_all_its_turns_are_cheapest() -> None:
    slow = Outlook(20.0, 1000.0, lambda _s: 20 / 21, lambda life: 20 / 21 * (0.2 if life <= SHORT_LIFE else 0.6))
    quick = Outlook(20.0, 1000.0, lambda _s: 20 / 21, lambda _life: 20 / 21)
    assert quotes(priced(outlook=slow))[0].lane is Lane.NOW
    assert quotes(priced(outlook=quick))[0].lane is Lane.BATCH


def test_batches_that_are_late_for_the_turns_to_come_make_them_dear() -> None:
    comes = outlook(20.0, 1000.0, {})
    sure = quotes(priced(outlook=comes))
    doubtful = quotes(priced(outlook=comes, odds=BatchOdds(0.5, 0.5)))
    assert sure[0].lane is Lane.BATCH
    assert doubtful[0].lane is Lane.NOW


def test_a_task_without_time_for_batches_stays_on_now() -> None:
    comes = outlook(20.0, 1000.0, {})
    some, none = (quotes(priced(outlook=comes, odds=BatchOdds(turns=turns))) for turns in (10.0, 0.0))
    assert on(Lane.BATCH, some, SHORT_LIFE).later < on(Lane.BATCH, none, SHORT_LIFE).later
    assert none[0].lane is Lane.NOW


# ------------------------------------------------------------ keeping a prefix alive


def coming(times: dict[float, float], turns: float = 50.0) -> Outlook:
    """Turns come back after one of these times, each with its chance."""

    def back(seconds: float) -> float:
        return turns / (1 + turns) * sum(share for at, share in times.items() if at <= seconds)

    return Outlook(turns, 0.0, back, back)


def test_pings_bridge_a_pause_that_most_conversations_make() -> None:
    call = priced(prices={Lane.NOW: NOW_PRICES}, lives={Lane.NOW: (SHORT_LIFE,)}, pings=True)
    [quote] = quotes(priced(prices=call.prices, lives=call.lives, pings=True, outlook=coming({10: 0.5, 700: 0.5})))
    assert quote.pings == 2
    [quote] = quotes(priced(prices=call.prices, lives=call.lives, pings=True, outlook=coming({10: 0.98, 7000: 0.02})))
    assert quote.pings == 0


def test_pings_make_turns_to_come_cheaper_and_are_paid() -> None:
    lanes: dict[str, Any] = {"prices": {Lane.NOW: NOW_PRICES}, "lives": {Lane.NOW: (SHORT_LIFE,)}}
    comes = coming({10: 0.5, 400: 0.5})
    [with_pings], [without] = (quotes(priced(outlook=comes, pings=pings, **lanes)) for pings in (True, False))
    half = 50 * 100_000 / 2
    assert without.later == pytest.approx(half * 0.1 + half * 1.25, rel=0.01)
    assert with_pings.later == pytest.approx(2 * half * 0.1 + with_pings.pings * half * 0.1, rel=0.05)


def test_pings_keep_nothing_alive_for_a_conversation_that_ends() -> None:
    lanes: dict[str, Any] = {"prices": {Lane.NOW: NOW_PRICES}, "lives": {Lane.NOW: (SHORT_LIFE,)}}
    [quote] = quotes(priced(outlook=coming({400: 1.0}, turns=0.05), pings=True, **lanes))
    assert quote.pings == 0
