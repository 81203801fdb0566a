"""The lease is checked right before the bytes of a create go out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from unittest.mock import AsyncMock, patch

import pytest
from anthropic import AsyncAnthropic

from carpool import FleetDispatcher, RoutingPolicy, StoreAway, StoreUnwritable
from carpool.core.clock import SystemClock
from carpool.core.lifecycle import BatchState
from carpool.core.model import Batch, PoolKey
from carpool.core.ports import HttpRequest, HttpResponse
from carpool.engine.batch import api, buy, follow
from carpool.http import HttpxClient
from carpool.mock import Constant, MockConfig, serve
from carpool.stores import SqliteStore
from tests.support.engine_context import START, engine_context


async def test_an_engine_that_lost_its_lease_sends_nothing() -> None:
    asked = asyncio.Event()

    async def lost(self: SqliteStore, batch: int, owner: str, until: float, now: float) -> bool:
        asked.set()
        return False

    async with serve() as mock:
        client = AsyncAnthropic(api_key="sk-test", base_url=mock.url)
        policy = RoutingPolicy(linger_ms=0)
        with patch.object(SqliteStore, "depart", lost):
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


def _answers(monkeypatch: pytest.MonkeyPatch, *first: bool) -> list[float]:
    """A store that says so of the lease, and then what is true; and until when it was asked for."""
    asked: list[float] = []
    left = list(first)
    still_mine, depart = SqliteStore.still_mine, SqliteStore.depart

    async def stays(self: SqliteStore, batch: int, owner: str, until: float) -> bool:
        asked.append(until - SystemClock().now())
        mine = await still_mine(self, batch, owner, until)
        return left.pop(0) if left else mine

    async def departs(self: SqliteStore, batch: int, owner: str, until: float, now: float) -> bool:
        asked.append(until - SystemClock().now())
        if left and not left.pop(0):
            return False
        return await depart(self, batch, owner, until, now)

    monkeypatch.setattr(SqliteStore, "still_mine", stays)
    monkeypatch.setattr(SqliteStore, "depart", departs)
    return asked


@pytest.mark.parametrize("first", [(), (False,), (False, False), (True, False), (True, False, False)])
async def test_a_create_is_broken_off_where_the_lease_runs_short(
    first: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its first byte or before its last one: either way nothing was bought, and the calls go again, once."""
    asked = _answers(monkeypatch, *first)
    monkeypatch.setattr(buy, "RECHECK_S", -1.0)
    monkeypatch.setattr(api, "PAUSE_S", 0.01)
    async with serve(MockConfig(batch_latency=Constant(0.0))) as mock:
        client = AsyncAnthropic(api_key="sk-test", base_url=mock.url)
        async with FleetDispatcher(client, policy=RoutingPolicy(linger_ms=0)) as fleet:
            message = {"role": "user", "content": "hello"}
            await fleet.submit_batch(model="claude-sonnet-5", max_tokens=5, messages=[message])
            assert fleet.stats.batches_refused == first.count(False)
            assert fleet.stats.batches_unknown == 0
        assert len(mock.provider.batches) == len(mock.provider.bill.charges) == 1
        assert len(asked) >= len(first) + 1
        await client.close()


async def test_the_lease_outlasts_the_time_that_a_create_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time-out that its request really has, not another constant."""
    asked = _answers(monkeypatch)
    timeouts: list[float] = []
    true = HttpxClient.send

    async def send(self: HttpxClient, request: HttpRequest) -> HttpResponse:
        if request.method == "POST" and request.url.endswith("/batches"):
            assert asked  # it was checked before
            timeouts.append(request.timeout)
        return await true(self, request)

    monkeypatch.setattr(HttpxClient, "send", send)
    async with serve(MockConfig(batch_latency=Constant(0.0))) as mock:
        client = AsyncAnthropic(api_key="sk-test", base_url=mock.url)
        async with FleetDispatcher(client, policy=RoutingPolicy(linger_ms=0)) as fleet:
            message = {"role": "user", "content": "hello"}
            await fleet.submit_batch(model="claude-sonnet-5", max_tokens=5, messages=[message])
        await client.close()
    assert len(timeouts) == 1
    assert min(asked) >= timeouts[0] - 1.0  # the second is for the look at the clock in between


async def _bought_once(monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """A call is answered and bought once; says how many batches were refused and unknown on its way."""
    monkeypatch.setattr(api, "PAUSE_S", 0.01)
    monkeypatch.setattr(follow, "GRACE_S", 0.2)
    async with serve(MockConfig(batch_latency=Constant(0.0))) as mock:
        client = AsyncAnthropic(api_key="sk-test", base_url=mock.url)
        policy = RoutingPolicy(linger_ms=0, poll_interval_s=0.1, batch_rpm=100_000)
        async with asyncio.timeout(30), FleetDispatcher(client, policy=policy) as fleet:
            message = {"role": "user", "content": "hello"}
            await fleet.submit_batch(model="claude-sonnet-5", max_tokens=5, messages=[message])
            stats = fleet.stats
        assert len(mock.provider.batches) == len(mock.provider.bill.charges) == 1
        await client.close()
    return stats.batches_refused, stats.batches_unknown


async def test_a_create_whose_lines_cannot_be_read_was_not_sent_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    true, failing = SqliteStore.lines, [True]

    async def lines(self: SqliteStore, batch: int) -> AsyncIterator[list[tuple[int, bytes]]]:
        if failing and failing.pop():
            raise StoreUnwritable("The disk is full.")
        async for chunk in true(self, batch):
            yield chunk

    monkeypatch.setattr(SqliteStore, "lines", lines)
    assert await _bought_once(monkeypatch) == (1, 0)


async def test_a_bought_batch_is_written_down_when_the_disk_has_room_again(monkeypatch: pytest.MonkeyPatch) -> None:
    true, failing = SqliteStore.move, [True] * 3

    async def move(self: SqliteStore, batch: int, target: BatchState, **changes: object) -> Batch:
        if target is BatchState.OPEN and failing and failing.pop():
            raise StoreUnwritable("The disk is full.")
        return await true(self, batch, target, **changes)

    monkeypatch.setattr(SqliteStore, "move", move)
    assert await _bought_once(monkeypatch) == (0, 0)
    assert not failing


async def test_a_store_that_fails_after_it_wrote_that_a_create_goes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody sends that create any more, and nobody but the provider can tell."""
    true, failing = SqliteStore.depart, [True]

    async def depart(self: SqliteStore, batch: int, owner: str, until: float, now: float) -> bool:
        departs = await true(self, batch, owner, until, now)
        if failing and failing.pop():
            raise StoreAway("The store can't be reached.")
        return departs

    monkeypatch.setattr(SqliteStore, "depart", depart)
    assert await _bought_once(monkeypatch) == (0, 1)


async def test_a_create_that_was_interrupted_is_looked_for_at_once() -> None:
    """The step that finds it plans with the rows as they were, so another one must follow."""
    context, credential = engine_context()
    key = PoolKey("openai", "openai", credential, "/v1/chat/completions", (), "gpt-5", "s", "patient")
    batch = Batch(1, 1, key, "nonce", BatchState.SUBMITTING, context.name, 3, 300, START, sent_at=START)
    context.batches, context.wake = [batch], float("inf")
    context.store.batch, context.store.pools = AsyncMock(return_value=batch), AsyncMock(return_value=[])  # type: ignore[method-assign]
    await buy.Buyer(context, api.BatchApi(context)).step()
    assert context.store.move.await_args.args == (1, BatchState.UNKNOWN)  # type: ignore[attr-defined]
    assert context.wake_event.is_set()
