"""An answer is a client's when it has all of it: whoever loses its connection before comes back, and pays once."""

import asyncio
import os
from typing import Any

import httpx2
import pytest

from carpool.core.model import OutcomeKind, ticket_text
from carpool.frontends.proxy.request import RequestContext
from carpool.frontends.proxy.waiting import KeepAliveIntervals
from carpool.mock import Constant, MockConfig, expected_text
from tests.support.disconnecting import HEADERS, LARGE, MIDDLING, SMALL, Caller, answered, calling, lengthen
from tests.support.sockets import read_message, request
from tests.support.stage import ask, staged

QUICK = MockConfig(batch_latency=Constant(0.1))
SLOW = MockConfig(batch_latency=Constant(1.0))
MARKED = "X-Stainless-Retry-Count: 1"


async def leave_while_it_rides(stage: Any, asked: Any) -> None:
    """A client leaves while its batch runs, and the batch ends without it."""
    async with calling(stage.url, asked) as caller:
        await stage.until(lambda: stage.mock.batches)
        caller.close()
    await stage.until(lambda: stage.engine.stats.settled_calls)


async def released(stage: Any) -> None:
    """Nobody waits at the proxy, and the store knows it."""
    await stage.until(lambda: not stage.proxy._open)
    await asyncio.gather(*[task for task in asyncio.all_tasks() if task.get_name() == "gone"])


async def once(stage: Any, asked: Any, *marks: str) -> None:
    """The client comes back, gets its answer, and it was bought once."""
    await answered(stage.url, asked, *marks)
    assert len(stage.mock.bill.charges) == 1


@pytest.mark.parametrize("way", ["close", "reset"])
@pytest.mark.parametrize("mark", [(), (MARKED,)], ids=["unmarked", "marked"])
async def test_a_client_may_break_off_at_once_as_often_as_it_likes(way: str, mark: tuple[str, ...]) -> None:
    async with staged(QUICK) as stage:
        await leave_while_it_rides(stage, ask("again and again"))
        for _ in range(5):
            async with calling(stage.url, ask("again and again"), *mark) as caller:
                getattr(caller, way)()
            await released(stage)
        await once(stage, ask("again and again"), *mark)


@pytest.mark.parametrize("way", ["close", "reset"])
@pytest.mark.parametrize("size", [MIDDLING, LARGE])
@pytest.mark.parametrize("more", [(), ("Connection: close",)], ids=["kept alive", "closing"])
async def test_an_answer_that_is_cut_in_the_middle_is_not_delivered(
    monkeypatch: pytest.MonkeyPatch, way: str, size: int, more: tuple[str, ...]
) -> None:
    """Whether it is so large that it waits here, or so small that the client's kernel has all of what it never read."""
    asked = ask("long")
    lengthen(monkeypatch, size)
    async with staged(QUICK) as stage:
        for _ in range(3):
            async with calling(stage.url, asked, *more) as caller:
                await caller.reader.readexactly(50_000)
                if size == LARGE:  # longer than it takes to write down what is delivered
                    await asyncio.sleep(0.3)
                getattr(caller, way)()
            await released(stage)
        await once(stage, asked)


async def test_a_connection_that_is_reset_right_behind_its_answer_did_not_deliver_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client's kernel has acknowledged all of it, and the client read only a part."""
    asked = ask("reset")
    lengthen(monkeypatch, SMALL)
    async with staged(QUICK) as stage:
        for _ in range(3):
            async with calling(stage.url, asked) as caller:
                await caller.reader.readexactly(1_000)
                caller.reset()
            await stage.until(lambda: not stage.engine.deliveries._pending)
            await released(stage)
        await once(stage, asked)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_in_the_moment_of_its_answer_comes_back_to_it(stream: bool) -> None:
    asked = ask("just now")
    async with staged(QUICK) as stage:
        async with calling(stage.url, asked | {"stream": stream}) as caller:
            resolve = stage.engine._context.waiters.resolve

            def leave_first(reply: Any) -> None:
                caller.reset()
                resolve(reply)

            stage.engine._context.waiters.resolve = leave_first
            await stage.until(lambda: stage.engine.stats.settled_calls)
        stage.engine._context.waiters.resolve = resolve
        await released(stage)
        await once(stage, asked)


async def test_a_client_that_leaves_before_its_call_is_on_disk_comes_back_to_it() -> None:
    """It may be back before the store has answered for the first time: then it waits until that is known."""
    asked, held = ask("so soon"), asyncio.Event()
    async with staged(QUICK) as stage:
        admit_all = stage.engine._context.store.admit_all

        async def slowly(admissions: Any) -> Any:
            await held.wait()
            return await admit_all(admissions)

        stage.engine._context.store.admit_all = slowly
        for _ in range(3):
            async with calling(stage.url, asked) as caller:
                await stage.until(lambda: stage.engine.tickets._arriving)
                caller.reset()
            await stage.until(lambda: not stage.proxy._open)
        coming = asyncio.create_task(once(stage, asked))
        await stage.until(lambda: stage.proxy._open)
        held.set()
        await coming


