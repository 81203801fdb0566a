"""Every request to a batch API waits for its turn, and every answer to one is learned from."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from carpool.core.errors import CarpoolError
from carpool.core.lifecycle import BatchState
from carpool.core.model import Batch, Headers, PoolKey
from carpool.dialects import OPENAI
from carpool.engine.batch.api import LONGEST_PAUSE_S, PAUSE_S, BatchApi
from carpool.engine.batch.collect import Collector
from carpool.engine.batch.rescue import Rescuer
from carpool.engine.now.send import Sender
from carpool.engine.recording import CallRecorder
from carpool.planners.policy import RoutingPolicy
from carpool.planners.pressure.quota import BatchQuota
from carpool.sim.timeline import Timeline, VirtualClock, run
from tests.support.engine_context import START, AlikeClient, engine_context


class StoppedClock:
    def now(self) -> float:
        return START

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("No request has to wait for its turn here.")


class Scene:
    def __init__(self, client: AlikeClient, timeline: Timeline | None = None) -> None:
        self.client = client
        clock = StoppedClock() if timeline is None else VirtualClock(timeline)
        self.context, self.credential = engine_context(client, clock=clock)
        self.upstream = self.context.upstreams["openai"]
        self.api = BatchApi(self.context)
        key = PoolKey("openai", "openai", self.credential, "/v1/chat/completions", (), "gpt-5", "s", "patient")
        self.batch = Batch(1, 1, key, "nonce", BatchState.OPEN, "engine-test", 3, 300, START, provider_id="batch_1")

    async def cancel(self) -> None:
        rescuer = Rescuer(
            self.context, self.api, Sender(self.context, CallRecorder(self.context)), lambda provider, batch: None
        )
        await rescuer._cancel(self.batch)

    async def delete(self) -> None:
        await self.api.delete_files(self.batch, ["file-1"])

    async def retrieve(self) -> None:
        with pytest.raises(CarpoolError):
            await Collector(self.context, self.api)._places(self.batch, self.upstream, None)

    async def results(self) -> None:
        with pytest.raises(CarpoolError):
            await anext(Collector(self.context, self.api).lines(self.batch, self.upstream, ["file-2"]))

    async def create(self) -> None:
        await self.api.send(self.batch, OPENAI.create((), "/v1/chat/completions", "nonce", "file-1", "gpt-5"))


@pytest.mark.parametrize("kind", ["cancel", "delete", "retrieve", "results", "create"])
async def test_a_429_to_any_request_slows_and_pauses_the_account(kind: str) -> None:
    scene = Scene(AlikeClient(429, (("retry-after", "7"),)))
    before = scene.api.quota(scene.credential)
    ask: Callable[[], Awaitable[None]] = getattr(scene, kind)
    await ask()
    assert len(scene.client.requests) == 1
    quota = scene.api.quota(scene.credential)
    assert quota.paused_until == START + 7
    assert quota.rpm == before.rpm // 2
    assert not quota.can_ask(START + 6.9)


@pytest.mark.parametrize("kind", ["cancel", "delete"])
async def test_the_providers_clock_is_learned_from_any_response(kind: str) -> None:
    scene = Scene(AlikeClient(200, (("date", "Thu, 01 Jan 1970 00:17:10 GMT"),)))
    await getattr(scene, kind)()
    assert scene.api.offsets == {"openai": 30.0}


@pytest.mark.parametrize(("headers", "pause"), [((), PAUSE_S), ((("retry-after", "90000"),), LONGEST_PAUSE_S)])
async def test_a_pause_has_a_default_and_a_limit(headers: Headers, pause: float) -> None:
    scene = Scene(AlikeClient(429, headers))
    await scene.delete()
    assert scene.api.quota(scene.credential).paused_until == START + pause


def test_the_next_request_waits_for_the_end_of_the_pause() -> None:
    timeline = Timeline()

    async def go() -> float:
        scene = Scene(AlikeClient(429, (("retry-after", "7"),)), timeline)
        started = scene.context.now()
        await scene.cancel()
        await scene.delete()
        assert len(scene.client.requests) == 2
        return scene.context.now() - started

    assert run(go(), timeline) >= 7.0


def test_turns_are_taken_in_the_order_of_asking() -> None:
    """Frequent polls do not hold up the download of results."""
    timeline = Timeline()
    order: list[str] = []

    async def go() -> None:
        scene = Scene(AlikeClient(200), timeline)
        scene.api.set_quota(scene.credential, BatchQuota.new(5, 2.0, scene.context.now()))

        async def look(name: str, times: int) -> None:
            for _ in range(times):
                await scene.api.turn(scene.credential)
                order.append(name)
                await asyncio.sleep(0.3)

        await asyncio.gather(look("a", 20), look("b", 20), look("c", 20), look("d", 20))

    run(go(), timeline)
    for start in range(8, 80, 4):
        assert sorted(order[start : start + 4]) == ["a", "b", "c", "d"], order


async def test_no_file_is_deleted_where_the_policy_forbids_it() -> None:
    scene = Scene(AlikeClient(200))
    scene.context.policy = RoutingPolicy(delete_provider_files=False)
    await scene.delete()
    assert scene.client.requests == []
