"""A throwaway PostgreSQL for tests: one for all of them, or one that `CARPOOL_TEST_POSTGRES` names.

It is started when the first test needs it, and shared by all workers of a run; each store has a schema of its own. It
lives under the run's folder and goes with the last process that used it.
"""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path
from uuid import uuid4

from carpool.sim import databases
from carpool.sim.databases import HASTY, Server, sweep

__all__ = ["HASTY", "Server", "schema_url", "shared_url", "swept_url"]


@cache
def shared_url() -> str:
    named = os.environ.get(databases.NAMED_BY)
    if named:
        return named
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or uuid4().hex
    return Server(Path(tempfile.gettempdir()) / f"carpool-postgres-{run[:12]}", **HASTY).url


def schema_url(base: str | None = None) -> str:
    """The address of a store that nobody else has."""
    return databases.schema_url(base or shared_url(), f"t_{uuid4().hex[:16]}")


@cache
def _own_schema() -> str:
    return f"t_{uuid4().hex[:16]}"


def swept_url() -> str:
    """The address of this process's one store, emptied: to make one anew takes longer than most tests."""
    sweep(shared_url(), _own_schema())
    return databases.schema_url(shared_url(), _own_schema())
