"""Simulated worlds on PostgreSQL: the same engine, the same checks, another store, driven by virtual time."""

from __future__ import annotations

import pytest
from servers import swept_url

from carpool.sim import draw, simulate

SEEDS = (14, 34, 71, 75, 122)  # several engines, which crash and are stopped


@pytest.mark.parametrize("seed", SEEDS)
def test_a_world_keeps_the_promises_on_postgres(seed: int) -> None:
    report = simulate(seed, store=swept_url())
    assert not report.problems, f"seed {seed}\n" + "\n".join(report.problems)


def test_both_stores_tell_the_same_story() -> None:
    assert simulate(45, store=swept_url()).story == simulate(45).story


def test_several_engines_share_the_store() -> None:
    assert all(draw(seed).engines > 1 for seed in SEEDS)
    assert any(draw(seed).crashes and draw(seed).stops for seed in SEEDS)
