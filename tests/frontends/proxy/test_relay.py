"""The short way of a call on `now`: two connections joined, without a task between, and everything else as ever."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from carpool.core.errors import StoreUnwritable
from carpool.frontends.proxy.http.connection import MAX_AT_ONCE
from carpool.stores.sqlite import _AttemptFile
from tests.support.sockets import PATIENCE, Peer, ask, dialled, provider, proxied, read_message
from tests.support.stage import staged

from .test_pass_through import ANSWER, CALL, SSE, call, said


def long_call(size: int) -> bytes:
    body = {"model": "claude-haiku-4-5", "max_tokens": 9, "messages": [{"role": "user", "content": "x" * size}]}
    return json.dumps(body).encode()


def attempts(folder: Path) -> int:
    return sum(file.read_bytes().count(b'"purchase":-1') for file in folder.glob("*.attempts-*"))


async def test_nobody_waits_for_a_call_that_is_relayed() -> None:
    asked, go = asyncio.Event(), asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        asked.set()
        await go.wait()
        await peer.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(ANSWER), ANSWER)
        await peer.gone()

    async with asyncio.timeout(PATIENCE), provider(script) as (direct, _), proxied(direct) as house:
        answer = asyncio.ensure_future(ask(house.url, call()))
        await asked.wait()
        assert len(house.proxy._guard.relays) == 1
        assert not house.proxy._open
        go.set()
        assert (await answer).body == ANSWER
        assert not house.proxy._guard.busy


async def test_calls_of_one_connection_share_one_connection_to_the_provider() -> None:
    async with (
        asyncio.timeout(PATIENCE),
        provider(said(ANSWER)) as (direct, heard),
        proxied(direct) as house,
        dialled(house.url) as (reader, writer),
    ):
        lines = house.engine._context.upstreams["anthropic"].http_client
        for _ in range(5):
            writer.write(call())
            assert (await read_message(reader)).body == ANSWER
        assert len(heard) == 5
        assert len(lines._lines) == 1  # type: ignore[attr-defined]


async def test_calls_sent_without_waiting_are_answered_in_their_order() -> None:
    async def script(peer: Peer) -> None:
        while True:
            message = await peer.request()
            body = json.dumps({"said": json.loads(message.body)["max_tokens"]}).encode()
            await peer.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body), body)

    numbered = [CALL.replace('"max_tokens": 9', f'"max_tokens": {number}').encode() for number in range(1, 9)]
    async with (
        asyncio.timeout(PATIENCE),
        provider(script) as (direct, _),
        proxied(direct) as house,
        dialled(house.url) as (reader, writer),
    ):
        writer.write(b"".join(call(body=body) for body in numbered))
        for number in range(1, 9):
            assert json.loads((await read_message(reader)).body) == {"said": number}


@pytest.mark.parametrize("size", [10, 100_000, MAX_AT_ONCE - 1000, MAX_AT_ONCE + 1, 2_000_000])
async def test_a_call_of_any_length_arrives_as_it_was_sent(size: int) -> None:
    body = long_call(size)
    async with provider(said(ANSWER)) as (direct, heard), proxied(direct) as house:
        assert (await ask(house.url, call(body=body))).body == ANSWER
        assert heard[0].body == body


async def test_a_client_that_sends_its_body_slowly_is_read_to_its_end() -> None:
    body = long_call(150_000)
    async with (
        asyncio.timeout(PATIENCE),
        provider(said(ANSWER)) as (direct, heard),
        proxied(direct) as house,
        dialled(house.url) as (reader, writer),
    ):
        sent = call(body=body)
        for start in range(0, len(sent), 40_000):
            writer.write(sent[start : start + 40_000])
            await writer.drain()
            await asyncio.sleep(0.005)
        assert (await read_message(reader)).body == ANSWER
        assert heard[0].body == body


async def test_a_client_that_leaves_amid_its_body_asks_nobody() -> None:
    async with asyncio.timeout(PATIENCE), provider(said(ANSWER)) as (direct, heard), proxied(direct) as house:
        async with dialled(house.url) as (_, writer):
            writer.write(call(body=long_call(1000))[:-10])
            await writer.drain()
        assert (await ask(house.url, call())).body == ANSWER
        assert [message.body for message in heard] == [CALL.encode()]
        assert not house.proxy._guard.busy


async def test_a_client_that_does_not_read_makes_the_provider_of_its_call_wait() -> None:
    piece, said_all = b"x" * 2**20, 0

    async def script(peer: Peer) -> None:
        nonlocal said_all
        await peer.request()
        await peer.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (100 * len(piece)))
        for _ in range(100):
            await peer.say(piece)
            said_all += 1

    async with (
        asyncio.timeout(60),
        provider(script) as (direct, _),
        proxied(direct) as house,
        dialled(house.url) as (reader, writer),
    ):
        writer.write(call())
        await reader.readuntil(b"\r\n\r\n")
        before: Any = None
        while said_all != before:
            before = said_all
            await asyncio.sleep(0.3)
        assert said_all < 60
        left = 100 * len(piece)
        while left:
            left -= len(await reader.read(2**20))
        while house.proxy._guard.busy:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_an_attempt_is_on_disk_before_its_bytes_go_out(tmp_path: Path) -> None:
    """Of a call over a new connection, and of one over a connection that is there."""
    noted: list[int] = []

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            noted.append(attempts(tmp_path))
            await peer.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(ANSWER), ANSWER)

    async with provider(script) as (direct, _):
        store = tmp_path / "s.db"
        async with staged(store=store) as stage:
            object.__setattr__(stage.engine._context.upstreams["anthropic"], "base_url", direct)
            for _ in range(3):
                assert (await ask(stage.url, call())).body == ANSWER
            (row,) = await stage.engine._context.store.totals()
            assert (row.purchases, row.unknown) == (3, 0)
    assert noted == [1, 2, 3]


async def test_what_can_not_be_noted_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise StoreUnwritable("The disk is full.")

    monkeypatch.setattr(_AttemptFile, "write", full)
    async with staged(store=tmp_path / "s.db") as stage:
        answer = await ask(stage.url, call())
        assert answer.status == StoreUnwritable.status
        assert not stage.mock.bill.charges


async def test_a_stop_waits_for_what_is_relayed_and_cuts_it_when_time_is_up() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n")
        await peer.gone()

    lines: list[Any] = []
    async with (
        asyncio.timeout(PATIENCE),
        provider(script) as (direct, _),
        proxied(direct, note=lines.append) as house,
        dialled(house.url) as (reader, writer),
    ):
        writer.write(call())
        await reader.readuntil(b"half")
        await house.proxy.drain(0.1)
        assert not (await reader.read()).endswith(b"0\r\n\r\n")
    assert [line.status for line in lines] == [503]


async def test_a_stop_tells_a_call_that_is_not_answered_yet_to_come_back() -> None:
    asked = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        asked.set()
        await peer.gone()

    async with asyncio.timeout(PATIENCE), provider(script) as (direct, _), proxied(direct) as house:
        answer = asyncio.ensure_future(ask(house.url, call()))
        await asked.wait()
        await house.proxy.drain(0.05)
        told = await answer
        assert told.status == 503
        assert told.header("retry-after") == ["1"]
        assert json.loads(told.body)["type"] == "error"


async def test_a_stop_waits_no_longer_than_it_must() -> None:
    go = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n")
        await go.wait()
        await peer.say(b"0\r\n\r\n")
        await peer.gone()

    async with asyncio.timeout(PATIENCE), provider(script) as (direct, _), proxied(direct) as house:
        answer = asyncio.ensure_future(ask(house.url, call()))
        while not house.proxy._guard.relays:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        stop = asyncio.ensure_future(house.proxy.drain(60.0))
        await asyncio.sleep(0.05)
        go.set()
        await stop
        assert (await answer).body == b"half"


async def test_a_mistake_of_ours_is_a_500_and_not_a_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a mistake")

    async with provider(said(ANSWER)) as (direct, heard), proxied(direct) as house:
        monkeypatch.setattr(house.proxy._calls, "relay", broken)
        assert (await ask(house.url, call())).status == 500
        assert not heard


async def test_one_line_is_said_of_every_call() -> None:
    lines: list[Any] = []
    stream = said(SSE, "Content-Type: text/event-stream")
    async with provider(stream) as (direct, _), proxied(direct, note=lines.append) as house:
        await ask(house.url, call())
        await ask(house.url, call("X-Carpool-Tags: team=ci"))
    assert [(line.status, line.input_tokens, line.output_tokens, line.bytes_out) for line in lines] == (
        [(200, 10, 20, len(SSE))] * 2
    )
    assert [line.tags for line in lines] == [{}, {"team": "ci"}]
