"""Streams that are closed after their last event, before the end of the body: what was bought is booked as billed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import pytest
from anthropic import Anthropic, AsyncAnthropic

import carpool
from carpool import Fleet, FleetDispatcher
from carpool.mock import MockAnthropic, serve
from tests.support.fleets import KEY, QUICK, SOON, ask, soon, until

CHAT = {"model": "gpt-6-luna", "messages": [{"role": "user", "content": "x"}], "stream": True}
CALLS = {
    "messages": ("/v1/messages", ask("x", stream=True), b"message_stop"),
    "completions": ("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}, b"[DONE]"),
    "responses": ("/v1/responses", {"model": "gpt-6-luna", "input": "x", "stream": True}, b"response.completed"),
}
HEADERS = {"x-api-key": KEY, "authorization": f"Bearer {KEY}", "anthropic-version": "2023-06-01"}


class Endless:
    """The mock, which never ends the body of a stream: whoever waits for that waits for ever."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def held(message: Any) -> None:
            ends = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send({**message, "more_body": True} if ends else message)
            if ends:
                while (await receive())["type"] != "http.disconnect":
                    continue

        await self._app(scope, receive, held)


def endless() -> MockAnthropic:
    provider = MockAnthropic(SOON)
    provider.app = Endless(provider.app)  # type: ignore[assignment]
    return provider


@pytest.mark.parametrize(
    ("name", "lane"),
    [("messages", "now"), ("completions", "now"), ("responses", "now"), ("completions", "flex"), ("responses", "flex")],
)
async def test_a_transport(name: str, lane: str) -> None:
    path, body, last = CALLS[name]
    async with serve(provider=endless()) as mock:
        road = carpool.transport(policy=QUICK, close_timeout=0.0, lane=lane)
        async with httpx2.AsyncClient(transport=road, base_url=mock.url, headers=HEADERS) as client:
            async with client.stream("POST", path, json=body) as answer:
                assert answer.headers["x-carpool-lane"] == lane
                seen = b""
                async for piece in answer.aiter_raw():
                    seen += piece
                    if last in seen and seen.endswith(b"\n\n"):
                        break
            assert road.stats.unknown_purchases == 0
            assert road.stats.paid == mock.provider.bill.total() > 0


async def test_a_dispatcher() -> None:
    async with (
        serve(provider=endless()) as mock,
        AsyncAnthropic(base_url=mock.url, api_key=KEY) as client,
        FleetDispatcher(client, policy=QUICK, close_timeout=0.5) as fleet,
    ):
        stream = await soon(fleet.submit(**ask(), stream=True))
        async for event in stream:
            if event.type == "message_stop":
                break
        await soon(stream.close())
        await until(lambda: fleet.stats.paid or fleet.stats.unknown_purchases)
        assert fleet.stats.paid == mock.provider.bill.total() > 0


async def test_a_blocking_fleet() -> None:
    def paid(url: str) -> int:
        with (
            Anthropic(base_url=url, api_key=KEY) as client,
            Fleet(client, policy=QUICK, close_timeout=0.5) as fleet,
        ):
            stream = fleet.submit(**ask(), stream=True)
            for event in stream:
                if event.type == "message_stop":
                    break
            stream.close()
            return fleet.stats.paid

    async with serve(provider=endless()) as mock:
        assert await soon(asyncio.to_thread(paid, mock.url)) == mock.provider.bill.total() > 0


async def test_a_stream_that_is_closed_earlier_has_no_known_price() -> None:
    async with (
        serve(provider=endless()) as mock,
        AsyncAnthropic(base_url=mock.url, api_key=KEY) as client,
        FleetDispatcher(client, policy=QUICK, close_timeout=0.5) as fleet,
    ):
        stream = await soon(fleet.submit(**ask(), stream=True))
        assert (await soon(anext(stream))).type == "message_start"
        await soon(stream.close())
        await until(lambda: fleet.stats.unknown_purchases == 1)
        assert fleet.stats.paid == 0
