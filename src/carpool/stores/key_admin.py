"""Manages the virtual keys of a store, even while `carpool serve` uses it."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from pathlib import Path

from carpool.core.errors import ConfigError, StoreError
from carpool.core.keys import VirtualKey
from carpool.stores import sqlite_path
from carpool.stores.addresses import is_postgres, no_store, postgres_module
from carpool.stores.operations import keys
from carpool.stores.operations.session import Session
from carpool.stores.operations.statements import migrations
from carpool.stores.secret import load_secret
from carpool.stores.sqlite.files import let_go, open_here
from carpool.stores.sqlite.opening import check_secret, connect, inspect_file, is_there, real_path, version_of
from carpool.stores.sqlite.session import SqliteSession, translate

Decide = Callable[[list[VirtualKey]], Sequence[VirtualKey]]


class KeyAdmin:
    """Reads and changes virtual keys. `transaction` locks the keys against other writers."""

    def __init__(
        self, session: Session, pepper: bytes, transaction: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._session = session
        self._transaction = transaction
        self.pepper = pepper

    def standing(self) -> list[VirtualKey]:
        loaded = keys.keys(self._session, None)
        return [] if loaded is None else loaded[1]

    def change(self, decide: Decide) -> None:
        """Passes the current keys to `decide` and writes what it returns, in one transaction. If it raises, nothing
        changes."""
        with self._transaction():
            keys.write_keys(self._session, decide(self.standing()))


def open_keys(url: str | Path | None, *, make: bool = False) -> AbstractContextManager[KeyAdmin]:
    """Opens the keys of the store that a URL names. A missing store is created only with `make`."""
    if not is_postgres(url):
        return open_key_admin(sqlite_path(url), make=make)
    return _open_postgres(str(url), make)


@contextmanager
def _open_postgres(url: str, make: bool) -> Iterator[KeyAdmin]:
    with postgres_module().open_alone(url, make=make) as (session, secret, transaction):
        yield KeyAdmin(session, secret, transaction)


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
def open_key_admin(path: str | None, *, make: bool = False) -> Iterator[KeyAdmin]:
    """Opens the keys of a SQLite store; `path` as returned by `sqlite_path`. A missing store is created only with
    `make`."""
    if path is None:
        raise ConfigError("Keys are kept in a store, and one in memory is gone at once. Name the store's file.")
    real = real_path(path)
    there = is_there(real)
    if not there and not make:
        raise StoreError(no_store(path))
    inspect_file(real)
    try:
        with _connected(real, there) as connection:
            secret = load_secret(real, os.environ)
            check_secret(connection, secret, real)
            yield KeyAdmin(SqliteSession(connection, real, numbers=False), secret, partial(_immediate, connection))
    except sqlite3.Error as error:
        raise translate(error, real) from error


@contextmanager
def _connected(real: str, there: bool) -> Iterator[sqlite3.Connection]:
    if there:
        with closing(connect(real)) as connection:
            if version_of(connection, real) == max(migrations()):
                yield connection
                return
    # Creating or migrating a store requires that no other process has it open.
    session, lock, _ = open_here(real, None)
    try:
        yield session.connection
    finally:
        let_go(session, lock)
