"""What the tests of the library share: a mock provider that writes down what reaches it, and fleets that are quick."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest
from anthropic import Anthropic, AsyncAnthropic

import carpool.engine.engine
import carpool.planners.routing
import carpool.planners.tracking
from carpool import BatchCollected, BatchSubmitted, CallAdmitted, Event, Fleet, FleetDispatcher, RoutingPolicy
from carpool.mock import Constant, MockAnthropic, MockConfig, MockServer, serve, serve_in_thread
from carpool.planners.forecast import Forecast, Part, Prior

E = TypeVar("E", bound=Event)

MODEL = "claude-haiku-4-5"
KEY = "sk-test-key-of-the-fleet"
QUICK = RoutingPolicy(linger_ms=50, poll_interval_s=0.1, batch_rpm=100_000)
SOON = MockConfig(batch_latency=Constant(0.1), batch_rpm=None)
PATIENCE = 10.0  # no test waits longer for anything: a hang fails


def ask(text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 50, "messages": [{"role": "user", "content": text}], **more}


def text_of(message: Any) -> str:
    return str(message.content[0].text)


async def soon(work: Any, seconds: float = PATIENCE) -> Any:
    """Awaits, and fails rather than hang."""
    return await asyncio.wait_for(work, seconds)


async def until(condition: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """Waits for something that nothing tells of, such as a count at the provider."""

    async def look() -> Any:
        while not (found := condition()):  # noqa: ASYNC110  there is no event to wait for
            await asyncio.sleep(0.01)
        return found

    return await soon(look(), seconds)


# ---------------------------------------------------------------- the provider's side


@dataclass
class Arrived:
    """One request, as it came over the wire."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def texts(self) -> list[str]:
        """The prompts of a create, as `ask` writes them."""
        return [line["params"]["messages"][0]["content"] for line in self.json()["requests"]]


class Log:
    """An ASGI app around the mock's own: everything passes, and is written down. `gate` may hold requests back."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.requests: list[Arrived] = []
        self.gate: Callable[[Arrived], Any] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        arrived = Arrived(scope["method"], scope["path"], headers)
        self.requests.append(arrived)

        async def read() -> Any:
            event = await receive()
            arrived.body += event.get("body", b"")
            return event

        if self.gate is not None:
            await self.gate(arrived)
        await self._app(scope, read, send)

    def of(self, method: str, path: str) -> list[Arrived]:
        return [one for one in self.requests if one.method == method and one.path == path]

    @property
    def creates(self) -> list[Arrived]:
        return self.of("POST", "/v1/messages/batches")

    @property
    def messages(self) -> list[Arrived]:
        return self.of("POST", "/v1/messages")

    @property
    def polls(self) -> list[Arrived]:
        return [r for r in self.requests if r.method == "GET" and not r.path.endswith("/results")]

    @property
    def cancels(self) -> list[Arrived]:
        return [r for r in self.requests if r.path.endswith("/cancel")]


def logged(config: MockConfig) -> tuple[MockAnthropic, Log]:
    provider = MockAnthropic(config)
    log = Log(provider.app)
    provider.app = log  # type: ignore[assignment]
    return provider, log


# ---------------------------------------------------------------- the fleet's side


class Events:
    """A hook that remembers, and can be waited for."""

    def __init__(self) -> None:
        self.all: list[Event] = []
        self._news = asyncio.Event()

    def __call__(self, event: Event) -> None:
        self.all.append(event)
        self._news.set()

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.all if isinstance(event, kind)]

    def __getitem__(self, kind: type[E]) -> list[E]:
        return self.of(kind)

    async def wait(self, kind: type[E], count: int = 1, seconds: float = PATIENCE) -> list[E]:
        async def enough() -> list[E]:
            while len(found := self.of(kind)) < count:
                self._news.clear()
                await self._news.wait()
            return found

        result: list[E] = await soon(enough(), seconds)
        return result


@dataclass
class Scene:
    server: MockServer
    provider: MockAnthropic
    log: Log
    client: AsyncAnthropic
    fleet: FleetDispatcher
    events: Events = field(default_factory=Events)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Every line of every create that arrived, as JSON."""
        return [line for create in self.log.creates for line in create.json()["requests"]]

    async def bought(self, count: int = 1) -> Sequence[BatchSubmitted]:
        return await self.events.wait(BatchSubmitted, count)

    async def admitted(self, count: int = 1) -> Sequence[CallAdmitted]:
        return await self.events.wait(CallAdmitted, count)

    async def collected(self, count: int = 1) -> Sequence[BatchCollected]:
        return await self.events.wait(BatchCollected, count)

    def start(self, text: str = "hello", **options: Any) -> asyncio.Task[Any]:
        return asyncio.create_task(self.fleet.submit(**{**ask(text), **options}))

    def charges(self, kind: str | None = None) -> list[Any]:
        return [charge for charge in self.provider.bill.charges if kind in (None, charge.kind)]


