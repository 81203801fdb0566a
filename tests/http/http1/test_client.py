"""What is particular to the client on the event loop; the rest is in the contract's suite."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from carpool.core.errors import ConnectionBroken, NotConnected
from carpool.core.model import Headers
from carpool.core.ports import HttpRequest, StreamedBody
from carpool.http import Http1Client

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@asynccontextmanager
async def serving(script: Script, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """A server that follows a script on every connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await script(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def always(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)


@asynccontextmanager
async def a_wire(**settings: float | bytes) -> AsyncIterator[Http1Client]:
    wire = Http1Client(**settings)  # type: ignore[arg-type]
    try:
        yield wire
    finally:
        await wire.aclose()


async def fetched(wire: Http1Client, url: str) -> bytes:
    response = await wire.send(HttpRequest("GET", url, (), timeout=5))
    return await response.read()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "30"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


async def test_tls_is_spoken_with_those_who_are_trusted(certificate: tuple[Path, Path]) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    roots = certificate[0].read_bytes()
    async with serving(always, context) as port, a_wire(roots_pem=roots) as trusting, a_wire() as wary:
        for _ in range(2):
            assert await fetched(trusting, f"https://localhost:{port}/") == b"ok"
        with pytest.raises(NotConnected, match="certificate of localhost is not trusted"):
            await fetched(wary, f"https://localhost:{port}/")
        with pytest.raises(NotConnected, match="certificate of 127"):  # another name than the certificate's
            await fetched(trusting, f"https://127.0.0.1:{port}/")


async def test_connecting_has_its_own_time() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)  # and never accepts: once the queue is full, connecting hangs
        queue = [socket.socket() for _ in range(4)]
        for waiting in queue:
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        async with a_wire(connect_timeout=0.1) as wire:
            with pytest.raises(NotConnected, match="too long"):
                await fetched(wire, f"http://127.0.0.1:{full.getsockname()[1]}/")
        for waiting in queue:
            waiting.close()


async def test_the_environments_proxies_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with serving(always) as port, a_wire() as wire:
        assert await fetched(wire, f"http://127.0.0.1:{port}/") == b"ok"


async def test_a_closed_wire_sends_nothing() -> None:
    wire = Http1Client()
    await wire.aclose()
    with pytest.raises(NotConnected, match="closed"):
        await fetched(wire, "http://127.0.0.1:9/")


async def test_answers_of_1xx_are_told_and_are_not_the_answer() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 103 Early\r\nLink: a\r\n\r\nHTTP/1.1 102 Wait\r\n\r\n" + OK)

    heard: list[tuple[int, Headers]] = []
    async with serving(script) as port, a_wire() as wire:
        url = f"http://127.0.0.1:{port}/"
        request = HttpRequest("GET", url, (), informed=lambda status, headers: heard.append((status, headers)))
        response = await wire.send(request)
        assert (response.status, response.headers, await response.read()) == (200, (("content-length", "2"),), b"ok")
    assert heard == [(103, (("link", "a"),)), (102, ())]


@pytest.mark.parametrize("unasked", [b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nother", b"x"])
async def test_what_nobody_asked_for_is_nobodys_answer(unasked: bytes) -> None:
    """Sent behind an answer, or while the connection rests, it must not be taken for the answer to the next request."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK + (unasked if together else b""))
        await writer.drain()
        if not together:
            await asyncio.sleep(0.01)
            writer.write(unasked)
        await reader.read()

    for together in (True, False):
        async with serving(script) as port, a_wire() as wire:
            for _ in range(3):
                try:
                    assert await fetched(wire, f"http://127.0.0.1:{port}/") == b"ok"
                except ConnectionBroken:
                    assert together  # the answer itself came with a stain
                await asyncio.sleep(0.03)


async def test_a_connection_that_rests_is_closed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carpool.http.http1.client.SWEEP_S", 0.02)
    gone = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await reader.read()
        gone.set()

    async with asyncio.timeout(5), serving(script) as port, a_wire() as wire:
        await fetched(wire, f"http://127.0.0.1:{port}/")
        await gone.wait()


async def test_a_head_that_never_ends_is_severed() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            writer.write(b"x-more: " + b"y" * 1000 + b"\r\n")
            await writer.drain()

    async with asyncio.timeout(10), serving(script) as port, a_wire() as wire:
        with pytest.raises(ConnectionBroken):
            await fetched(wire, f"http://127.0.0.1:{port}/")


@pytest.mark.parametrize(
    "headers",
    [(("x\r\ny", "1"),), (("x", "1\r\ny: 2"),), (("x y", "1"),), (("", "1"),), (("x", "\0"),), (("x", "\u20ac"),)],
)
async def test_a_header_that_is_more_than_one_is_not_sent(headers: Headers) -> None:
    async with a_wire() as wire:
        with pytest.raises(NotConnected, match="This request can't be sent"):
            await wire.send(HttpRequest("GET", "http://127.0.0.1:9/", headers))


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/a b", "http://127.0.0.1:9/a\r\nx: y", "http://127.0.0.1:9/\xe9"])
async def test_an_address_that_is_more_than_one_is_not_sent(url: str) -> None:
    async with a_wire() as wire:
        with pytest.raises(NotConnected, match="This request can't be sent"):
            await wire.send(HttpRequest("GET", url, ()))


def test_it_works_on_uvloop_too() -> None:
    """Where it runs in earnest: answers, uploads in chunks, and an abort before the head."""
    asked, gone = asyncio.Event(), asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/silent" in head:
            asked.set()
            await reader.read()
            gone.set()
        else:
            assert await reader.readuntil(b"0\r\n\r\n") == b"3\r\none\r\n3\r\ntwo\r\n5\r\nthree\r\n0\r\n\r\n"
            writer.write(OK)

    async def pieces() -> AsyncIterator[bytes]:
        for piece in (b"one", b"two", b"three"):
            yield piece

    async def run() -> None:
        async with asyncio.timeout(5), serving(script) as port, a_wire() as wire:
            url = f"http://127.0.0.1:{port}"
            response = await wire.send(HttpRequest("POST", url, (), StreamedBody(None, pieces(), live=True)))
            assert await response.read() == b"ok"
            task = asyncio.create_task(wire.send(HttpRequest("GET", url + "/silent", ())))
            await asked.wait()
            task.cancel()
            await gone.wait()

    uvloop.run(run())


async def test_an_empty_last_piece_does_not_end_a_chunked_body_twice() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"all"
        yield b"x" * 65_536
        yield b""

    received = bytearray()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not received.endswith(b"0\r\n\r\n"):
            received.extend(await reader.read(65_536))
        await asyncio.sleep(0.05)
        writer.write(OK)
        received.extend(await reader.read(65_536))

    async with serving(script) as port, a_wire() as wire:
        response = await wire.send(HttpRequest("POST", f"http://127.0.0.1:{port}/", (), StreamedBody(None, pieces())))
        assert await response.read() == b"ok"
    assert received.count(b"0\r\n\r\n") == 1
