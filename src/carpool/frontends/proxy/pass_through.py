"""Pass-through: requests that carpool does not understand, and the responses of calls on `now`, unchanged."""

from __future__ import annotations

from collections.abc import AsyncIterator

from carpool.core.errors import Severed
from carpool.core.model import Headers
from carpool.core.ports import Ask, HttpRequest, RawRequest, StreamedBody
from carpool.engine import Passage, Upstream
from carpool.frontends.proxy.http.asgi import Disconnected, Send, end_to_end, head, passed_on, send_chunk
from carpool.frontends.proxy.http.connection import Inform

PASSING_S = 86_400.0  # no limit of our own: the client has its timeout


def as_it_is(raw: RawRequest, onward: Headers | None) -> Ask:
    """The client's own request: its query, its body, and all end-to-end headers (`onward`, if already known)."""
    return Ask(raw.method, _target(raw), tuple(end_to_end(raw.headers)) if onward is None else onward, raw.body)


async def pass_through(
    upstream: Upstream, raw: RawRequest, body: bytes | StreamedBody, send: Send, inform: Inform | None
) -> int:
    """Sends a request that carpool does not understand, passes the response to the client and returns its status."""
    url, headers = upstream.url(_target(raw)), tuple(end_to_end(raw.headers))
    try:
        response = await upstream.http_client.send(HttpRequest(raw.method, url, headers, body, PASSING_S, inform))
    except Severed as error:
        if isinstance(error.__cause__, Disconnected):  # the client disconnected during its upload
            raise error.__cause__ from None
        raise
    try:
        await _relay(response.status, passed_on(response.headers), response.chunks(), send)
    finally:
        await response.aclose()
    return response.status


async def pass_answer(passage: Passage, added: Headers, send: Send) -> None:
    """Streams the response of a call on `now`, with carpool's headers added."""
    try:
        await _relay(passage.status, [*passed_on(passage.headers), *added], passage.chunks, send)
    finally:
        await passage.chunks.aclose()


async def _relay(status: int, headers: list[tuple[str, str]], chunks: AsyncIterator[bytes], send: Send) -> None:
    await send(head(status, headers))
    size, length = 0, _length(headers)
    async for chunk in chunks:
        size += len(chunk)
        await send({"type": "http.response.body", "body": chunk, "more_body": size != length})
    if size != length or not size:
        await send_chunk(send, b"", more=False)


def _length(headers: list[tuple[str, str]]) -> int | None:
    """The content length. If it is known, the last chunk can be marked as the last."""
    for name, value in headers:
        if name == "content-length" and value.isdecimal():
            return int(value)
    return None


def _target(raw: RawRequest) -> str:
    return f"{raw.path}?{raw.query}" if raw.query else raw.path
