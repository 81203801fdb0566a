"""A store's file from the lock to a session that is ready, and back."""

from __future__ import annotations

import asyncio
import os
import sqlite3

from carpool.errors import StoreUnwritable
from carpool.stores._attempts import forget, left_behind
from carpool.stores._ledger import record
from carpool.stores._lock import FileLock
from carpool.stores._opening import SqliteMeta, check_path, check_secret, connect, migrate, void_the_dead
from carpool.stores._sealing import open_sealing
from carpool.stores._sqlite_session import SqliteSession
from carpool.stores._trouble import translate
from carpool.stores.secret import load_secret

_MEMORY = "in memory"

Opened = tuple[SqliteSession, FileLock | None, bytes]


async def open_aside(path: str | None, secret: bytes | None, encrypt: bool = False) -> Opened:
    """Opens in another thread. A caller that is cancelled meanwhile leaves no lock behind."""
    opening = asyncio.get_running_loop().run_in_executor(None, open_here, path, secret, encrypt)
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_discard)
        raise


def _discard(opening: asyncio.Future[Opened]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        session, lock, _ = opening.result()
        let_go(session, lock)


def let_go(session: SqliteSession, lock: FileLock | None) -> None:
    session.connection.close()
    if lock is not None:
        lock.release()


def open_here(path: str | None, secret: bytes | None, encrypt: bool = False) -> Opened:
    """The secret, where none is given, is the one in the environment or beside the file."""
    if path is None:
        secret = secret or load_secret(None, os.environ)
        return _session(None, secret, encrypt), None, secret
    try:
        real = os.path.realpath(path)  # two names of one file share one lock
        check_path(real)
    except (OSError, ValueError) as error:  # too long a name, a zero byte
        raise StoreUnwritable(f"{path!r} can't be a file ({error}). Choose another store.") from error
    lock = FileLock(real)
    lock.acquire()
    try:
        secret = secret or load_secret(real, os.environ)
        return _session(real, secret, encrypt), lock, secret
    except BaseException:
        lock.release()
        raise


def _recover(session: SqliteSession, path: str) -> None:
    """Takes the attempts on `now` that a crash kept from the ledger."""
    if entries := left_behind(path):
        session.connection.execute("BEGIN IMMEDIATE")
        record(session, entries)
        session.connection.execute("COMMIT")
    forget(path)


def _session(path: str | None, secret: bytes, encrypt: bool) -> SqliteSession:
    name = path or _MEMORY
    try:
        return _opened(path, name, secret, encrypt)
    except sqlite3.Error as error:
        raise translate(error, name) from error


def _opened(path: str | None, name: str, secret: bytes, encrypt: bool) -> SqliteSession:
    connection = connect(path)
    try:
        migrate(connection, name)
        check_secret(connection, secret, name)
        void_the_dead(connection)
        session = SqliteSession(connection, name, open_sealing(SqliteMeta(connection), secret, name, encrypt=encrypt))
        if path is not None:
            _recover(session, path)
    except BaseException:
        connection.close()
        raise
    return session
