"""Results come home by chunks of one size, however many lines a piece of the wire brings."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from anthropic import AsyncAnthropic

from carpool import FleetDispatcher, RoutingPolicy
from carpool.core.model import Settlement
from carpool.engine.batch import collect
from carpool.mock import Constant, MockConfig, serve
from carpool.stores import SqliteStore

CALLS = 25


@pytest.mark.parametrize("chunk", [1, 4, 25, 100])
async def test_no_chunk_is_larger_and_all_but_the_last_are_full(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    written: list[int] = []
    settle = SqliteStore.settle

    async def noted(self: SqliteStore, settlements: Sequence[Settlement], now: float) -> list[bool]:
        written.append(len(settlements))
        return await settle(self, settlements, now)

    monkeypatch.setattr(SqliteStore, "settle", noted)
    monkeypatch.setattr(collect, "CHUNK", chunk)
    config = MockConfig(batch_latency=Constant(0.0))  # writes 500 lines at a time
    async with serve(config) as mock, AsyncAnthropic(api_key="sk-test", base_url=mock.url) as client:
        policy = RoutingPolicy(linger_ms=50, poll_interval_s=0.05, batch_rpm=100_000, batch_max_size=CALLS)
        async with FleetDispatcher(client, policy=policy) as fleet:
            questions = [[{"role": "user", "content": f"number {number}"}] for number in range(CALLS)]
            asked = (fleet.submit_batch(model="claude-sonnet-5", max_tokens=5, messages=one) for one in questions)
            answers = await asyncio.gather(*asked)
    assert len({answer.id for answer in answers}) == CALLS
    whole, rest = divmod(CALLS, chunk)
    assert written == [chunk] * whole + ([rest] if rest else [])
