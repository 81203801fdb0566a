"""Clients that hang up on a stream: those that had their answer were answered, of the others what is known is kept."""

import asyncio
import json
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import brotli
import pytest
import zstandard

from carpool.core.model import Entry, Lane, Usage, ticket_number
from carpool.frontends.proxy.request import DisconnectGuard
from tests.support.sockets import PATIENCE, House, Peer, ask, dialled, provider, proxied, request

from .test_pass_through import ANSWER, SSE

CHAT = (
    b'data: {"id":"1","choices":[{"index":0,"delta":{"content":"x"}}],"usage":null}\n\n'
    b'data: {"id":"1","choices":[],"usage":{"prompt_tokens":10,"completion_tokens":20}}\n\n'
    b"data: [DONE]\n\n"
)
RESPONSES = (
    b'event: response.created\ndata: {"type":"response.created","response":{"id":"r","usage":null}}\n\n'
    b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"x"}\n\n'
    b'event: response.completed\ndata: {"type":"response.completed","response":{"id":"r",'
    b'"usage":{"input_tokens":10,"output_tokens":20}}}\n\n'
)
HEAD = "HTTP/1.1 200 OK\r\nContent-Type: %s\r\nTransfer-Encoding: chunked\r\n%s\r\n"
USED = Usage(10, 20)


@dataclass(frozen=True)
class Kind:
    """One kind of stream: who speaks it, what asks for it, its events, and the last of them."""

    dialect: str
    path: str
    body: dict[str, Any]
    stream: bytes
    last: bytes

    def call(self, *headers: str, **more: Any) -> bytes:
        keys = ("Authorization: Bearer k", "X-Api-Key: k", "Anthropic-Version: 2023-06-01")
        body = json.dumps({**self.body, "stream": True, **more}).encode()
        return request(f"POST {self.path}", *keys, "Content-Type: application/json", *headers, body=body)


ASKED: list[Any] = [{"role": "user", "content": "x"}]
MESSAGES = Kind(
    "anthropic",
    "/v1/messages",
    {"model": "claude-haiku-4-5", "max_tokens": 9, "messages": ASKED},
    SSE,
    b'"message_stop"}\n\n',
)
COMPLETIONS = Kind(
    "openai", "/v1/chat/completions", {"model": "gpt-5-mini", "messages": ASKED}, CHAT, b"data: [DONE]\n\n"
)
CODEX = Kind("openai", "/v1/responses", {"model": "gpt-5-mini", "input": "x"}, RESPONSES, b'"output_tokens":20}}}\n\n')
KINDS = [pytest.param(kind, id=kind.path.rpartition("/")[2]) for kind in (MESSAGES, COMPLETIONS, CODEX)]
WAYS = [pytest.param((), id="short"), pytest.param(("X-Carpool-Budget: 30s", "X-Carpool-Lane: now"), id="long")]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def head(*headers: str, kind: str = "text/event-stream") -> bytes:
    return (HEAD % (kind, "".join(f"{line}\r\n" for line in headers))).encode()


class Scene:
    """A provider that says something and holds back the end of the body, and a proxy before it."""

    def __init__(self, *pieces: bytes, then: Callable[[Peer], None] | None = None) -> None:
        self.pieces = pieces
        self.then = then
        self.hung_up = asyncio.Event()
        self.lines: list[Any] = []

    async def script(self, peer: Peer) -> None:
        await peer.request()
        for piece in self.pieces:
            await peer.say(piece)
        if self.then is not None:
            self.then(peer)
            return
        await peer.gone()
        self.hung_up.set()

    async def play(self, kind: Kind, sent: bytes, until: bytes) -> tuple[Any, Entry]:
        """Calls, reads so far and hangs up: the log's line and the ledger's entry of that."""
        async with self.open(kind) as house:
            async with dialled(house.url) as (reader, writer):
                writer.write(sent)
                await reader.readuntil(until)
            return await self.told(house)

    @asynccontextmanager
    async def open(self, kind: Kind) -> AsyncIterator[House]:
        async with (
            asyncio.timeout(PATIENCE),
            provider(self.script) as (direct, _),
            proxied({kind.dialect: (kind.dialect, direct)}, note=self.lines.append) as house,
        ):
            yield house

    async def told(self, house: House) -> tuple[Any, Entry]:
        while not (lines := [line for line in self.lines if line.ticket]):  # noqa: ASYNC110  by another connection
            await asyncio.sleep(0.005)
        (line,) = lines
        (entry,) = await house.engine._context.store.entries(ticket_number(line.ticket))
        return line, entry


