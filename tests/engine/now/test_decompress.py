"""Compressed bodies: read whole within a bound, and read along while they pass."""

import gzip
import tracemalloc
import zlib
from collections.abc import Callable

import brotli
import pytest
import zstandard

from carpool.core.errors import BadCall, CallTooLarge
from carpool.core.model import Headers
from carpool.engine.now import decompress

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
    assert decompress.read_whole(pack(TEXT), under(encoding), len(TEXT)) == TEXT


@pytest.mark.parametrize("step", [1, 7, 100_000])
@pytest.mark.parametrize(("encoding", "pack"), PACKED)
def test_what_passes_is_read_along(encoding: str, pack: Callable[[bytes], bytes], step: int) -> None:
    heard, data = Heard(), pack(TEXT)
    feed = decompress.reading(heard, under(encoding))
    for start in range(0, len(data), step):
        feed(data[start : start + step])
    assert heard.data == TEXT


@pytest.mark.parametrize(("encoding", "pack"), [pair for pair in PACKED if pair[0] != "identity"])
def test_a_bomb_is_refused_before_it_has_gone_off(encoding: str, pack: Callable[[bytes], bytes]) -> None:
    with pytest.raises(CallTooLarge):
        decompress.read_whole(pack(b"0" * 20_000_000), under(encoding), 1_000_000)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "compress", "nonsense"])
def test_what_can_not_be_read_is_said(encoding: str) -> None:
    with pytest.raises(BadCall, match="can't read"):
        decompress.read_whole(b"\x00this is neither", under(encoding), 1_000_000)


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("br", brotli.compress), ("deflate", bare)])
def test_half_a_body_is_not_taken_for_a_whole(encoding: str, pack: Callable[[bytes], bytes]) -> None:
    with pytest.raises(BadCall, match="can't read"):
        decompress.read_whole(pack(TEXT)[:-20], under(encoding), 1_000_000)


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "nonsense"])
def test_what_passes_unreadable_disturbs_nobody(encoding: str) -> None:
    heard = Heard()
    feed = decompress.reading(heard, under(encoding))
    for _ in range(3):
        feed(b"\x00 not compressed at all")
    assert heard.data == b""


@pytest.mark.parametrize(("encoding", "pack"), [pair for pair in PACKED if pair[0] != "identity"])
def test_a_bomb_that_passes_takes_no_memory_and_is_given_up(encoding: str, pack: Callable[[bytes], bytes]) -> None:
    """A provider's answer is not bounded, and what it unpacks to is nothing that anybody needs."""
    packed, fed = pack(b"0" * 40_000_000), 0

    class Counting(Heard):
        def feed(self, chunk: bytes) -> None:
            nonlocal fed
            fed += len(chunk)

    feed = decompress.reading(Counting(), under(encoding))
    tracemalloc.start()
    try:
        feed(packed)
        feed(packed)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20_000_000
    assert fed < 20_000_000


def test_members_without_end_are_given_up() -> None:
    with pytest.raises(BadCall, match="can't read"):
        decompress.read_whole(gzip.compress(b"") * 100_000, under("gzip"), 1_000_000)


def test_nobody_packs_four_times() -> None:
    with pytest.raises(BadCall, match="compressed 4 times"):
        decompress.read_whole(b"", under("gzip, gzip, gzip, gzip"), 1_000_000)
    heard = Heard()
    decompress.reading(heard, under("gzip, gzip, gzip, gzip"))(TEXT)
    assert heard.data == b""


def test_what_packs_unusually_well_is_read_all_the_same() -> None:
    """Up to some size nobody asks how well."""
    plain = b"0" * 3_000_000
    assert decompress.read_whole(gzip.compress(plain), under("gzip"), 32_000_000) == plain
    with pytest.raises(CallTooLarge, match="over 4 MB"):
        decompress.read_whole(gzip.compress(plain * 3), under("gzip"), 32_000_000)
