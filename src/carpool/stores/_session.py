"""A connection and what is remembered beside it: the numbers of credentials and pools."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any

from carpool.errors import StoreError
from carpool.model import PoolKey
from carpool.stores._codec import Row, headers_text, headers_value, to_json
from carpool.stores._sealing import PLAIN, Sealing
from carpool.stores._statements import SQL

# Every step of a statement gives up the interpreter's lock, and a busy event loop takes 5 ms to give it back. So many
# rows go into one statement; the few sizes keep the cache of prepared statements small.
_SIZES = (2048, 1024, 512, 256, 128, 32, 8, 2, 1)
_MOST_VALUES = 32_766  # of one statement, by SQLite's own default

Parameters = Sequence[Any] | Mapping[str, Any]


class Session:
    """Used by one thread at a time, inside a transaction that its driver begins and ends."""

    def __init__(
        self, connection: sqlite3.Connection, name: str, sealing: Sealing = PLAIN, *, numbers: bool = True
    ) -> None:
        self.connection = connection
        self.name = name
        self.sealing = sealing
        self.awaiters: set[str] = set()  # every engine that a call was ever said to be awaited by
        self._credentials: dict[str, int] = {}
        self._words: dict[str, int] = {}
        self._numbers: dict[PoolKey, int] = {}
        self._pools: dict[int, PoolKey] = {}
        if numbers:
            self.forget()

    def run(self, statement: str, parameters: Parameters = ()) -> sqlite3.Cursor:
        return self.connection.execute(SQL[statement], parameters)

    def change(self, statement: str, parameters: Parameters) -> None:
        """As `run`, where nothing is to be read: `execute` gives the lock up once more, for the last row's id."""
        self.connection.executemany(SQL[statement], (parameters,))

    def row(self, statement: str, parameters: Parameters = ()) -> Row | None:
        found: Row | None = self.run(statement, parameters).fetchone()
        return found

    def rows(self, statement: str, parameters: Parameters = ()) -> list[Row]:
        return self.run(statement, parameters).fetchall()

    def insert(self, statement: str, rows: Sequence[Row]) -> None:
        """Runs an INSERT with its `{rows}` filled in, many rows at a time."""
        columns, start = len(rows[0]) if rows else 0, 0
        for size in _SIZES:
            while len(rows) - start >= size and size * columns <= _MOST_VALUES:
                values = list(chain.from_iterable(rows[start : start + size]))
                self.connection.executemany(_with_rows(statement, size, columns), (values,))
                start += size

    # numbers

    def forget(self) -> None:
        """Reads the numbers anew: after a rollback the remembered ones may never have been written."""
        self._credentials = dict(self.rows("credentials"))
        self._words = {self.sealing.text_out(text): number for text, number in self.rows("words")}
        self._pools = {row[0]: self._pool_value(row) for row in self.rows("all_pools")}
        self._numbers = {key: number for number, key in self._pools.items()}

    def credential(self, name: str) -> int:
        number = self._credentials.get(name)
        if number is None:
            number = self._credentials[name] = _new_id(self.run("insert_credential", (name,)))
        return number

    def word(self, text: str) -> int:
        number = self._words.get(text)
        if number is None:
            number = self._words[text] = _new_id(self.run("insert_word", (self.sealing.text_in(text),)))
        return number

    def next_outcome(self) -> int:
        row = self.row("next_outcome")
        return 1 if row is None else row[0]

    def known_credentials(self, names: Iterable[str]) -> list[int]:
        return [self._credentials[name] for name in dict.fromkeys(names) if name in self._credentials]

    def pool(self, key: PoolKey) -> int:
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = _new_id(self.run("insert_pool", self._pool_row(key)))
            self._pools[number] = key
        return number

    def pool_key(self, number: int) -> PoolKey:
        if number not in self._pools:
            raise StoreError(f"The store {self.name} knows no pool {number}.")
        return self._pools[number]

    def pools_of(self, names: Iterable[str]) -> str:
        """The numbers of all pools of these credentials, as JSON."""
        wanted = set(names)
        return to_json([number for number, key in self._pools.items() if key.credential in wanted])

    def _pool_row(self, key: PoolKey) -> Row:
        return (
            self.credential(key.credential),
            key.provider,
            key.dialect,
            key.endpoint,
            self.sealing.text_in(headers_text(key.headers)),
            key.model,
            key.size_class,
            key.deadline_class,
        )

    def _pool_value(self, row: Row) -> PoolKey:
        _, provider, dialect, credential, endpoint, headers, model, size_class, deadline_class = row
        said = headers_value(self.sealing.text_out(headers))
        return PoolKey(provider, dialect, credential, endpoint, said, model, size_class, deadline_class)


@cache
def _with_rows(statement: str, rows: int, columns: int) -> str:
    placeholders = f"({', '.join('?' * columns)})"
    return SQL[statement].replace("{rows}", ", ".join([placeholders] * rows))


def _new_id(cursor: sqlite3.Cursor) -> int:
    assert cursor.lastrowid is not None
    return cursor.lastrowid
