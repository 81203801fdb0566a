"""Bytes that travel through untouched: requests that carpool does not understand, and the answers of calls on `now`."""

from __future__ import annotations

from collections.abc import AsyncIterator

from carpool.doors.asgi import Disconnected, Send, end_to_end, head, passed_on, send_chunk
from carpool.doors.proxy.connection import Inform
from carpool.engine import Passage, Upstream
from carpool.errors import Severed
from carpool.model import Headers
from carpool.ports import Ask, RawRequest, StreamedBody, WireRequest

PASSING_S = 86_400.0  # how long silence may last is the client's to say


def upgrade_refused(path: str, headers: Headers) -> int | None:
    """The status for a client that asks for a WebSocket. 426 sends one that can do without back to HTTP at once."""
    if not any(name == "upgrade" and value.lower() == "websocket" for name, value in headers):
        return None
    return 426 if path == "/v1/responses" else 501


def as_it_is(raw: RawRequest, onward: Headers | None) -> Ask:
    """The client's own request: its query, its bytes, and every header that is not about its connection (`onward`,
    where it is known already)."""
    return Ask(raw.method, _target(raw), tuple(end_to_end(raw.headers)) if onward is None else onward, raw.body)


async def pass_through(
    upstream: Upstream, raw: RawRequest, body: bytes | StreamedBody, send: Send, inform: Inform | None
) -> int:
    """Gives the provider's answer to a request that carpool does not understand, and says its status."""
    url, headers = upstream.url(_target(raw)), tuple(end_to_end(raw.headers))
    try:
        response = await upstream.wire.send(WireRequest(raw.method, url, headers, body, PASSING_S, inform))
    except Severed as error:
        if isinstance(error.__cause__, Disconnected):  # the client left amid its upload
            raise error.__cause__ from None
        raise
    try:
        await _relay(response.status, passed_on(response.headers), response.chunks(), send)
    finally:
        await response.aclose()
    return response.status


async def pass_answer(passage: Passage, said: Headers, send: Send) -> int:
    """The answer of a call on `now` as it comes, with what carpool says of it; how many bytes that were."""
    try:
        return await _relay(passage.status, [*passed_on(passage.headers), *said], passage.chunks, send)
    finally:
        await passage.chunks.aclose()


async def _relay(status: int, headers: list[tuple[str, str]], chunks: AsyncIterator[bytes], send: Send) -> int:
    await send(head(status, headers))
    size, length = 0, _length(headers)
    async for chunk in chunks:
        size += len(chunk)
        await send({"type": "http.response.body", "body": chunk, "more_body": size != length})
    if size != length or not size:
        await send_chunk(send, b"", more=False)
    return size


def _length(headers: list[tuple[str, str]]) -> int | None:
    """Known beforehand, the last chunk can be sent as such."""
    for name, value in headers:
        if name == "content-length" and value.isdecimal():
            return int(value)
    return None


def _target(raw: RawRequest) -> str:
    return f"{raw.path}?{raw.query}" if raw.query else raw.path
