"""The few words of ASGI that the proxy speaks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from carpool.errors import CallTooLarge
from carpool.model import Headers

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

HOP_BY_HOP = frozenset(
    {"connection", "content-length", "expect", "host", "keep-alive", "proxy-authenticate", "proxy-authorization"}
    | {"proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
)


class Disconnected(Exception):
    """The client is gone."""


def request_headers(scope: Scope) -> Headers:
    return tuple((name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"])


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


async def gone(receive: Receive) -> None:
    """Returns when the client has hung up."""
    while (await receive())["type"] != "http.disconnect":
        continue


class Once:
    """A `send` that remembers whether the answer has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

    async def __call__(self, message: Scope) -> None:
        self.begun = True
        await self._send(message)


async def send_head(send: Send, status: int, headers: Iterable[tuple[str, str]]) -> None:
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    await send({"type": "http.response.start", "status": status, "headers": encoded})


async def send_chunk(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def send_whole(send: Send, status: int, headers: Iterable[tuple[str, str]], body: bytes) -> None:
    await send_head(send, status, (*headers, ("content-length", str(len(body)))))
    await send_chunk(send, body, more=False)


def end_to_end(headers: Headers) -> list[tuple[str, str]]:
    """Without what concerns one connection only, be it by its name or because `connection` names it."""
    named = {part.strip().lower() for name, value in headers if name == "connection" for part in value.split(",")}
    return [pair for pair in headers if pair[0] not in HOP_BY_HOP and pair[0] not in named]


def passed_on(headers: Headers) -> list[tuple[str, str]]:
    """The head of an answer that passes: its body keeps its length."""
    return end_to_end(headers) + [pair for pair in headers if pair[0] == "content-length"]
