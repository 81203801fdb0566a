"""The way out through a proxy: CONNECT, then TLS with the provider itself; and addresses that are never asked."""

from __future__ import annotations

import asyncio
import socket
import ssl
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from carpool.core.errors import NotConnected
from carpool.core.ports import HttpRequest
from carpool.http import Http1Client, OutgoingProxy

from .test_client import always, certificate, serving

__all__ = ["certificate"]
SECRET = "sk-ant-never-seen-on-the-way"
LOGIN = "fleet:pass:word"
MADE = b"HTTP/1.1 200 Connection established\r\nvia: squid\r\n\r\n"


class Proxy:
    """A small CONNECT proxy. Remembers what it was asked, and every byte that it passed on."""

    def __init__(self, answer: bytes = MADE) -> None:
        self.answer = answer
        self.asked: list[bytes] = []
        self.seen = b""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.asked.append(head)
        writer.write(self.answer)
        await writer.drain()
        if self.answer != MADE:
            return
        host, _, port = head.split()[1].decode().rpartition(":")
        there, back = await asyncio.open_connection(host.strip("[]"), int(port))
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pump(reader, back))
            group.create_task(self._pump(there, writer))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                self.seen += data
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            return
        finally:
            sink.close()


@asynccontextmanager
async def behind(
    proxy: Proxy, certificate: tuple[Path, Path], login: str | None = None
) -> AsyncIterator[tuple[Http1Client, str]]:
    """A wire whose only way to a provider that speaks TLS leads through the proxy; and the provider's address."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    async with serving(always, context) as port, serving(proxy) as way:
        outgoing = OutgoingProxy(f"http://127.0.0.1:{way}", login)
        wire = Http1Client(roots_pem=certificate[0].read_bytes(), proxy=outgoing)
        try:
            yield wire, f"https://localhost:{port}/v1"
        finally:
            await wire.aclose()


async def fetched(wire: Http1Client, url: str) -> bytes:
    response = await wire.send(HttpRequest("POST", url, (("x-api-key", SECRET),), b"a prompt", timeout=5))
    return await response.read()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_the_proxy_sees_nothing_but_the_providers_name(
    certificate: tuple[Path, Path], run: Callable[[Any], None]
) -> None:
    async def scene() -> None:
        proxy = Proxy()
        async with behind(proxy, certificate) as (wire, url):
            for _ in range(3):
                assert await fetched(wire, url) == b"ok"
            place = url.removeprefix("https://").partition("/")[0].encode()
            assert proxy.asked == [b"CONNECT " + place + b" HTTP/1.1\r\nhost: " + place + b"\r\n\r\n"]  # kept open
            assert len(proxy.seen) > 500
            assert SECRET.encode() not in proxy.seen
            assert b"a prompt" not in proxy.seen

    run(scene())


async def test_the_login_is_for_the_proxy_only(certificate: tuple[Path, Path]) -> None:
    proxy = Proxy()
    async with behind(proxy, certificate, LOGIN) as (wire, url):
        assert await fetched(wire, url) == b"ok"
        assert b"proxy-authorization: Basic " + b64encode(LOGIN.encode()) + b"\r\n" in proxy.asked[0]
    assert LOGIN not in repr(OutgoingProxy("http://h:1", LOGIN))


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"HTTP/1.1 407 Proxy Authentication Required\r\ncontent-length: 0\r\n\r\n", "outgoing_proxy_auth_env"),
        (b"HTTP/1.1 403 Forbidden\r\n\r\n", "would not connect to localhost .status 403."),
        (b"HTTP/1.0 200 OK\r\nx: " + b"y" * 20_000, "No connection"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "No connection"),
        (b"HTTP/1.1 200", "No connection"),
        (b"", "No connection"),
    ],
)
async def test_a_proxy_that_does_not_connect(certificate: tuple[Path, Path], answer: bytes, told: str) -> None:
    """Nothing of the request was sent, and so it is said: it may be sent again."""
    async with behind(Proxy(answer), certificate, LOGIN) as (wire, url):
        with pytest.raises(NotConnected, match=told) as caught:
            await fetched(wire, url)
        assert LOGIN not in str(caught.value)
        assert SECRET not in str(caught.value)


async def test_a_proxy_that_is_not_there_or_says_nothing(certificate: tuple[Path, Path]) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        wire = Http1Client(proxy=OutgoingProxy(f"http://127.0.0.1:{nobody.getsockname()[1]}"))
        with pytest.raises(NotConnected, match="No connection"):
            await fetched(wire, "https://localhost:1/")

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with serving(silent) as port:
        wire = Http1Client(connect_timeout=0.1, proxy=OutgoingProxy(f"http://127.0.0.1:{port}"))
        with pytest.raises(NotConnected, match="too long"):
            await fetched(wire, "https://localhost:1/")


async def test_a_proxy_that_pretends_to_be_the_provider_is_found_out(certificate: tuple[Path, Path]) -> None:
    """It may end the tunnel anywhere; without the provider's certificate it gets no key."""
    proxy = Proxy()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    async with serving(always, context) as port, serving(proxy) as way:
        wire = Http1Client(proxy=OutgoingProxy(f"http://127.0.0.1:{way}"))  # that does not know this certificate
        with pytest.raises(NotConnected, match="not trusted"):
            await fetched(wire, f"https://localhost:{port}/")
        await wire.aclose()


async def test_what_is_not_encrypted_does_not_go_through_it() -> None:
    async with serving(always) as port:
        wire = Http1Client(proxy=OutgoingProxy("http://127.0.0.1:9"))
        assert await fetched(wire, f"http://127.0.0.1:{port}/") == b"ok"
        await wire.aclose()


# ---------------------------------------------------------------- addresses that are never asked


@pytest.mark.parametrize(
    "host", ["169.254.169.254", "2852039166", "0xA9FEA9FE", "0251.0376.0251.0376", "[::ffff:169.254.169.254]"]
)
async def test_no_spelling_leads_to_the_metadata_service(host: str) -> None:
    wire = Http1Client(connect_timeout=1)
    with pytest.raises(NotConnected, match="link-local"):
        await fetched(wire, f"http://{host}/latest/meta-data")


async def test_a_name_that_leads_there_leads_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in ("192.0.2.1", "169.254.1.1")
        ]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(NotConnected, match=r"rebound\.example leads to a link-local address"):
        await fetched(Http1Client(), "http://rebound.example/")