# ---------------------------------------------------------------- after the last event


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_client_that_leaves_after_the_last_event_was_answered(kind: Kind, way: tuple[str, ...]) -> None:
    scene = Scene(head(), chunk(kind.stream))
    line, entry = await scene.play(kind, kind.call(*way), kind.last)
    assert (line.status, line.input_tokens, line.output_tokens) == (200, 10, 20)
    assert line.bytes_out == len(kind.stream)
    assert entry.usage == USED
    assert entry.paid
    assert line.cost_usd == entry.paid / 1e9


async def test_a_client_that_leaves_after_the_last_event_on_flex_was_answered() -> None:
    served = CODEX.stream.replace(b'"id":"r"', b'"id":"r","service_tier":"flex"')
    line, entry = await Scene(head(), chunk(served)).play(CODEX, CODEX.call("X-Carpool-Lane: flex"), CODEX.last)
    assert (line.status, line.lane, line.output_tokens) == (200, "flex", 20)
    assert entry.lane is Lane.FLEX
    assert entry.paid
    assert entry.would_have_paid == 2 * entry.paid


def gzipped(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=31)
    return packer.compress(data) + packer.flush(zlib.Z_SYNC_FLUSH)


def brotlied(data: bytes) -> bytes:
    packer = brotli.Compressor()
    return bytes(packer.process(data) + packer.flush())


def zstandarded(data: bytes) -> bytes:
    packer = zstandard.ZstdCompressor().compressobj()
    return packer.compress(data) + packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "pack"), [("gzip", gzipped), ("br", brotlied), ("zstd", zstandarded)])
async def test_a_packed_stream_without_its_end_is_read_so_far(
    name: str, pack: Callable[[bytes], bytes], way: tuple[str, ...]
) -> None:
    packed = pack(SSE)
    scene = Scene(head(f"Content-Encoding: {name}"), chunk(packed))
    sent = MESSAGES.call("Accept-Encoding: gzip, br, zstd", *way)
    line, entry = await scene.play(MESSAGES, sent, packed)
    assert (line.status, entry.usage) == (200, USED)
    assert entry.paid


@pytest.mark.parametrize("way", WAYS)
async def test_json_that_is_here_as_a_whole_is_an_answer(way: tuple[str, ...]) -> None:
    scene = Scene(head(kind="application/json"), chunk(ANSWER))
    line, entry = await scene.play(MESSAGES, MESSAGES.call(*way, stream=False), ANSWER)
    assert (line.status, entry.usage) == (200, USED)
    assert entry.paid


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_provider_that_breaks_after_the_last_event_is_paid(kind: Kind, way: tuple[str, ...]) -> None:
    """Its client sees that the connection broke, as it would without carpool."""
    scene = Scene(head(), chunk(kind.stream), then=Peer.close)
    async with scene.open(kind) as house:
        answer = await ask(house.url, kind.call(*way))
        assert (answer.body, answer.whole) == (kind.stream, False)
        line, entry = await scene.told(house)
    assert (line.status, line.output_tokens) == (200, 20)
    assert entry.paid


@pytest.mark.parametrize("way", WAYS)
async def test_a_stop_after_the_last_event_costs_nobody_its_price(way: tuple[str, ...]) -> None:
    scene = Scene(head(), chunk(SSE))
    async with scene.open(MESSAGES) as house, dialled(house.url) as (reader, writer):
        writer.write(MESSAGES.call(*way))
        await reader.readuntil(MESSAGES.last)
        await house.proxy.drain(0.05)
        line, entry = await scene.told(house)
    assert line.status == 200
    assert entry.paid


