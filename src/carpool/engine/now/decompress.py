"""Decompresses bodies, whole or chunk by chunk. Streamed bodies are only read, never changed."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

from carpool.core.errors import BadCall, CallTooLarge
from carpool.core.model import Headers
from carpool.core.ports import UsageTap

T = TypeVar("T")
Unpack = Callable[[bytes], Iterator[bytes]]

_WINDOW = 32 + zlib.MAX_WBITS  # detects gzip or zlib by the first bytes
_ZSTD_WINDOW = 2**23  # the maximum that RFC 9659 allows for zstd over HTTP
_PIECE = 64 * 1024  # maximum output of one step
_ZSTD_STEP = 256  # input of one step: four bytes may expand to 128 KB, and the decoder has no output limit
_ZLIB = ("gzip", "x-gzip", "deflate")
_MOST_LAYERS = 3  # nested encodings are of no practical use
_MOST_MEMBERS = 1000  # members of a gzip body: each costs more than it contains
_RATIO = 100  # text compresses to a tenth, seldom to a thirtieth
_FREE = 4_000_000  # output allowed whatever the ratio


class Unreadable(Exception):
    """The encoding is not supported, or the data is broken or malicious."""


def encodings(headers: Headers) -> list[str]:
    """The content encodings of a body, in the order in which they were applied."""
    if "content-encoding" not in dict(headers):
        return []
    values = [part for name, value in headers if name == "content-encoding" for part in value.split(",")]
    return [part for text in values if (part := text.strip().lower()) not in ("", "identity")]


def unpacker(encoding: str) -> Unpack:
    """An incremental decoder: takes chunks, yields their content in pieces of bounded size."""
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


def _as_unreadable(decode: Callable[[T], bytes], failure: type[Exception]) -> Callable[[T], bytes]:
    def unpack(chunk: T) -> bytes:
        try:
            return decode(chunk)
        except failure as error:
            raise Unreadable from error

    return unpack


def _pieces(decoder: Any, data: bytes) -> Iterator[bytes]:
    """The output of a zlib decoder for the data, up to the end of the compressed stream."""
    full = True
    while data or full:
        try:
            piece = decoder.decompress(data, _PIECE)
        except zlib.error as error:
            raise Unreadable from error
        yield piece
        data = decoder.unconsumed_tail
        full = len(piece) == _PIECE and not decoder.eof  # the decoder may have more output


class _Inflater:
    """Decodes gzip, possibly with several members, or deflate: in zlib format, or raw from some senders."""

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
        for start in range(0, len(chunk), _PIECE):  # in small steps, because the data after a member is copied
            rest = chunk[start : start + _PIECE]
            while rest and (not self.ended or self._gzip):
                if self.ended:
                    self._members += 1
                    if self._members > _MOST_MEMBERS:
                        raise Unreadable
                    self._decoder = zlib.decompressobj(_WINDOW)
                yield from _pieces(self._decoder, rest)
                rest = self._decoder.unused_data


def _brotli_pieces() -> Unpack:
    module = _optional("brotli")
    decoder = module.Decompressor()
    process = _as_unreadable(partial(decoder.process, output_buffer_limit=_PIECE), module.error)

    def unpack(chunk: bytes) -> Iterator[bytes]:
        yield process(chunk)
        while not decoder.can_accept_more_data():
            yield process(b"")

    return unpack


def _zstd_pieces() -> Unpack:
    module = _optional("zstandard")
    decoder = module.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj(read_across_frames=True)
    decompress = _as_unreadable(decoder.decompress, module.ZstdError)

    def unpack(chunk: bytes) -> Iterator[bytes]:
        for start in range(0, len(chunk), _ZSTD_STEP):
            yield decompress(chunk[start : start + _ZSTD_STEP])

    return unpack


def read_whole(body: bytes, headers: Headers, limit: int) -> bytes:
    """Decompresses a client's body. A decompression bomb is rejected before it expands."""
    layers = encodings(headers)
    if len(layers) > _MOST_LAYERS:
        raise BadCall(f"This body is compressed {len(layers)} times. Compress it once, or not at all.")
    for encoding in reversed(layers):
        most = min(limit, max(_FREE, _RATIO * len(body)))
        try:
            body = _decompress_up_to(body, encoding, most + 1)
        except Unreadable:
            raise BadCall(f"carpool can't read this body with content-encoding {encoding[:40]!r}.") from None
        if len(body) > most:
            raise CallTooLarge(
                f"Unpacked, this body is over {most / 1_000_000:.3g} MB, the most that limits.max_body_mb and its "
                "packed size allow. Send it unpacked, or send less."
            )
    return body


def _decompress_up_to(body: bytes, encoding: str, most: int) -> bytes:
    """The first `most` bytes of the decompressed body."""
    if encoding == "zstd":
        module = _optional("zstandard")
        decoder = module.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
        return _as_unreadable(decoder.stream_reader(body, read_across_frames=True).read, module.ZstdError)(most)
    if encoding == "br":
        module = _optional("brotli")
        return _as_unreadable(partial(_brotli, module.Decompressor(), most), module.error)(body)
    if encoding not in _ZLIB:
        raise Unreadable
    inflater, output = _Inflater(gzip=encoding != "deflate"), bytearray()
    for piece in inflater(body):
        output += piece
        if len(output) >= most:
            break
    if len(output) < most and not inflater.ended:
        raise Unreadable
    return bytes(output)


def _brotli(decoder: Any, most: int, data: bytes) -> bytes:
    output: bytes = decoder.process(data, output_buffer_limit=most)
    if len(output) < most and not decoder.is_finished():
        raise Unreadable
    return output


def reading(tap: UsageTap, headers: Headers) -> Callable[[bytes], None]:
    """Returns a function that feeds the tap with decompressed chunks. If they can't be read, usage stays unknown."""
    feed: Callable[[bytes], None] = tap.feed
    layers = encodings(headers)
    if len(layers) > _MOST_LAYERS:
        return _ignore
    for encoding in layers:
        try:
            feed = _decoding_feed(unpacker(encoding), feed)
        except Unreadable:
            return _ignore
    return feed


def _decoding_feed(unpack: Unpack, feed: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """Stops reading at a suspicious ratio. The body still passes to the client, but its usage stays unknown."""
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


def _ignore(chunk: bytes) -> None:
    """Ignores a body that can't be read."""
