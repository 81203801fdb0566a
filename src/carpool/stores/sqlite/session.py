"""A session on a SQLite connection."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import cache
from itertools import chain

from carpool.core.errors import StoreCorrupt, StoreError, StoreLocked, StoreUnwritable
from carpool.stores.encryption import PLAIN, Sealing
from carpool.stores.operations.codec import Row
from carpool.stores.operations.session import Parameters, Session
from carpool.stores.operations.statements import SQL

# Every step of a statement releases the GIL, and it may take 5 ms to get it back from a busy event loop. So one
# statement inserts many rows; using only a few sizes keeps the cache of prepared statements small.
_SIZES = (8192, 4096, 2048, 1024, 512, 256, 128, 32, 8, 2, 1)


class SqliteSession(Session):
    def __init__(
        self, connection: sqlite3.Connection, name: str, sealing: Sealing = PLAIN, *, numbers: bool = True
    ) -> None:
        super().__init__(name, SQL, sealing)
        self.connection = connection
        self._most_values = connection.getlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER)  # per statement
        if numbers:
            self.forget()

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

    def departed(self, now: float) -> list[str]:
        return sorted(self.awaiters - {row[0] for row in self.rows("engines", (now,))})

    # Only one process uses the file, with one transaction at a time, so there is nothing to lock.

    def alone(self) -> None:
        pass

    def hold(self, tickets: str) -> None:
        pass

    def forget(self) -> None:
        self._credentials = dict(self.rows("credentials"))
        self._words = {self.sealing.text_out(text): number for text, number in self.rows("words")}
        self._pools = {row[0]: self._pool_value(row) for row in self.rows("all_pools")}
        self._numbers = {key: number for number, key in self._pools.items()}

    def bury(self) -> None:
        """Does nothing: engines of earlier processes were voided when the file was opened."""

    def doubtful(self, fingerprints: str) -> list[int]:
        return []

    def in_doubt(self, fingerprint: int, credential: int, newcomer: str | None) -> bool:
        return False

    def next_outcome(self) -> int:
        row = self.row("next_outcome")
        return 1 if row is None else row[0]


@cache
def _with_rows(statement: str, rows: int, columns: int) -> str:
    placeholders = f"({', '.join('?' * columns)})"
    return SQL[statement].replace("{rows}", ", ".join([placeholders] * rows))


# ------------------------------------------------------------ errors
# Translates the driver's exceptions to carpool's errors.

_UNWRITABLE = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_PERM}
_LOCKED = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_CORRUPT = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


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
        return StoreCorrupt(f"The store {name} is damaged ({error}). Restore a copy, or move it away to start anew.")
    return StoreError(f"The store {name} failed: {error}.")