@asynccontextmanager
async def provided(config: MockConfig = SOON) -> AsyncIterator[tuple[MockServer, Log]]:
    provider, log = logged(config)
    async with serve(provider=provider) as server:
        yield server, log


@asynccontextmanager
async def riding(
    config: MockConfig = SOON,
    policy: RoutingPolicy = QUICK,
    *,
    api_key: str = KEY,
    max_retries: int = 2,
    hooks: tuple[Any, ...] = (),
    **options: Any,
) -> AsyncIterator[Scene]:
    """A mock provider over HTTP, a real `AsyncAnthropic`, and a dispatcher that runs."""
    async with provided(config) as (server, log):
        client = AsyncAnthropic(base_url=server.url, api_key=api_key, max_retries=max_retries)
        events = Events()
        options = {"close_timeout": 0.5, **options}
        async with client, FleetDispatcher(client, policy=policy, hooks=[*hooks, events], **options) as fleet:
            yield Scene(server, server.provider, log, client, fleet, events)


@asynccontextmanager
async def dispatching(url: str, policy: RoutingPolicy = QUICK, **options: Any) -> AsyncIterator[FleetDispatcher]:
    """One more dispatcher against a provider that runs already."""
    options = {"close_timeout": 0.5, **options}
    client = AsyncAnthropic(base_url=url, api_key=options.pop("api_key", KEY))
    async with client, FleetDispatcher(client, policy=policy, **options) as fleet:
        yield fleet


@contextmanager
def blocking(
    config: MockConfig = SOON, policy: RoutingPolicy = QUICK, **options: Any
) -> Iterator[tuple[MockServer, Fleet]]:
    """The same for threads: the provider in a thread of its own, a real `Anthropic`, and a `Fleet` that runs."""
    options = {"close_timeout": 0.5, **options}
    with (
        serve_in_thread(config) as server,
        Anthropic(base_url=server.url, api_key=KEY) as client,
        Fleet(client, policy=policy, **options) as fleet,
    ):
        yield server, fleet


def faulty(config: MockConfig = SOON, **faults: Any) -> MockConfig:
    return replace(config, faults=replace(config.faults, **faults))


def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are foreseen to end at once, so that they are looked at as often as the policy allows."""
    monkeypatch.setattr(
        carpool.engine.engine, "Forecast", lambda: Forecast(Prior(parts=(Part(1.0, 0.2, 0.5),)), learns=False)
    )


def small_times(monkeypatch: pytest.MonkeyPatch, *, cancel_seconds: float = 0.4, sync_floor: float = 0.6) -> None:
    """Makes seconds of minutes: batches are foreseen to take a moment, and a rescue needs little room."""
    prior = Prior(parts=(Part(1.0, 0.2, 0.5),), cancel_seconds=cancel_seconds, sync_floor=sync_floor, tokens_per_s=1e9)
    monkeypatch.setattr(carpool.engine.engine, "Forecast", lambda: Forecast(prior, learns=False))
    monkeypatch.setattr(carpool.planners.routing, "RESCUE_MARGIN", 0.2)
    monkeypatch.setattr(carpool.planners.tracking, "RESCUE_MARGIN", 0.2)


HASTY = replace(QUICK, sync_max_latency_ms=100)  # so that budgets of a second or two still ride a batch
