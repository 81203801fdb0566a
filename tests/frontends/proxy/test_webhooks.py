"""Webhooks: signed, looked up, and never believed more than that."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI

from carpool.core.clock import SystemClock
from carpool.dialects import get as get_dialect
from carpool.engine import Engine, Keyring, Upstream
from carpool.frontends.proxy import Proxy
from carpool.http import Http1Client
from carpool.mock import Constant, MockConfig, MockServer, serve
from carpool.mock.openai.hooks import sign
from carpool.planners.policy import RoutingPolicy
from carpool.stores import open_store
from tests.support.stage import _served

SECRET = "whsec_Y2FycG9vbC1tb2NrLXdlYmhvb2stc2VjcmV0"
SELDOM = RoutingPolicy(linger_ms=20, poll_interval_s=3000, batch_rpm=100_000)
CHAT = {"model": "gpt-6-luna", "messages": [{"role": "user", "content": "hello"}]}


@asynccontextmanager
async def hooked(policy: RoutingPolicy = SELDOM) -> AsyncIterator[tuple[str, MockServer, Engine]]:
    clock, wire, store = SystemClock(), Http1Client(), await open_store(None)
    async with serve(MockConfig(batch_latency=Constant(0.3))) as mock:
        upstream = Upstream("openai", f"{mock.url}/v1", get_dialect("openai"), wire)
        upstreams = {"openai": upstream}
        engine = Engine(store=store, clock=clock, upstreams=upstreams, keyring=Keyring(store.pepper), policy=policy)
        await engine.start()
        async with _served(Proxy(engine, upstreams, clock, hook_secrets={"openai": SECRET})) as url:
            yield url, mock, engine
        await engine.close(0.0)
        await wire.aclose()


async def ask(url: str) -> Any:
    async with AsyncOpenAI(base_url=f"{url}/@lane=batch/v1", api_key="k", max_retries=0, timeout=20) as client:
        return await client.chat.completions.create(**CHAT)


async def test_a_webhook_brings_the_answer_long_before_the_next_look() -> None:
    async with hooked() as (url, mock, engine):
        mock.provider.tell(f"{url}/carpool/hooks/openai", SECRET)
        async with asyncio.timeout(60):  # the next poll is 50 minutes away, and the client is kept alive until then
            answer = await ask(url)
        assert answer.choices
        assert engine.stats.settled_calls == 1
        assert {one.status for one in mock.provider.hooks_sent} == {200}


async def test_one_that_is_lost_costs_time_only_and_one_that_is_doubled_nothing() -> None:
    async with hooked(RoutingPolicy(linger_ms=20, poll_interval_s=0.2, batch_rpm=100_000)) as (url, mock, engine):
        mock.provider.tell(f"{url}/carpool/hooks/openai", SECRET)
        mock.provider.script("hook_lost")
        await ask(url)
        mock.provider.script("hook_double")
        await ask(url)
        assert engine.stats.settled_calls == 2
        assert len(mock.provider.bill.charges) == 2


def _signed(body: bytes, name: str = "evt_1", stamp: int | None = None, secret: str = SECRET) -> dict[str, str]:
    now = int(SystemClock().now()) if stamp is None else stamp
    return {"webhook-id": name, "webhook-timestamp": str(now), "webhook-signature": sign(secret, name, now, body)}


@pytest.mark.parametrize("wrong", ["secret", "body", "old", "unsigned", "version", "stamp"])
async def test_what_is_not_signed_well_is_refused(wrong: str) -> None:
    body = json.dumps({"type": "batch.completed", "data": {"id": "batch_1"}}).encode()
    headers = _signed(body)
    if wrong == "secret":
        headers = _signed(body, secret="whsec_" + "QUJD" * 6)
    elif wrong == "old":
        headers = _signed(body, stamp=int(SystemClock().now()) - 400)
    elif wrong == "unsigned":
        headers = {}
    elif wrong == "version":
        headers["webhook-signature"] = headers["webhook-signature"].replace("v1,", "v2,")
    elif wrong == "stamp":
        headers["webhook-timestamp"] = "soon"
    async with hooked() as (url, _, _engine), httpx2.AsyncClient() as http:
        sent = body + b" " if wrong == "body" else body
        answer = await http.post(f"{url}/carpool/hooks/openai", content=sent, headers=headers)
        assert answer.status_code == 401
        assert "error" in answer.json()
        assert SECRET not in answer.text


async def test_good_ones_are_taken_whatever_they_speak_of() -> None:
    async with hooked() as (url, _, _engine), httpx2.AsyncClient() as http:
        for number, event in enumerate(
            (
                {"type": "batch.completed", "data": {"id": "batch_of_a_stranger"}},
                {"type": "response.completed", "data": {"id": "r"}},
            )
        ):
            body = json.dumps(event).encode()
            two = _signed(body, f"evt_{number}")
            two["webhook-signature"] = f"v1,AAAA {two['webhook-signature']}"  # while a secret is changed there are two
            for _ in range(2):
                answer = await http.post(f"{url}/carpool/hooks/openai", content=body, headers=two)
                assert answer.status_code == 200
        body = b"[]"
        assert (await http.post(f"{url}/carpool/hooks/openai", content=body, headers=_signed(body))).status_code == 400
        assert (await http.get(f"{url}/carpool/hooks/openai")).status_code == 400
        assert (await http.post(f"{url}/carpool/hooks/anthropic", content=body)).status_code == 404
        big = b"x" * 200_000
        assert (await http.post(f"{url}/carpool/hooks/openai", content=big, headers=_signed(big))).status_code == 413
