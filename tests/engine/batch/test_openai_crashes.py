"""An engine that stops between upload, create and the purchase being written down: its successor buys nothing twice."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from carpool.core.clock import SystemClock
from carpool.core.model import Call, Lane
from carpool.core.ports import RawRequest, Store
from carpool.dialects import get as get_dialect
from carpool.engine import Engine, Keyring, Probe, Upstream
from carpool.frontends.intake import make_call
from carpool.http import Http1Client
from carpool.mock import Constant, MockConfig, MockServer, serve
from carpool.planners.access.options import Options
from carpool.planners.policy import RoutingPolicy
from carpool.stores import open_store

POLICY = RoutingPolicy(linger_ms=0, poll_interval_s=0.05, batch_rpm=100_000)
HEADERS = (("authorization", "Bearer k"),)
BODY = json.dumps({"model": "gpt-6-luna", "messages": [{"role": "user", "content": "hello"}]}).encode()


def made(mock: MockServer, store: Store, wire: Http1Client, probe: Probe | None = None) -> tuple[Engine, Call]:
    clock = SystemClock()
    upstream = Upstream("openai", f"{mock.url}/v1", get_dialect("openai"), wire)
    keyring = Keyring(store.pepper)
    engine = Engine(
        store=store, clock=clock, upstreams={"openai": upstream}, keyring=keyring, policy=POLICY, probe=probe
    )
    raw = RawRequest("POST", "/v1/chat/completions", "", HEADERS, BODY)
    return engine, make_call(engine, upstream, clock, raw, Options(lane=Lane.BATCH, key="once"))


@pytest.mark.parametrize(
    ("point", "bought"),
    [
        ("intended", 0),
        ("uploaded", 0),
        ("checked", 0),
        ("created", 1),
        ("bought", 1),
        ("ended", 1),
        ("settled", 1),
    ],
)
async def test_a_successor_buys_nothing_twice(
    point: str, bought: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carpool.engine.batch.follow.GRACE_S", 1.0)
    there = asyncio.Event()

    async def probe(name: str) -> None:
        if name == point:
            there.set()
            await asyncio.Event().wait()  # for ever, until it is aborted

    wire = Http1Client()
    async with serve(MockConfig(batch_latency=Constant(0.2))) as mock:
        store = await open_store(tmp_path / "fleet.db")
        engine, call = made(mock, store, wire, probe)
        await engine.start()
        waiting = asyncio.create_task(engine.submit(call))
        await asyncio.wait_for(there.wait(), 20)
        engine.abort()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await store.aclose()
        assert len(mock.provider.batches) == bought

        store = await open_store(tmp_path / "fleet.db")
        engine, call = made(mock, store, wire)
        await engine.start()
        reply, _ = await asyncio.wait_for(engine.submit(call), 30)
        assert reply.outcome.status == 200
        assert len(mock.provider.batches) == 1
        assert len(mock.provider.bill.charges) == 1
        entries = await store.entries(reply.ticket)
        assert sum(entry.paid or 0 for entry in entries) == mock.provider.bill.total()
        # Before the create was about to go out nothing can have been bought; then nobody saw whether it went.
        assert sum(entry.paid is None for entry in entries) == (1 if point == "checked" else 0)
        await engine.close(0.0)
    await wire.aclose()
