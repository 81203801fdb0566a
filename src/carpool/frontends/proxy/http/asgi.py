"""ASGI helpers: reading requests, sending responses, and filtering headers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping, Set
from functools import lru_cache
from typing import Any

from carpool.core.errors import BadCall, CallTooLarge, CarpoolError, Closed, KeyUnready
from carpool.core.model import Headers
from carpool.core.ports import Dialect, StreamedBody

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

SMALL_BODY = 64 * 1024
JSON = ("content-type", "application/json")
EVENT_STREAM = ("content-type", "text/event-stream; charset=utf-8")
RETRY = (("retry-after", "1"), ("x-should-retry", "true"))  # the call is persisted, or was never started
NO_RETRY = ("x-should-retry", "false")  # SDKs obey it; Claude Code would otherwise retry a refused key for minutes
HOP_BY_HOP = frozenset(
    {"connection", "content-length", "expect", "host", "keep-alive", "proxy-authenticate", "proxy-authorization"}
    | {"proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
)
_NOT_PASSED_ON = HOP_BY_HOP - {"content-length"}
_NO_NAMES: frozenset[str] = frozenset()
_USUAL_VALUES = ("keep-alive", "close")


class Disconnected(Exception):
    """The client has disconnected."""


def request_headers(scope: Scope) -> Headers:
    return tuple([(_lower(name), value.decode("latin-1")) for name, value in scope["headers"]])


@lru_cache(4096)
def _lower(name: bytes) -> str:
    return name.decode("latin-1").lower()


async def read_body(receive: Receive, limit: int, setting: str = "") -> bytes:
    """The whole body. Raises `CallTooLarge` above the limit; `setting` names the config value to change.

    The pieces go into one buffer, because many small ones held until the end would fragment memory."""
    whole = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        piece = message.get("body", b"")
        if len(whole) + len(piece) > limit:
            source = f" by {setting} of its config" if setting else ""
            raise CallTooLarge(f"This body is over {limit / 1_000_000:.3g} MB, the most that carpool takes{source}.")
        if not message.get("more_body", False):
            whole += piece
            return bytes(whole) if len(whole) > len(piece) else piece
        whole += piece


class Upload:
    """A request body that is forwarded while it arrives. If its length is known and small, it is read at once."""

    def __init__(self, receive: Receive, headers: Headers) -> None:
        self._receive = receive
        self._ended = asyncio.Event()
        self._length = _content_length(headers)

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
        """Returns when the client disconnects after its body. During the body, reading it raises `Disconnected`."""
        await self._ended.wait()
        await gone(self._receive)


def _content_length(headers: Headers) -> int | None:
    """The length of the body; None if it is unknown, 0 if no header announces a body."""
    length: int | None = 0
    for name, value in headers:
        if name == "transfer-encoding":
            return None
        if name == "content-length":
            length = int(value) if value.isdecimal() else None
    return length


async def gone(receive: Receive) -> None:
    """Returns when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        continue


class Once:
    """A `send` that records whether the response has started, its status, and the dialect for errors."""

    __slots__ = ("_send", "begun", "dialect", "status")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False
        self.status = 0
        self.dialect: Dialect | None = None  # set when the provider is chosen

    def __call__(self, message: Scope) -> Awaitable[None]:
        if not self.begun:
            self.begun, self.status = True, message["status"]
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


def advice(error: CarpoolError) -> Headers:
    """The retry headers of an error: a retry helps after a shutdown, but never with an invalid request."""
    if isinstance(error, Closed):
        return RETRY
    return (NO_RETRY,) if isinstance(error, BadCall | KeyUnready) else ()


def end_to_end(headers: Headers) -> list[tuple[str, str]]:
    """The headers without hop-by-hop ones, whether known by name or listed in `connection`."""
    dropped = HOP_BY_HOP | _listed_in_connection(headers)
    return [pair for pair in headers if pair[0] not in dropped]


def passed_on(headers: Headers) -> list[tuple[str, str]]:
    """The headers of a response that is passed through: its body keeps its length."""
    listed = _listed_in_connection(headers)
    dropped = _NOT_PASSED_ON | listed - {"content-length"} if listed else _NOT_PASSED_ON
    return [pair for pair in headers if pair[0] not in dropped]


def _listed_in_connection(headers: Headers) -> Set[str]:
    """The headers listed in `connection`."""
    by_name = dict(headers)
    if "connection" not in by_name or (by_name["connection"].lower() in _USUAL_VALUES and len(by_name) == len(headers)):
        return _NO_NAMES
    values = [value for name, value in headers if name == "connection"]
    return {part.strip().lower() for value in values for part in value.split(",")}
