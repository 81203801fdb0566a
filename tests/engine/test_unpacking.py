"""Compressed bodies: read whole within a bound, and read along while they pass."""

import gzip
import zlib
from collections.abc import Callable

import brotli
import pytest
import zstandard

from carpool.engine import unpacking
from carpool.errors import BadCall, CallTooLarge
from carpool.model import Headers

TEXT = b'{"text": "' + b"several words, and some more; " * 500 + b'"}'


def bare(data: bytes) -> bytes:
    return zlib.compress(data)[2:-4]


def two_members(data: bytes) -> bytes:
    return gzip.compress(data[:100]) + gzip.compress(data[100:])


PACKED: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("gzip", gzip.compress),
    ("X-Gzip", gzip.compress),
    ("gzip", two_members),
    ("deflate", zlib.compress),
    ("deflate", bare),
    ("br", brotli.compress),
    ("zstd", zstandard.compress),
    ("identity", bytes),
    ("gzip, br", lambda data: brotli.compress(gzip.compress(data))),
]


def under(encoding: str) -> Headers:
    return (("content-encoding", encoding),)


class Heard:
    def __init__(self) -> None:
        self.data = b""

    def feed(self, chunk: bytes) -> None:
        self.data += chunk

    def usage(self) -> None:
        return None


@pytest.mark.parametrize(("encoding", "pack"), PACKED)
def test_a_whole_body_is_read(encoding: str, pack: Callable[[bytes], bytes]) -> None:
    assert unpacking.read_whole(pack(TEXT), under(encoding), len(TEXT)) == TEXT


@pytest.mark.parametrize("step", [1, 7, 100_000])
@pytest.mark.parametrize(("encoding", "pack"), PACKED)
def test_what_passes_is_read_along(encoding: str, pack: Callable[[bytes], bytes], step: int) -> None:
    heard, data = Heard(), pack(TEXT)
    feed = unpacking.reading(heard, under(encoding))
    for start in range(0, len(data), step):
        feed(data[start : start + step])
    assert heard.data == TEXT


@pytest.mark.parametrize(("encoding", "pack"), [pair for pair in PACKED if pair[0] != "identity"])
def test_a_bomb_is_refused_before_it_has_gone_off(encoding: str, pack: Callable[[bytes], bytes]) -> None:
    with pytest.raises(CallTooLarge):
        unpacking.read_whole(pack(b"0" * 20_000_000), under(encoding), 1_000_000)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "compress", "nonsense"])
def test_what_can_not_be_read_is_said(encoding: str) -> None:
    with pytest.raises(BadCall, match="can't read"):
        unpacking.read_whole(b"\x00this is neither", under(encoding), 1_000_000)


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("br", brotli.compress), ("deflate", bare)])
def test_half_a_body_is_not_taken_for_a_whole(encoding: str, pack: Callable[[bytes], bytes]) -> None:
    with pytest.raises(BadCall, match="can't read"):
        unpacking.read_whole(pack(TEXT)[:-20], under(encoding), 1_000_000)


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "nonsense"])
def test_what_passes_unreadable_disturbs_nobody(encoding: str) -> None:
    heard = Heard()
    feed = unpacking.reading(heard, under(encoding))
    for _ in range(3):
        feed(b"\x00 not compressed at all")
    assert heard.data == b""
