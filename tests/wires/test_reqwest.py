"""What is particular to carpool's own client; the rest is in the contract's suite."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from pyreqwest.exceptions import ConnectError, ConnectTimeoutError, PoolTimeoutError, ReadTimeoutError, RequestError

from carpool.errors import NotConnected, Severed, TimedOut, WireError
from carpool.ports import WireRequest
from carpool.wires.reqwest import ReqwestWire, _wire_error


@asynccontextmanager
async def answering(heads: list[bytes], answer: bytes) -> AsyncIterator[int]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectError("x", {"causes": [{"message": "client error (Connect)"}, {"message": "refused"}]}), NotConnected),
        (ConnectError("x", {"causes": [{"message": "client error (SendRequest)"}]}), Severed),
        (ConnectError("x", {"causes": None}), Severed),
        (ConnectTimeoutError("x", {"causes": None}), NotConnected),
        (PoolTimeoutError("x", {"causes": None}), NotConnected),
        (ReadTimeoutError("x", {"causes": None}), TimedOut),
        (RequestError("x", {"causes": [{"message": "Connect"}]}), Severed),
        (TimeoutError(), TimedOut),
        (KeyError("x"), Severed),
    ],
)
def test_only_a_cause_that_says_so_means_not_connected(error: Exception, expected: type[WireError]) -> None:
    assert type(_wire_error(error, "host")) is expected


async def test_connecting_has_its_own_time() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)  # and never accepts: once the queue is full, connecting hangs
        address = full.getsockname()
        queue = [socket.socket() for _ in range(4)]
        for waiting in queue:
            waiting.setblocking(False)
            waiting.connect_ex(address)
        wire = ReqwestWire(connect_timeout=0.1)
        with pytest.raises(NotConnected, match="too long"):
            await wire.send(WireRequest("GET", f"http://127.0.0.1:{address[1]}/", ()))
        await wire.aclose()
        for waiting in queue:
            waiting.close()


async def test_the_environments_proxies_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    heads: list[bytes] = []
    wire = ReqwestWire()
    async with answering(heads, OK) as port:
        response = await wire.send(WireRequest("GET", f"http://127.0.0.1:{port}/", ()))
        assert await response.read() == b"ok"
    await wire.aclose()
    assert b"user-agent: carpool/" in heads[0]  # where the request brings none


async def test_a_proxy_that_is_set_is_used() -> None:
    heads: list[bytes] = []
    async with answering(heads, OK) as port:
        wire = ReqwestWire(proxy=f"http://127.0.0.1:{port}")
        response = await wire.send(WireRequest("GET", "http://provider.invalid/v1", ()))
        assert await response.read() == b"ok"
    await wire.aclose()
    assert heads[0].startswith(b"GET http://provider.invalid/v1 HTTP/1.1")


async def test_a_header_that_is_not_ascii_does_not_spoil_the_others() -> None:
    answer = OK.replace(b"content-length", b"x-name: caf\xe9\r\nx-other: fine\r\ncontent-length")
    wire = ReqwestWire()
    async with answering([], answer) as port:
        response = await wire.send(WireRequest("GET", f"http://127.0.0.1:{port}/", ()))
        assert await response.read() == b"ok"
    await wire.aclose()
    assert ("x-other", "fine") in response.headers


async def test_a_closed_wire_sends_nothing() -> None:
    wire = ReqwestWire()
    await wire.aclose()
    with pytest.raises(NotConnected, match="closed"):
        await wire.send(WireRequest("GET", "http://127.0.0.1:9/", ()))