async def test_an_answer_that_was_read_to_the_end_is_delivered(
    stage_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However its client then leaves: the next equal call is another one."""
    asked = ask("read")
    lengthen(monkeypatch, LARGE)
    async with stage_with(QUICK) as stage:
        for number, more in enumerate([(), ("Connection: close",)]):
            async with calling(stage.url, asked, *more) as caller:
                assert (await read_message(caller.reader)).status == 200
            await stage.until(lambda: not stage.proxy._open and not stage.engine.deliveries._pending)
            assert len(stage.mock.bill.charges) == number + 1


@pytest.mark.parametrize("stream_head_s", [0.05, 60.0], ids=["after pings", "at once"])
async def test_a_client_that_leaves_behind_the_last_event_of_a_stream_has_its_answer(
    stage_with: Any, monkeypatch: pytest.MonkeyPatch, stream_head_s: float
) -> None:
    """As Codex does. It does not wait for the end of the body, which would lie unread and make a reset of it."""
    asked = ask("streamed") | {"stream": True}
    send_chunk, callers, lines = RequestContext.send_chunk, list[Caller](), list[Any]()

    async def leave_behind_the_last_event(request: RequestContext, body: bytes, *, more: bool) -> None:
        await send_chunk(request, body, more=more)
        if b"message_stop" in body:
            os.read(callers[-1].writer.get_extra_info("socket").fileno(), 1 << 20)
            callers[-1].close()

    monkeypatch.setattr(RequestContext, "send_chunk", leave_behind_the_last_event)
    intervals = KeepAliveIntervals(stream_head_s=stream_head_s, ping_s=stream_head_s)
    async with stage_with(QUICK, intervals=intervals, note=lines.append) as stage:
        for number in range(2):
            async with calling(stage.url, asked) as caller:
                callers.append(caller)
                await stage.until(lambda count=number: len(lines) > count)
            await stage.until(lambda: not stage.proxy._open and not stage.engine.deliveries._pending)
        assert [line.status for line in lines] == [200, 200]
        assert len(stage.mock.bill.charges) == 2  # the next equal call is another one


async def test_a_failure_that_only_a_broken_connection_can_tell_is_told_to_who_comes_back(stage_with: Any) -> None:
    asked = ask("[error:invalid_request_error]")
    quiet = KeepAliveIntervals(head_s=0.05, space_s=0.05)
    async with stage_with(MockConfig(batch_latency=Constant(0.6)), intervals=quiet) as stage:
        async with calling(stage.url, asked) as caller:
            broken = await read_message(caller.reader)
        assert (broken.status, broken.whole) == (200, False)
        await released(stage)
        async with calling(stage.url, asked) as caller:
            answer = await read_message(caller.reader)
        assert answer.status == 400
        [call] = await stage.engine.overview.calls(None, None, 10)
        assert call.kind is OutcomeKind.ERRORED


# ------------------------------------------------------------ by its ticket


@pytest.mark.parametrize("wait", [0, 30])
async def test_who_never_heard_of_its_ticket_comes_back_by_its_call(stage_with: Any, wait: int) -> None:
    asked = ask("202, I guess")
    async with stage_with(SLOW) as stage:
        async with calling(stage.url, asked, f"Prefer: respond-async, wait={wait}") as caller:
            await caller.writer.drain()
            if wait:
                await stage.until(lambda: len(stage.engine._context.waiters))
            caller.reset()
        await released(stage)
        await once(stage, asked)


async def test_who_asks_for_a_call_by_its_ticket_and_hangs_up_leaves_it_as_it_was(stage_with: Any) -> None:
    asked = ask("by its ticket")
    async with stage_with(SLOW) as stage:
        async with calling(stage.url, asked) as caller:
            await stage.until(lambda: stage.mock.batches)
            caller.reset()
        await released(stage)
        [row] = await stage.engine.overview.calls(None, None, 10)
        url = httpx2.URL(stage.url)
        _, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(request(f"GET /carpool/calls/{ticket_text(row.ticket)}?wait=30s", *HEADERS))
        await stage.until(lambda: len(stage.engine._context.waiters))
        writer.transport.abort()
        await released(stage)
        await once(stage, asked)


async def test_an_answer_that_is_cut_while_it_is_collected_is_collected_again(
    stage_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ask("collected")
    lengthen(monkeypatch, LARGE)
    async with stage_with(QUICK) as stage:
        async with calling(stage.url, asked, "Prefer: respond-async") as caller:
            place = (await read_message(caller.reader)).header("location")[0]
        await stage.until(lambda: stage.engine.stats.settled_calls)
        url = httpx2.URL(stage.url)
        reader, writer = await asyncio.open_connection(url.host, url.port, limit=2**16)
        writer.write(request(f"GET {place}", *HEADERS))
        await reader.readexactly(50_000)
        writer.transport.abort()
        await released(stage)
        [row] = await stage.engine.overview.calls(None, None, 10)
        assert row.delivered_at is None
        answer = await stage.http.get(stage.url + place, headers={"x-api-key": "k"})
        assert answer.json()["content"][0]["text"] == expected_text(asked)
        assert len(stage.mock.bill.charges) == 1
