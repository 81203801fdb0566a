"""Clients that hang up, upstreams that break: nothing is lost, and nothing false ends cleanly."""

import asyncio
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest

from carpool.mock import Constant, MockConfig
from carpool.planners.policy import RoutingPolicy

KEY = {"x-api-key": "k", "anthropic-version": "2023-06-01"}


async def hang_up(stage: Any, asked: dict[str, Any], when: Any, **headers: str) -> None:
    """Sends a call and closes its connection as soon as `when` is true."""
    url = httpx2.URL(stage.url)
    _, writer = await asyncio.open_connection(url.host, url.port)
    request = httpx2.Request("POST", f"{stage.url}/v1/messages", json=asked, headers=KEY | headers)
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    writer.write(f"POST /v1/messages HTTP/1.1\r\n{head}\r\n".encode() + request.read())
    await writer.drain()
    await stage.until(when)
    writer.transport.abort()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_comes_back_gets_its_own_call(stage_with: Any, body: Any, stream: bool) -> None:
    async with stage_with(MockConfig(batch_latency=Constant(0.6))) as stage:
        asked = body("I will be back", stream=stream)
        await hang_up(stage, asked, lambda: stage.mock.batches, **{"x-carpool-budget": "30m"})
        await asyncio.sleep(0.1)
        answer = await stage.post(body("I will be back"), x_carpool_budget="30m")
        assert answer.status_code == 200
        assert len(stage.mock.bill.charges) == 1
        assert stage.engine.stats.returned_calls == 1


async def test_an_answer_that_was_not_delivered_is_kept(stage_with: Any, body: Any) -> None:
    async with stage_with(MockConfig(batch_latency=Constant(0.2))) as stage:
        await hang_up(stage, body("late"), lambda: stage.mock.batches, **{"x-carpool-budget": "30m"})
        await stage.until(lambda: stage.engine.stats.settled_calls)
        answer = await stage.post(body("late"), x_carpool_budget="30m")
        assert answer.status_code == 200
        assert len(stage.mock.bill.charges) == 1


async def test_hanging_up_on_a_stream_before_its_first_event_aborts_the_request(stage_with: Any, body: Any) -> None:
    async with stage_with(MockConfig(sync_latency=Constant(60))) as stage, open_requests(stage) as count:
        await hang_up(stage, body(stream=True), lambda: stage.mock.bill.charges)
        await stage.until(lambda: count() == 0)


async def test_hanging_up_on_now_ends_the_call(stage_with: Any, body: Any) -> None:
    """The wire is told at once; before the answer's head it can break the connection only when that comes."""
    async with stage_with(MockConfig(sync_latency=Constant(60))) as stage:
        await hang_up(stage, body(), lambda: stage.mock.bill.charges)
        await stage.until(lambda: not stage.proxy._open and not stage.proxy._guard.busy)


@pytest.mark.parametrize("headers", [{}, {"x-carpool-budget": "30m", "x-carpool-on-disconnect": "cancel"}])
@pytest.mark.parametrize("size", [150_000, 400_000, 1_000_000])
async def test_hanging_up_after_a_large_body_is_noticed(
    stage_with: Any, body: Any, size: int, headers: dict[str, str]
) -> None:
    """Reading pauses while much of a body waits to be read; a connection that is not read does not tell of its end."""
    slow = MockConfig(sync_latency=Constant(60), batch_latency=Constant(60))
    async with stage_with(slow) as stage:
        heard = lambda: stage.mock.bill.charges or stage.mock.batches  # noqa: E731
        await hang_up(stage, body("." * size), heard, **headers)
        await stage.until(lambda: not stage.proxy._open and not stage.proxy._guard.busy)


async def test_hanging_up_amid_a_silent_stream_aborts_the_request(stage_with: Any, body: Any) -> None:
    async with (
        stage_with(MockConfig(sync_latency=Constant(60), first_token_share=0.001)) as stage,
        open_requests(stage) as count,
    ):
        async with stage.http.stream(
            "POST", f"{stage.url}/v1/messages", json=body(stream=True), headers=KEY
        ) as response:
            async for _ in response.aiter_raw():
                break
        await stage.until(lambda: count() == 0)


async def test_hanging_up_on_another_path_ends_the_request(stage_with: Any) -> None:
    async with stage_with(MockConfig(control_latency=Constant(60))) as stage:
        with pytest.raises(httpx2.ReadTimeout):
            await stage.http.get(f"{stage.url}/v1/messages/batches", headers=KEY, timeout=0.3)
        await stage.until(lambda: not stage.proxy._open and not stage.proxy._guard.busy)


async def test_a_policy_may_cancel_the_call_of_a_client_that_left(stage_with: Any, body: Any) -> None:
    policy = RoutingPolicy(linger_ms=60_000, on_disconnect="cancel")
    async with stage_with(policy=policy) as stage:
        left = {"x-carpool-budget": "30m"}
        await hang_up(stage, body("never mind"), lambda: stage.engine.stats.batched_calls, **left)
        await stage.until(lambda: not stage.proxy._open)
        await asyncio.sleep(0.2)
        assert (await stage.engine._context.store.counts())["tickets.queued"] == 0


def open_requests(stage: Any) -> Any:
    """Counts what the mock is still working on."""
    app, under_way = stage.mock.app, 0

    async def counting(scope: Any, receive: Any, send: Any) -> None:
        nonlocal under_way
        under_way += 1
        try:
            await answer_or_leave(scope, receive, send)
        finally:
            under_way -= 1

    async def answer_or_leave(scope: Any, receive: Any, send: Any) -> None:
        heard: asyncio.Queue[Any] = asyncio.Queue()

        async def listen() -> None:
            while True:
                message = await receive()
                heard.put_nowait(message)
                if message["type"] == "http.disconnect":
                    return

        answering = asyncio.ensure_future(original(scope, heard.get, send))
        listening = asyncio.ensure_future(listen())
        await asyncio.wait((answering, listening), return_when=asyncio.FIRST_COMPLETED)
        for task in (answering, listening):
            task.cancel()
        await asyncio.gather(answering, listening, return_exceptions=True)

    original = type(app).__call__.__get__(app)

    @asynccontextmanager
    async def scope() -> Any:
        patch = pytest.MonkeyPatch()
        patch.setattr(type(app), "__call__", lambda self, *ports: counting(*ports))
        try:
            yield lambda: under_way
        finally:
            patch.undo()

    return scope()


async def test_a_stream_that_breaks_upstream_breaks_here(stage_with: Any, body: Any) -> None:
    async with stage_with() as stage:
        stage.mock.script("sync_cut_midway")
        with pytest.raises(httpx2.RemoteProtocolError):
            await stage.post(body(stream=True))


async def test_a_stream_that_closes_while_it_waits_breaks(stage_with: Any, body: Any) -> None:
    headers = KEY | {"x-carpool-budget": "30m"}
    async with (
        stage_with(MockConfig(batch_latency=Constant(60))) as stage,
        stage.http.stream("POST", f"{stage.url}/v1/messages", json=body(stream=True), headers=headers) as response,
    ):
        assert response.status_code == 200
        await stage.engine.close(0.0)
        with pytest.raises(httpx2.RemoteProtocolError):
            await response.aread()


async def test_an_upstream_that_is_not_there_is_a_502(stage_with: Any, body: Any) -> None:
    async with stage_with() as stage:
        stage.mock.script("sync_cut")
        answer = await stage.post(body())
        assert answer.status_code == 502
        assert answer.json()["type"] == "error"
