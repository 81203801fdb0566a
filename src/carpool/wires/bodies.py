"""Request bodies on their way out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

from carpool.ports import StreamedBody, WireRequest

BLOCK = 64 * 1024
_FRAMING = ("content-length", "transfer-encoding")


class Unmade(Exception):
    """The body could not be made as announced, so the request was broken off."""


def framed(request: WireRequest) -> list[tuple[str, str]]:
    """The request's headers, with the framing that this body needs: its length, and chunks only where it has none."""
    headers = [(name, value) for name, value in request.headers if name.lower() not in _FRAMING]
    length = request.body.length if isinstance(request.body, StreamedBody) else len(request.body)
    if length is None:
        headers.append(("transfer-encoding", "chunked"))
    elif length or request.method.upper() in ("POST", "PUT", "PATCH"):
        headers.append(("content-length", str(length)))
    return headers


async def blocks(body: StreamedBody, progress: Callable[[], None] = lambda: None) -> AsyncGenerator[bytes, None]:
    """The body in blocks of some size, because each block costs a trip through the client; exactly its length.

    A live body is not gathered: whoever makes it may wait for what its last piece brings about.

    `progress` is called whenever the client comes for more.
    """
    sent = 0
    async with aclosing(_each(body.pieces) if body.live else _joined(body.pieces)) as joined:
        async for block in joined:
            sent += len(block)
            if body.length is not None and sent > body.length:
                raise Unmade(f"The body is longer than the {body.length} bytes announced.")
            progress()
            yield block
    if body.length is not None and sent != body.length:
        raise Unmade(f"The body ended after {sent} of the {body.length} bytes announced.")


async def _each(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    async for piece in pieces:
        if piece:
            yield piece


async def _joined(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    waiting: list[bytes] = []
    size = 0
    async for piece in pieces:
        waiting.append(piece)
        size += len(piece)
        if size >= BLOCK:
            yield b"".join(waiting)
            waiting.clear()
            size = 0
    if waiting:
        yield b"".join(waiting)


async def sliced(body: bytes) -> AsyncGenerator[bytes, None]:
    view = memoryview(body)
    for start in range(0, len(body), BLOCK):
        yield bytes(view[start : start + BLOCK])
