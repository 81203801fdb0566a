"""The library with OpenAI's clients: every lane answers with the SDK's own types."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import Completion, CreateEmbeddingResponse, ModerationCreateResponse
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from carpool import BadCall, BadParams, Fleet, FleetDispatcher, RoutingPolicy, WrongClient
from carpool.mock import MockAnthropic, expected_openai_text, serve, serve_in_thread
from tests.support.fleets import QUICK, SOON, soon

MODEL = "gpt-6-luna"


def chat(text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **more}


@asynccontextmanager
async def riding(policy: RoutingPolicy = QUICK, **more: Any) -> AsyncIterator[tuple[FleetDispatcher, MockAnthropic]]:
    async with (
        serve(SOON) as mock,
        AsyncOpenAI(api_key="k", base_url=f"{mock.url}/v1", max_retries=0) as client,
        FleetDispatcher(client, policy=policy, close_timeout=0.0, **more) as fleet,
    ):
        yield fleet, mock.provider


async def test_patient_calls_ride_batches_and_come_back_as_the_sdks_own() -> None:
    async with riding() as (fleet, mock):
        told, response, vectors = await soon(
            asyncio.gather(
                fleet.submit(**chat()),
                fleet.submit(model=MODEL, input="hello"),
                fleet.submit(model="text-embedding-3-small", input=["a", "b"], endpoint="embeddings"),
            )
        )
        assert isinstance(told, ChatCompletion)
        assert told.choices[0].message.content == expected_openai_text(chat())
        assert isinstance(response, Response)
        assert response.output_text
        assert isinstance(vectors, CreateEmbeddingResponse)
        assert len(vectors.data[0].embedding) == 1536
        assert fleet.stats.batched_calls == 3
        assert fleet.stats.paid == mock.bill.total() > 0


async def test_every_lane_answers_alike() -> None:
    async with riding() as (fleet, mock):
        lanes = [await soon(fleet.submit(lane=lane, **chat())) for lane in ("now", "batch", "flex")]
        assert all(isinstance(one, ChatCompletion) for one in lanes)
        assert lanes[2].service_tier == "flex"
        stats = fleet.stats
        assert (stats.sync_calls, stats.batched_calls, stats.flex_calls) == (1, 1, 1)
        assert stats.paid == mock.bill.total()


async def test_a_stream_travels_on_now() -> None:
    async with riding() as (fleet, _):
        stream = await soon(fleet.submit(stream=True, **chat()))
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected_openai_text(chat())


async def test_errors_are_the_sdks_own_on_every_lane() -> None:
    async with riding() as (fleet, _):
        for lane in ("now", "batch", "flex"):
            with pytest.raises(openai.BadRequestError):
                await soon(fleet.submit(lane=lane, **chat("[error:invalid_request_error]")))
        with pytest.raises(BadCall, match="lane batch was asked for"):
            await soon(fleet.submit(lane="batch", model=MODEL, input="x", previous_response_id="resp_1"))
        with pytest.raises(BadParams, match=r"chat\.completions"):
            await fleet.submit(endpoint="images", **chat())


async def test_a_key_is_the_same_call(tmp_path: Any) -> None:
    async with riding(store=tmp_path / "fleet.db") as (fleet, mock):
        first = await soon(fleet.submit(key="once", **chat()))
        again = await soon(fleet.submit(key="once", **chat()))
        assert first.id == again.id
        assert len(mock.bill.charges) == 1


def test_blocking_clients_ride_too() -> None:
    with (
        serve_in_thread(SOON) as mock,
        OpenAI(api_key="k", base_url=f"{mock.url}/v1", max_retries=0) as client,
        Fleet(client, policy=QUICK, close_timeout=0.0) as fleet,
    ):
        told = fleet.submit(**chat())
        assert isinstance(told, ChatCompletion)
        assert fleet.stats.batched_calls == 1
        assert isinstance(fleet.submit(endpoint="responses", model=MODEL, input="x"), Response)


def test_the_wrong_kind_of_client_is_named() -> None:
    with pytest.raises(WrongClient, match=r"openai\.OpenAI is a blocking client.*AsyncOpenAI"):
        FleetDispatcher(OpenAI(api_key="k"))
    with pytest.raises(WrongClient, match=r"openai\.AsyncOpenAI is an asyncio client.*OpenAI"):
        Fleet(AsyncOpenAI(api_key="k"))


async def test_moderations_and_completions_ride_batches_too() -> None:
    async with riding() as (fleet, mock):
        judged, completed = await soon(
            asyncio.gather(
                fleet.submit(model="omni-moderation-latest", input="[flag] you", endpoint="moderations"),
                fleet.submit(model="gpt-3.5-turbo-instruct", prompt="once upon", endpoint="completions"),
            )
        )
        assert isinstance(judged, ModerationCreateResponse)
        assert judged.results[0].flagged
        assert isinstance(completed, Completion)
        assert completed.choices[0].text.startswith("echo:")
        assert fleet.stats.batched_calls == 2
        charges = {charge.model: charge.nano_usd for charge in mock.bill.charges}
        assert charges["omni-moderation-latest"] == 0
        assert (fleet.stats.paid, fleet.stats.unknown_purchases) == (
            0,
            1,
        )  # nobody names a price of completions in batches


async def test_a_moderation_that_names_no_model_goes_at_once() -> None:
    async with riding() as (fleet, mock):
        assert isinstance(await soon(fleet.submit(input="hello", endpoint="moderations")), ModerationCreateResponse)
        assert (fleet.stats.sync_calls, fleet.stats.paid, len(mock.batches)) == (1, 0, 0)


async def test_what_a_key_or_a_model_may_not_do_is_remembered_by_the_next_process(tmp_path: Any) -> None:
    config = replace(SOON, keys_without_batch=frozenset({"k"}))
    async with serve(config) as mock:
        for life in range(2):
            client = AsyncOpenAI(api_key="k", base_url=f"{mock.url}/v1", max_retries=0)
            fleet = FleetDispatcher(client, policy=QUICK, store=tmp_path / "fleet.db", close_timeout=0.0)
            async with client, fleet:
                await soon(fleet.submit(**chat(f"life {life}")))
            uploads = mock.provider.requests_seen.count("upload")
            assert uploads == 1, "the first process is refused, the second knows"
        assert len(mock.provider.bill.charges) == 2
