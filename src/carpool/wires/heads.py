"""The heads of requests, as they stand on the wire."""

from __future__ import annotations

import re
from functools import lru_cache

from carpool.errors import NotConnected
from carpool.model import Headers
from carpool.ports import StreamedBody, WireRequest

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_TARGET = re.compile(r"[!-~]+")
_FRAMING = ("content-length", "transfer-encoding")


def head_of(request: WireRequest, authority: str, target: str, host: str) -> bytes:
    """The request's line and headers. What could be taken for more than that is refused."""
    before, after = _around(request.method, authority, target, request.headers, host)
    return before + _framing(request) + after


@lru_cache(512)  # a client sends the same headers with every call; in memory only, as the keyring
def _around(method: str, authority: str, target: str, headers: Headers, host: str) -> tuple[bytes, bytes]:
    """What stands before and after the framing, which is each body's own."""
    before, after = [f"{method} {target} HTTP/1.1", f"host: {authority}"], list[str]()
    lines = before
    for name, value in headers:
        lower = name.lower()
        if lower in _FRAMING:
            lines = after
        elif lower != "host":
            lines.append(f"{name}: {value}")
            if not _TOKEN.fullmatch(name):
                raise _unfit(host)
    text = "".join([*before, *after])
    if "\n" in text or "\r" in text or "\0" in text or not _TARGET.fullmatch(target):
        raise _unfit(host)
    try:
        return "\r\n".join([*before, ""]).encode("latin-1"), "\r\n".join([*after, "", ""]).encode("latin-1")
    except UnicodeEncodeError:
        raise _unfit(host) from None


def _unfit(host: str) -> NotConnected:
    return NotConnected(f"This is no request that can be sent to {host}.")


def _framing(request: WireRequest) -> bytes:
    """Its length, and chunks only where nobody knows it."""
    length = request.body.length if isinstance(request.body, StreamedBody) else len(request.body)
    if length is None:
        return b"transfer-encoding: chunked\r\n"
    if length or request.method in ("POST", "PUT", "PATCH"):
        return b"content-length: %d\r\n" % length
    return b""
