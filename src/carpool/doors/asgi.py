"""The few words of ASGI that the proxy speaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping, Set
from functools import lru_cache
from typing import Any

from carpool.errors import CallTooLarge
from carpool.model import Headers
from carpool.ports import Dialect, StreamedBody

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

SMALL_BODY = 64 * 1024
JSON = ("content-type", "application/json")
EVENT_STREAM = ("content-type", "text/event-stream; charset=utf-8")
RETRY = (("retry-after", "1"), ("x-should-retry", "true"))  # the call is kept, or was never begun
HOP_BY_HOP = frozenset(
    {"connection", "content-length", "expect", "host", "keep-alive", "proxy-authenticate", "proxy-authorization"}
    | {"proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
)
_NOT_PASSED = HOP_BY_HOP - {"content-length"}
_NOTHING: frozenset[str] = frozenset()
_PLAIN = ("keep-alive", "close")


class Disconnected(Exception):
    """The client is gone."""


def request_headers(scope: Scope) -> Headers:
    return tuple([(_lower(name), value.decode("latin-1")) for name, value in scope["headers"]])


@lru_cache(4096)
def _lower(name: bytes) -> str:
    return name.decode("latin-1").lower()


async def read_body(receive: Receive, limit: int) -> bytes:
    """The whole body, as long as it is within the limit."""
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        size += len(message.get("body", b""))
        if size > limit:
            raise CallTooLarge(f"This body is over {limit // 1_000_000} MB, the most that the provider takes.")
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)


class Upload:
    """A body that travels on while it comes. Where its length is known and small, it is one piece at once."""

    def __init__(self, receive: Receive, headers: Headers) -> None:
        self._receive = receive
        self._ended = asyncio.Event()
        self._length = _announced(headers)

    async def body(self) -> bytes | StreamedBody:
        if self._length is not None and self._length <= SMALL_BODY:
            body = await read_body(self._receive, SMALL_BODY) if self._length else b""
            self._ended.set()
            return body
        return StreamedBody(self._length, self._pieces(), live=True)

    async def _pieces(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            yield message.get("body", b"")
            more = message.get("more_body", False)
        self._ended.set()

    async def gone(self) -> None:
        """Returns when the client has hung up after its body; within it, the body itself breaks off."""
        await self._ended.wait()
        await gone(self._receive)


def _announced(headers: Headers) -> int | None:
    """How long a body will be; None when nobody knows. Without a word of it there is none."""
    length: int | None = 0
    for name, value in headers:
        if name == "transfer-encoding":
            return None
        if name == "content-length":
            length = int(value) if value.isdecimal() else None
    return length


async def gone(receive: Receive) -> None:
    """Returns when the client has hung up."""
    while (await receive())["type"] != "http.disconnect":
        continue


class Once:
    """A `send` that remembers whether the answer has begun, and in whose words errors are told."""

    __slots__ = ("_send", "begun", "dialect")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False
        self.dialect: Dialect | None = None  # known when the provider is chosen

    def __call__(self, message: Scope) -> Awaitable[None]:
        self.begun = True
        return self._send(message)


def head(status: int, headers: Iterable[tuple[str, str]]) -> Scope:
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    return {"type": "http.response.start", "status": status, "headers": encoded}


async def send_head(send: Send, status: int, headers: Iterable[tuple[str, str]]) -> None:
    await send(head(status, headers))


async def send_chunk(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def send_whole(send: Send, status: int, headers: Iterable[tuple[str, str]], body: bytes) -> None:
    await send_head(send, status, (*headers, ("content-length", str(len(body)))))
    await send_chunk(send, body, more=False)


def end_to_end(headers: Headers) -> list[tuple[str, str]]:
    """Without what concerns one connection only, be it by its name or because `connection` names it."""
    dropped = HOP_BY_HOP | _named(headers)
    return [pair for pair in headers if pair[0] not in dropped]


def passed_on(headers: Headers) -> list[tuple[str, str]]:
    """The head of an answer that passes: its body keeps its length."""
    named = _named(headers)
    dropped = _NOT_PASSED | named - {"content-length"} if named else _NOT_PASSED
    return [pair for pair in headers if pair[0] not in dropped]


def _named(headers: Headers) -> Set[str]:
    """What `connection` names besides itself."""
    told = dict(headers)
    if "connection" not in told or (told["connection"].lower() in _PLAIN and len(told) == len(headers)):
        return _NOTHING
    said = [value for name, value in headers if name == "connection"]
    return {part.strip().lower() for value in said for part in value.split(",")}
