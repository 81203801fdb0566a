"""Both ends of the proxy as plain sockets: what was said is compared byte by byte, directly and through carpool."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from carpool.core.clock import SystemClock
from carpool.dialects import get as get_dialect
from carpool.engine import Engine, Keyring, Upstream
from carpool.frontends.proxy import Proxy
from carpool.frontends.proxy.http.connection import Connection
from carpool.http import Http1Client
from carpool.planners.policy import RoutingPolicy
from carpool.stores import open_store
from tests.support.stage import _served

Script = Callable[["Peer"], Awaitable[None]]
PATIENCE = 10


class Peer:
    """The provider's end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, heard: list[Message]) -> None:
        self.reader, self.writer, self.heard = reader, writer, heard

    async def request(self) -> Message:
        message = await read_message(self.reader)
        self.heard.append(message)
        return message

    async def say(self, *data: bytes) -> None:
        self.writer.write(b"".join(data))
        await self.writer.drain()

    async def gone(self) -> None:
        try:
            while await self.reader.read(65536):
                continue
        except ConnectionError:
            return

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


@dataclass
class Message:
    """A request or an answer as it stood on the wire."""

    first: str
    headers: list[tuple[str, str]]
    body: bytes = b""
    whole: bool = True  # its end was seen
    informed: list[Message] = field(default_factory=list)  # 1xx before it

    @property
    def status(self) -> int:
        return int(self.first.split()[1])

    def header(self, name: str) -> list[str]:
        return [value for known, value in self.headers if known == name]

    def travelling(self) -> list[tuple[str, str]]:
        """What should be the same on both sides of the proxy, in its order."""
        own = {"connection", "host", "keep-alive", "transfer-encoding", "user-agent-of-the-test"}
        return [pair for pair in self.headers if pair[0] not in own and not pair[0].startswith("x-carpool-")]


async def read_message(reader: asyncio.StreamReader, *, bodiless: bool = False) -> Message:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")[:-2]
    pairs = [tuple(part.strip() for part in line.split(":", 1)) for line in lines]
    message = Message(first, [(name.lower(), value) for name, value in pairs])
    answer = first.startswith("HTTP/")
    if answer and message.status < 200:
        final = await read_message(reader, bodiless=bodiless)
        final.informed.insert(0, message)
        return final
    if bodiless or (answer and message.status in (204, 304)):
        return message
    try:
        await _read_body(reader, message, answer)
    except (ConnectionError, asyncio.IncompleteReadError) as error:
        message.body += getattr(error, "partial", b"")
        message.whole = False
    return message


async def _read_body(reader: asyncio.StreamReader, message: Message, answer: bool) -> None:
    if message.header("transfer-encoding") == ["chunked"]:
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            message.body += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readuntil(b"\r\n")
    elif message.header("content-length"):
        message.body = await reader.readexactly(int(message.header("content-length")[0]))
    elif answer:
        while piece := await reader.read(65536):
            message.body += piece


@asynccontextmanager
async def provider(script: Script) -> AsyncIterator[tuple[str, list[Message]]]:
    """A server that follows a script on every connection; its address, and what it heard."""
    heard: list[Message] = []
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await script(Peer(reader, writer, heard))
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accepted, "127.0.0.1", 0, limit=2**20)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heard
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class House:
    url: str
    engine: Engine
    proxy: Proxy


@asynccontextmanager
async def proxied(
    bases: Mapping[str, tuple[str, str]] | str,
    http: type[Connection] = Connection,
    policy: RoutingPolicy | None = None,
    **more: Any,
) -> AsyncIterator[House]:
    """A proxy before these providers: names with dialects and base URLs, or the base URL of the only one."""
    if isinstance(bases, str):
        bases = {"anthropic": ("anthropic", bases)}
    clock, wire, store = SystemClock(), Http1Client(), await open_store(None)
    upstreams = {name: Upstream(name, url, get_dialect(speaks), wire) for name, (speaks, url) in bases.items()}
    engine = Engine(
        store=store, clock=clock, upstreams=upstreams, keyring=Keyring(store.pepper), policy=policy or RoutingPolicy()
    )
    await engine.start()
    proxy = Proxy(engine, upstreams, clock, **more)
    async with _served(proxy, http) as url:
        yield House(url, engine, proxy)
    await engine.close(0.0)
    await wire.aclose()


@asynccontextmanager
async def dialled(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = re.fullmatch(r"http://([\d.]+):(\d+)", url).groups()  # type: ignore[union-attr]
    reader, writer = await asyncio.open_connection(host, int(port), limit=2**20)
    try:
        yield reader, writer
    finally:
        writer.close()


async def ask(url: str, request: bytes) -> Message:
    """Sends these bytes on a fresh connection and reads the answer."""
    async with asyncio.timeout(PATIENCE), dialled(url) as (reader, writer):
        writer.write(request)
        return await read_message(reader, bodiless=request.startswith(b"HEAD "))


def request(line: str, *headers: str, body: bytes = b"", length: bool = True) -> bytes:
    lines = [line + " HTTP/1.1", "Host: 127.0.0.1", *headers]
    if length and (body or line.startswith(("POST", "PUT", "PATCH"))):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


async def both(script: Script, sent: bytes) -> tuple[Message, Message, list[Message]]:
    """The answer without and with carpool between, and what the provider heard, in this order."""
    async with provider(script) as (direct, heard), proxied(direct) as house:
        return await ask(direct, sent), await ask(house.url, sent), heard
