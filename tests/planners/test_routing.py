from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from carpool.core.errors import BadCall
from carpool.core.model import Call, Lane
from carpool.planners.agents import Agents
from carpool.planners.forecast import Forecast
from carpool.planners.policy import RoutingPolicy
from carpool.planners.quoter import KnownPrompt, Quoter
from carpool.planners.quotes import Quote, TokenPrices
from carpool.planners.routing import (
    BatchDeadlines,
    Decision,
    deadline_class,
    explained,
    noted,
    pool_key,
    pool_wait,
    route,
    size_class,
)

NOW = 1_800_000_000.0
FORECAST = Forecast()
WHY_NOT = "Calls with this field can't be batched."


def a_call(budget: float | None = None, **changes: object) -> Call:
    call = Call(
        ticket=1,
        provider="anthropic",
        dialect="anthropic",
        endpoint="/v1/messages",
        body=b"{}",
        headers=(("anthropic-version", "2023-06-01"),),
        credential="c1",
        model="claude-sonnet-5",
        arrived=NOW,
        deadline=None if budget is None else NOW + budget,
        max_output_tokens=200,
    )
    return replace(call, **changes)  # type: ignore[arg-type]


def routed(call: Call, policy: RoutingPolicy | None = None, *, beta: float = 0.5, **settings: object) -> Decision:
    prices = {Lane.NOW: TokenPrices(), Lane.FLEX: TokenPrices().times(0.5), Lane.BATCH: TokenPrices().times(beta)}

    def quote(lanes: Sequence[Lane], times: BatchDeadlines) -> Sequence[Quote]:
        offered = {lane: prices[lane] for lane in lanes}
        return Quoter(FORECAST, Agents()).quote(call, KnownPrompt(1000), offered, times, NOW)

    return route(call, policy or RoutingPolicy(), FORECAST, NOW, quote, **settings)  # type: ignore[arg-type]


def test_without_a_deadline_the_door_decides() -> None:
    assert routed(a_call()).lane is Lane.BATCH
    assert routed(a_call()).rescue_at is None
    assert routed(a_call(), default=Lane.NOW) == Decision(Lane.NOW, "No budget was given, so it goes at once.", None)


def test_a_tight_budget_goes_now() -> None:
    assert routed(a_call(5)).lane is Lane.NOW
    assert "tight" in routed(a_call(5)).reason
    assert "tight" in routed(a_call(400), RoutingPolicy(sync_max_latency_ms=400_000)).reason


def test_no_room_for_a_rescue_goes_now_even_where_the_cap_would_batch() -> None:
    # 9 s to answer, 20 s to cancel, half a second to linger
    decision = routed(a_call(29.5), RoutingPolicy(sync_max_latency_ms=1000))
    assert decision.lane is Lane.NOW
    assert "no room" in decision.reason
    assert routed(a_call(29.6), RoutingPolicy(sync_max_latency_ms=1000)).lane is Lane.BATCH


def test_an_explicit_cap_is_obeyed_above_it() -> None:
    assert routed(a_call(40)).lane is Lane.NOW  # by expected cost
    assert routed(a_call(40), RoutingPolicy(sync_max_latency_ms=5000)).lane is Lane.BATCH


def test_expected_cost_decides_the_rest() -> None:
    assert routed(a_call(60)).lane is Lane.NOW
    decision = routed(a_call(600))
    assert decision.lane is Lane.BATCH
    assert re.fullmatch(
        r"Batch is cheapest: of the cost on now, batch \d\d%; a batch is in time .* \d\d%\.", decision.reason
    )
    assert [quote.lane for quote in decision.quotes] == [Lane.BATCH, Lane.NOW]
    assert decision.rescue_at == NOW + 600 - 9 - 2


def test_the_chance_counts_the_wait_in_the_pool() -> None:
    budget = 130.0
    assert routed(a_call(budget)).lane is Lane.BATCH
    assert routed(a_call(budget), RoutingPolicy(batch_window_ms=60_000)).lane is Lane.NOW


