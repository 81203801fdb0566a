"""The virtual keys of a store, for whoever manages them: also while a `carpool serve` works on it."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from pathlib import Path

from carpool.errors import ConfigError, StoreError, StoreUnwritable
from carpool.keys import VirtualKey
from carpool.stores import _keys, sqlite_path
from carpool.stores._drivers import is_postgres, postgres_module
from carpool.stores._files import let_go, open_here
from carpool.stores._opening import check_path, check_secret, connect, version_of
from carpool.stores._session import Session
from carpool.stores._sqlite_session import SqliteSession
from carpool.stores._statements import migrations
from carpool.stores._trouble import translate
from carpool.stores.secret import load_secret

Decide = Callable[[list[VirtualKey]], Sequence[VirtualKey]]


class Cabinet:
    """`transaction`: makes what is done in it one change, with nobody between."""

    def __init__(
        self, session: Session, pepper: bytes, transaction: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._session = session
        self._transaction = transaction
        self.pepper = pepper

    def standing(self) -> list[VirtualKey]:
        found = _keys.keys(self._session, None)
        return [] if found is None else found[1]

    def change(self, decide: Decide) -> None:
        """Writes what `decide` makes of the keys that stand, with nobody between. What it raises changes nothing."""
        with self._transaction():
            _keys.write_keys(self._session, decide(self.standing()))


def open_keys(url: str | Path | None, *, make: bool = False) -> AbstractContextManager[Cabinet]:
    """The keys of the store that a URL names. One that is missing is made only where `make` says so."""
    if not is_postgres(url):
        return open_cabinet(sqlite_path(url), make=make)
    return _postgres_cabinet(str(url), make)


@contextmanager
def _postgres_cabinet(url: str, make: bool) -> Iterator[Cabinet]:
    with postgres_module().open_alone(url, make=make) as (session, secret, transaction):
        yield Cabinet(session, secret, transaction)


@contextmanager
def _immediate(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


@contextmanager
def open_cabinet(path: str | None, *, make: bool = False) -> Iterator[Cabinet]:
    """`path` as `sqlite_path` gives it. A store that is missing is made only where `make` says so."""
    if path is None:
        raise ConfigError("Keys are kept in a store, and one in memory is gone at once. Name the store's file.")
    try:
        real = os.path.realpath(path)
        check_path(real)
        there = Path(real).exists() and Path(real).stat().st_size > 0
    except (OSError, ValueError) as error:
        raise StoreUnwritable(f"{path!r} can't be a file ({error}). Choose another store.") from error
    if not there and not make:
        raise StoreError(f"There is no store at {path}. Name the file that carpool keeps its calls in.")
    try:
        with _connected(real, there) as connection:
            secret = load_secret(real, os.environ)
            check_secret(connection, secret, real)
            yield Cabinet(SqliteSession(connection, real, numbers=False), secret, partial(_immediate, connection))
    except sqlite3.Error as error:
        raise translate(error, real) from error


@contextmanager
def _connected(real: str, there: bool) -> Iterator[sqlite3.Connection]:
    if there:
        with closing(connect(real)) as connection:
            if version_of(connection, real) == max(migrations()):
                yield connection
                return
    # To make a store, or to bring it up to date, nobody else may have it open.
    session, lock, _ = open_here(real, None)
    try:
        yield session.connection
    finally:
        let_go(session, lock)
