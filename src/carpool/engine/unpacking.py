"""Reads compressed bodies, as they pass or whole. What passes is never changed; this only looks at it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

from carpool.errors import BadCall, CallTooLarge
from carpool.model import Headers
from carpool.ports import UsageTap

T = TypeVar("T")
Unpack = Callable[[bytes], Iterator[bytes]]

_WINDOW = 32 + zlib.MAX_WBITS  # gzip or zlib, as the first bytes say
_ZSTD_WINDOW = 2**23  # the most that RFC 9659 allows where zstd is sent over HTTP
_PIECE = 64 * 1024  # what is unpacked at a time
_ZSTD_STEP = 256  # bytes in at a time: four may hold 128 KB, and its decoder can't be told to stop
_ZLIB = ("gzip", "x-gzip", "deflate")
_MOST_LAYERS = 3  # nobody packs in earnest what is packed already
_MOST_MEMBERS = 1000  # of a gzip body: each costs more than it holds
_RATIO = 100  # text packs to a tenth, seldom to a thirtieth
_FREE = 4_000_000  # so much may come of anything, however little went in


class Unreadable(Exception):
    """Nothing here can undo this encoding, or nobody should."""


def encodings(headers: Headers) -> list[str]:
    """What was done to a body, in the order in which it was done."""
    found: list[str] = []
    if "content-encoding" not in dict(headers):
        return found
    for name, value in headers:
        if name == "content-encoding":
            found += [part for text in value.split(",") if (part := text.strip().lower()) not in ("", "identity")]
    return found


def unpacker(encoding: str) -> Unpack:
    """An incremental decoder: chunks in, what they hold out, in pieces of a bounded size."""
    if encoding in _ZLIB:
        return _Inflater(gzip=encoding != "deflate")
    if encoding == "br":
        return _brotli_pieces()
    if encoding == "zstd":
        return _zstd_pieces()
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


def _pieces(decoder: Any, data: bytes) -> Iterator[bytes]:
    """What a zlib decoder makes of the data, up to the end of what it decodes."""
    decompress, full = _guarded(partial(_decompress, decoder), zlib.error), True
    while data or full:
        piece = decompress(data)
        yield piece
        data = decoder.unconsumed_tail
        full = len(piece) == _PIECE and not decoder.eof  # it may hold more than it could give


def _decompress(decoder: Any, data: bytes) -> bytes:
    piece: bytes = decoder.decompress(data, _PIECE)
    return piece


class _Inflater:
    """gzip, of which several files may follow each other in one body; or deflate: zlib's format by the book, bare from
    some."""

    def __init__(self, *, gzip: bool) -> None:
        self._gzip = gzip
        self._decoder: Any = zlib.decompressobj(_WINDOW) if gzip else None
        self._members = 1

    @property
    def ended(self) -> bool:
        return self._decoder is not None and bool(self._decoder.eof)

    def __call__(self, chunk: bytes) -> Iterator[bytes]:
        if self._decoder is None and chunk:
            self._decoder = zlib.decompressobj(zlib.MAX_WBITS if chunk[0] & 0x0F == 8 else -zlib.MAX_WBITS)
        for start in range(0, len(chunk), _PIECE):  # what is left of a member's data is copied for the next
            rest = chunk[start : start + _PIECE]
            while rest and (not self.ended or self._gzip):
                if self.ended:
                    self._next()
                yield from _pieces(self._decoder, rest)
                rest = self._decoder.unused_data

    def _next(self) -> None:
        self._members += 1
        if self._members > _MOST_MEMBERS:
            raise Unreadable
        self._decoder = zlib.decompressobj(_WINDOW)


def _brotli_pieces() -> Unpack:
    module = _optional("brotli")
    decoder = module.Decompressor()
    process = _guarded(partial(decoder.process, output_buffer_limit=_PIECE), module.error)

    def unpack(chunk: bytes) -> Iterator[bytes]:
        yield process(chunk)
        while not decoder.can_accept_more_data():
            yield process(b"")

    return unpack


def _zstd_pieces() -> Unpack:
    module = _optional("zstandard")
    decoder = module.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj(read_across_frames=True)
    decompress = _guarded(decoder.decompress, module.ZstdError)

    def unpack(chunk: bytes) -> Iterator[bytes]:
        for start in range(0, len(chunk), _ZSTD_STEP):
            yield decompress(chunk[start : start + _ZSTD_STEP])

    return unpack


def read_whole(body: bytes, headers: Headers, limit: int) -> bytes:
    """A client's body as it was before it was compressed; a bomb is met before it has gone off."""
    layers = encodings(headers)
    if len(layers) > _MOST_LAYERS:
        raise BadCall(f"This body is packed {len(layers)} times over. Pack it once, or not at all.")
    for encoding in reversed(layers):
        most = min(limit, max(_FREE, _RATIO * len(body)))
        try:
            body = _bounded(body, encoding, most + 1)
        except Unreadable:
            raise BadCall(f"carpool can't read this body with content-encoding {encoding[:40]!r}.") from None
        if len(body) > most:
            raise CallTooLarge(
                f"Unpacked, this body is over {most / 1_000_000:.3g} MB, the most that limits.max_body_mb and its "
                "packed size allow. Send it unpacked, or send less."
            )
    return body


def _bounded(body: bytes, encoding: str, most: int) -> bytes:
    """The first bytes that a body holds, `most` of them."""
    if encoding == "zstd":
        module = _optional("zstandard")
        decoder = module.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
        return _guarded(decoder.stream_reader(body, read_across_frames=True).read, module.ZstdError)(most)
    if encoding == "br":
        module = _optional("brotli")
        return _guarded(partial(_brotli, module.Decompressor(), most), module.error)(body)
    if encoding in _ZLIB:
        return _inflate(_Inflater(gzip=encoding != "deflate"), most, body)
    raise Unreadable


def _brotli(decoder: Any, most: int, data: bytes) -> bytes:
    found: bytes = decoder.process(data, output_buffer_limit=most)
    if len(found) < most and not decoder.is_finished():
        raise Unreadable
    return found


def _inflate(unpack: _Inflater, most: int, data: bytes) -> bytes:
    found = bytearray()
    for piece in unpack(data):
        found += piece
        if len(found) >= most:
            break
    if len(found) < most and not unpack.ended:
        raise Unreadable
    return bytes(found)


def reading(tap: UsageTap, headers: Headers) -> Callable[[bytes], None]:
    """Feeds the tap with what passes, compressed or not; where that can't be read, usage stays unknown."""
    feed: Callable[[bytes], None] = tap.feed
    layers = encodings(headers)
    if len(layers) > _MOST_LAYERS:
        return _unread
    for encoding in layers:
        try:
            feed = _through(unpacker(encoding), feed)
        except Unreadable:
            return _unread
    return feed


def _through(unpack: Unpack, feed: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """Nothing but a bomb holds so much more than went in: it passes, and what it used stays unknown."""
    broken, taken, given = False, 0, 0

    def unpacked(chunk: bytes) -> None:
        nonlocal broken, taken, given
        if broken:
            return
        taken += len(chunk)
        try:
            for piece in unpack(chunk):
                given += len(piece)
                broken = given > max(_FREE, _RATIO * taken)
                if broken:
                    return
                feed(piece)
        except Unreadable:
            broken = True

    return unpacked


def _unread(chunk: bytes) -> None:
    """Passes by."""
