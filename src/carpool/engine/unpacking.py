"""Reads compressed bodies, as they pass or whole. What passes is never changed; this only looks at it."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

from carpool.errors import BadCall, CallTooLarge
from carpool.model import Headers
from carpool.ports import UsageTap

T = TypeVar("T")
Unpack = Callable[[bytes], bytes]

_WINDOW = 32 + zlib.MAX_WBITS  # gzip or zlib, as the first bytes say


class Unreadable(Exception):
    """Nothing here can undo this encoding."""


def encodings(headers: Headers) -> list[str]:
    """What was done to a body, in the order in which it was done."""
    found: list[str] = []
    for name, value in headers:
        if name == "content-encoding":
            found += [part for text in value.split(",") if (part := text.strip().lower()) not in ("", "identity")]
    return found


def unpacker(encoding: str) -> Unpack:
    """An incremental decoder: chunks in, what they hold out."""
    if encoding in ("gzip", "x-gzip"):
        return _many_members()
    if encoding == "deflate":
        return _deflate()
    if encoding == "br":
        module = _optional("brotli")
        return _guarded(module.Decompressor().process, module.error)
    if encoding == "zstd":
        module = _optional("zstandard")
        return _guarded(module.ZstdDecompressor().decompressobj(read_across_frames=True).decompress, module.ZstdError)
    raise Unreadable


def _optional(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise Unreadable from None


def _guarded(decode: Callable[[T], bytes], failure: type[Exception]) -> Callable[[T], bytes]:
    def unpack(chunk: T) -> bytes:
        try:
            return decode(chunk)
        except failure as error:
            raise Unreadable from error

    return unpack


def _many_members() -> Unpack:
    """gzip files may follow each other in one body."""
    decoder = zlib.decompressobj(_WINDOW)

    def unpack(chunk: bytes) -> bytes:
        nonlocal decoder
        parts = [decoder.decompress(chunk)]
        while decoder.eof and decoder.unused_data:
            rest, decoder = decoder.unused_data, zlib.decompressobj(_WINDOW)
            parts.append(decoder.decompress(rest))
        return b"".join(parts)

    return _guarded(unpack, zlib.error)


def _deflate() -> Unpack:
    """By the book it is zlib's format; some send it bare."""
    decoder: Any = None

    def unpack(chunk: bytes) -> bytes:
        nonlocal decoder
        if decoder is None and chunk:
            decoder = zlib.decompressobj(zlib.MAX_WBITS if chunk[0] & 0x0F == 8 else -zlib.MAX_WBITS)
        return decoder.decompress(chunk) if chunk else b""

    return _guarded(unpack, zlib.error)


def read_whole(body: bytes, headers: Headers, limit: int) -> bytes:
    """A client's body as it was before it was compressed; a bomb is met before it has gone off."""
    for encoding in reversed(encodings(headers)):
        try:
            body = _bounded(body, encoding, limit + 1)
        except Unreadable:
            raise BadCall(f"carpool can't read this body with content-encoding {encoding[:40]!r}.") from None
        if len(body) > limit:
            raise CallTooLarge(f"This body is over {limit // 1_000_000} MB, the most that the provider takes.")
    return body


def _bounded(body: bytes, encoding: str, most: int) -> bytes:
    """The first bytes that a body holds, `most` of them."""
    if encoding == "zstd":
        module = _optional("zstandard")
        read = module.ZstdDecompressor(max_window_size=2**27).stream_reader(body, read_across_frames=True).read
        return _guarded(read, module.ZstdError)(most)
    if encoding == "br":
        module = _optional("brotli")
        return _guarded(partial(_brotli, module.Decompressor(), most), module.error)(body)
    if encoding in ("gzip", "x-gzip", "deflate"):
        return _guarded(partial(_inflate, encoding, most), zlib.error)(body)
    raise Unreadable


def _brotli(decoder: Any, most: int, data: bytes) -> bytes:
    found: bytes = decoder.process(data, output_buffer_limit=most)
    if len(found) < most and not decoder.is_finished():
        raise Unreadable
    return found


def _inflate(encoding: str, most: int, data: bytes) -> bytes:
    bare = encoding == "deflate" and data[:1] and data[0] & 0x0F != 8
    found = bytearray()
    while data and len(found) < most:
        decoder = zlib.decompressobj(-zlib.MAX_WBITS if bare else _WINDOW)
        found += decoder.decompress(data, most - len(found))
        if not decoder.eof and len(found) < most:
            raise Unreadable
        data = decoder.unused_data
    return bytes(found)


def reading(tap: UsageTap, headers: Headers) -> Callable[[bytes], None]:
    """Feeds the tap with what passes, compressed or not; where that can't be read, usage stays unknown."""
    feed: Callable[[bytes], None] = tap.feed
    for encoding in encodings(headers):
        try:
            feed = _through(unpacker(encoding), feed)
        except Unreadable:
            return _unread
    return feed


def _through(unpack: Unpack, feed: Callable[[bytes], None]) -> Callable[[bytes], None]:
    broken = False

    def unpacked(chunk: bytes) -> None:
        nonlocal broken
        if not broken:
            try:
                feed(unpack(chunk))
            except Unreadable:
                broken = True

    return unpacked


def _unread(chunk: bytes) -> None:
    """Passes by."""
