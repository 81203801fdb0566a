"""Serialises HTTP/1.1 requests: heads and bodies."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import lru_cache

from carpool.core.errors import NotConnected
from carpool.core.model import Headers
from carpool.core.ports import HttpRequest, StreamedBody

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_TARGET = re.compile(r"[!-~]+")
_FRAMING = ("content-length", "transfer-encoding")
BLOCK = 64 * 1024


class Unmade(Exception):
    """The body could not be produced as announced, so the request was aborted."""


def head_of(request: HttpRequest, authority: str, target: str, host: str) -> bytes:
    """Returns request line and headers. Refuses values that could inject further headers."""
    try:
        before, after = _around_framing(request.method, authority, target, request.headers)
    except ValueError:
        raise NotConnected(f"This is no request that can be sent to {host}.") from None
    return before + _framing(request) + after


@lru_cache(512)  # a client sends the same headers with every call; like the keyring, in memory only
def _around_framing(method: str, authority: str, target: str, headers: Headers) -> tuple[bytes, bytes]:
    """Returns the parts of the head before and after the framing header, which depends on the body."""
    before, after = [f"{method} {target} HTTP/1.1", f"host: {authority}"], list[str]()
    lines = before
    for name, value in headers:
        lower = name.lower()
        if lower in _FRAMING:
            lines = after
        elif lower != "host":
            lines.append(f"{name}: {value}")
            if not _TOKEN.fullmatch(name):
                raise ValueError("This is no name of a header.")
    text = "".join([*before, *after])
    if "\n" in text or "\r" in text or "\0" in text or not _TARGET.fullmatch(target):
        raise ValueError("A line break would begin another header.")
    return "\r\n".join([*before, ""]).encode("latin-1"), "\r\n".join([*after, "", ""]).encode("latin-1")


def _framing(request: HttpRequest) -> bytes:
    """Returns the framing header: content-length, or chunked encoding if the length is unknown."""
    length = request.body.length if isinstance(request.body, StreamedBody) else len(request.body)
    if length is None:
        return b"transfer-encoding: chunked\r\n"
    if length or request.method in ("POST", "PUT", "PATCH"):
        return b"content-length: %d\r\n" % length
    return b""


def framed(request: HttpRequest) -> list[tuple[str, str]]:
    """Returns the request's headers with the framing header for its body."""
    headers = [(name, value) for name, value in request.headers if name.lower() not in _FRAMING]
    if line := _framing(request):
        name, _, value = line.decode().strip().partition(": ")
        headers.append((name, value))
    return headers


async def blocks(body: StreamedBody) -> AsyncGenerator[bytes, None]:
    """Yields the body in blocks of at least `BLOCK` bytes, because each block costs a pass through the client. Raises
    `Unmade` if the total is not the announced length.

    A live body is not buffered: its producer may wait for the effect of the last piece.
    """
    sent = 0
    async with aclosing(_joined(body.pieces, 1 if body.live else BLOCK)) as joined:
        async for block in joined:
            sent += len(block)
            if body.length is not None and sent > body.length:
                raise Unmade(f"The body is longer than the {body.length} bytes announced.")
            yield block
    if body.length is not None and sent != body.length:
        raise Unmade(f"The body ended after {sent} of the {body.length} bytes announced.")


async def _joined(pieces: AsyncIterator[bytes], least: int) -> AsyncGenerator[bytes, None]:
    """Joins pieces until they have the size. Yields no empty block: with chunked encoding it would end the body."""
    buffered: list[bytes] = []
    size = 0
    async for piece in pieces:
        buffered.append(piece)
        size += len(piece)
        if size >= least:
            yield b"".join(buffered)
            buffered.clear()
            size = 0
    if size:
        yield b"".join(buffered)


async def sliced(body: bytes) -> AsyncGenerator[bytes, None]:
    view = memoryview(body)
    for start in range(0, len(body), BLOCK):
        yield bytes(view[start : start + BLOCK])
