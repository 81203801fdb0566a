"""OpenAI's SDK or that of a compatible provider, at every door: run in an environment with carpool and that SDK alone.

    python tests/sdk/openai_compatible.py groq 1.7

Every case runs at every door and on every lane that there is, against the mock over real HTTP, and the SDK checks
every answer strictly. Nothing is skipped: a case that can't run fails.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import carpool
from carpool import Fleet, FleetDispatcher, RoutingPolicy
from carpool.mock import Constant, MockConfig, MockServer, OpenAIConfig, expected_openai_text, serve

KEY = "sk-test-compatible"
QUICK = RoutingPolicy(linger_ms=60, poll_interval_s=0.05, batch_rpm=100_000)
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}
PATIENCE = 20.0


@dataclass(frozen=True)
class Sdk:
    package: str
    asyncio: str
    blocking: str
    vendor: str
    model: str
    below: str  # what its base URL ends in
    lanes: tuple[str, ...]


SDKS = {
    one.package: one
    for one in (
        Sdk("openai", "AsyncOpenAI", "OpenAI", "openai", "gpt-5-mini", "/v1", ("now", "flex", "batch")),
        Sdk("groq", "AsyncGroq", "Groq", "groq", "openai/gpt-oss-120b", "", ("now", "batch")),
    )
}


class Door(ABC):
    """One way to submit, over a client of the SDK."""

    def __init__(self, sdk: Sdk, lib: Any, server: MockServer) -> None:
        self.sdk, self.lib, self.server = sdk, lib, server
        self.stack = AsyncExitStack()

    def options(self, key: str) -> dict[str, Any]:
        url = self.server.url + self.sdk.below
        return {"base_url": url, "api_key": key, "max_retries": 0, "_strict_response_validation": True}

    def ask(self, text: str = "hello", **more: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}]
        return {"model": self.sdk.model, "messages": messages, "max_completion_tokens": 50, **more}

    @abstractmethod
    async def open(self, key: str = KEY) -> None: ...

    @abstractmethod
    async def submit(self, **params: Any) -> Any: ...

    @abstractmethod
    async def chunks(self, **params: Any) -> list[Any]: ...


class Dispatcher(Door):
    async def open(self, key: str = KEY) -> None:
        client = getattr(self.lib, self.sdk.asyncio)(**self.options(key))
        self.client = await self.stack.enter_async_context(client)
        self.fleet: Any = await self.stack.enter_async_context(FleetDispatcher(client, policy=QUICK, close_timeout=2))

    async def submit(self, **params: Any) -> Any:
        return await self.fleet.submit(**params)

    async def chunks(self, **params: Any) -> list[Any]:
        return [chunk async for chunk in await self.fleet.submit(**params, stream=True)]


class Threads(Door):
    async def open(self, key: str = KEY) -> None:
        client = self.stack.enter_context(getattr(self.lib, self.sdk.blocking)(**self.options(key)))
        self.fleet = Fleet(client, policy=QUICK, close_timeout=2)
        await asyncio.to_thread(self.fleet.__enter__)
        self.stack.push_async_callback(asyncio.to_thread, self.fleet.close)

    async def submit(self, **params: Any) -> Any:
        return await asyncio.to_thread(self.fleet.submit, **params)

    async def chunks(self, **params: Any) -> list[Any]:
        return await asyncio.to_thread(lambda: list(self.fleet.submit(**params, stream=True)))


# ---------------------------------------------------------------- the cases

Case = Callable[[Door], Awaitable[None]]
CASES: list[Case] = []


def case(work: Case) -> Case:
    CASES.append(work)
    return work


def expected(asked: dict[str, Any], lane: str) -> str:
    """The mock echoes a fingerprint of what it got: on flex that is one member more."""
    return expected_openai_text({**asked, "service_tier": "flex"} if lane == "flex" else asked)


async def failure(door: Door, lane: str, **asked: Any) -> Any:
    try:
        await door.submit(lane=lane, **asked)
    except (door.lib.APIError, carpool.CarpoolError) as error:
        return error
    raise AssertionError(f"nothing was raised on {lane}")


def sound(answer: Any, asked: dict[str, Any], lane: str = "batch") -> None:
    assert type(answer).__name__ == "ChatCompletion", type(answer)
    assert answer.choices[0].message.content == expected(asked, lane), answer
    assert answer.usage.completion_tokens > 0


@case
async def every_lane_answers_with_the_sdks_own_type(door: Door) -> None:
    for lane in door.sdk.lanes:
        sound(await door.submit(lane=lane, **door.ask(lane)), door.ask(lane), lane)
    kinds = [charge.kind for charge in door.server.provider.bill.charges]
    assert kinds == ["batch" if lane == "batch" else "sync" for lane in door.sdk.lanes]
    assert door.fleet.stats.paid == door.server.provider.bill.total() > 0


@case
async def several_calls_share_a_batch(door: Door) -> None:
    told = await asyncio.gather(*(door.submit(lane="batch", **door.ask(f"n{number}")) for number in range(5)))
    for number, answer in enumerate(told):
        sound(answer, door.ask(f"n{number}"))
    assert sum(batch.size for batch in door.server.provider.batches) == 5
    assert len(door.server.provider.batches) <= 2  # threads may come a little late


@case
async def tools_travel_on_every_lane(door: Door) -> None:
    for lane in door.sdk.lanes:
        answer = await door.submit(lane=lane, **door.ask("[tool] now", tools=[TOOL]))
        call = answer.choices[0].message.tool_calls[0]
        assert (answer.choices[0].finish_reason, call.function.name) == ("tool_calls", "look")
        assert json.loads(call.function.arguments)["nested"] == {"n": [1, 2.5, None, True]}


@case
async def streams_travel_where_they_can(door: Door) -> None:
    for lane in (lane for lane in door.sdk.lanes if lane != "batch"):
        chunks = await door.chunks(lane=lane, **door.ask())
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert said == expected(door.ask(), lane), said
        told = await door.chunks(lane=lane, **door.ask("[tool] now", tools=[TOOL]))
        calls = [part for chunk in told if chunk.choices for part in chunk.choices[0].delta.tool_calls or ()]
        assert json.loads("".join(part.function.arguments or "" for part in calls))["query"] == "[tool] now"


@case
async def errors_are_the_sdks_own(door: Door) -> None:
    for lane in door.sdk.lanes:
        error = await failure(door, lane, **door.ask("[error:invalid_request_error]"))
        assert type(error) is door.lib.BadRequestError, repr(error)
        assert error.status_code == 400
        assert "You asked for invalid_request_error." in str(error)


@case
async def a_wrong_key_is_said_to_be_so(door: Door) -> None:
    await door.stack.aclose()
    await door.open("sk-wrong")
    for lane in door.sdk.lanes:
        error = await failure(door, lane, **door.ask())
        assert isinstance(error, door.lib.AuthenticationError), repr(error)


@case
async def a_key_is_one_call(door: Door) -> None:
    first = await door.submit(lane="batch", key="essay", **door.ask())
    assert first.id == (await door.submit(lane="batch", key="essay", **door.ask())).id
    assert len(door.server.provider.bill.charges) == 1


# ---------------------------------------------------------------- the runner


@asynccontextmanager
async def stage(kind: type[Door], sdk: Sdk, lib: Any) -> AsyncIterator[Door]:
    own = OpenAIConfig(vendor=sdk.vendor)
    config = MockConfig(batch_latency=Constant(0.02), batch_rpm=None, keys=frozenset({KEY}), openai=own)
    async with serve(config) as server:
        door = kind(sdk, lib, server)
        await door.open()
        try:
            yield door
        finally:
            await door.stack.aclose()


async def run(kind: type[Door], work: Case, sdk: Sdk, lib: Any) -> str | None:
    try:
        async with stage(kind, sdk, lib) as door:
            await asyncio.wait_for(work(door), PATIENCE)
    except Exception:  # noqa: BLE001  whatever it is, it is reported and the next case runs
        return traceback.format_exc()
    return None


def main(package: str, wanted: str) -> int:
    sdk, lib = SDKS[package], importlib.import_module(package)
    said = f"{package} {lib.__version__}"
    if lib.__version__.split(".")[:2] != wanted.split(".")[:2]:
        print(f"This environment has {said}, and not {wanted}.", file=sys.stderr)
        return 2
    start, failed, ran = time.monotonic(), 0, 0
    for work in CASES:
        for kind in (Dispatcher, Threads):
            ran += 1
            trouble = asyncio.run(run(kind, work, sdk, lib))
            if trouble is not None:
                failed += 1
                print(f"FAILED {work.__name__} at {kind.__name__}\n{trouble}", file=sys.stderr)
    print(f"{said}: {ran - failed} of {ran} passed in {time.monotonic() - start:.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
