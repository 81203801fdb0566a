"""The bill against sums done by hand."""

import pytest

from carpool.mock import CATALOGUE, Constant, MockConfig, Usage, find_model, price_nano


def nano(model, kind, **usage):
    return price_nano(CATALOGUE[model], Usage(**{"input": 0, "output": 0, **usage}), kind)


@pytest.mark.parametrize(
    ("model", "kind", "usage", "expected"),
    [
        # 1,000 x $1 + 100 x $5 per million = $0.0015
        ("claude-haiku-4-5", "sync", {"input": 1000, "output": 100}, 1_500_000),
        ("claude-haiku-4-5", "batch", {"input": 1000, "output": 100}, 750_000),
        # writes at 1.25x and 2x, reads at 0.1x of $5
        ("claude-opus-5", "sync", {"write_5m": 100, "write_1h": 10, "read": 1000}, 625_000 + 100_000 + 500_000),
        ("claude-opus-5", "batch", {"write_5m": 100, "write_1h": 10, "read": 1000}, 612_500),
        # the newest generations read cheaper
        ("claude-opus-5-5", "sync", {"read": 1000}, 200_000),
        ("claude-fable-5-1", "batch", {"read": 1000}, 125_000),
        # US only: 1.1x, but not on models that have no such price
        ("claude-sonnet-4-6", "batch", {"input": 1000, "output": 10, "geo_us": True}, 1_650_000 + 82_500),
        ("claude-sonnet-4-5", "sync", {"input": 1000, "geo_us": True}, 3_000_000),
        # above 100,000 input tokens, cached ones included, haiku-5-5 costs five times as much
        ("claude-haiku-5-5", "sync", {"input": 100_000, "output": 10}, 10_005_000),
        ("claude-haiku-5-5", "sync", {"input": 1, "read": 100_000, "output": 10}, 500 + 5_000_000 + 25_000),
        ("claude-haiku-5-5", "batch", {"input": 100_001, "output": 0}, 25_000_250),
        # a search costs a cent, in a batch as well
        ("claude-haiku-4-5", "batch", {"searches": 3}, 30_000_000),
        ("claude-opus-5", "sync", {"input": 10, "fast": True}, 100_000),
        # 62.5 and 187.5 nano-dollars: half to even, once, after the sum
        ("claude-haiku-5-5", "batch", {"write_5m": 1}, 62),
        ("claude-haiku-5-5", "batch", {"write_5m": 3}, 188),
        ("claude-haiku-5-5", "batch", {"write_5m": 2}, 125),
    ],
)
def test_prices_by_hand(model, kind, usage, expected):
    assert nano(model, kind, **usage) == expected


def test_the_whole_price_list():
    """Input, output, 5m write, 1h write, read, and the least that can be cached, as published."""
    rows = {spec.id: (spec.input, spec.output, spec.write_5m, spec.write_1h, spec.read) for spec in CATALOGUE.values()}
    assert rows["claude-mythos-5"] == (10_000, 50_000, 12_500, 20_000, 1000)
    assert rows["claude-opus-5-5"] == (4000, 20_000, 5000, 8000, 200)
    assert rows["claude-opus-4-8"] == (5000, 25_000, 6250, 10_000, 500)
    assert rows["claude-sonnet-5-5"] == (2000, 10_000, 2500, 4000, 100)
    assert rows["claude-sonnet-4-6"] == (3000, 15_000, 3750, 6000, 300)
    assert rows["claude-haiku-5-5"] == (100, 500, 125, 200, 10)
    assert rows["claude-haiku-4-5"] == (1000, 5000, 1250, 2000, 100)
    assert len(rows) == 17
    assert find_model("claude-sonnet-4-5-20250929") is CATALOGUE["claude-sonnet-4-5"]
    assert find_model("claude-fable-5-2") is None


async def test_the_bill_names_every_purchase(turned, body, requests_of):
    world = turned(MockConfig(batch_latency=Constant(10)))
    answer = (await world.call("POST", "/v1/messages", body("x" * 40))).json()
    batch_id = await world.create(requests_of("x" * 40, "y"))
    assert len(world.provider.bill.charges) == 1
    world.time += 10
    bill = world.provider.bill
    sync, half, _ = bill.charges
    output = answer["usage"]["output_tokens"]
    assert sync.nano_usd == 11 * 1000 + output * 5000
    assert (sync.kind, sync.credential, sync.message_id, sync.batch_id) == ("sync", "k", answer["id"], None)
    assert half.nano_usd * 2 == sync.nano_usd
    assert (half.kind, half.batch_id, half.custom_id, half.at) == ("batch", batch_id, "c0", world.time)
    assert half.workspace == world.provider.workspace_of("k")
    assert bill.total() == sum(charge.nano_usd for charge in bill.charges)
    assert bill.total(kind="sync") == bill.total() - bill.total(kind="batch") == sync.nano_usd
    assert bill.by_custom_id["c0"] == [half]
    line = (await world.results(batch_id))["c0"]["message"]
    assert line["id"] == half.message_id
    assert line["usage"]["output_tokens"] == half.usage.output == output


async def test_reading_the_bill_often_or_once_makes_no_difference(turned, requests_of):
    config = MockConfig(batch_latency=Constant(10), batch_execution=Constant(3))
    often, once = turned(config), turned(config)
    for world in (often, once):
        await world.create(requests_of("a", "[blocks]", "[error:api_error]"))
    for _ in range(20):
        often.time += 1
        assert often.provider.bill.total() >= 0
    once.time += 20
    assert often.provider.bill.charges == once.provider.bill.charges


async def test_the_bill_can_be_asked_for(turned, body, requests_of):
    world = turned(MockConfig(batch_latency=Constant(10)))
    nothing = {"purchases": 0, "input_tokens": 0, "output_tokens": 0, "nano_usd": 0, "usd": 0.0}
    empty = await world.call("GET", "/mock/bill", key="")
    assert (empty.status, empty.json()) == (200, {**nothing, "by_lane": {}, "by_model": {}, "lines": []})
    await world.call("POST", "/v1/messages", body("now"))
    await world.call("POST", "/v1/messages", body("now", model="claude-opus-5"))
    await world.create(requests_of("a", "b"))
    world.time += 10
    told = (await world.call("GET", "/mock/bill", key="")).json()
    charges = world.provider.bill.charges
    assert (told["purchases"], told["nano_usd"]) == (4, sum(charge.nano_usd for charge in charges))
    assert told["usd"] == told["nano_usd"] / 1e9 > 0
    assert told["input_tokens"] == sum(charge.usage.total_input for charge in charges)
    assert {lane: sums["purchases"] for lane, sums in told["by_lane"].items()} == {"now": 2, "batch": 2}
    assert {model: sums["purchases"] for model, sums in told["by_model"].items()} == {
        "claude-haiku-4-5": 3,
        "claude-opus-5": 1,
    }
    for parts in (told["by_lane"].values(), told["by_model"].values(), told["lines"]):
        assert sum(part["nano_usd"] for part in parts) == told["nano_usd"]
    assert world.provider.bill_summary == told


async def test_the_bill_tells_flex_from_now(openai_turned):
    world = openai_turned()
    for tier in ("flex", "default"):
        asked = {"model": "gpt-5-mini", "messages": [{"role": "user", "content": "hi"}], "service_tier": tier}
        assert (await world.call("POST", "/v1/chat/completions", asked)).status == 200
    told = (await world.call("GET", "/mock/bill")).json()
    assert [(line["model"], line["lane"], line["purchases"]) for line in told["lines"]] == [
        ("gpt-5-mini", "flex", 1),
        ("gpt-5-mini", "now", 1),
    ]