def test_a_batch_that_saves_nothing_is_not_worth_the_risk() -> None:
    assert routed(a_call(600), beta=1.0).lane is Lane.NOW
    assert routed(a_call(600), beta=0.9).lane is Lane.NOW
    assert routed(a_call(86_000), beta=0.9).lane is Lane.BATCH


def test_a_reason_says_what_each_lane_costs() -> None:
    batch = Quote(Lane.BATCH, 3600.0, 40.0, 60.0, 0.97, 12.0)
    on_now, dearer = Quote(Lane.NOW, 300.0, 80.0, 120.0, 1.0, 12.0), Quote(Lane.NOW, 3600.0, 90.0, 200.0, 1.0, 12.0)
    assert explained([batch, on_now, dearer]) == (
        "Batch is cheapest with the 12 turns to come: of the cost on now, batch 50%; a batch is in time with a chance "
        "of 97%."
    )
    assert explained([on_now]) == "It takes the lane now."
    assert explained([on_now, batch]).startswith("Now is kept with the 12 turns to come, as a change would save too")
    assert explained([batch._replace(cost=300.0, probe=True), on_now]).startswith("It is a probe of how long batches")
    free = [quote._replace(cost=0.0, later=0.0) for quote in (batch, on_now)]
    assert explained(free) == "It costs nothing on any lane."


def test_what_can_not_batch_goes_now_and_says_why() -> None:
    assert routed(a_call(600, unbatchable=WHY_NOT)) == Decision(Lane.NOW, WHY_NOT, None)
    assert routed(a_call(), can_batch="This key has no batches.") == Decision(
        Lane.NOW, "This key has no batches.", None
    )


def test_a_forced_lane_wins() -> None:
    assert routed(a_call(lane=Lane.NOW)).lane is Lane.NOW
    assert routed(a_call(60, lane=Lane.BATCH)).lane is Lane.BATCH
    assert routed(a_call(60, lane=Lane.BATCH)).rescue_at == NOW + 60 - 11
    assert routed(a_call(lane=Lane.BATCH), default=Lane.NOW).rescue_at is None


def test_a_forced_batch_that_can_not_be_is_the_callers_mistake() -> None:
    with pytest.raises(BadCall, match=WHY_NOT):
        routed(a_call(lane=Lane.BATCH, unbatchable=WHY_NOT))
    with pytest.raises(BadCall, match="no batches"):
        routed(a_call(lane=Lane.BATCH), can_batch="This key has no batches.")


# ---------------------------------------------------------------- flex


def test_flex_is_taken_where_it_is_offered_and_a_batch_is_not_sure() -> None:
    """It costs as much as a batch and need not be rescued."""
    for minutes in (5, 10, 60):
        decision = routed(a_call(minutes * 60.0, max_output_tokens=500), can_flex=None)
        assert (decision.lane, decision.rescue_at) == (Lane.FLEX, None)
        assert "flex" in decision.reason
    assert routed(a_call(86_000.0, max_output_tokens=500), can_flex=None).lane is Lane.BATCH
    assert routed(a_call(None), can_flex=None).lane is Lane.BATCH


def test_flex_is_not_taken_where_a_refusal_would_leave_no_time() -> None:
    assert routed(a_call(30.0, max_output_tokens=2000), can_flex=None).lane is Lane.NOW
    assert routed(a_call(3.0, max_output_tokens=10), can_flex=None).lane is Lane.NOW


def test_what_can_not_batch_may_flex() -> None:
    assert routed(a_call(600.0, unbatchable=WHY_NOT, max_output_tokens=100), can_flex=None).lane is Lane.FLEX
    assert routed(a_call(None, unbatchable=WHY_NOT), can_flex=None).lane is Lane.FLEX
    assert routed(a_call(None, unbatchable=WHY_NOT), can_flex=None, default=Lane.NOW).lane is Lane.NOW
    assert routed(a_call(600.0, unbatchable=WHY_NOT)).lane is Lane.NOW


