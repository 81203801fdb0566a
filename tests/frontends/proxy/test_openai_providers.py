"""OpenAI-compatible providers behind the proxy, as `carpool serve` would set them up from a config."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from carpool.cli.setup import configured_keys, defaults_of, upstreams_of
from carpool.config import read_config
from carpool.core.clock import SystemClock
from carpool.engine import Engine, Keyring
from carpool.frontends.proxy import Proxy
from carpool.http import Http1Client
from carpool.mock import Constant, MockAnthropic, MockConfig, OpenAIConfig, expected_openai_text, serve
from carpool.planners.policy import RoutingPolicy
from carpool.planners.routing import Capabilities
from carpool.stores import open_store
from tests.support.stage import _served

MODELS = {"azure": "gpt-6-luna", "groq": "openai/gpt-oss-120b", "mistral": "mistral-small-latest", "xai": "grok-4.3"}
QUICK = RoutingPolicy(linger_ms=20, poll_interval_s=0.05, batch_rpm=100_000)


@dataclass
class House:
    url: str
    mock: MockAnthropic
    http: httpx2.AsyncClient
    vendor: str

    def body(self, **more: Any) -> dict[str, Any]:
        return {"model": MODELS[self.vendor], "messages": [{"role": "user", "content": "hello"}], **more}

    async def post(self, path: str, body: dict[str, Any] | None = None, **headers: str) -> httpx2.Response:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.http.post(self.url + path, json=body or self.body(), headers=sent)


@asynccontextmanager
async def house(vendor: str, section: str = "", tmp_path: Path | None = None, **own: Any) -> AsyncIterator[House]:
    """A proxy with one provider, named like the vendor, in front of its mock."""
    async with AsyncExitStack() as stack:
        config = MockConfig(batch_latency=Constant(0.1), batch_rpm=None, openai=OpenAIConfig(vendor=vendor, **own))
        mock = await stack.enter_async_context(serve(config))
        file = (tmp_path or Path()) / "carpool.yaml"
        file.write_text(f"providers:\n  {vendor}: {{base_url: '{mock.url}'{section}}}\n")
        read = read_config(file, {"HOUSE_KEY": "house"})
        wire, clock, store = Http1Client(), SystemClock(), await open_store(None)
        stack.push_async_callback(wire.aclose)
        upstreams = upstreams_of(read, lambda one: wire)
        abilities = Capabilities({one.name: one.models for one in read.providers})
        ring = Keyring(store.pepper)
        engine = Engine(
            store=store, clock=clock, upstreams=upstreams, keyring=ring, policy=QUICK, capabilities=abilities
        )
        await engine.start()
        stack.push_async_callback(engine.close, 0.0)
        keys = {name: secret[0] for name, secret in configured_keys(read, {"HOUSE_KEY": "house"}).items()}
        proxy = Proxy(engine, upstreams, clock, defaults=defaults_of(read), keys=keys)
        url = await stack.enter_async_context(_served(proxy))
        http = await stack.enter_async_context(httpx2.AsyncClient(timeout=20))
        yield House(url, mock.provider, http, vendor)


def text_of(answer: httpx2.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize("vendor", sorted(MODELS))
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/openai/v1/chat/completions"])
async def test_either_path_is_understood(vendor: str, path: str, tmp_path: Path) -> None:
    async with house(vendor, tmp_path=tmp_path) as on:
        for lane in ("now", "batch"):
            answer = await on.post(path, authorization="Bearer k", x_carpool_lane=lane)
            assert text_of(answer) == expected_openai_text(on.body())
            assert answer.headers["x-carpool-lane"] == lane
        assert [charge.kind for charge in on.mock.bill.charges] == ["sync", "batch"]


async def test_azure_takes_its_own_header_and_a_version_on_every_request(tmp_path: Path) -> None:
    section = ", api_version: preview, api_key_env: HOUSE_KEY"
    async with house("azure", section, tmp_path, api_version="preview") as on:
        way = "/openai/v1/chat/completions"
        for path in (way, f"{way}?api-version=preview"):
            for lane in ("now", "batch"):
                answer = await on.post(path, api_key="k", x_carpool_lane=lane)
                assert text_of(answer) == expected_openai_text(on.body())
                assert answer.headers["x-carpool-lane"] == lane
        assert (await on.http.get(f"{on.url}/openai/v1/models", headers={"api-key": "k"})).status_code == 200
        assert {charge.credential for charge in on.mock.bill.charges} == {"k"}
        assert text_of(await on.post(way)) == expected_openai_text(on.body())
        assert on.mock.bill.charges[-1].credential == "house"  # lent as Azure is sent a key


async def test_another_version_than_the_configured_one_does_not_ride(tmp_path: Path) -> None:
    async with house("azure", ", api_version: preview", tmp_path) as on:
        way = "/openai/v1/chat/completions?api-version=2024-10-21"
        answer = await on.post(way, api_key="k", x_carpool_lane="batch")
        assert answer.status_code == 400
        assert "query" in answer.text


async def test_a_provider_without_batches_is_never_asked_for_one(tmp_path: Path) -> None:
    async with house("mistral", ", batch: false", tmp_path) as on:
        answer = await on.post("/v1/chat/completions", authorization="Bearer k", x_carpool_budget="6h")
        assert text_of(answer) == expected_openai_text(on.body())
        assert answer.headers["x-carpool-lane"] == "now"
        assert on.mock.requests_seen.count("upload") == 0


async def test_groqs_flex_is_for_those_who_ask_for_it(tmp_path: Path) -> None:
    section = ", models: {'*': {flex: true}}"
    async with house("groq", section, tmp_path) as on:
        asked = await on.post("/v1/chat/completions", authorization="Bearer k", x_carpool_lane="flex")
        assert asked.headers["x-carpool-lane"] == "flex"
        assert text_of(asked) == expected_openai_text(on.body(service_tier="flex"))
        budget = await on.post("/v1/chat/completions", authorization="Bearer k", x_carpool_budget="10m")
        assert budget.headers["x-carpool-lane"] != "flex"  # it costs as much as `now`
        on.mock.script("flex_429")
        full = await on.post("/v1/chat/completions", authorization="Bearer k", x_carpool_lane="flex")
        assert full.status_code == 200
        assert full.headers["x-carpool-lane"] != "flex"
    async with house("groq", "", tmp_path) as on:
        refused = await on.post("/v1/chat/completions", authorization="Bearer k", x_carpool_lane="flex")
        assert refused.status_code == 400


@pytest.mark.parametrize(("window", "asked"), [("24h", "24h"), ("7d", "7d"), ("36h", "36h")])
async def test_groqs_window_can_be_longer(window: str, asked: str, tmp_path: Path) -> None:
    async with house("groq", f", window: {window}", tmp_path, windows=frozenset({asked})) as on:
        answer = await on.post("/v1/chat/completions", authorization="Bearer k", x_carpool_lane="batch")
        assert text_of(answer) == expected_openai_text(on.body())
        assert [batch.window for batch in on.mock.batches] == [asked]
