"""Runs are priced by the production price book, to the nano-dollar."""

from __future__ import annotations

from fractions import Fraction

import pytest

from carpool.core.errors import ConfigError
from carpool.core.model import Lane
from carpool.sim.money.billing import MULTIPLIERS, PriceTable, bill
from carpool.sim.money.model import ROOT, Node, RunPurchase, Trace, TraceSession

TABLES = (PriceTable(), *(PriceTable(multiplier) for multiplier in MULTIPLIERS))
NODES = [Node(ROOT, 1000), Node(0, 3001)]


def trace(model: str, provider: str = "anthropic") -> Trace:
    return Trace("tiny", NODES, (TraceSession("a", 0.0, model, ()), TraceSession("b", 0.0, model, ())), provider)


def purchases(lane: Lane = Lane.NOW) -> list[RunPurchase]:
    return [
        RunPurchase(0, 0, Lane.NOW, "purchase", 0.0, 1.0, 2.0, 0, 10, "5m"),
        RunPurchase(1, 0, lane, "purchase", 10.0, 11.0, 12.0, 1, 100, "1h"),
    ]


def test_the_true_table_and_the_read_multipliers() -> None:
    bills = bill(trace("claude-opus-5"), purchases(), TABLES)
    written = 1000 * 6250 + 10 * 25000
    rest = 2001 * 10000 + 100 * 25000
    assert [row.table for row in bills] == ["true", "0.1", "0.05", "0.025"]
    assert [row.cost - written - rest for row in bills] == [500_000, 500_000, 250_000, 125_000]
    assert bills[0].by_session == [written, rest + 500_000]
    assert bills[0].by_lane == {Lane.NOW: bills[0].cost, Lane.BATCH: 0, Lane.FLEX: 0}
    assert bills[0].cache_share == 1000 / 4001


def test_batches_cost_half_and_each_purchase_is_rounded_half_to_even() -> None:
    (row,) = bill(trace("claude-haiku-5-5"), [_batch(1, 1), _batch(1, 2)], (PriceTable(Fraction(1, 40)),))
    assert row.by_lane[Lane.BATCH] == 2 * 50 * 3001 + 250 + 500
    (row,) = bill(
        trace("claude-haiku-5-5"), [_batch(1, 0, "1h"), _batch(1, 0, "1h", 9.0)], (PriceTable(Fraction(1, 40)),)
    )
    assert row.by_lane[Lane.BATCH] == 100 * 3001 + 3751  # 3,001 tokens read at 1.25 nano-dollars are 3,751.25


def _batch(node: int, output: int, ttl: object = None, starts: float = 0.0) -> RunPurchase:
    return RunPurchase(0, 0, Lane.BATCH, "purchase", starts, starts + 1, starts + 2, node, output, ttl)  # type: ignore[arg-type]


def test_the_dearer_tier_of_long_prompts_stays_in_every_table() -> None:
    long = Trace("long", [Node(ROOT, 100_001)], (TraceSession("a", 0.0, "claude-haiku-5-5", ()),))
    bought = [RunPurchase(0, 0, Lane.NOW, "purchase", 0.0, 1.0, 2.0, 0, 0)]
    assert [row.cost for row in bill(long, bought, TABLES)] == [100_001 * 500] * 4


def test_flex_at_openai_costs_as_much_as_a_batch() -> None:
    flex, batch = (
        bill(trace("gpt-6-sol", "openai"), purchases(lane), TABLES[:1])[0] for lane in (Lane.FLEX, Lane.BATCH)
    )
    assert flex.by_lane[Lane.FLEX] == batch.by_lane[Lane.BATCH] > 0


def test_an_unknown_price_is_an_error_and_never_0() -> None:
    with pytest.raises(ConfigError, match="no-such-model"):
        bill(trace("no-such-model"), purchases(), TABLES)
