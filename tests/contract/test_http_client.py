"""The contract of `ports.HttpClient`, over every client, against a server that is nothing but a socket."""

from __future__ import annotations

import asyncio
import gzip
import re
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import httpx2
import psutil
import pytest

from carpool.core.errors import ConnectionBroken, NotConnected, TimedOut, WireError
from carpool.core.ports import HttpClient, HttpRequest, StreamedBody
from carpool.http import Http1Client, HttpxClient, ThreadedHttpxClient

TLS = ssl.create_default_context()  # made once: it takes longer than most of these tests
Handler = Callable[["Peer"], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Peer:
    """The server's end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def head(self) -> bytes:
        return await self.reader.readuntil(b"\r\n\r\n")

    async def request(self) -> tuple[bytes, bytes]:
        head = await self.head()
        length = re.search(rb"\r\ncontent-length: (\d+)\r\n", head.lower())
        return head, await self.reader.readexactly(int(length[1]) if length else 0)

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def gone(self) -> bool:
        """True once the client has closed its end."""
        with suppress(ConnectionError):  # a reset is an end, too
            while await self.reader.read(65536):
                pass
        return True

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """A server that treats every connection with `handler`; gives its address."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):  # the client may go whenever it likes
                await handler(Peer(reader, writer))
        finally:
            writer.close()

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accepted, "127.0.0.1", 0, limit=2**20)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture(params=["http1", "httpx", "threads"])
async def wire(request: pytest.FixtureRequest) -> AsyncIterator[HttpClient]:
    if request.param == "http1":
        own = Http1Client()
        yield own
        await own.aclose()
    elif request.param == "httpx":
        async with httpx2.AsyncClient(trust_env=False, verify=TLS) as client:
            yield HttpxClient(client)
    else:
        with httpx2.Client(trust_env=False, verify=TLS) as blocking:
            threaded = ThreadedHttpxClient(blocking)
            yield threaded
            await threaded.aclose()


def post(url: str, body: bytes | StreamedBody = b"{}", timeout: float = 5.0, **headers: str) -> HttpRequest:
    pairs = tuple((name.replace("_", "-"), value) for name, value in headers.items())
    return HttpRequest("POST", url, pairs, body, timeout)


async def pieces(count: int, piece: bytes) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield piece


# ---------------------------------------------------------------- bytes pass untouched


async def test_bytes_pass_untouched_both_ways(wire: HttpClient) -> None:
    seen: list[tuple[bytes, bytes]] = []
    every_byte = bytes(range(256)) * 3

    async def handler(peer: Peer) -> None:
        seen.append(await peer.request())
        await peer.say(b"HTTP/1.1 201 Made\r\ncontent-length: 768\r\n\r\n" + every_byte)

    async with serving(handler) as url:
        response = await wire.send(post(f"{url}/v1/a%20b?beta=true", every_byte, x_b="1", x_a="2"))
        assert (response.status, await response.read()) == (201, every_byte)
        await response.aclose()
    head, body = seen[0]
    assert body == every_byte
    assert head.startswith(b"POST /v1/a%20b?beta=true HTTP/1.1\r\n")
    lines = head.decode().lower().split("\r\n")
    assert lines.index("x-b: 1") < lines.index("x-a: 2")
    assert "content-length: 768" in lines


async def test_only_the_headers_given_travel(wire: HttpClient) -> None:
    heads: list[bytes] = []

    async def handler(peer: Peer) -> None:
        heads.append((await peer.request())[0])
        await peer.say(OK)

    async with serving(handler) as url:
        request = post(url, user_agent="agent/1", accept="application/json", accept_encoding="identity")
        await (await wire.send(request)).read()
        await (await wire.send(HttpRequest("GET", url, (("accept", "*/*"), ("user-agent", "agent/1"))))).read()
    names = [{line.split(":")[0].lower() for line in head.decode().split("\r\n")[1:-2]} for head in heads]
    assert names[0] == {"host", "user-agent", "accept", "accept-encoding", "content-length"}
    assert names[1] == {"host", "user-agent", "accept"}


async def test_repeated_headers_are_kept_in_order_and_lower_cased(wire: HttpClient) -> None:
    heads: list[bytes] = []

    async def handler(peer: Peer) -> None:
        heads.append((await peer.request())[0])
        await peer.say(b"HTTP/1.1 200 OK\r\nX-Many: One\r\nX-Many: Two\r\nContent-Length: 2\r\nA-B: C\r\n\r\nok")

    async with serving(handler) as url:
        repeated = (("anthropic-beta", "a"), ("anthropic-beta", "b"))
        response = await wire.send(HttpRequest("POST", url, repeated, b"{}"))
        await response.read()
    assert heads[0].lower().count(b"anthropic-beta: ") == 2
    assert response.headers == (("x-many", "One"), ("x-many", "Two"), ("content-length", "2"), ("a-b", "C"))


