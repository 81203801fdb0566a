"""Simulated worlds on PostgreSQL: the same engine, the same checks, another store, driven by virtual time."""

from __future__ import annotations

import os
import subprocess
import sys

import psycopg
import pytest

from carpool.sim import draw, simulate
from tests.support.deep import quick_and_deep
from tests.support.postgres import shared_url, swept_url

# Several engines, which crash and are stopped. Worlds in which nobody has to wait for days: those take minutes here.
QUICK = (86, 100, 122)
SEEDS = (14, 15, 34, 43, 71, 75, *QUICK, 101, 116)


@pytest.mark.parametrize("seed", quick_and_deep(SEEDS, QUICK))
def test_a_world_keeps_the_promises_on_postgres(seed: int) -> None:
    """And writes the same log as in memory: whatever an engine asks, both stores answer alike."""
    report = simulate(seed, store=swept_url())
    again = f'make sim SEED={seed} ARGS="--store postgres"'
    assert not report.problems, f"{again}\n" + "\n".join(report.problems)
    assert report.log == simulate(seed).log, again


def test_several_engines_share_the_store() -> None:
    assert all(draw(seed).engines > 1 for seed in SEEDS)
    assert any(draw(seed).crashes and draw(seed).stops for seed in SEEDS)


def test_the_command_line_runs_worlds_on_a_server_and_leaves_nothing_there() -> None:
    environment = {**os.environ, "CARPOOL_TEST_POSTGRES": shared_url()}
    words = [sys.executable, "-m", "carpool.sim", "2", "--first", "100", "--store", "postgres"]
    ran = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "2 seeds" in ran.stdout
    with psycopg.connect(shared_url()) as connection:
        assert not connection.execute("SELECT nspname FROM pg_namespace WHERE nspname ~ '^sim_'").fetchall()


@pytest.mark.parametrize("store", ["carpool.db", "postgresql://nobody:hidden@127.0.0.1:1/none"])
def test_a_store_that_is_no_server_is_a_sentence(store: str) -> None:
    words = [sys.executable, "-m", "carpool.sim", "2", "--store", store]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1
    assert "hidden" not in ran.stderr