def test_who_insists_on_flex_gets_it_or_is_told_why_not() -> None:
    assert routed(a_call(lane=Lane.FLEX), can_flex=None).lane is Lane.FLEX
    with pytest.raises(BadCall, match="The lane flex was asked for"):
        routed(a_call(lane=Lane.FLEX))
    assert routed(a_call(lane=Lane.FLEX, insists=False), default=Lane.NOW).lane is Lane.NOW


@settings(deadline=None)
@given(st.floats(-100, 1e6), st.integers(0, 200_000), st.sampled_from([None, 0, 5000]))
def test_whatever_is_batched_can_still_be_rescued_in_time(budget: float, tokens: int, cap: int | None) -> None:
    call = a_call(budget, max_output_tokens=tokens)
    decision = routed(call, RoutingPolicy(sync_max_latency_ms=cap))
    assert decision.reason.endswith(".")
    if decision.lane is Lane.BATCH:
        assert decision.rescue_at is not None
        assert NOW < decision.rescue_at < NOW + budget - FORECAST.sync_seconds("anthropic", "m", tokens)
    else:
        assert decision.rescue_at is None


def test_the_wait_in_the_pool() -> None:
    assert pool_wait(RoutingPolicy()) == 0.5
    assert pool_wait(RoutingPolicy(batch_min_size=10)) == 30
    assert pool_wait(RoutingPolicy(batch_min_size=10, batch_window_ms=7000)) == 7
    assert pool_wait(RoutingPolicy(batch_window_ms=0)) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"provider": "other"},
        {"dialect": "other"},
        {"credential": "c2"},
        {"endpoint": "/v1/other"},
        {"headers": (("anthropic-beta", "x"),)},
        {"model": "claude-haiku-4-5"},
        {"max_output_tokens": 30_000},
        {"deadline": NOW + 600},
    ],
)
def test_what_must_not_share_a_batch_has_another_pool(changes: dict[str, object]) -> None:
    assert pool_key(a_call(), False, NOW) != pool_key(a_call(**changes), False, NOW)


def test_what_may_share_a_batch_has_the_same_pool() -> None:
    same = a_call(ticket=2, body=b"{ }", max_output_tokens=300, tags={"a": "b"}, key="k", stream=True, arrived=NOW + 1)
    assert pool_key(a_call(), False, NOW) == pool_key(same, False, NOW)
    haiku = a_call(model="claude-haiku-4-5")
    assert pool_key(a_call(), True, NOW) == pool_key(haiku, True, NOW)


def test_size_classes() -> None:
    assert [size_class(n) for n in (0, 1024, 1025, 8192, 8193)] == ["s", "s", "m", "m", "l"]


def test_deadline_classes() -> None:
    spans = {
        30: "1m",
        119: "1m",
        120: "2m",
        600: "8m",
        959: "8m",
        960: "16m",
        3600: "32m",
        86_400: "1024m",
        9e9: "1024m",
    }
    assert {span: deadline_class(span, 0.0) for span in spans} == spans
    assert deadline_class(None, NOW) == "patient"
    assert deadline_class(NOW - 5, NOW) == "1m"


# ---------------------------------------------------------------- what rules ask for


def test_a_lane_that_a_rule_asks_for_is_taken_where_it_can_be() -> None:
    wished = a_call(lane=Lane.BATCH, insists=False, note="The rule x asks for the lane batch.")
    assert routed(wished).reason == "The rule x asks for the lane batch."
    hindered = replace(wished, unbatchable="A batch may not carry this.")
    decision = noted(hindered, routed(hindered))
    assert decision == Decision(Lane.NOW, "The rule x asks for the lane batch. A batch may not carry this.")


def test_a_note_stands_before_the_reason_once() -> None:
    decision = Decision(Lane.NOW, "Said.")
    assert noted(a_call(), decision) is decision
    assert noted(a_call(note="Said."), decision) is decision
    assert noted(a_call(note="First."), decision).reason == "First. Said."
