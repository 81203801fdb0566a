"""Stores: they implement `ports.Store`. `open_store` finds the right one for a URL."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote

from carpool.errors import ConfigError, StoreError
from carpool.model import Totals
from carpool.ports import Store
from carpool.stores import _calls, _ledger
from carpool.stores._drivers import carries_password, is_postgres, postgres_module, shown
from carpool.stores._opening import migrate
from carpool.stores._sqlite_session import SqliteSession
from carpool.stores._trouble import translate
from carpool.stores.secret import load_secret
from carpool.stores.sqlite import SqliteStore

__all__ = ["SqliteStore", "carries_password", "check_url", "load_secret", "open_inline", "open_store"]
__all__ += ["peek", "shown", "sqlite_path"]

_SQLITE = "sqlite://"


async def open_store(url: str | Path | None, *, secret: bytes | None = None, encrypt: bool = False) -> Store:
    """None keeps everything in memory; a path or `sqlite:///path` is a SQLite file, `postgresql://…` a database that
    many processes may share. `encrypt`: what it writes of calls and answers can be read with the secret only."""
    if is_postgres(url):
        opened: Store = await postgres_module().PostgresStore.open(str(url), secret=secret, encrypt=encrypt)
        return opened
    return await SqliteStore.open(sqlite_path(url), secret=secret, encrypt=encrypt)


async def open_inline(url: str | None, secret: bytes) -> Store:
    """One that works in the caller's thread, never suspends, and takes the time that callers say: for a simulation."""
    if is_postgres(url):
        asked = {"threaded": False, "own_clock": False, "secret": secret}
        opened: Store = await postgres_module().PostgresStore.open(url, **asked)
        return opened
    return await SqliteStore.open(sqlite_path(url), threaded=False, secret=secret)


async def peek(url: str | Path) -> tuple[list[Totals], Mapping[str, int]]:
    """The ledger's sums and the counts by state of a store, also while another process works on it."""
    if is_postgres(url):
        return await asyncio.to_thread(postgres_module().look, str(url))
    path = sqlite_path(url)
    if path is None:
        raise ConfigError("A store in memory can't be looked at from outside. Name the store's file.")
    return await asyncio.to_thread(_peek, path)


def check_url(url: str | Path | None) -> None:
    """Raises where this names no store."""
    if is_postgres(url):
        postgres_module().address_of(str(url))
    else:
        sqlite_path(url)


def _peek(path: str) -> tuple[list[Totals], Mapping[str, int]]:
    """Read-only and without the lock, so that it disturbs nobody."""
    file = Path(path)
    if not os.path.isfile(file):  # noqa: PTH113  unlike Path.is_file it never raises
        raise StoreError(f"There is no store at {path}. Name the file that carpool keeps its calls in.")
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)) as db:
            if db.execute("SELECT count(*) FROM sqlite_schema").fetchone() == (0,):
                return [], {}
            migrate(db, path)  # on a read-only connection it can only check
            db.execute("BEGIN")  # both as of one moment
            session = SqliteSession(db, path, numbers=False)
            return _ledger.totals(session), _calls.counts(session)
    except sqlite3.Error as error:
        raise translate(error, path) from error


def sqlite_path(url: str | Path | None) -> str | None:
    """The file that a store URL names; None means memory."""
    if url is None:
        return None
    text = str(url)
    scheme, separator, _ = text.partition("://")
    if not separator or isinstance(url, Path):
        return _file(text)
    if scheme != "sqlite":
        raise ConfigError(
            f"{scheme}:// is not a store. Use a path, sqlite:///path, postgresql://…, or leave it out to use memory."
        )
    if not text.startswith(_SQLITE + "/"):
        raise ConfigError(f"{text} names no file. Write sqlite:///carpool.db, or sqlite:////var/lib/carpool.db.")
    return _file(unquote(text.removeprefix(_SQLITE + "/")))


def _file(text: str) -> str | None:
    if not text:
        raise ConfigError("The store's path is empty. Name a file, or leave the store out to use memory.")
    return None if text == ":memory:" else str(Path(text).expanduser())
