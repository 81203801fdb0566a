"""Every parser under bytes that nobody would write. A longer run, guided by coverage: `make fuzz SECONDS=600`."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .seeds import SEEDS
from .targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
EXAMPLES = 150

bytes_or_odd = st.binary(max_size=12) | st.sampled_from(
    [b"\r\n", b"\n", b"\0", b" ", b":", b'"', b"\\", b"{", b"}", b"[", b"]", b"\xff", b"9" * 30, b"e999", b"%00", b","]
)


@st.composite
def mutated(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """Something good with something wrong in it, at any place; or nothing good at all."""
    data = draw(st.sampled_from(seeds) | st.binary(max_size=200))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 20)))
        data = data[:start] + draw(bytes_or_odd) + data[end:]
    return data


@pytest.mark.parametrize("name", TARGETS)
def test_a_parser_bears_anything(name: str) -> None:
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
    @given(mutated(SEEDS[name]))
    def bears(data: bytes) -> None:
        TARGETS[name](data)

    bears()


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_good_is_borne_too(name: str) -> None:
    for seed in SEEDS[name]:
        TARGETS[name](seed)


FOUND = sorted(CORPUS.glob("*/*"))


@pytest.mark.parametrize("file", [pytest.param(file, id=f"{file.parent.name}/{file.name}") for file in FOUND])
def test_what_was_found_once_stays_mended(file: Path) -> None:
    TARGETS[file.parent.name](file.read_bytes())


def test_the_corpus_stays_small_and_known() -> None:
    assert {file.parent.name for file in FOUND} <= TARGETS.keys()
    assert sum(file.stat().st_size for file in FOUND) < 100_000
