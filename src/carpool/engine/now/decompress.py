"""Decompresses bodies, whole or chunk by chunk. Streamed bodies are only read, never changed."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any, Protocol

from carpool.core.errors import BadCall, CallTooLarge
from carpool.core.model import Headers
from carpool.core.ports import UsageTap

_WINDOW = 32 + zlib.MAX_WBITS  # detects gzip or zlib by the first bytes
_ZSTD_WINDOW = 2**23  # the maximum that RFC 9659 allows for zstd over HTTP
_PIECE = 64 * 1024  # maximum output of one step
_ZSTD_STEP = 256  # input of one step: four bytes may expand to 128 KB, and the decoder has no output limit
_ZLIB = ("gzip", "x-gzip", "deflate")
_MAX_LAYERS = 3  # nested encodings are of no practical use
_MAX_MEMBERS = 1000  # members of a gzip body: each costs more than it contains
_RATIO = 100  # text compresses to a tenth, seldom to a thirtieth
_FREE = 4_000_000  # output allowed whatever the ratio


class Unreadable(Exception):
    """The encoding is not supported, or the data is broken or malicious."""


class _Decoder(Protocol):
    """Decodes one encoding: takes chunks, yields their content in pieces of bounded size."""

    @property
    def ended(self) -> bool:
        """Whether the content is complete, as far as the encoding tells."""

    def __call__(self, chunk: bytes) -> Iterator[bytes]: ...


def encodings(headers: Headers) -> list[str]:
    """The content encodings of a body, in the order in which they were applied."""
    if "content-encoding" not in dict(headers):
        return []
    values = [part for name, value in headers if name == "content-encoding" for part in value.split(",")]
    return [part for text in values if (part := text.strip().lower()) not in ("", "identity")]


def unpacker(encoding: str) -> _Decoder:
    if encoding in _ZLIB:
        return _ZlibDecoder(gzip=encoding != "deflate")
    if encoding == "br":
        return _BrotliDecoder()
    if encoding == "zstd":
        return _ZstdDecoder()
    raise Unreadable


def _optional(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise Unreadable from None


def _as_unreadable(decode: Callable[[bytes], bytes], failure: type[Exception]) -> Callable[[bytes], bytes]:
    def unpack(chunk: bytes) -> bytes:
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


class _ZlibDecoder:
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
                    if self._members > _MAX_MEMBERS:
                        raise Unreadable
                    self._decoder = zlib.decompressobj(_WINDOW)
                yield from _pieces(self._decoder, rest)
                rest = self._decoder.unused_data


class _BrotliDecoder:
    def __init__(self) -> None:
        module = _optional("brotli")
        self._decoder = module.Decompressor()
        self._process = _as_unreadable(partial(self._decoder.process, output_buffer_limit=_PIECE), module.error)

    @property
    def ended(self) -> bool:
        return bool(self._decoder.is_finished())

    def __call__(self, chunk: bytes) -> Iterator[bytes]:
        yield self._process(chunk)
        while not self._decoder.can_accept_more_data():
            yield self._process(b"")


class _ZstdDecoder:
    ended = True  # after any frame: the library does not tell whether another one has begun

    def __init__(self) -> None:
        module = _optional("zstandard")
        decoder = module.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj(read_across_frames=True)
        self._decompress = _as_unreadable(decoder.decompress, module.ZstdError)

    def __call__(self, chunk: bytes) -> Iterator[bytes]:
        for start in range(0, len(chunk), _ZSTD_STEP):
            yield self._decompress(chunk[start : start + _ZSTD_STEP])


def read_whole(body: bytes, headers: Headers, limit: int) -> bytes:
    """Decompresses a client's body. A decompression bomb is rejected before it expands."""
    layers = encodings(headers)
    if len(layers) > _MAX_LAYERS:
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
    """The decompressed body; at least its first `most` bytes, if it is larger."""
    decoder, output = unpacker(encoding), bytearray()
    for piece in decoder(body):
        output += piece
        if len(output) >= most:
            return bytes(output)
    if not decoder.ended:
        raise Unreadable
    return bytes(output)


def reading(tap: UsageTap, headers: Headers) -> Callable[[bytes], None]:
    """Returns a function that feeds the tap with decompressed chunks. If they can't be read, usage stays unknown."""
    feed: Callable[[bytes], None] = tap.feed
    layers = encodings(headers)
    if len(layers) > _MAX_LAYERS:
        return _ignore
    for encoding in layers:
        try:
            feed = _decoding_feed(unpacker(encoding), feed)
        except Unreadable:
            return _ignore
    return feed


def _decoding_feed(unpack: _Decoder, feed: Callable[[bytes], None]) -> Callable[[bytes], None]:
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
