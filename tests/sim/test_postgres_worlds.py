"""Simulated worlds on PostgreSQL: the same engine, the same checks, another store, driven by virtual time."""

from __future__ import annotations

import os
import subprocess
import sys

import psycopg
import pytest
from servers import shared_url, swept_url

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


def test_the_command_line_runs_worlds_on_a_server_and_leaves_nothing_there() -> None:
    environment = {**os.environ, "CARPOOL_TEST_POSTGRES": shared_url()}
    words = [sys.executable, "-m", "carpool.sim", "2", "--first", "34", "--store", "postgres"]
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
