"""A session on a PostgreSQL connection, which may be replaced by a new one; its statements and its errors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

import psycopg
from psycopg import Connection, Cursor

from carpool.core.errors import StoreAway, StoreError, StoreUnwritable
from carpool.core.model import PoolKey
from carpool.stores.operations.session import Parameters, Row, Session, load_statements, to_json

SHARDS = 64  # rows that each count is spread over, so that processes don't wait for each other's locks

_DATABASE_CLOCK = "extract(epoch FROM clock_timestamp())::float8"
_CALLERS_CLOCK = ":now"
# Whether the backend process of an engine's connection is gone. Of other users' backends only the pid is visible.
_MISSING = """backend IS NOT NULL AND pulse_until > 0 AND NOT EXISTS (
  SELECT 1 FROM pg_stat_get_activity(backend) one WHERE coalesce(one.backend_start = backend_since, true)
)"""
# While the same server runs, a live process reconnects within moments. After a restart or a fail-over it may first have
# to notice that the old server is gone, which can take longer: then the pulse decides.
_DEAD = f"""CASE WHEN server_since = pg_postmaster_start_time()
  THEN coalesce(missed_at <= clock_timestamp() - interval '5 seconds', false)
  ELSE missed_at IS NOT NULL AND pulse_until < {_DATABASE_CLOCK} END"""
_LISTS = {"numbers": "ANY (ARRAY(SELECT json_array_elements_text({}::json)::bigint))"}
_LISTS |= {"names": "ANY (ARRAY(SELECT json_array_elements_text({}::json)))"}

_FEW = 4  # rows up to which an INSERT is used; with more, COPY is worth its second round trip


class _Target(NamedTuple):
    """The target of an INSERT, for COPY."""

    copy: str
    query: str
    columns: int


class PostgresSession(Session):
    """Other processes write to the same tables, so ids that are not cached are looked up."""

    def __init__(self, connection: Connection[Row], name: str, *, own_clock: bool = True) -> None:
        super().__init__(name, statements(own_clock))
        self.connection = connection
        self._types: dict[str, list[int]] = {}  # column types by statement name

    def execute(self, text: str, parameters: Parameters = ()) -> Cursor[Row]:
        return self.connection.execute(for_driver(text), parameters)

    def insert(self, statement: str, rows: Sequence[Row], most: int = 0) -> None:
        if not rows:
            return
        text = self.sql[statement]
        if ":rows" in text:
            done = self.run(statement, {"rows": to_json(rows)}).rowcount
            if done != len(rows):
                raise WriteConflict(f"{statement} met {len(rows) - done} rows that another transaction changed")
        elif len(rows) <= _FEW:
            columns = _target(text).columns  # rows for SQLite begin with ids that are not needed here
            placeholders = f"({', '.join('?' * columns)})"
            values = [value for row in rows for value in row[-columns:]]
            self.execute(text.replace("{rows}", ", ".join([placeholders] * len(rows))), values)
        else:
            self._copy(statement, rows)

    def _copy(self, statement: str, rows: Sequence[Row]) -> None:
        target = _target(self.sql[statement])
        with self.connection.cursor() as cursor:
            types = self._types.get(statement)
            if types is None:
                described = cursor.execute(for_driver(target.query)).description or ()
                types = self._types[statement] = [column.type_code for column in described]
            with cursor.copy(for_driver(target.copy)) as copy:
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
            raise WriteConflict(f"{statement} found its row neither there nor missing")
        return int(row[0])

    def close(self) -> None:
        self.connection.close()

    def departed(self, now: float) -> list[str]:
        return [row[0] for row in self.rows("departed", {"now": now})]

    def mark_dead_engines(self) -> None:
        missing = self.rows("missing")
        if any(news or dead for _, news, dead in missing):
            self.alone()
            self.run("miss")
            if dead := [row[0] for row in self.rows("mark_dead_engines")]:
                self.run("forget_awaiters", {"dead": to_json(dead)})
            missing = self.rows("missing")
        self.doubted = frozenset(row[0] for row in missing)

    def alone(self) -> None:
        self.run("alone")

    def hold(self, tickets: str) -> None:
        self.run("hold", (tickets,))

    # cached ids

    def forget(self) -> None:
        for remembered in (self._credentials, self._words, self._numbers, self._pools):
            remembered.clear()

    def known_credentials(self, names: Iterable[str]) -> list[int]:
        names = list(names)
        missing = [name for name in names if name not in self._credentials]
        if missing:
            self._credentials.update(self.rows("known_credentials", (to_json(missing),)))
        return super().known_credentials(names)

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


class WriteConflict(Exception):
    """Another transaction was faster. Run again, this one sees its changes."""


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


# ------------------------------------------------------------ statements


@cache
def statements(own_clock: bool) -> dict[str, str]:
    """Loads the statements. `own_clock`: leases use the database's clock; otherwise the caller's, for a simulation."""
    clock = _DATABASE_CLOCK if own_clock else _CALLERS_CLOCK
    live = f"(SELECT name FROM engines WHERE pulse_until >= {clock})"  # noqa: S608
    words = {"missing": _MISSING, "dead": _DEAD, "database_clock": _DATABASE_CLOCK}
    words |= {"clock": clock, "shard": f"pg_backend_pid() % {SHARDS}"}
    # `{numbers :tickets}` matches any element of a list that is passed as JSON.
    return {
        name: re.sub(r"\{(numbers|names) ([:?\w]+)\}", lambda match: _LISTS[match[1]].format(match[2]), text)
        for name, text in load_statements("postgres", live, words).items()
    }


@cache
def for_driver(text: str) -> str:
    """Converts the placeholders `?` and `:name` to psycopg's. All statements come from our own files; values are bound
    as parameters, never inserted into the text."""
    text = re.sub(r"(?<!:):(?!:)([a-z_]+)", r"%(\1)s", text.replace("%", "%%"))
    return text.replace("?", "%s")


# ------------------------------------------------------------ errors
# Translates the driver's exceptions to carpool's errors. Leaves out the server's details: they may quote data.

# Unique keys that two transactions may insert at the same time: run again, the second one finds the row.
_TWINS = {"calls_key", "entries_pkey"}
_AGAIN = {"40001", "40P01", "55P03"}  # serialization failure, deadlock, lock not available
_LATER = {"53300", "57P01", "57P02", "57P03", "57P04", "57P05", "25P03", "25P04"}  # no slot, starting, shutting down
_NO_ROOM = ("File too large", "Disk quota exceeded")  # the server has no error codes for these
_REFUSED = ("28", "3D", "3F", "42")  # wrong user, database, schema or rights: a retry does not help


def lost(error: BaseException, connection: psycopg.Connection[object]) -> bool:
    """Whether the connection is lost, or must be replaced."""
    return connection.closed or connection.broken or state_of(error) in _LATER


def again(error: BaseException) -> bool:
    """Whether the same transaction may succeed if it is run again immediately."""
    if isinstance(error, WriteConflict) or state_of(error) in _AGAIN:
        return True
    return isinstance(error, psycopg.errors.UniqueViolation) and error.diag.constraint_name in _TWINS


def is_permanent(error: BaseException) -> bool:
    """Whether a failed attempt to connect would fail again every time."""
    if state_of(error).startswith(_REFUSED):
        return True
    return any(word in str(error) for word in ("authentication failed", "no pg_hba.conf", "does not exist"))


def state_of(error: BaseException) -> str:
    return (error.sqlstate or "") if isinstance(error, psycopg.Error) else ""


def translate(error: BaseException, name: str) -> StoreError:
    primary = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    lines = (primary or str(error)).strip().splitlines()  # only the first one is shown: further lines may quote rows
    state, message = state_of(error), lines[0].rstrip(".") if lines else type(error).__name__
    if state == "53100" or any(text in message for text in _NO_ROOM):
        return StoreUnwritable(f"The store {name} can't grow: the disk is full. Free some space; nothing was lost.")
    if state in ("25006", "42501"):
        return StoreUnwritable(
            f"The store {name} can't be written ({message}). Check the server and the user's rights."
        )
    if state == "53300" or "too many clients" in message or "connection slots" in message:
        return StoreAway(
            f"The store {name} has no connection left. Raise the server's max_connections, or run fewer processes."
        )
    if state.startswith("22") or (not state and isinstance(error, psycopg.DataError)):
        return StoreError(f"The store {name} can't hold such a value: {message}.")
    if state == "57014":
        return StoreAway(f"The store {name} took too long to answer. Look at the server's load and locks.")
    if isinstance(error, psycopg.OperationalError):
        return StoreAway(f"The store {name} can't be reached ({message}). Check its address and that the server runs.")
    return StoreError(f"The store {name} failed: {message}.")
