"""A session on a SQLite connection, its groups of jobs, and its errors."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain

from carpool.core.errors import StoreCorrupt, StoreError, StoreLocked, StoreUnwritable
from carpool.stores.operations.session import SQL, Parameters, Row, Session
from carpool.stores.operations.writer import Groups, Job, runs, work

# Every step of a statement releases the GIL, and it may take 5 ms to get it back from a busy event loop. So one
# statement inserts many rows; using only a few sizes keeps the cache of prepared statements small.
_SIZES = (8192, 4096, 2048, 1024, 512, 256, 128, 32, 8, 2, 1)


class SqliteSession(Session):
    """Only one process uses the file, with one transaction at a time. `forget` must be called before ids are used.
    `lock` is the descriptor that holds the file's lock."""

    def __init__(self, connection: sqlite3.Connection, name: str, lock: int | None = None) -> None:
        super().__init__(name, SQL)
        self.connection = connection
        self.lock = lock
        self._most_values = connection.getlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER)  # per statement

    def execute(self, text: str, parameters: Parameters = ()) -> sqlite3.Cursor:
        return self.connection.execute(text, parameters)

    def insert(self, statement: str, rows: Sequence[Row], most: int = _SIZES[0]) -> None:
        columns, start = len(rows[0]) if rows else 0, 0
        most = max(1, min(most, self._most_values // (columns or 1)))
        for size in _SIZES:
            while len(rows) - start >= size and size <= most:
                values = list(chain.from_iterable(rows[start : start + size]))
                self.connection.executemany(_with_rows(statement, size, columns), (values,))
                start += size

    def change(self, statement: str, parameters: Parameters) -> None:
        """Uses `executemany`: `execute` releases the GIL once more, for the last row's id."""
        self.connection.executemany(self.sql[statement], (parameters,))

    def new_id(self, statement: str, parameters: Parameters = ()) -> int:
        number = self.execute(self.sql[statement], parameters).lastrowid
        assert number is not None
        return number

    def close(self) -> None:
        self.connection.close()
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    def departed(self, now: float) -> list[str]:
        return sorted(self.awaiters - {row[0] for row in self.rows("engines", (now,))})

    def forget(self) -> None:
        self._credentials = dict(self.rows("credentials"))
        self._words = {self.contents.text_out(text): number for text, number in self.rows("words")}
        self._pools = {row[0]: self._pool_value(row) for row in self.rows("all_pools")}
        self._numbers = {key: number for number, key in self._pools.items()}


@cache
def _with_rows(statement: str, rows: int, columns: int) -> str:
    placeholders = f"({', '.join('?' * columns)})"
    return SQL[statement].replace("{rows}", ", ".join([placeholders] * rows))


class SqliteGroups(Groups):
    """Runs each group in one transaction, with a savepoint per run of jobs with the same work."""

    _session: SqliteSession

    def __init__(self, session: SqliteSession) -> None:
        super().__init__(session)
        self._strict = True  # the `synchronous` setting with which the file was opened

    def run(self, jobs: Sequence[Job]) -> None:
        connection = self._session.connection
        try:
            strict = not all(job.relaxed for job in jobs)
            if strict is not self._strict:  # a strict commit also syncs earlier relaxed ones
                connection.execute(f"PRAGMA synchronous = {'FULL' if strict else 'NORMAL'}")
                self._strict = strict
            connection.execute("BEGIN IMMEDIATE")
            if len(jobs) == 1:  # the transaction itself serves as savepoint
                work(self._session, jobs)
            else:
                for run in runs(jobs):
                    self._savepoint(run)
            connection.execute("COMMIT")
            self.commits += 1
        except Exception as error:  # noqa: BLE001  raised for the callers; it must not end the thread
            translated = self._callers_error(error)
            try:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                self._session.forget()
            except sqlite3.Error as second:
                translated = translate(second, self._session.name)
            for job in jobs:
                job.error = translated

    def _must_end(self, error: Exception) -> bool:
        return not self._session.connection.in_transaction  # SQLite rolled it back: disk full, I/O error

    def _translate(self, error: Exception) -> StoreError | None:
        if not isinstance(error, sqlite3.Error):
            return None
        translated = translate(error, self._session.name)
        translated.__cause__ = error
        return translated


# ------------------------------------------------------------ errors
# Translates the driver's exceptions to carpool's errors.

_UNWRITABLE = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_PERM}
_LOCKED = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_CORRUPT = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


@contextmanager
def translated(name: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise translate(error, name) from error


def translate(error: sqlite3.Error, name: str) -> StoreError:
    code = getattr(error, "sqlite_errorcode", None)
    primary = None if code is None else code & 0xFF  # the upper bits hold details that are not needed here
    if primary == sqlite3.SQLITE_FULL:
        return StoreUnwritable(f"The store {name} can't grow: the disk is full. Free some space; nothing was lost.")
    if primary in _UNWRITABLE:
        return StoreUnwritable(f"The store {name} can't be written ({error}). Check its permissions and its disk.")
    if primary in _LOCKED:
        return StoreLocked(f"Another program holds {name} locked. End it, or wait until it is done.")
    if primary in _CORRUPT:
        return StoreCorrupt(
            f"The store {name} is damaged ({error}). Restore a copy, or move it away to start with a new one."
        )
    return StoreError(f"The store {name} failed: {error}.")
