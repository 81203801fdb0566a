"""The lease is checked right before the bytes of a create go out."""

from __future__ import annotations

import asyncio
from unittest.mock import patch

from anthropic import AsyncAnthropic

from carpool import FleetDispatcher, RoutingPolicy
from carpool.mock import serve
from carpool.stores import SqliteStore


async def test_an_engine_that_lost_its_lease_sends_nothing() -> None:
    asked = asyncio.Event()

    async def lost(self: SqliteStore, batch: int, owner: str, until: float) -> bool:
        asked.set()
        return False

    async with serve() as mock:
        client = AsyncAnthropic(api_key="sk-test", base_url=mock.url)
        policy = RoutingPolicy(linger_ms=0)
        with patch.object(SqliteStore, "still_mine", lost):
            async with FleetDispatcher(client, policy=policy, close_timeout=0.0) as fleet:
                message = {"role": "user", "content": "hello"}
                call = asyncio.create_task(
                    fleet.submit_batch(model="claude-sonnet-5", max_tokens=5, messages=[message])
                )
                await asyncio.wait_for(asked.wait(), 10)
                await asyncio.sleep(0.2)
            await asyncio.gather(call, return_exceptions=True)
        assert mock.provider.requests_seen.count("create") == 0
        await client.close()
