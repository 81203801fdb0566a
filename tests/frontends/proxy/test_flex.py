"""The lane flex through the proxy: half price at once, and another lane where it has no room."""

import json
from typing import Any

import openai
import pytest

from carpool.core.keys import Profile, VirtualKey
from carpool.core.model import Lane
from carpool.engine import Keyring
from carpool.mock import Constant, MockConfig, OpenAIConfig, expected_openai_text

from .test_openai_batches import balanced
from .test_openai_calls import CHAT_TOOL, MODEL, both, chat

QUICK = MockConfig(batch_latency=Constant(0.2))
FLEX = {"extra_headers": {"x-carpool-lane": "flex"}}


@pytest.mark.parametrize("options", ["/@lane=flex", "/@budget=10m"])
async def test_a_budget_of_minutes_travels_on_flex_at_half_the_price(options: str) -> None:
    async with both(QUICK) as stage, stage.client(options) as client:
        raw = await client.chat.completions.with_raw_response.create(**chat(max_completion_tokens=200))
        assert raw.headers["x-carpool-lane"] == "flex"
        answer = raw.parse()
        assert answer.service_tier == "flex"
        assert answer.choices[0].message.content == expected_openai_text(
            chat(max_completion_tokens=200, service_tier="flex")
        )
        (entry,) = await balanced(stage, 1)
        assert (entry.lane, entry.would_have_paid) == ("flex", 2 * entry.paid)
        assert stage.engine.stats.flex_calls == 1


async def test_streams_pass_on_flex() -> None:
    async with both(QUICK) as stage, stage.client() as client:
        wish: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}, "tools": [CHAT_TOOL]}
        chunks = [one async for one in await client.chat.completions.create(**chat("[tool]"), **wish, **FLEX)]
        assert any(one.choices and one.choices[0].delta.tool_calls for one in chunks)
        events = [one async for one in await client.responses.create(model=MODEL, input="x", stream=True, **FLEX)]
        assert events[-1].response.service_tier == "flex"
        entries = await balanced(stage, 2)
        assert {entry.lane for entry in entries} == {"flex"}


async def test_a_refusal_costs_nothing_and_now_is_next() -> None:
    async with both(QUICK) as stage, stage.client() as client:
        stage.mock.script("flex_429")
        raw = await client.chat.completions.with_raw_response.create(**chat(), **FLEX)
        assert raw.headers["x-carpool-lane"] == "now"
        assert raw.parse().service_tier != "flex"
        free, paid = sorted(await balanced(stage, 1), key=lambda entry: entry.paid or 0)
        assert (free.lane, free.paid, paid.lane) == ("flex", 0, "now")
        assert stage.engine.stats.flex_refused == 1


async def test_with_time_enough_a_batch_is_next() -> None:
    async with both(QUICK) as stage, stage.client("/@budget=1h") as client:
        stage.mock.script("flex_429")
        raw = await client.chat.completions.with_raw_response.create(**chat())
        assert raw.headers["x-carpool-lane"] == "batch"
        entries = await balanced(stage, 1)
        assert sorted((entry.lane, bool(entry.paid)) for entry in entries) == [("batch", True), ("flex", False)]


async def test_flex_that_takes_too_long_is_rescued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carpool.engine.now.flex.rescue_time", lambda call, forecast: call.arrived + 0.3)
    config = MockConfig(openai=OpenAIConfig(flex_latency=Constant(60.0)))
    async with both(config) as stage, stage.client("/@budget=10m") as client:
        raw = await client.chat.completions.with_raw_response.create(**chat(), **FLEX)
        assert raw.headers["x-carpool-lane"] == "now"
        entries = {entry.lane: entry for entry in await stage.booked(1)}
        assert entries["flex"].paid is None  # whether it was billed, nobody said
        assert entries["now"].kind == "rescue"


async def test_a_mistake_of_the_caller_is_told_at_once() -> None:
    async with both(QUICK) as stage, stage.client() as client:
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(**chat("[error:invalid_request_error]"), **FLEX)
        assert stage.engine.stats.flex_refused == 0
        (entry,) = await balanced(stage, 1)
        assert entry.paid == 0


async def test_a_model_without_flex_says_so_and_a_client_with_a_tier_keeps_it() -> None:
    async with both(QUICK) as stage, stage.client() as client:
        with pytest.raises(openai.BadRequestError, match="not offered on the lane flex"):
            await client.chat.completions.create(**chat() | {"model": "gpt-4o"}, **FLEX)
        with pytest.raises(openai.BadRequestError, match="lane flex"):
            await client.chat.completions.create(**chat(service_tier="priority"), **FLEX)
        with pytest.raises(openai.BadRequestError, match="lane flex"):
            await client.embeddings.create(model="text-embedding-3-small", input="a", **FLEX)


async def test_one_member_is_set_and_every_other_byte_stays() -> None:
    from carpool.dialects.openai import ServiceTier

    body = b' {"model" : "m",\n "service_tier": "auto" , "messages":[ ] } '
    assert ServiceTier().requested(body) == b' {"model" : "m",\n "service_tier":"flex" , "messages":[ ] } '
    assert ServiceTier().requested(b'{"model":"m" }') == b'{"model":"m","service_tier":"flex" }'
    assert json.loads(ServiceTier().requested(b"{}")) == {"service_tier": "flex"}


async def test_a_virtual_key_without_the_lane_does_not_get_it() -> None:
    async with both(QUICK) as stage:
        pepper = Keyring(stage.store.pepper)
        texts = {name: f"cpk-{name * 43}" for name in ("a", "b")}
        lanes = {"a": (Lane.NOW, Lane.BATCH), "b": ()}
        await stage.store.write_keys(
            [
                VirtualKey(
                    pepper.digest(text), name, name, text[-4:], "openai", "HOUSE", "", Profile(lanes=lanes[name]), 1.0
                )
                for name, text in texts.items()
            ]
        )
        await stage.engine.virtual_key_cache.open(lambda provider, env: [(("authorization", "Bearer k"),)])
        for name, lane in (("a", "batch"), ("b", "flex")):
            async with stage.client("/@budget=1h", api_key=texts[name]) as client:
                raw = await client.chat.completions.with_raw_response.create(**chat())
                assert raw.headers["x-carpool-lane"] == lane
