"""Opens and closes a SQLite store: file lock, connection, recovery, session."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3

from carpool.core.errors import StoreLocked, StoreUnwritable
from carpool.stores.encryption import open_sealing
from carpool.stores.operations.ledger import record
from carpool.stores.secret import load_secret
from carpool.stores.sqlite.attempts import forget, left_behind
from carpool.stores.sqlite.opening import (
    SqliteMeta,
    check_secret,
    connect,
    inspect_file,
    migrate,
    real_path,
    void_the_dead,
)
from carpool.stores.sqlite.session import SqliteSession, translate

# ------------------------------------------------------------ lock
# Only one process may use a store file. The operating system releases the lock when its holder dies.


class FileLock:
    """Held from `acquire` to `release`. The lock file contains the holder's pid, for the error message only."""

    def __init__(self, path: str) -> None:
        self._store = path
        self._path = f"{path}.lock"
        self._descriptor: int | None = None

    def acquire(self) -> None:
        descriptor = self._open()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 20).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            raise StoreLocked(
                f"The store {self._store} is in use by process {holder}. Stop that process, or choose another store."
            ) from None
        except OSError as error:
            os.close(descriptor)
            raise StoreUnwritable(f"{self._path} can't be locked ({error.strerror}). Use a local disk.") from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        self._descriptor = descriptor

    def _open(self) -> int:
        try:
            return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreUnwritable(
                f"The store {self._store} can't be locked: {self._path} can't be written ({error.strerror})."
            ) from error

    def release(self) -> None:
        # The file stays: after a removal, two processes could lock two different files of the same name.
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_MEMORY = "in memory"

Opened = tuple[SqliteSession, FileLock | None, bytes]


async def open_aside(path: str | None, secret: bytes | None, encrypt: bool = False) -> Opened:
    """Opens in another thread. If the caller is cancelled meanwhile, connection and lock are released."""
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
    """Opens in this thread. Without a `secret`, uses the one from the environment or from the file beside the store."""
    if path is None:
        secret = secret or load_secret(None, os.environ)
        return _session(None, secret, encrypt), None, secret
    real = real_path(path)
    inspect_file(real, secret, encrypt=encrypt)
    lock = FileLock(real)
    lock.acquire()
    try:
        secret = secret or load_secret(real, os.environ)
        return _session(real, secret, encrypt), lock, secret
    except BaseException:
        lock.release()
        raise


def _recover(session: SqliteSession, path: str) -> None:
    """Enters the attempts on `now` that a crash left out of the ledger."""
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