async def test_a_compressed_answer_stays_compressed(wire: HttpClient) -> None:
    packed = gzip.compress(b"hello" * 100)

    async def handler(peer: Peer) -> None:
        await peer.request()
        head = f"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: {len(packed)}\r\n\r\n"
        await peer.say(head.encode() + packed)

    async with serving(handler) as url:
        response = await wire.send(post(url, accept_encoding="gzip"))
        assert await response.read() == packed
        assert ("content-encoding", "gzip") in response.headers


async def test_a_redirect_is_an_answer(wire: HttpClient) -> None:
    connections = 0

    async def handler(peer: Peer) -> None:
        nonlocal connections
        connections += 1
        await peer.request()
        await peer.say(b"HTTP/1.1 307 Elsewhere\r\nlocation: /other\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")

    async with serving(handler) as url:
        response = await wire.send(post(url))
        assert (response.status, await response.read()) == (307, b"")
    assert connections == 1


async def test_chunks_arrive_as_they_are_sent(wire: HttpClient) -> None:
    go_on = asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.say(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        await go_on.wait()
        await peer.say(b"6\r\nsecond\r\n0\r\n\r\n")

    async with serving(handler) as url:
        chunks = (await wire.send(post(url))).chunks()
        assert await anext(chunks) == b"first"
        go_on.set()
        assert [chunk async for chunk in chunks] == [b"second"]


# ---------------------------------------------------------------- streamed uploads


async def test_a_long_upload_is_streamed_in_flat_memory(wire: HttpClient) -> None:
    count, piece = 100_000, b"x" * 524  # 50 MB
    process = psutil.Process()
    heads: list[bytes] = []

    async def handler(peer: Peer) -> None:
        nonlocal most
        heads.append(await peer.head())
        left = count * len(piece)
        while left:
            left -= len(await peer.reader.read(min(left, 2**20)))
            most = max(most, process.memory_info().rss)
        await peer.say(OK)

    before = most = process.memory_info().rss
    async with serving(handler) as url:
        response = await wire.send(post(url, StreamedBody(count * len(piece), pieces(count, piece))))
        assert await response.read() == b"ok"
        await response.aclose()
    assert f"content-length: {count * len(piece)}".encode() in heads[0].lower()
    assert b"transfer-encoding" not in heads[0].lower()
    assert most - before < 16 * 2**20


@pytest.mark.parametrize("length", [5, 500_000])
async def test_a_body_of_another_length_than_announced_is_broken_off(wire: HttpClient, length: int) -> None:
    answered = False

    async def handler(peer: Peer) -> None:
        nonlocal answered
        await peer.request()
        answered = True
        await peer.say(OK)

    async with serving(handler) as url:
        with pytest.raises(ConnectionBroken, match="announced"):
            await wire.send(post(url, StreamedBody(length, pieces(4, b"x" * 100_000))))
    assert not answered


async def test_a_body_that_cannot_be_made_is_broken_off(wire: HttpClient) -> None:
    async def failing() -> AsyncIterator[bytes]:
        yield b"x" * 100_000
        raise KeyError("secret")

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.say(OK)

    async with serving(handler) as url:
        with pytest.raises(ConnectionBroken) as caught:
            await wire.send(post(url, StreamedBody(200_000, failing())))
    assert "secret" not in str(caught.value)


async def test_an_early_answer_ends_the_upload(wire: HttpClient) -> None:
    async def handler(peer: Peer) -> None:
        await peer.head()
        await peer.say(b"HTTP/1.1 413 Too much\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno")
        await peer.gone()

    async with serving(handler) as url:
        body = StreamedBody(20 * 2**20, pieces(20, b"x" * 2**20))
        response = await wire.send(post(url, body))
        assert (response.status, await response.read()) == (413, b"no")
        await response.aclose()


# ---------------------------------------------------------------- trouble


def a_free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


async def test_a_refused_connection_is_not_connected(wire: HttpClient) -> None:
    with pytest.raises(NotConnected, match=r"127\.0\.0\.1"):
        await wire.send(post(f"http://127.0.0.1:{a_free_port()}/"))


async def test_an_unknown_host_is_not_connected(wire: HttpClient) -> None:
    with pytest.raises(NotConnected):
        await wire.send(post("http://no-such-host.invalid/"))


@pytest.mark.parametrize("url", ["http://[::1/", "no address", "ftp://host/", "http:///path"])
async def test_an_impossible_address_is_not_connected(wire: HttpClient, url: str) -> None:
    with pytest.raises(NotConnected):
        await wire.send(post(url))


async def test_an_impossible_header_is_not_connected_and_not_shown(wire: HttpClient) -> None:
    with pytest.raises(WireError) as caught:
        await wire.send(post("http://127.0.0.1:9/", x_api_key="sk-secret\n"))
    assert "secret" not in str(caught.value)


async def test_a_failed_tls_handshake_is_not_connected(wire: HttpClient) -> None:
    async def handler(peer: Peer) -> None:
        await peer.reader.read(1)
        peer.close()

    async with serving(handler) as url:
        with pytest.raises(NotConnected):
            await wire.send(post(url.replace("http:", "https:")))


BODY = b"x" * 2_000_000


async def nothing(peer: Peer) -> None:
    await peer.reader.read(1)  # the first byte shows that the client believes to be connected


async def half(peer: Peer) -> None:
    await peer.head()
    await peer.reader.readexactly(len(BODY) // 2)


async def everything(peer: Peer) -> None:
    await peer.request()


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("end", [Peer.close, Peer.reset])
@pytest.mark.parametrize("received", [nothing, half, everything])
async def test_a_connection_cut_before_the_answer_is_severed(
    wire: HttpClient, received: Handler, end: Callable[[Peer], None], streamed: bool
) -> None:
    connections = 0

    async def handler(peer: Peer) -> None:
        nonlocal connections
        connections += 1
        await received(peer)
        end(peer)

    body = StreamedBody(len(BODY), pieces(20, BODY[: len(BODY) // 20])) if streamed else BODY
    async with serving(handler) as url:
        with pytest.raises(ConnectionBroken) as caught:
            await wire.send(post(url + "/path?secret", body))
        await asyncio.sleep(0.02)
    assert not isinstance(caught.value, TimedOut)
    assert "secret" not in str(caught.value)
    assert connections == 1  # nothing was sent again


@pytest.mark.parametrize("end", [Peer.close, Peer.reset])
async def test_a_connection_cut_right_after_accept_is_not_sent_again(
    wire: HttpClient, end: Callable[[Peer], None]
) -> None:
    connections = 0

    async def handler(peer: Peer) -> None:
        nonlocal connections
        connections += 1
        end(peer)

    async with serving(handler) as url:
        with pytest.raises(WireError):  # a reset may hit while the client still connects
            await wire.send(post(url, BODY))
        await asyncio.sleep(0.02)
    assert connections == 1


async def test_silence_before_the_answer_times_out(wire: HttpClient) -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.gone()

    async with serving(handler) as url:
        with pytest.raises(TimedOut):
            await wire.send(post(url, timeout=0.1))


async def test_silence_within_the_answer_times_out(wire: HttpClient) -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.say(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf")
        await peer.gone()

    async with serving(handler) as url:
        response = await wire.send(post(url, timeout=0.1))
        with pytest.raises(TimedOut):
            await response.read()
        await response.aclose()


async def test_a_slow_but_steady_exchange_does_not_time_out(wire: HttpClient) -> None:
    async def slowly() -> AsyncIterator[bytes]:
        for _ in range(3):
            await asyncio.sleep(0.08)
            yield b"x" * 70_000

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.say(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n")
        for _ in range(3):
            await asyncio.sleep(0.08)
            await peer.say(b"x")

    async with serving(handler) as url:
        response = await wire.send(post(url, StreamedBody(210_000, slowly()), timeout=0.2))
        assert await response.read() == b"xxx"


@pytest.mark.parametrize("end", [Peer.close, Peer.reset])
@pytest.mark.parametrize(
    "answer",
    [b"content-length: 10\r\n\r\nhalf", b"transfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n"],
    ids=["length", "chunked"],
)
async def test_half_an_answer_is_severed(wire: HttpClient, answer: bytes, end: Callable[[Peer], None]) -> None:
    got = asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.say(b"HTTP/1.1 200 OK\r\n" + answer)
        await got.wait()
        end(peer)

    async with serving(handler) as url:
        response = await wire.send(post(url))
        chunks = response.chunks()
        assert await anext(chunks) == b"half"
        got.set()
        with pytest.raises(ConnectionBroken):
            await anext(chunks)
        await response.aclose()


async def test_an_answer_that_is_not_http_is_severed(wire: HttpClient) -> None:
    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.say(b"SSH-2.0-hello\r\n\r\n")

    async with serving(handler) as url:
        with pytest.raises(ConnectionBroken):
            await wire.send(post(url))


@pytest.mark.parametrize("rest", [0.0, 0.03])
async def test_a_connection_closed_while_idle_is_never_sent_on_twice(wire: HttpClient, rest: float) -> None:
    """With and without time for the client to notice. Either it connects anew, or it says ConnectionBroken."""
    received = 0

    async def handler(peer: Peer) -> None:
        nonlocal received
        await peer.request()
        received += 1
        await peer.say(OK)
        peer.close()

    sent = 0
    async with serving(handler) as url:
        for _ in range(6):
            with suppress(ConnectionBroken):
                await (await wire.send(post(url))).read()
            sent += 1
            await asyncio.sleep(rest)
        await asyncio.sleep(0.02)
    assert received <= sent


async def test_a_kept_connection_cut_after_the_second_request_is_severed(wire: HttpClient) -> None:
    connections, requests = 0, 0

    async def handler(peer: Peer) -> None:
        nonlocal connections, requests
        connections += 1
        await peer.request()
        requests += 1
        await peer.say(OK)
        await peer.request()
        requests += 1

    async with serving(handler) as url:
        await (await wire.send(post(url))).read()
        with pytest.raises(ConnectionBroken):
            await wire.send(post(url))
        await asyncio.sleep(0.02)
    assert (connections, requests) == (1, 2)


# ---------------------------------------------------------------- giving up


async def cancel_when(task: asyncio.Task[object], ready: asyncio.Event) -> None:
    await ready.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancelling_an_upload_aborts_the_connection(wire: HttpClient) -> None:
    ready, gone = asyncio.Event(), asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 100_000
            await asyncio.sleep(0.005)

    async def handler(peer: Peer) -> None:
        await peer.head()
        ready.set()
        await peer.gone()
        gone.set()

    async with serving(handler) as url:
        await cancel_when(asyncio.create_task(wire.send(post(url, StreamedBody(10**9, endless())))), ready)
        await asyncio.wait_for(gone.wait(), 2)


async def test_cancelling_before_the_answer_aborts_the_connection(wire: HttpClient) -> None:
    ready, gone = asyncio.Event(), asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.request()
        ready.set()
        await peer.gone()
        gone.set()

    async with serving(handler) as url:
        await cancel_when(asyncio.create_task(wire.send(post(url))), ready)
        await asyncio.wait_for(gone.wait(), 2)


async def test_cancelling_within_the_answer_aborts_the_connection(wire: HttpClient) -> None:
    ready, gone = asyncio.Event(), asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.say(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf")
        ready.set()
        await peer.gone()
        gone.set()

    async with serving(handler) as url:
        response = await wire.send(post(url))
        await cancel_when(asyncio.create_task(response.read()), ready)
        await response.aclose()
        await asyncio.wait_for(gone.wait(), 2)


async def test_closing_an_unread_answer_aborts_the_connection_and_may_be_repeated(wire: HttpClient) -> None:
    gone = asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.request()
        await peer.say(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf")
        await peer.gone()
        gone.set()

    async with serving(handler) as url:
        response = await wire.send(post(url))
        await response.aclose()
        await response.aclose()
        await asyncio.wait_for(gone.wait(), 2)
        late = await wire.send(post(url))
        await wire.aclose()
        await late.aclose()


async def test_many_requests_share_connections(wire: HttpClient) -> None:
    connections = 0

    async def handler(peer: Peer) -> None:
        nonlocal connections
        connections += 1
        while True:
            await peer.request()
            await peer.say(OK)

    async with serving(handler) as url:
        for _ in range(5):
            response = await wire.send(post(url))
            await response.read()
            await response.aclose()
    assert connections == 1


async def test_closing_a_wire_twice_is_fine(wire: HttpClient) -> None:
    await wire.aclose()
    await wire.aclose()


async def test_requests_in_flight_do_not_disturb_each_other(wire: HttpClient) -> None:
    async def handler(peer: Peer) -> None:
        while True:
            _, body = await peer.request()
            await peer.say(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)

    async def echoed(url: str, number: int) -> bool:
        body = f"{number} ".encode() * 1000
        response = await wire.send(post(url, body))
        try:
            return await response.read() == body
        finally:
            await response.aclose()

    async with serving(handler) as url:
        assert all(await asyncio.gather(*(echoed(url, number) for number in range(100))))