# ---------------------------------------------------------------- before it


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seen", [1, 2])
async def test_a_client_that_leaves_earlier_leaves_what_was_said(seen: int, way: tuple[str, ...]) -> None:
    """The counts are kept; what it cost is not known, since nobody heard the end."""
    events = SSE.split(b"\n\n")
    said = b"\n\n".join([*events[:seen], b""])
    scene = Scene(head(), chunk(said))
    line, entry = await scene.play(MESSAGES, MESSAGES.call(*way), events[seen - 1] + b"\n\n")
    await asyncio.wait_for(scene.hung_up.wait(), PATIENCE)  # the provider hears of it
    assert (line.status, line.cost_usd, line.bytes_out) == (499, None, len(said))
    assert entry.usage == Usage(10, 1 if seen == 1 else 20)
    assert (entry.paid, entry.would_have_paid) == (None, None)


@pytest.mark.parametrize("way", WAYS)
async def test_usage_before_the_end_of_a_chat_is_kept(way: tuple[str, ...]) -> None:
    """Some who speak this dialect say it with every chunk, so only the end tells that it is all."""
    scene = Scene(head(), chunk(CHAT.removesuffix(b"data: [DONE]\n\n")))
    line, entry = await scene.play(COMPLETIONS, COMPLETIONS.call(*way), b'"completion_tokens":20}}\n\n')
    assert (line.status, entry.usage, entry.paid) == (499, USED, None)


@pytest.mark.parametrize("way", WAYS)
async def test_half_of_a_json_answer_says_nothing(way: tuple[str, ...]) -> None:
    half = ANSWER[:-5]
    scene = Scene(head(kind="application/json"), chunk(half))
    line, entry = await scene.play(MESSAGES, MESSAGES.call(*way, stream=False), half)
    assert (line.status, entry.usage, entry.paid) == (499, None, None)


@pytest.mark.parametrize("way", WAYS)
async def test_a_stream_that_breaks_in_the_middle_keeps_its_counts(way: tuple[str, ...]) -> None:
    begun = SSE[: SSE.index(b"event: message_delta")]
    scene = Scene(head(), chunk(begun), then=Peer.close)
    async with scene.open(MESSAGES) as house:
        assert not (await ask(house.url, MESSAGES.call(*way))).whole
        line, entry = await scene.told(house)
    assert (line.status, line.input_tokens, line.cost_usd) == (502, 10, None)
    assert (entry.usage, entry.paid) == (Usage(10, 1), None)


@pytest.mark.parametrize("way", WAYS)
async def test_a_stream_that_ends_in_an_error_has_no_known_price(way: tuple[str, ...]) -> None:
    """Its client has heard all that will come: it was answered, though not well."""
    begun = SSE[: SSE.index(b"event: message_delta")]
    failed = b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}\n\n'
    for end in (b"", b"0\r\n\r\n"):
        scene = Scene(head(), chunk(begun + failed), end)
        line, entry = await scene.play(MESSAGES, MESSAGES.call(*way), failed)
        assert (line.status, entry.usage, entry.paid) == (200, Usage(10, 1), None)


@pytest.mark.parametrize("way", WAYS)
async def test_a_refusal_whose_client_leaves_is_free(way: tuple[str, ...]) -> None:
    body = b'{"type":"error","error":{"type":"invalid_request_error","message":"No."}}'
    refusal = head(kind="application/json").replace(b"200 OK", b"400 Bad Request")
    line, entry = await Scene(refusal, chunk(body)).play(MESSAGES, MESSAGES.call(*way), body)
    assert (line.status, entry.paid) == (400, 0)


async def test_a_client_that_leaves_in_the_moment_in_which_its_work_ends_cancels_nothing_else() -> None:
    """The callback of `leaving` may be on its way when the work returns; the task is at something else by then."""
    guard = DisconnectGuard()
    leaving: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    admitted: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def work() -> str:
        return await admitted

    async def request() -> str:
        result = await guard.run_while_connected(work(), leaving)
        await asyncio.sleep(0.01)  # as `respond-async` holds its answer back
        return result

    answering = asyncio.create_task(request())
    await asyncio.sleep(0)
    admitted.set_result("on disk")
    leaving.set_result(None)
    assert await answering == "on disk"
