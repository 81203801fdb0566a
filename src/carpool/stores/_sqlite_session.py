"""A session on a SQLite connection."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import cache
from itertools import chain

from carpool.stores._codec import Row
from carpool.stores._sealing import PLAIN, Sealing
from carpool.stores._session import Parameters, Session
from carpool.stores._statements import SQL

# Every step of a statement gives up the interpreter's lock, and a busy event loop takes 5 ms to give it back. So many
# rows go into one statement; the few sizes keep the cache of prepared statements small.
_SIZES = (8192, 4096, 2048, 1024, 512, 256, 128, 32, 8, 2, 1)


class SqliteSession(Session):
    def __init__(
        self, connection: sqlite3.Connection, name: str, sealing: Sealing = PLAIN, *, numbers: bool = True
    ) -> None:
        super().__init__(name, SQL, sealing)
        self.connection = connection
        self._most_values = connection.getlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER)  # of one statement
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
        """`execute` gives the lock up once more, for the last row's id."""
        self.connection.executemany(self.sql[statement], (parameters,))

    def new_id(self, statement: str, parameters: Parameters = ()) -> int:
        number = self.execute(self.sql[statement], parameters).lastrowid
        assert number is not None
        return number

    def departed(self, now: float) -> list[str]:
        return sorted(self.awaiters - {row[0] for row in self.rows("engines", (now,))})

    # One process works on the file, and one transaction at a time.

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
        """Those of other processes were voided when the file was opened."""

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
