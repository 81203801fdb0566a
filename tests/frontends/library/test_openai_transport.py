"""`carpool.transport()` under OpenAI's clients: all endpoints pool in process, and answer with the SDK's own types."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

import carpool
from carpool.mock import MockServer, expected_openai_text, expected_text, serve, serve_in_thread
from tests.support.fleets import QUICK, SOON, soon

MODEL = "gpt-6-luna"
BATCH = {"x-carpool-lane": "batch"}


def chat(text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **more}


@asynccontextmanager
async def riding(**settings: Any) -> AsyncIterator[tuple[AsyncOpenAI, Any, MockServer]]:
    async with serve(SOON) as mock:
        road = carpool.transport(**{"policy": QUICK, "close_timeout": 0.0, **settings})
        http_client = openai.DefaultAsyncHttpxClient(transport=road)
        async with AsyncOpenAI(api_key="k", base_url=f"{mock.url}/v1", http_client=http_client) as client:
            yield client, road, mock


async def test_all_three_endpoints_ride_batches() -> None:
    async with riding(lane="batch") as (client, road, mock):
        told, response, vectors = await soon(
            asyncio.gather(
                client.chat.completions.create(**chat()),
                client.responses.create(model=MODEL, input="hello"),
                client.embeddings.create(model="text-embedding-3-small", input=["a", "b"]),
            )
        )
        assert told.choices[0].message.content == expected_openai_text(chat())
        assert response.output_text == expected_openai_text({"model": MODEL, "input": "hello"})
        assert len(vectors.data) == 2
        assert (road.stats.batched_calls, road.stats.paid) == (3, mock.provider.bill.total())


async def test_a_task_budget_gives_time_for_batches() -> None:
    async with riding(task="essay", task_budget="3h") as (client, road, _):
        await soon(client.chat.completions.create(**chat()))
        late = {"x-carpool-task": "other", "x-carpool-task-budget": "30s"}
        await soon(client.chat.completions.create(**chat("quick"), extra_headers=late))
        assert (road.stats.batched_calls, road.stats.sync_calls) == (1, 1)


async def test_a_stream_of_a_batched_answer_is_the_sdks_own() -> None:
    async with riding() as (client, road, _):
        stream = await soon(client.chat.completions.create(**chat(), stream=True, extra_headers=BATCH))
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == expected_openai_text(chat())
        assert road.stats.batched_calls == 1


async def test_flex_is_a_lane_like_the_others() -> None:
    async with riding(lane="flex") as (client, road, mock):
        raw = await soon(client.chat.completions.with_raw_response.create(**chat()))
        assert raw.headers["x-carpool-lane"] == "flex", raw.headers["x-carpool-reason"]
        assert raw.parse().service_tier == "flex"
        assert (road.stats.flex_calls, road.stats.paid) == (1, mock.provider.bill.total())


async def test_without_a_wish_everything_goes_straight_through() -> None:
    async with riding() as (client, road, mock):
        await soon(client.chat.completions.create(**chat()))
        assert [model.id async for model in await client.models.list()]
        assert road.stats.batched_calls == 0
        assert mock.provider.requests_seen.count("chat") == 1


async def test_errors_are_the_sdks_own() -> None:
    async with riding() as (client, _, _):
        with pytest.raises(openai.BadRequestError):
            await soon(client.chat.completions.create(**chat("[error:invalid_request_error]"), extra_headers=BATCH))
        with pytest.raises(openai.BadRequestError, match="lane batch was asked for") as refused:
            await soon(client.responses.create(model=MODEL, input="x", background=True, extra_headers=BATCH))
        assert refused.value.body["message"].startswith("The lane batch")  # type: ignore[index]


async def test_one_transport_serves_both_families() -> None:
    async with riding(lane="batch") as (client, road, mock):
        http_client = anthropic.DefaultAsyncHttpxClient(transport=road)
        other = anthropic.AsyncAnthropic(api_key="k", base_url=mock.url, http_client=http_client)
        asked = {"model": "claude-haiku-4-5", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}
        told, message = await soon(
            asyncio.gather(client.chat.completions.create(**chat()), other.messages.create(**asked))
        )
        assert told.choices[0].message.content == expected_openai_text(chat())
        assert message.content[0].text == expected_text(asked)
        assert {batch.id.partition("_")[0] for batch in mock.provider.batches} == {"batch", "msgbatch"}
        assert road.stats.paid == mock.provider.bill.total()


def test_blocking_clients_pool_too() -> None:
    with serve_in_thread(SOON) as mock:
        http_client = openai.DefaultHttpxClient(transport=carpool.transport(lane="batch", policy=QUICK))
        with OpenAI(api_key="k", base_url=f"{mock.url}/v1", http_client=http_client) as client:
            told = client.chat.completions.create(**chat())
        assert told.choices[0].message.content == expected_openai_text(chat())
        assert len(mock.provider.batches) == 1
