"""The mistralai SDK over `carpool.transport()`: run in an environment with carpool and that SDK alone.

    python tests/sdk/under.py mistralai 3.7

It has no door of its own: its HTTP clients are given a transport, and it is told nothing else.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

import httpx2
from mistralai.client import Mistral
from mistralai.client.errors import SDKError

import carpool
from carpool import RoutingPolicy
from carpool.mock import Constant, MockConfig, MockServer, OpenAIConfig, serve

MODEL = "mistral-small-latest"
QUICK = RoutingPolicy(linger_ms=60, poll_interval_s=0.05, batch_rpm=100_000)
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}
LANES = ("now", "batch")
CONFIG = MockConfig(batch_latency=Constant(0.02), batch_rpm=None, openai=OpenAIConfig(vendor="mistral"))


class Under:
    """The SDK's own client, asyncio or blocking, over a transport."""

    def __init__(self, server: MockServer, *, blocking: bool) -> None:
        self.server, self.blocking = server, blocking
        self.transport = carpool.transport(policy=QUICK, close_timeout=2, vendor="mistral")
        way = httpx2.Client if blocking else httpx2.AsyncClient
        self.http: Any = way(transport=self.transport)
        given = {"client" if blocking else "async_client": self.http}
        self.client = Mistral(api_key="k", server_url=server.url, **given)

    async def aclose(self) -> None:
        await (asyncio.to_thread(self.http.close) if self.blocking else self.http.aclose())

    async def ask(self, lane: str, text: str = "hello", **more: Any) -> Any:
        asked = self.asked(lane, text, more)
        if self.blocking:
            return await asyncio.to_thread(lambda: self.client.chat.complete(**asked))
        return await self.client.chat.complete_async(**asked)

    async def chunks(self, lane: str, text: str = "hello", **more: Any) -> list[Any]:
        asked = self.asked(lane, text, more)
        if self.blocking:
            return await asyncio.to_thread(lambda: [event.data for event in self.client.chat.stream(**asked)])
        return [event.data async for event in await self.client.chat.stream_async(**asked)]

    def asked(self, lane: str, text: str, more: dict[str, Any]) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}]
        return {"model": MODEL, "messages": messages, "http_headers": {"x-carpool-lane": lane}, **more}


async def answers_come_on_every_lane(sdk: Under) -> None:
    for lane in LANES:
        answer = await sdk.ask(lane)
        assert type(answer).__name__ == "ChatCompletionResponse", type(answer)
        assert answer.choices[0].message.content.endswith("hello")
        assert answer.usage.completion_tokens > 0
    charges = sdk.server.provider.bill.charges
    assert [charge.kind for charge in charges] == ["sync", "batch"]
    assert sdk.transport.stats.paid == sdk.server.provider.bill.total() > 0


async def everybody_gets_their_own(sdk: Under) -> None:
    told = await asyncio.gather(*(sdk.ask("batch", f"n{number}") for number in range(5)))
    assert [one.choices[0].message.content.split()[-1] for one in told] == [f"n{number}" for number in range(5)]
    sent = {charge.fingerprint for charge in sdk.server.provider.bill.charges}
    assert {one.choices[0].message.content.split()[0].removeprefix("echo:") for one in told} == sent


async def tools_travel_whole_and_streamed(sdk: Under) -> None:
    for lane in LANES:
        whole = (await sdk.ask(lane, "[tool] now", tools=[TOOL])).choices[0].message.tool_calls
        parts = await sdk.chunks(lane, "[tool] now", tools=[TOOL])
        streamed = [call for chunk in parts for choice in chunk.choices for call in choice.delta.tool_calls or ()]
        for calls in (whole, streamed):
            assert [call.function.name for call in calls] == ["look"]
            assert json.loads(calls[0].function.arguments)["nested"] == {"n": [1, 2.5, None, True]}


async def streams_come_on_every_lane(sdk: Under) -> None:
    for lane in LANES:
        chunks = await sdk.chunks(lane)
        said = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        assert said.startswith("echo:"), said
        assert said.endswith("hello"), said
        assert next(chunk.usage for chunk in reversed(chunks) if chunk.usage).completion_tokens > 0


async def errors_are_the_sdks_own(sdk: Under) -> None:
    for lane in LANES:
        try:
            await sdk.ask(lane, "[error:invalid_request_error]")
        except SDKError as error:
            said = (error.status_code, "You asked for invalid_request_error." in str(error.body))
        else:
            said = None
        assert said == (400, True), said


CASES: tuple[Callable[[Under], Awaitable[None]], ...] = (
    answers_come_on_every_lane,
    everybody_gets_their_own,
    tools_travel_whole_and_streamed,
    streams_come_on_every_lane,
    errors_are_the_sdks_own,
)


async def run(work: Callable[[Under], Awaitable[None]], *, blocking: bool) -> str | None:
    try:
        async with serve(CONFIG) as server:
            sdk = Under(server, blocking=blocking)
            try:
                await asyncio.wait_for(work(sdk), 20)
            finally:
                await sdk.aclose()
    except Exception:  # noqa: BLE001  whatever it is, it is reported and the next case runs
        return traceback.format_exc()
    return None


def main(package: str, wanted: str) -> int:
    said = version(package)
    if said.split(".")[:2] != wanted.split(".")[:2]:
        print(f"This environment has {package} {said}, and not {wanted}.", file=sys.stderr)
        return 2
    start, failed, ran = time.monotonic(), 0, 0
    for work in CASES:
        for blocking in (False, True):
            ran += 1
            trouble = asyncio.run(run(work, blocking=blocking))
            if trouble is not None:
                failed += 1
                print(f"FAILED {work.__name__}, {'blocking' if blocking else 'asyncio'}\n{trouble}", file=sys.stderr)
    print(f"{package} {said}: {ran - failed} of {ran} passed in {time.monotonic() - start:.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
