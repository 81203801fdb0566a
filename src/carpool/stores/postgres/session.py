"""A session on a PostgreSQL connection, which may be replaced by a new one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from psycopg import Connection, Cursor

from carpool.core.errors import StoreError
from carpool.core.model import PoolKey
from carpool.stores.encryption import PLAIN, Sealing
from carpool.stores.operations.codec import Row, to_json
from carpool.stores.operations.session import Parameters, Session
from carpool.stores.postgres.queries import for_driver

_FEW = 4  # rows up to which an INSERT is used; with more, COPY is worth its second round trip


class _Target(NamedTuple):
    """The target of an INSERT, for COPY."""

    copy: str
    look: str
    columns: int


class PostgresSession(Session):
    """Other processes write to the same tables, so ids that are not cached are looked up."""

    def __init__(
        self, connection: Connection[Row], name: str, sql: Mapping[str, str], sealing: Sealing = PLAIN
    ) -> None:
        super().__init__(name, sql, sealing)
        self.connection = connection
        self._doubted: frozenset[str] = frozenset()  # engines that may be dead or alive
        self._types: dict[str, list[int]] = {}  # column types by statement name

    def execute(self, text: str, parameters: Parameters = ()) -> Cursor[Row]:
        return self.connection.execute(_query(text), parameters)

    def insert(self, statement: str, rows: Sequence[Row], most: int = 0) -> None:
        if not rows:
            return
        text = self.sql[statement]
        if ":rows" in text:
            self._insert_as_json(statement, rows)
        elif len(rows) <= _FEW:
            columns = _target(text).columns  # rows for SQLite begin with ids that are not needed here
            placeholders = f"({', '.join('?' * columns)})"
            values = [value for row in rows for value in row[-columns:]]
            self.execute(text.replace("{rows}", ", ".join([placeholders] * len(rows))), values)
        else:
            self._copy(statement, rows)

    def _insert_as_json(self, statement: str, rows: Sequence[Row]) -> None:
        done = self.run(statement, {"rows": to_json(rows)}).rowcount
        if done != len(rows):
            raise Raced(f"{statement} met {len(rows) - done} rows that another transaction changed")

    def _copy(self, statement: str, rows: Sequence[Row]) -> None:
        target = _target(self.sql[statement])
        with self.connection.cursor() as cursor:
            types = self._types.get(statement)
            if types is None:
                described = cursor.execute(_query(target.look)).description or ()
                types = self._types[statement] = [column.type_code for column in described]
            with cursor.copy(_query(target.copy)) as copy:
                copy.set_types(types)
                for row in rows:
                    copy.write_row(row[-target.columns :])

    def new_id(self, statement: str, parameters: Parameters = ()) -> int:
        """Inserts a row; for a row that must be unique, returns the existing one's id."""
        known = f"{statement}_known"
        if known not in self.sql:
            row = self.row(statement, parameters)
        else:
            row = self.row(known, parameters) or self.row(statement, parameters) or self.row(known, parameters)
        if row is None:
            raise Raced(f"{statement} found its row neither there nor missing")
        return int(row[0])

    def departed(self, now: float) -> list[str]:
        return [row[0] for row in self.rows("departed", {"now": now})]

    def bury(self) -> None:
        missing = self.rows("missing")
        if any(news or dead for _, news, dead in missing):
            self.alone()
            self.run("miss")
            if dead := [row[0] for row in self.rows("bury")]:
                self.run("forget_awaiters", {"dead": to_json(dead)})
            missing = self.rows("missing")
        self._doubted = frozenset(row[0] for row in missing)

    def doubtful(self, fingerprints: str) -> list[int]:
        if not self._doubted:
            return []
        query = {"fingerprints": fingerprints, "doubted": to_json(sorted(self._doubted))}
        return [row[0] for row in self.rows("doubtful", query)]

    def in_doubt(self, fingerprint: int, credential: int, newcomer: str | None) -> bool:
        doubted = self._doubted - {newcomer}
        query = {"fingerprint": fingerprint, "credential": credential, "doubted": to_json(sorted(doubted))}
        return bool(doubted) and self.row("in_doubt", query) is not None

    def next_outcome(self) -> int:
        return 0  # PostgreSQL finds outcomes by ticket and needs no number

    def alone(self) -> None:
        self.run("alone")

    def hold(self, tickets: str) -> None:
        self.run("hold", (tickets,))

    # cached ids

    def forget(self) -> None:
        for remembered in (self._credentials, self._words, self._numbers, self._pools):
            remembered.clear()

    def known_credentials(self, names: Iterable[str]) -> list[int]:
        distinct = list(dict.fromkeys(names))
        missing = [name for name in distinct if name not in self._credentials]
        if missing:
            self._credentials.update(self.rows("known_credentials", (to_json(missing),)))
        return super().known_credentials(distinct)

    def pool_key(self, number: int) -> PoolKey:
        key = self._pools.get(number)
        if key is None:
            row = self.row("one_pool", (number,))
            if row is None:
                raise StoreError(f"The store {self.name} knows no pool {number}.")
            key = self._pools[number] = self._pool_value(row)
        return key

    def pools_of(self, names: Iterable[str]) -> str:
        return to_json([row[0] for row in self.rows("pools_of", (to_json(list(names)),))])


class Raced(Exception):
    """Another transaction was faster. Run again, this one sees its changes."""


def _query(text: str) -> str:
    """All statements come from our own files; values are bound as parameters, never inserted into the text."""
    return for_driver(text)


@cache
def _target(text: str) -> _Target:
    match = re.match(r"INSERT INTO (\w+) \(([^)]*)\)", text)
    assert match is not None
    table, columns = match[1], match[2]
    return _Target(
        f"COPY {table} ({columns}) FROM STDIN (FORMAT BINARY)",
        f"SELECT {columns} FROM {table} LIMIT 0",  # noqa: S608
        columns.count(",") + 1,
    )
