"""The walks of `make walk`: short, and as docs/architecture.md shows them."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.walk import all_walks, documented

MOST = {
    "now: bytes → answer": 39,
    "patient: bytes → disk": 42,
    "patient: ended → settled": 37,
    "fleet.submit → disk": 38,
}
TRIES = 3  # what runs beside a call by the clock, an engine's pulse, may fall into a walk


@pytest.fixture(scope="module")
def walks() -> dict[str, set[str]]:
    shortest: dict[str, set[str]] = {}
    for _ in range(TRIES):
        for name, modules in asyncio.run(all_walks()).items():
            if name not in shortest or len(modules) < len(shortest[name]):
                shortest[name] = set(modules)
        if {name: set(modules) for name, modules in documented().items()} == shortest:
            break
    return shortest


@pytest.mark.parametrize("name", MOST)
def test_a_walk_is_short(name: str, walks: dict[str, set[str]]) -> None:
    assert len(walks[name]) <= MOST[name]


@pytest.mark.parametrize("name", MOST)
def test_the_docs_show_the_walk(name: str, walks: dict[str, set[str]]) -> None:
    shown = set(documented()[name])
    assert shown == walks[name], f"run `make walk ARGS=--write`; {sorted(shown ^ walks[name])}"
