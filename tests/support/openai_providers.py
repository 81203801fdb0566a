"""Every OpenAI-compatible provider that the suite runs over: one row each, beside those of dialect and mock."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from carpool.core.clock import SystemClock
from carpool.core.model import Call, Entry, Lane
from carpool.core.ports import RawRequest, Store
from carpool.dialects import COMPATIBLE_PROVIDERS, configured_dialect
from carpool.engine import Engine, Keyring, Probe, Reply, Upstream
from carpool.frontends.intake import make_call
from carpool.http import Http1Client
from carpool.mock import Constant, MockConfig, MockServer, OpenAIConfig, serve
from carpool.planners.access.options import Options
from carpool.planners.policy import RoutingPolicy
from carpool.planners.routing import Capabilities
from carpool.stores import open_store

POLICY = RoutingPolicy(linger_ms=50, poll_interval_s=0.05, batch_rpm=100_000)
CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Row:
    name: str
    model: str
    other: str  # another model
    unoffered: str = ""  # one that it does not sell in batches
    priced: bool = True  # whether the price in batches is known
    secret: tuple[tuple[str, str], ...] = (("authorization", "Bearer k"),)
    refused: tuple[str, ...] = ("/v1/embeddings", "/v1/responses", "/v1/completions")  # never in its batches
    sweeps: bool = True  # whether its input file can be found again when the batch is over
    blunt: bool = False  # its results do not say with which status a call failed


ROWS = {
    row.name: row
    for row in (
        Row("openai", "gpt-6-luna", "gpt-5-mini", "gpt-5.3-codex", refused=()),
        Row("azure", "gpt-6-luna", "gpt-5-mini", secret=(("api-key", "k"),), refused=("/v1/embeddings",)),
        Row("groq", "openai/gpt-oss-120b", "qwen/qwen3.8-27b"),
        Row(
            "together",
            "meta-llama/Llama-3.3-70B-Instruct-Turbo",
            "meta-llama/Llama-3.3-70B-Instruct-Turbo",
            "Qwen/Qwen3-235B",
            priced=False,
        ),
        Row("mistral", "mistral-small-latest", "mistral-large-latest", refused=("/v1/responses", "/v1/completions")),
        Row("xai", "grok-4.3", "grok-4.3", "grok-4.7", sweeps=False, blunt=True),
    )
}


@dataclass
class Scene:
    """An engine that buys from an OpenAI-compatible provider over real HTTP."""

    row: Row
    mock: MockServer
    store: Store
    engine: Engine
    upstream: Upstream
    clock: SystemClock = field(default_factory=SystemClock)
    stopped: bool = False

    async def stop(self) -> None:
        """As a crash would."""
        self.stopped = True
        self.engine.abort()
        await self.store.aclose()

    def body(self, text: str = "hello", **more: Any) -> dict[str, Any]:
        return {"model": self.row.model, "messages": [{"role": "user", "content": text}], **more}

    def call(self, body: dict[str, Any], path: str = CHAT, lane: Lane | None = Lane.BATCH, **options: Any) -> Call:
        raw = RawRequest("POST", path, "", self.row.secret, json.dumps(body).encode())
        return make_call(self.engine, self.upstream, self.clock, raw, Options(lane=lane, **options))

    async def ask(self, body: dict[str, Any] | None = None, seconds: float = 30, **how: Any) -> Reply:
        reply, _ = await asyncio.wait_for(self.engine.submit(self.call(body or self.body(), **how)), seconds)
        return reply

    async def entries(self, *replies: Reply) -> list[Entry]:
        return [entry for reply in replies for entry in await self.store.entries(reply.ticket)]


async def until(true: Callable[[], Any], seconds: float = 20.0) -> None:
    """Waits for something at the provider, which tells nobody."""
    async with asyncio.timeout(seconds):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@asynccontextmanager
async def engine_at(
    row: Row, mock: MockServer, path: Path | None = None, probe: Probe | None = None, **settings: Any
) -> AsyncIterator[Scene]:
    store, wire = await open_store(path), Http1Client()
    base_url = mock.url + (COMPATIBLE_PROVIDERS[row.name].path or "/v1")
    upstream = Upstream(row.name, base_url, configured_dialect("openai", base_url, row.name, **settings), wire)
    engine = Engine(
        store=store,
        clock=SystemClock(),
        upstreams={row.name: upstream},
        keyring=Keyring(store.pepper),
        policy=POLICY,
        capabilities=Capabilities(),
        probe=probe,
    )
    await engine.start()
    made = Scene(row, mock, store, engine, upstream)
    try:
        yield made
    finally:
        if not made.stopped:
            await engine.close(0.0)
        await wire.aclose()


@asynccontextmanager
async def scene(row: Row, mock: dict[str, Any] | None = None, **own: Any) -> AsyncIterator[Scene]:
    """`mock` are settings of the mock, `own` those that only its OpenAI has."""
    settings = {"batch_latency": Constant(0.1), "batch_rpm": None, **(mock or {})}
    async with (
        serve(MockConfig(**settings, openai=OpenAIConfig(vendor=row.name, **own))) as server,
        engine_at(row, server) as made,
    ):
        yield made
