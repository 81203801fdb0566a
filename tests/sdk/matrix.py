"""One SDK, every door: run in an environment that has carpool and one version of `anthropic`, and nothing else.

    python tests/sdk/matrix.py 1.17

Every case runs at every door, asyncio and blocking, against the mock provider over real HTTP, and the SDK validates
every answer strictly. Nothing is skipped: a case that can't run fails.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anthropic
from anthropic import Anthropic, AsyncAnthropic
from anthropic.types import Message, RawMessageStartEvent
from anthropic.types.beta import BetaMessage

import carpool
from carpool import Fleet, FleetDispatcher, RoutingPolicy
from carpool.mock import Constant, MockAnthropic, MockConfig, MockServer, expected_text, serve

MODEL = "claude-haiku-4-5"
KEY = "sk-test-of-the-matrix"
BETA = "interleaved-thinking-2025-05-14"
QUICK = RoutingPolicy(linger_ms=60, poll_interval_s=0.05, batch_rpm=100_000)
CONFIG = MockConfig(batch_latency=Constant(0.02), batch_rpm=None, keys=frozenset({KEY}))
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}
PATIENCE = 20.0
LANES = ("now", "batch")

# The HTTP library that this SDK is built on: what its clients must be made of.
ROOTS = [parent.__module__.partition(".")[0] for parent in type(Anthropic(api_key="k")._client).__mro__]
LIB = sys.modules[next(root for root in ROOTS if root in ("httpx", "httpx2"))]

Case = Callable[["Door"], Awaitable[None]]
CASES: list[tuple[Case, bool]] = []


def case(work: Case) -> Case:
    """A case for every door."""
    CASES.append((work, False))
    return work


def transport_case(work: Case) -> Case:
    """A case for the doors that stand under an unmodified client."""
    CASES.append((work, True))
    return work


def ask(text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 50, "messages": [{"role": "user", "content": text}], **more}


# ---------------------------------------------------------------- the provider, which writes down what it is asked


class Log:
    def __init__(self, app: Any) -> None:
        self._app = app
        self.requests: list[tuple[str, str, dict[str, str]]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.requests.append((scope["method"], scope["path"], headers))
        await self._app(scope, receive, send)

    def posts(self, path: str) -> list[dict[str, str]]:
        return [headers for method, at, headers in self.requests if (method, at) == ("POST", path)]


# ---------------------------------------------------------------- the doors


class Door(ABC):
    """One way in. Blocking ones work in threads, so that every case reads the same."""

    under_client = False
    strict = True  # the SDK validates every answer

    def __init__(self, server: MockServer, log: Log) -> None:
        self.server, self.log = server, log
        self.stack = AsyncExitStack()

    @property
    def provider(self) -> MockAnthropic:
        return self.server.provider

    @abstractmethod
    async def open(self, key: str = KEY, url: str | None = None) -> None: ...

    @abstractmethod
    async def ask(
        self, *, lane: str | None = None, budget: str | None = None, key: str | None = None, **p: Any
    ) -> Any: ...

    @abstractmethod
    async def events(self, *, lane: str | None = None, **params: Any) -> list[Any]: ...

    def client_options(self, key: str, url: str | None) -> dict[str, Any]:
        strict = {"_strict_response_validation": self.strict}
        return {"base_url": url or self.server.url, "api_key": key, "max_retries": 0, **strict}

    async def again(self, key: str = KEY, url: str | None = None) -> None:
        """The same door for another client."""
        await self.stack.aclose()
        await self.open(key, url)


class Dispatcher(Door):
    async def open(self, key: str = KEY, url: str | None = None) -> None:
        self.client = await self.stack.enter_async_context(AsyncAnthropic(**self.client_options(key, url)))
        fleet = FleetDispatcher(self.client, policy=QUICK, close_timeout=2)
        self.fleet = await self.stack.enter_async_context(fleet)

    async def ask(self, **params: Any) -> Any:
        return await self.fleet.submit(**params)

    async def events(self, **params: Any) -> list[Any]:
        return [event async for event in await self.fleet.submit(**params, stream=True)]


class Threads(Door):
    async def open(self, key: str = KEY, url: str | None = None) -> None:
        self.client = self.stack.enter_context(Anthropic(**self.client_options(key, url)))
        fleet = Fleet(self.client, policy=QUICK, close_timeout=2)
        self.fleet = await asyncio.to_thread(fleet.__enter__)
        self.stack.push_async_callback(asyncio.to_thread, fleet.close)

    async def ask(self, **params: Any) -> Any:
        return await asyncio.to_thread(self.fleet.submit, **params)

    async def events(self, **params: Any) -> list[Any]:
        return await asyncio.to_thread(lambda: list(self.fleet.submit(**params, stream=True)))


def as_headers(params: dict[str, Any]) -> dict[str, Any]:
    """The options of a call as an unmodified client brings them."""
    options = {name: params.pop(name) for name in ("lane", "budget", "key") if name in params}
    headers = {f"x-carpool-{name}": value for name, value in options.items() if value is not None}
    return {**params, "extra_headers": {**params.get("extra_headers", {}), **headers}}


class UnderAsync(Door):
    under_client = True

    async def open(self, key: str = KEY, url: str | None = None) -> None:
        self.transport = carpool.transport(policy=QUICK, close_timeout=2)
        options = self.client_options(key, url)
        http = LIB.AsyncClient(transport=self.transport, base_url=options["base_url"])
        self.client = await self.stack.enter_async_context(AsyncAnthropic(http_client=http, **options))

    async def ask(self, **params: Any) -> Any:
        messages = self.client.beta.messages if "betas" in params else self.client.messages
        return await messages.create(**as_headers(params))

    async def events(self, **params: Any) -> list[Any]:
        return [event async for event in await self.client.messages.create(**as_headers(params), stream=True)]

    async def whole_stream(self, **params: Any) -> Any:
        async with self.client.messages.stream(**as_headers(params)) as told:
            return await told.get_final_message()

    async def others(self) -> tuple[Any, list[Any]]:
        counted = await self.client.messages.count_tokens(**{k: v for k, v in ask().items() if k != "max_tokens"})
        return counted, [model async for model in self.client.models.list()]


class UnderBlocking(Door):
    under_client = True

    async def open(self, key: str = KEY, url: str | None = None) -> None:
        self.transport = carpool.transport(policy=QUICK, close_timeout=2)
        options = self.client_options(key, url)
        http = LIB.Client(transport=self.transport, base_url=options["base_url"])
        self.client = Anthropic(http_client=http, **options)
        self.stack.push_async_callback(asyncio.to_thread, self.client.close)

    async def ask(self, **params: Any) -> Any:
        messages = self.client.beta.messages if "betas" in params else self.client.messages
        return await asyncio.to_thread(messages.create, **as_headers(params))

    async def events(self, **params: Any) -> list[Any]:
        return await asyncio.to_thread(
            lambda: list(self.client.messages.create(**as_headers(params), stream=True)),
        )

    async def whole_stream(self, **params: Any) -> Any:
        def listen() -> Any:
            with self.client.messages.stream(**as_headers(params)) as told:
                return told.get_final_message()

        return await asyncio.to_thread(listen)

    async def others(self) -> tuple[Any, list[Any]]:
        asked = {k: v for k, v in ask().items() if k != "max_tokens"}
        counted = await asyncio.to_thread(self.client.messages.count_tokens, **asked)
        return counted, await asyncio.to_thread(lambda: list(self.client.models.list()))


DOORS: tuple[type[Door], ...] = (Dispatcher, Threads, UnderAsync, UnderBlocking)


# ---------------------------------------------------------------- the cases


def sound(message: Any, asked: dict[str, Any], kind: type = Message) -> None:
    assert type(message) is kind, type(message)
    assert message.content[0].text == expected_text(asked), message.content
    assert message.usage.output_tokens > 0


@case
async def one_call_on_now(door: Door) -> None:
    message = await door.ask(lane="now", **ask())
    sound(message, ask())
    assert message.usage.service_tier == "standard"
    assert len(door.log.posts("/v1/messages")) == 1


@case
async def several_calls_share_a_batch(door: Door) -> None:
    told = await asyncio.gather(*(door.ask(lane="batch", **ask(f"n{i}")) for i in range(5)))
    for number, message in enumerate(told):
        sound(message, ask(f"n{number}"))
        assert message.usage.service_tier == "batch"
    assert sum(batch.size for batch in door.provider.batches) == 5
    assert len(door.provider.batches) <= 2  # threads may come a little late
    assert not door.log.posts("/v1/messages")


@case
async def the_budget_chooses_the_lane(door: Door) -> None:
    hasty, patient = await asyncio.gather(
        door.ask(budget="2s", **ask("hasty")), door.ask(budget="30m", **ask("patient"))
    )
    assert (hasty.usage.service_tier, patient.usage.service_tier) == ("standard", "batch")


@case
async def a_stream_on_now(door: Door) -> None:
    events = await door.events(lane="now", **ask())
    assert isinstance(events[0], RawMessageStartEvent)
    text = "".join(e.delta.text for e in events if e.type == "content_block_delta" and e.delta.type == "text_delta")
    assert text == expected_text(ask())
    assert events[-1].type == "message_stop"


@case
async def tools_travel_on_both_lanes(door: Door) -> None:
    for lane in LANES:
        message = await door.ask(lane=lane, **ask("[tool] now", tools=[TOOL], tool_choice={"type": "auto"}))
        assert message.stop_reason == "tool_use"
        assert message.content[-1].name == "look"
        assert message.content[-1].input["nested"] == {"n": [1, 2.5, None, True]}


@case
async def betas_travel_on_both_lanes(door: Door) -> None:
    for lane in LANES:
        message = await door.ask(lane=lane, betas=[BETA], **ask("with a beta"))
        sound(message, ask("with a beta"), BetaMessage)
    sent = [*door.log.posts("/v1/messages"), *door.log.posts("/v1/messages/batches")]
    assert len(sent) == 2
    assert all(BETA in headers["anthropic-beta"] for headers in sent)


@case
async def the_sdks_own_dialect_reaches_the_provider(door: Door) -> None:
    """Credential and version as this SDK sends them, in every lane alike."""
    for lane in LANES:
        await door.ask(lane=lane, **ask())
    now, batch = door.log.posts("/v1/messages")[0], door.log.posts("/v1/messages/batches")[0]
    secret = {name: now.get(name) for name in ("authorization", "x-api-key", "anthropic-version")}
    assert secret == {name: batch.get(name) for name in secret}
    assert KEY in f"{secret['authorization']} {secret['x-api-key']}"
    assert secret["anthropic-version"]


@case
async def a_key_is_one_call(door: Door) -> None:
    for lane in LANES:
        first = await door.ask(lane=lane, key=f"essay-{lane}", **ask(lane))
        again = await door.ask(lane=lane, key=f"essay-{lane}", **ask(lane))
        assert first.id == again.id
    assert len(door.provider.bill.charges) == 2


async def failure(door: Door, **params: Any) -> Exception | None:
    try:
        await door.ask(**params)
    except (anthropic.AnthropicError, carpool.CarpoolError) as error:
        return error
    return None


async def refused(door: Door, kind: type[anthropic.APIStatusError], status: int, **params: Any) -> None:
    error: Any = await failure(door, **params)
    assert type(error) is kind, repr(error)
    assert error.status_code == status
    assert error.body["error"]["type"]


@case
async def errors_are_the_sdks_own(door: Door) -> None:
    for lane in LANES:
        await refused(door, anthropic.BadRequestError, 400, lane=lane, **ask("", messages=[]))
        await refused(door, anthropic.NotFoundError, 404, lane=lane, **ask(model="claude-unknown-1"))
    door.provider.script("sync_429")
    await refused(door, anthropic.RateLimitError, 429, lane="now", **ask())
    sound(await door.ask(lane="batch", **ask()), ask())  # nothing is left of the errors


@case
async def a_wrong_key_is_said_to_be_so(door: Door) -> None:
    await door.again(key="sk-wrong")
    for lane in LANES:
        await refused(door, anthropic.AuthenticationError, 401, lane=lane, **ask())


@case
async def an_unreachable_provider_is_a_connection_error(door: Door) -> None:
    await door.again(url="http://127.0.0.1:9")
    error = await failure(door, lane="now", **ask())
    assert type(error) is anthropic.APIConnectionError, repr(error)


@case
async def a_wrong_option_is_a_mistake_of_the_caller(door: Door) -> None:
    error = await failure(door, lane="fast", **ask())
    assert isinstance(error, carpool.BadCall | anthropic.BadRequestError), repr(error)
    assert "is not a lane" in str(error)


@case
async def later_calls_are_as_the_first(door: Door) -> None:
    """The SDK makes the first request and answer of a kind, and the library, where it can, the others after them."""
    for strict in (True, False):
        door.strict = strict
        await door.again()
        for more in ({}, {"betas": [BETA]}, {"extra_headers": {"x-team": "ci"}, "tools": [TOOL]}):
            del door.log.requests[:]
            told = [await door.ask(lane="now", budget="1h", **ask("[blocks]", **more)) for _ in range(3)]
            heard = door.log.posts("/v1/messages")
            assert heard[0] == heard[1] == heard[2]
            assert visible(told[0]) == visible(told[1]) == visible(told[2])
            if not door.under_client:
                pattern = list(door.fleet._quick._patterns.values())[-1]  # type: ignore[attr-defined]
                assert pattern.answer is type(told[0])


@transport_case
async def without_options_a_call_goes_straight_through(door: Any) -> None:
    sound(await door.ask(**ask()), ask())
    assert (door.transport.stats.sync_calls, door.transport.stats.batched_calls) == (1, 0)


@transport_case
async def other_requests_pass(door: Any) -> None:
    counted, models = await door.others()
    assert counted.input_tokens > 0
    assert MODEL in [model.id for model in models]
    assert door.transport.stats.sync_calls == 0


@transport_case
async def a_batched_answer_can_be_heard_as_a_stream(door: Any) -> None:
    for text in ("hello", "[blocks]"):
        told = await door.whole_stream(lane="batch", **ask(text))
        plain = await door.ask(lane="batch", **ask(text))
        assert type(told.content[0]).__name__.endswith(type(plain.content[0]).__name__)
        assert comparable(told) == comparable(plain)


def comparable(message: Any) -> Any:
    """Without what is unset, and without details of the usage that older SDKs do not hear of in a stream."""
    told = set_only(json.loads(message.to_json(warnings=False)))
    told["usage"].pop("output_tokens_details", None)
    return {key: told[key] for key in ("content", "stop_reason", "usage", "model")}


def set_only(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: set_only(inner) for key, inner in value.items() if inner is not None}
    return [set_only(inner) for inner in value] if isinstance(value, list) else value


def visible(model: Any) -> Any:
    """Whatever can be seen of an answer, but for the names that the provider gave it."""
    if isinstance(model, list):
        return [visible(part) for part in model]
    if not isinstance(model, anthropic.BaseModel):
        return model
    fields = {name: visible(value) for name, value in vars(model).items() if name not in ("id", "_request_id")}
    return type(model), sorted(model.model_fields_set), model.model_extra, sorted(vars(model)), fields


# ---------------------------------------------------------------- the runner


@asynccontextmanager
async def stage(kind: type[Door]) -> AsyncIterator[Door]:
    provider = MockAnthropic(CONFIG)
    log = Log(provider.app)
    provider.app = log  # type: ignore[assignment]
    async with serve(provider=provider) as server:
        door = kind(server, log)
        await door.open()
        try:
            yield door
        finally:
            await door.stack.aclose()


async def run(kind: type[Door], work: Case) -> str | None:
    try:
        async with stage(kind) as door:
            await asyncio.wait_for(work(door), PATIENCE)
    except Exception:  # noqa: BLE001  whatever it is, it is reported and the next case runs
        return traceback.format_exc()
    return None


def main(wanted: str) -> int:
    said = f"anthropic {anthropic.__version__} on {LIB.__name__} {LIB.__version__}"
    if anthropic.__version__.split(".")[:2] != wanted.split(".")[:2]:
        print(f"This environment has {said}, and not {wanted}.", file=sys.stderr)
        return 2
    start, failed, ran = time.monotonic(), 0, 0
    for work, under_client in CASES:
        for kind in DOORS:
            if under_client and not kind.under_client:
                continue
            ran += 1
            trouble = asyncio.run(run(kind, work))
            if trouble is not None:
                failed += 1
                print(f"FAILED {work.__name__} at {kind.__name__}\n{trouble}", file=sys.stderr)
    print(f"{said}: {ran - failed} of {ran} passed in {time.monotonic() - start:.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
