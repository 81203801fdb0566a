"""What passes through carpool is what would have been said without it, byte by byte, in both directions."""

import asyncio
import gzip
import hashlib
import json
import zlib
from collections.abc import Callable
from typing import Any

import brotli
import pytest
import zstandard

from tests.support.sockets import (
    PATIENCE,
    Message,
    Peer,
    Script,
    ask,
    both,
    dialled,
    provider,
    proxied,
    read_message,
    request,
)

CALL = json.dumps({"model": "claude-haiku-4-5", "max_tokens": 9, "messages": [{"role": "user", "content": "hé"}]})
KEYS = ("X-Api-Key: k", "Anthropic-Version: 2023-06-01", "Content-Type: application/json")
USAGE = {"input_tokens": 10, "output_tokens": 20}
ANSWER = json.dumps(
    {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude-haiku-4-5", "content": [], "usage": USAGE}
).encode()
SSE = (
    b'event: message_start\ndata: {"type":"message_start","message":{"model":"claude-haiku-4-5",'
    b'"usage":{"input_tokens":10,"output_tokens":1}}}\n\n'
    b'event: message_delta\ndata: {"type":"message_delta","delta":{},"usage":{"output_tokens":20}}\n\n'
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
)


def said(body: bytes, *headers: str, status: str = "200 OK") -> Script:
    """A provider that answers every request with this."""
    head = "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]).encode("latin-1")

    async def script(peer: Peer) -> None:
        while True:
            message = await peer.request()
            await peer.say(head, b"" if message.first.startswith("HEAD") else body)

    return script


def call(*headers: str, body: bytes = CALL.encode(), path: str = "/v1/messages") -> bytes:
    return request(f"POST {path}", *KEYS, *headers, body=body)


def same(direct: Message, through: Message) -> None:
    assert (through.status, through.travelling(), through.body) == (direct.status, direct.travelling(), direct.body)
    assert through.whole == direct.whole


def heard_alike(heard: list[Message]) -> None:
    direct, through = heard
    assert (through.first, through.travelling(), through.body) == (direct.first, direct.travelling(), direct.body)


# ---------------------------------------------------------------- calls on `now`


async def test_a_call_and_its_answer_pass_as_they_are() -> None:
    sent = call(
        "User-Agent: agent/1", "Accept-Encoding: gzip, br", "X-Odd: caf\xe9", "Anthropic-Beta: b", "Anthropic-Beta: a"
    )
    direct, through, heard = await both(said(ANSWER, "Request-Id: req_1", "X-Many: 1", "X-Many: 2", "A: \xfc"), sent)
    same(direct, through)
    heard_alike(heard)
    assert through.header("x-carpool-lane") == ["now"]


async def test_the_query_of_a_call_reaches_the_provider() -> None:
    direct, through, heard = await both(said(ANSWER), call(path="/v1/messages?beta=true&x=%20"))
    same(direct, through)
    heard_alike(heard)


async def test_a_stream_passes_chunk_by_chunk() -> None:
    go_on = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        half = len(SSE) // 2
        await peer.say(b"%x\r\n%b\r\n" % (half, SSE[:half]))
        await go_on.wait()
        await peer.say(b"%x\r\n%b\r\n0\r\n\r\n" % (len(SSE) - half, SSE[half:]))

    async with asyncio.timeout(PATIENCE), provider(script) as (direct, _), proxied(direct) as house:
        async with dialled(house.url) as (reader, writer):
            writer.write(call(body=CALL[:-1].encode() + b', "stream": true}'))
            await reader.readuntil(b"\r\n\r\n")
            assert SSE[:40] in await reader.read(1000)  # while the provider holds back the rest
            go_on.set()
            assert b"message_stop" in await reader.readuntil(b"0\r\n\r\n")
        (row,) = await house.engine._context.store.totals()
        assert (row.purchases, row.unknown) == (1, 0)


async def test_a_stream_is_the_same_bytes() -> None:
    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.say(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            for start in range(0, len(SSE), 7):
                piece = SSE[start : start + 7]
                await peer.say(b"%x\r\n%b\r\n" % (len(piece), piece))
            await peer.say(b"0\r\n\r\n")

    direct, through, heard = await both(script, call(body=CALL[:-1].encode() + b', "stream": true}'))
    same(direct, through)
    heard_alike(heard)


def zlib_bare(data: bytes) -> bytes:
    return zlib.compress(data)[2:-4]


PACKERS: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("gzip", gzip.compress),
    ("deflate", zlib.compress),
    ("deflate", zlib_bare),
    ("br", brotli.compress),
    ("zstd", zstandard.compress),
]


@pytest.mark.parametrize("answer", [ANSWER, SSE], ids=["json", "sse"])
@pytest.mark.parametrize(("encoding", "pack"), PACKERS)
async def test_a_compressed_answer_stays_packed_and_its_usage_is_known(
    encoding: str, pack: Callable[[bytes], bytes], answer: bytes
) -> None:
    packed = pack(answer)
    async with provider(said(packed, f"Content-Encoding: {encoding}")) as (direct, _), proxied(direct) as house:
        through = await ask(house.url, call("Accept-Encoding: gzip, br, zstd"))
        assert through.body == packed
        assert through.header("content-encoding") == [encoding]
        (row,) = await house.engine._context.store.totals()
        assert (row.purchases, row.unknown) == (1, 0)
        assert row.paid > 0


@pytest.mark.parametrize(("encoding", "pack"), PACKERS)
async def test_a_compressed_call_is_understood_and_stays_packed(encoding: str, pack: Callable[[bytes], bytes]) -> None:
    sent = call(f"Content-Encoding: {encoding}", body=pack(CALL.encode()))
    direct, through, heard = await both(said(ANSWER), sent)
    same(direct, through)
    heard_alike(heard)
    assert through.header("x-carpool-lane") == ["now"]  # it was understood


@pytest.mark.parametrize("body", [b"{", b"[]", b"{}", b'{"model": 7}', b"\xff"])
async def test_what_is_wrong_with_a_call_is_the_providers_to_say(body: bytes) -> None:
    direct, through, heard = await both(said(b'{"type":"error"}', status="400 Bad Request"), call(body=body))
    same(direct, through)
    heard_alike(heard)


@pytest.mark.parametrize("status", ["429 Too Many Requests", "529 Overloaded", "401 Unauthorized", "500 Oh"])
async def test_errors_keep_status_body_and_headers(status: str) -> None:
    error = b'{"type":"error","error":{"type":"rate_limit_error","message":"slow down"}}'
    direct, through, _ = await both(said(error, "Retry-After: 7", "X-Should-Retry: true", status=status), call())
    same(direct, through)
    assert through.header("retry-after") == ["7"]


# ---------------------------------------------------------------- everything else


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PURGE"])
async def test_every_method_passes(method: str) -> None:
    direct, through, heard = await both(said(b"answer"), request(f"{method} /v1/unknown", *KEYS, body=b"a body"))
    same(direct, through)
    heard_alike(heard)


@pytest.mark.parametrize(
    "target",
    ["/", "//", "/v1/files/a%2Fb?x=1&x=2&y", "/v1/models?after_id=%C3%BC", "/v1/../v2;p=1", "/v1/a?b=c?d", "/a:b@c"],
)
async def test_paths_and_queries_pass_as_they_are(target: str) -> None:
    direct, through, heard = await both(said(b"answer"), request(f"GET {target}", *KEYS))
    same(direct, through)
    heard_alike(heard)


async def test_repeated_headers_keep_their_order_and_connection_headers_stay_here() -> None:
    sent = request(
        "GET /v1/unknown",
        *("X-B: 1", "X-A: 2", "X-B: 3", "Cookie: a=1", "Cookie: b=2", "Connection: keep-alive, X-Hop", "X-Hop: 1"),
        *("Proxy-Authorization: secret", "X-Carpool-Tags: a=b", "TE: trailers"),
    )
    script = said(b"answer", "Set-Cookie: a=1", "X-A: 1", "Set-Cookie: b=2", "Connection: X-Here", "X-Here: 1")
    async with provider(script) as (direct, heard), proxied(direct) as house:
        through = await ask(house.url, sent)
    names = [("x-b", "1"), ("x-a", "2"), ("x-b", "3"), ("cookie", "a=1"), ("cookie", "b=2")]
    assert heard[0].travelling() == names
    assert [pair for pair in through.headers if pair[0] != "content-length"] == [
        *[("set-cookie", "a=1"), ("x-a", "1"), ("set-cookie", "b=2")]
    ]


@pytest.mark.parametrize(
    ("status", "length"), [("204 No Content", 0), ("304 Not Modified", 0), ("304 Not Modified", 5)]
)
async def test_answers_without_a_body_have_none(status: str, length: int) -> None:
    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            said_length = f"Content-Length: {length}\r\n" if length else ""
            await peer.say(f"HTTP/1.1 {status}\r\nEtag: x\r\n{said_length}\r\n".encode())

    async with (
        asyncio.timeout(PATIENCE),
        provider(script) as (direct, _),
        proxied(direct) as house,
        dialled(house.url) as (reader, writer),
    ):
        for _ in range(2):  # the connection lives on
            writer.write(request("GET /v1/unknown", *KEYS))
            answer = await read_message(reader)
            assert answer.first.split()[1] == status.split()[0]
            assert answer.header("content-length") == ([str(length)] if length else [])


async def test_head_is_answered_without_a_body_on_a_connection_that_lives_on() -> None:
    async with (
        asyncio.timeout(PATIENCE),
        provider(said(b"12345")) as (direct, heard),
        proxied(direct) as house,
        dialled(house.url) as (reader, writer),
    ):
        for _ in range(3):
            writer.write(request("HEAD /v1/unknown", *KEYS))
            answer = await read_message(reader, bodiless=True)
            assert (answer.status, answer.header("content-length")) == (200, ["5"])
        writer.write(request("GET /v1/unknown", *KEYS))
        assert (await read_message(reader)).body == b"12345"
    assert len(heard) == 4


async def test_answers_of_1xx_pass_before_the_answer() -> None:
    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.say(b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n")
            await peer.say(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    direct, through, _ = await both(script, request("GET /v1/unknown", *KEYS))
    same(direct, through)
    assert [(one.status, one.headers) for one in through.informed] == [
        (one.status, one.headers) for one in direct.informed
    ]
    assert len(through.informed) == 2


async def test_a_call_whose_provider_says_1xx_first_gets_its_answer() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(ANSWER), ANSWER
        )

    async with provider(script) as (direct, _), proxied(direct) as house:
        through = await ask(house.url, call())
    assert (through.status, through.body) == (200, ANSWER)


async def test_an_answer_that_ends_with_its_connection_is_whole() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nuntil the end")

    direct, through, _ = await both(script, request("GET /v1/unknown", *KEYS))
    same(direct, through)
    assert through.body == b"until the end"


# ---------------------------------------------------------------- uploads


BOUNDARY = b"--boundary\r\nContent-Disposition: form-data; name=file\r\n\r\n"


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_long_upload_is_passed_on_while_it_comes(chunked: bool) -> None:
    """40 MB, more than a call may have; the provider has the first of it before the client sends the last."""
    piece, count = BOUNDARY + bytes(range(256)) * 4000, 40
    digest, begun = hashlib.sha256(), asyncio.Event()

    async def script(peer: Peer) -> None:
        head = await peer.reader.readuntil(b"\r\n\r\n")
        assert (b"transfer-encoding: chunked" in head.lower()) == chunked
        left = len(piece) * count
        while left:
            if chunked:
                size = int((await peer.reader.readuntil(b"\r\n")), 16)
                data = (await peer.reader.readexactly(size + 2))[:-2]
            else:
                data = await peer.reader.read(min(left, 2**20))
            left -= len(data)
            digest.update(data)
            begun.set()
        if chunked:
            await peer.reader.readuntil(b"0\r\n\r\n")
        await peer.say(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(piece) * count}"
    head = request("POST /v1/files", *KEYS, framing, "Content-Type: multipart/form-data", length=False)
    async with (
        asyncio.timeout(60),
        provider(script) as (direct, _),
        proxied(direct) as house,
        dialled(house.url) as (reader, writer),
    ):
        writer.write(head)
        for number in range(count):
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
            await writer.drain()
            if number == 0:
                await begun.wait()
        writer.write(b"0\r\n\r\n" if chunked else b"")
        assert (await read_message(reader)).body == b"ok"
    assert digest.digest() == hashlib.sha256(piece * count).digest()


async def test_a_short_upload_with_pauses_is_not_held_back() -> None:
    heard = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.reader.readuntil(b"5\r\nfirst\r\n")
        heard.set()
        await peer.reader.readuntil(b"0\r\n\r\n")
        await peer.say(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    head = request("POST /v1/files", *KEYS, "Transfer-Encoding: chunked", length=False)
    async with (
        asyncio.timeout(PATIENCE),
        provider(script) as (direct, _),
        proxied(direct) as house,
        dialled(house.url) as (reader, writer),
    ):
        writer.write(head + b"5\r\nfirst\r\n")
        await heard.wait()
        writer.write(b"6\r\nsecond\r\n0\r\n\r\n")
        assert (await read_message(reader)).body == b"ok"


async def test_an_upload_that_is_refused_early_is_answered_at_once() -> None:
    async def script(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.say(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno")
        await peer.gone()

    head = request("POST /v1/files", *KEYS, "Content-Length: 50000000", length=False)
    async with (
        asyncio.timeout(PATIENCE),
        provider(script) as (direct, _),
        proxied(direct) as house,
        dialled(house.url) as (reader, writer),
    ):
        writer.write(head + b"only the beginning")
        answer = await read_message(reader)
    assert (answer.status, answer.body) == (413, b"no")


# ---------------------------------------------------------------- ends that are none

BROKEN = {
    "length": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf",
    "chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
    "cut chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n64\r\nhalf",
}


@pytest.mark.parametrize("sent", [call(), request("GET /v1/unknown", *KEYS)], ids=["call", "other"])
@pytest.mark.parametrize("end", [Peer.close, Peer.reset])
@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
async def test_an_answer_that_breaks_off_is_not_ended_cleanly(
    broken: bytes, end: Callable[[Peer], None], sent: bytes
) -> None:
    seen = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(broken)
        await seen.wait()
        end(peer)

    async with (
        asyncio.timeout(PATIENCE),
        provider(script) as (direct, _),
        proxied(direct) as house,
        dialled(house.url) as (reader, writer),
    ):
        writer.write(sent)
        await reader.readuntil(b"half")
        seen.set()
        try:
            rest = await reader.read()
        except ConnectionError:
            rest = b""
        assert b"0\r\n\r\n" not in rest


async def test_an_answer_that_breaks_off_is_a_reset_for_an_old_client() -> None:
    """HTTP/1.0 has no other way to tell it from a clean end."""

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(BROKEN["chunked"])
        await asyncio.sleep(0.05)
        peer.reset()

    sent = request("GET /v1/unknown", *KEYS).replace(b"HTTP/1.1", b"HTTP/1.0")
    async with (
        asyncio.timeout(PATIENCE),
        provider(script) as (direct, _),
        proxied(direct) as house,
        dialled(house.url) as (reader, writer),
    ):
        writer.write(sent)
        with pytest.raises(ConnectionResetError):
            await reader.read()


@pytest.mark.parametrize("sent", [call(), request("GET /v1/unknown", *KEYS)], ids=["call", "other"])
@pytest.mark.parametrize("end", [Peer.close, Peer.reset])
async def test_a_connection_cut_before_the_answer_is_a_502(end: Callable[[Peer], None], sent: bytes) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        end(peer)

    async with provider(script) as (direct, heard), proxied(direct) as house:
        through = await ask(house.url, sent)
    assert through.status == 502
    assert json.loads(through.body)["type"] == "error"
    assert len(heard) == 1  # nothing was sent again


# ---------------------------------------------------------------- clients that leave


SENT = {
    "call": call(),
    "stream": call(body=CALL[:-1].encode() + b', "stream": true}'),
    "other": request("GET /v1/unknown", *KEYS),
    "upload": request("POST /v1/files", *KEYS, "Content-Length: 50000000", length=False) + b"x" * 100_000,
}


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("kind", SENT)
async def test_a_client_that_hangs_up_aborts_the_request(kind: str, begun: bool) -> None:
    asked, gone = asyncio.Event(), asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        if begun:
            await peer.say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n")
        asked.set()
        await peer.gone()
        gone.set()

    async with asyncio.timeout(PATIENCE), provider(script) as (direct, _), proxied(direct) as house:
        async with dialled(house.url) as (reader, writer):
            writer.write(SENT[kind])
            await asked.wait()
            if begun and kind != "upload":
                await reader.readuntil(b"half")
        await gone.wait()
        while house.proxy._guard.busy or house.proxy._open:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_what_an_aborted_call_cost_is_unknown() -> None:
    asked = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        asked.set()
        await peer.gone()

    async with asyncio.timeout(PATIENCE), provider(script) as (direct, _), proxied(direct) as house:
        async with dialled(house.url) as (_, writer):
            writer.write(call())
            await asked.wait()
        while house.proxy._open:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        (row,) = await house.engine._context.store.totals()
        assert (row.purchases, row.unknown) == (1, 1)


async def test_a_slow_reader_holds_up_nobody_but_itself() -> None:
    """A client that does not read makes the provider wait, and memory does not grow by what it leaves."""
    piece, said_all = b"x" * 2**20, 0

    async def script(peer: Peer) -> None:
        nonlocal said_all
        await peer.request()
        await peer.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (200 * len(piece)))
        for _ in range(200):
            await peer.say(piece)
            said_all += 1

    async with (
        asyncio.timeout(60),
        provider(script) as (direct, _),
        proxied(direct) as house,
        dialled(house.url) as (reader, writer),
    ):
        writer.write(request("GET /v1/unknown", *KEYS))
        await reader.readuntil(b"\r\n\r\n")
        before: Any = None
        while said_all != before:
            before = said_all
            await asyncio.sleep(0.3)
        assert said_all < 100
        left = 200 * len(piece)
        while left:
            left -= len(await reader.read(2**20))
