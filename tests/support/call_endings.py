"""Every way in which a call can end, each made over plain sockets with a large body."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import zstandard

from carpool.core.keys import PREFIX
from tests.support.sockets import Peer, dialled, provider, read_message
from tests.support.stage import MODEL

SIZE = 5_000_000
LIMITS = {"max_body_mb": 6, "slow_sender_s": 3, "max_waiting_calls_per_credential": 40}  # of the server
PATIENCE = 120.0
FILLING = b"." * SIZE
_number = itertools.count()


@dataclass
class House:
    """A server, and what its clients need to know."""

    url: str
    batch_only: str  # a virtual key that may not go on `now`
    waiting: AsyncExitStack  # clients that stay


@dataclass(frozen=True)
class Way:
    """How `one` call ends. `together`: so many at a time."""

    one: Callable[[House], Awaitable[None]]
    together: int = 10
    before: Callable[[House], Awaitable[None]] | None = None


WAYS: dict[str, Way] = {}


def way(together: int = 10, before: Callable[[House], Awaitable[None]] | None = None) -> Callable[..., None]:
    def register(one: Callable[[House], Awaitable[None]]) -> None:
        WAYS[one.__name__.replace("_", " ")] = Way(one, together, before)

    return register


async def walk(house: House, name: str, calls: int) -> None:
    """So many calls that end in this way."""
    left = iter(range(calls))

    async def client() -> None:
        for _ in left:
            async with asyncio.timeout(PATIENCE):
                await WAYS[name].one(house)

    async with asyncio.TaskGroup() as group:
        for _ in range(WAYS[name].together):
            group.create_task(client())


# ---------------------------------------------------------------- requests


def body(**more: object) -> bytes:
    """A call of five megabytes; each is another one."""
    text = f"call {next(_number)} "
    call = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": text + "@"}], **more}
    return json.dumps(call).encode().replace(b"@", FILLING, 1)


def head(length: int, *headers: str, target: str = "/v1/messages", key: str = "k") -> bytes:
    lines = [
        f"POST {target} HTTP/1.1",
        "host: 127.0.0.1",
        f"x-api-key: {key}",
        "anthropic-version: 2023-06-01",
        "content-type: application/json",
        f"content-length: {length}",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode()


async def ask(
    house: House, *headers: str, content: bytes | None = None, target: str = "/v1/messages", key: str = "k"
) -> int:
    """The status of the answer; 0 where it breaks off."""
    content = body() if content is None else content
    async with dialled(house.url) as (reader, writer):
        writer.write(head(len(content), *headers, target=target, key=key))
        writer.write(content)
        del content
        answer = await read_message(reader)
        return answer.status if answer.whole else 0


async def expect(status: int, house: House, *headers: str, **more: object) -> None:
    found = await ask(house, *headers, **more)  # type: ignore[arg-type]
    assert found == status, (found, status)


def answering(how: str) -> tuple[str, str]:
    """The headers of a call to the provider below, which answers it so."""
    return "x-carpool-provider: scripted", f"x-answer: {how}"


def fresh() -> str:
    """A key that was never seen: what one account meets does not touch the next."""
    return f"k-{next(_number)}"


# ---------------------------------------------------------------- refused


SMALL = json.dumps({"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}).encode()


async def _take_the_key(house: House) -> None:
    await expect(202, house, "x-carpool-key: taken", "x-carpool-budget: 10h", "prefer: respond-async", content=SMALL)


@way(before=_take_the_key)
async def a_key_that_was_used_for_another_call(house: House) -> None:
    await expect(409, house, "x-carpool-key: taken", "x-carpool-budget: 10h")


@way()
async def too_large(house: House) -> None:
    await expect(413, house, content=b" " * 7_000_000)


@way()
async def too_large_when_unpacked(house: House) -> None:
    await expect(413, house, "content-encoding: zstd", "x-carpool-budget: 1h", content=_BOMB)


_BOMB = zstandard.compress(b"[" * 20_000_000)


@way()
async def no_json(house: House) -> None:
    await expect(400, house, "x-carpool-budget: 1h", content=body()[:-1])


@way()
async def a_bad_option(house: House) -> None:
    await expect(400, house, "x-carpool-budget: soon")


@way()
async def an_unknown_virtual_key(house: House) -> None:
    await expect(401, house, key=PREFIX + "x" * 40)


@way()
async def a_lane_that_the_key_may_not_take(house: House) -> None:
    await expect(403, house, "x-carpool-lane: now", key=house.batch_only)


@way()
async def no_such_provider(house: House) -> None:
    await expect(404, house, "x-carpool-provider: nobody")


CROWD = ("x-carpool-provider: scripted", "x-carpool-lane: batch", "x-carpool-budget: 10h")  # where no batch is made


async def _crowd(house: House) -> None:
    """As many as may wait do, when this returns."""
    for _ in range(LIMITS["max_waiting_calls_per_credential"]):
        _, writer = await house.waiting.enter_async_context(dialled(house.url))
        writer.write(head(len(SMALL), *CROWD, key="crowd") + SMALL)
    status = 0
    while status != 429:
        try:
            async with asyncio.timeout(0.2):
                status = await ask(house, *CROWD, content=SMALL, key="crowd")
        except TimeoutError:  # it was let in, and left again
            continue


@way(before=_crowd)
async def too_many_are_waiting(house: House) -> None:
    await expect(429, house, *CROWD, key="crowd")


# ---------------------------------------------------------------- on `now`


@way()
async def answered_on_now(house: House) -> None:
    await expect(200, house, *answering("200"))


@way()
async def refused_by_the_provider(house: House) -> None:
    await expect(400, house, *answering("400"))


@way()
async def failed_by_the_provider(house: House) -> None:
    await expect(500, house, *answering("500"), key=fresh())


@way()
async def a_stream_that_breaks_off(house: House) -> None:
    await expect(0, house, *answering("cut"), content=body(stream=True), key=fresh())


@way()
async def cut_before_the_answer(house: House) -> None:
    await expect(502, house, *answering("reset"), key=fresh())


@way()
async def a_provider_that_is_not_there(house: House) -> None:
    await expect(502, house, "x-carpool-provider: gone", key=fresh())


@way()
async def refused_with_a_budget(house: House) -> None:
    await expect(400, house, *answering("400"), "x-carpool-lane: now", "x-carpool-budget: 1h")


@way()
async def kept_and_answered_on_now(house: House) -> None:
    await expect(200, house, *answering("200"), f"x-carpool-key: {fresh()}", "x-carpool-lane: now")


@way()
async def passed_through(house: House) -> None:
    await expect(200, house, *answering("200"), target="/v1/files")


@way()
async def passed_through_and_refused(house: House) -> None:
    await expect(400, house, *answering("400"), target="/v1/files")


@way()
async def passed_through_and_cut(house: House) -> None:
    await expect(0, house, *answering("cut"), target="/v1/files")


# ---------------------------------------------------------------- by batch


@way(20)
async def answered_by_a_batch(house: House) -> None:
    await expect(200, house, "x-carpool-lane: batch", "x-carpool-budget: 1h")


@way(20)
async def kept_for_its_client(house: House) -> None:
    await expect(202, house, "x-carpool-budget: 1h", "prefer: respond-async", key="later")


@way(20)
async def nobody_reached_until_the_deadline(house: House) -> None:
    """It takes 102s, so its answer has its status however late that is."""
    gone = ("x-carpool-provider: gone", "x-carpool-lane: batch", "x-carpool-budget: 1s")
    await expect(502, house, *gone, "x-stainless-lang: python", key=fresh())


# ---------------------------------------------------------------- clients that leave


@way()
async def left_amid_the_upload(house: House) -> None:
    content = body()
    async with dialled(house.url) as (_, writer):
        writer.write(head(len(content)))
        writer.write(content[: len(content) // 2])
        await writer.drain()


@way(20)
async def too_slow(house: House) -> None:
    content = body()
    async with dialled(house.url) as (reader, writer):
        writer.write(head(len(content)))
        writer.write(content[:-1])
        assert (await read_message(reader)).status == 408


@way()
async def left_amid_an_upload_that_passes(house: House) -> None:
    content = body()
    async with dialled(house.url) as (_, writer):
        writer.write(head(len(content), *answering("hang"), target="/v1/files"))
        writer.write(content[: len(content) // 2])
        await writer.drain()


async def _leave(house: House, *headers: str, key: str = "k", headed: bool = True) -> None:
    """Sends a call, and leaves when the head of its answer is there, or when the provider has heard of it."""
    content = body(stream=True)
    async with dialled(house.url) as (reader, writer):
        writer.write(head(len(content), *headers, key=key))
        writer.write(content)
        del content
        await (reader.readuntil(b"\r\n\r\n") if headed else HEARD.acquire())


@way(20)
async def left_while_it_waits_for_its_batch(house: House) -> None:
    await _leave(house, *CROWD, key="left")


@way(20)
async def left_and_taken_back(house: House) -> None:
    await _leave(house, *CROWD, "x-carpool-on-disconnect: cancel", key="left")


@way(20)
async def left_before_the_answer(house: House) -> None:
    await _leave(house, *answering("hang"), headed=False)


@way(20)
async def left_amid_the_answer(house: House) -> None:
    await _leave(house, *answering("stall"))


# ---------------------------------------------------------------- the provider

ANSWER = b'{"type": "message", "usage": {"input_tokens": 1, "output_tokens": 1}}'


HEARD = asyncio.Semaphore(0)  # requests that came whole, and are not answered


async def _script(peer: Peer) -> None:
    """Does what a header of the request says. Bodies are read, and not kept."""
    while True:
        lines = (await peer.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        said = dict(line.split(": ", 1) for line in lines if ": " in line)
        left = int(said.get("content-length", 0))
        while left and (piece := await peer.reader.read(min(left, 1 << 18))):
            left -= len(piece)
        if left:  # its client is gone
            return
        await _answer(peer, said.get("x-answer", "wait"))


async def _answer(peer: Peer, how: str) -> None:
    if how.isdecimal():
        kind, length = b"content-type: application/json", len(ANSWER)
        await peer.say(b"HTTP/1.1 %b \r\n%b\r\ncontent-length: %d\r\n\r\n" % (how.encode(), kind, length), ANSWER)
    elif how == "reset":
        peer.reset()
    else:
        if how in ("cut", "stall"):
            started = b"event: ping\ndata: {}\n\n"
            await peer.say(
                b"HTTP/1.1 200 \r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n",
                b"%x\r\n%b\r\n" % (len(started), started),
            )
        if how == "cut":
            peer.close()
        else:
            if how == "hang":
                HEARD.release()
            await peer.gone()


@asynccontextmanager
async def scripted() -> AsyncIterator[str]:
    async with provider(_script) as (url, _):
        yield url
