"""OpenAI's calls through the proxy: on `now`, beside Anthropic's, and every nano-dollar in the ledger."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from carpool.core.clock import SystemClock
from carpool.core.model import Entry, ticket_number
from carpool.core.ports import Store
from carpool.dialects import get as get_dialect
from carpool.engine import Engine, Keyring, Upstream
from carpool.frontends.proxy import Proxy
from carpool.frontends.proxy.log import LogLine
from carpool.http import Http1Client
from carpool.mock import MockAnthropic, MockConfig, expected_openai_text, serve
from carpool.planners.policy import RoutingPolicy
from carpool.stores import open_store
from tests.support.stage import _served

MODEL = "gpt-6-luna"
LONG = "word " * 2000
TOOL = {"type": "function", "name": "lookup", "strict": False, "parameters": {"type": "object", "properties": {}}}
CHAT_TOOL = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}


@dataclass
class Both:
    """Two providers behind one proxy."""

    url: str
    direct: str
    mock: MockAnthropic
    engine: Engine
    store: Store
    lines: list[LogLine]

    def client(self, options: str = "", base: str | None = None, **more: Any) -> AsyncOpenAI:
        settings = {"api_key": "k", "max_retries": 0, "_strict_response_validation": True, **more}
        return AsyncOpenAI(base_url=f"{base or self.url}{options}/v1", **settings)

    async def booked(self, count: int) -> list[Entry]:
        """What the ledger says of so many calls, once all have passed."""
        async with asyncio.timeout(5):
            while len(self.lines) < count:  # noqa: ASYNC110  they end on the other side of a connection
                await asyncio.sleep(0.01)
        return [
            entry
            for line in self.lines
            if line.ticket
            for entry in await self.store.entries(ticket_number(line.ticket))
        ]


@asynccontextmanager
async def both(config: MockConfig | None = None, **more: Any) -> AsyncIterator[Both]:
    clock, wire, store = SystemClock(), Http1Client(), await open_store(None)
    lines: list[LogLine] = []
    async with serve(config) as mock:
        upstreams = {
            "anthropic": Upstream("anthropic", mock.url, get_dialect("anthropic"), wire),
            "openai": Upstream("openai", f"{mock.url}/v1", get_dialect("openai"), wire),
        }
        policy = RoutingPolicy(linger_ms=20, poll_interval_s=0.05, batch_rpm=3000)
        engine = Engine(store=store, clock=clock, upstreams=upstreams, keyring=Keyring(store.pepper), policy=policy)
        await engine.start()
        async with _served(Proxy(engine, upstreams, clock, note=lines.append, **more)) as url:
            yield Both(url, mock.url, mock.provider, engine, store, lines)
        await engine.close(0.0)
        await wire.aclose()


def chat(text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **more}


async def test_every_kind_of_call_is_answered_and_booked() -> None:
    async with both() as stage, stage.client() as client:
        answer = await client.chat.completions.create(**chat())
        assert answer.choices[0].message.content == expected_openai_text(chat())
        wish = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = [chunk async for chunk in await client.chat.completions.create(**chat(LONG), **wish)]
        assert chunks[-1].usage.prompt_tokens_details.cache_write_tokens > 0
        again = await client.chat.completions.create(**chat(LONG))
        assert again.usage.prompt_tokens_details.cached_tokens > 0
        told = await client.responses.create(model=MODEL, input="[think] about it", instructions=LONG)
        assert told.usage.output_tokens_details.reasoning_tokens > 0
        events = [
            one async for one in await client.responses.create(model=MODEL, input="[tool]", tools=[TOOL], stream=True)
        ]
        assert events[-1].response.output[0].type == "function_call"
        called = await client.chat.completions.create(**chat("[tool]", tools=[CHAT_TOOL]))
        assert called.choices[0].message.tool_calls
        await client.responses.create(model="gpt-5-mini", input=LONG, service_tier="flex")
        await client.responses.create(model="gpt-5-mini", input=LONG, service_tier="flex")
        await client.embeddings.create(model="text-embedding-3-small", input=["a", "b"], encoding_format="float")
        entries = await stage.booked(9)
        bill = stage.mock.bill
        assert len(entries) == len(bill.charges) == 9
        assert {entry.provider for entry in entries} == {"openai"}
        assert sorted(entry.paid for entry in entries) == sorted(charge.nano_usd for charge in bill.charges)
        assert stage.engine.stats.paid == stage.engine.stats.would_have_paid == bill.total() > 0


async def test_a_big_answer_is_booked_as_well() -> None:
    async with both() as stage, stage.client() as client:
        many = [f"text {n}" for n in range(400)]  # some 8 MB of JSON
        answer = await client.embeddings.create(model="text-embedding-3-small", input=many, encoding_format="float")
        assert len(answer.data) == 400
        (entry,) = await stage.booked(1)
        assert entry.paid == stage.mock.bill.total() > 0


async def test_a_chat_stream_without_usage_is_unknown_and_never_free() -> None:
    async with both() as stage, stage.client() as client:
        _ = [chunk async for chunk in await client.chat.completions.create(**chat(), stream=True)]
        (entry,) = await stage.booked(1)
        assert entry.paid is None
        assert stage.engine.stats.unknown_purchases == 1


async def test_answers_are_byte_for_byte_those_of_the_provider() -> None:
    config = MockConfig(seed=7)
    seen = []
    for through in (False, True):
        async with both(config) as stage, httpx2.AsyncClient() as http:
            base = stage.url if through else stage.direct
            for path, body in (
                ("/v1/chat/completions", chat("[tool]", tools=[CHAT_TOOL])),
                ("/v1/chat/completions", chat(stream=True)),
                ("/v1/responses", {"model": MODEL, "input": "x", "stream": True}),
                ("/v1/embeddings", {"model": "text-embedding-3-small", "input": "x", "encoding_format": "base64"}),
                ("/v1/responses", {"model": "gpt-nobody", "input": "x"}),
                ("/v1/chat/completions", {"model": MODEL}),
            ):
                answer = await http.post(base + path, json=body, headers={"authorization": "Bearer k"})
                text = answer.content
                for name in (b'"created":', b'"created_at":', b'"completed_at":'):  # the second in which it was made
                    text = name.join(
                        [part.lstrip(b"0123456789") if n else part for n, part in enumerate(text.split(name))]
                    )
                seen.append((through, answer.status_code, answer.headers["content-type"], text))
    half = len(seen) // 2
    assert [one[1:] for one in seen[:half]] == [one[1:] for one in seen[half:]]


async def test_a_budget_is_no_reason_to_refuse() -> None:
    """What can't ride a batch goes at once: that is the way of carpool, not the client's."""
    async with both() as stage, stage.client("/@budget=30m") as client:
        raw = await client.chat.completions.with_raw_response.create(**chat(store=True, service_tier="default"))
        assert raw.headers["x-carpool-lane"] == "now"
        assert "`store`" in raw.headers["x-carpool-reason"]
        assert raw.parse().choices[0].message.content == expected_openai_text(chat(store=True, service_tier="default"))


async def test_who_insists_on_a_batch_is_told_why_not() -> None:
    async with both() as stage, stage.client("/@lane=batch") as client:
        with pytest.raises(openai.BadRequestError, match="`previous_response_id`") as caught:
            await client.responses.create(model=MODEL, input="x", previous_response_id="resp_1")
        assert caught.value.type == "invalid_request_error"
        assert stage.mock.bill.charges == []


@pytest.mark.parametrize("endpoint", ["chat", "responses"])
async def test_a_key_brings_the_same_answer_streamed_or_not(endpoint: str) -> None:
    async with both() as stage, stage.client(default_headers={"x-carpool-key": "once"}) as client:
        if endpoint == "chat":
            first = (await client.chat.completions.create(**chat())).choices[0].message.content
            chunks = [one async for one in await client.chat.completions.create(**chat(), stream=True)]
            second = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            wish = {"stream": True, "stream_options": {"include_usage": True}}
            told = [one async for one in await client.chat.completions.create(**chat(), **wish)]
            assert told[-1].usage.prompt_tokens > 0
            assert told[-1].choices == []
        else:
            first = (await client.responses.create(model=MODEL, input="x")).output_text
            events = [one async for one in await client.responses.create(model=MODEL, input="x", stream=True)]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            second = events[-1].response.output_text
        assert first == second
        assert len(stage.mock.bill.charges) == 1


async def test_projects_of_one_key_are_kept_apart() -> None:
    async with both() as stage:
        for project in ("one", "two"):
            async with stage.client(project=project, default_headers={"x-carpool-key": "same"}) as client:
                await client.responses.create(model=MODEL, input="x")
        assert len(stage.mock.bill.charges) == 2


async def test_both_providers_at_one_address() -> None:
    async with both() as stage, stage.client() as client:
        async with AsyncAnthropic(base_url=stage.url, api_key="k", max_retries=0) as other:
            message, answer = await asyncio.gather(
                other.messages.create(
                    model="claude-haiku-4-5", max_tokens=9, messages=[{"role": "user", "content": "x"}]
                ),
                client.responses.create(model=MODEL, input="x"),
            )
            assert message.content
            assert answer.output_text
            assert (await other.models.list()).data[0].id.startswith("claude")
        assert MODEL in [model.id async for model in client.models.list()]
        entries = await stage.booked(2)
        assert {entry.provider for entry in entries} == {"anthropic", "openai"}
        assert stage.engine.stats.paid == stage.mock.bill.total()


async def test_errors_of_either_keep_their_shape() -> None:
    async with both() as stage, stage.client() as client:
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(**chat("[error:rate_limit_error]"))
        assert caught.value.code == "rate_limit_exceeded"
        (entry,) = await stage.booked(1)
        assert entry.paid == 0
        with pytest.raises(openai.BadRequestError) as ours:
            await client.responses.create(model=MODEL, input="x", store=True, extra_headers={"x-carpool-lane": "batch"})
        assert set(json.loads(ours.value.response.text)["error"]) == {"message", "type", "param", "code"}
