"""Many rows in one statement: all of them arrive, whatever their number, and none is too many for SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

import pytest

from carpool.stores.operations.session import SQL
from carpool.stores.sqlite.session import SqliteSession

DEFAULT_LIMIT = 32_766  # of values in one statement; distributions may raise it


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[SqliteSession]:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, DEFAULT_LIMIT)
    connection.execute("CREATE TABLE things (a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q)")
    monkeypatch.setitem(SQL, "insert_things", "INSERT INTO things VALUES {rows}")
    yield SqliteSession(connection, "things")
    connection.close()


def wide(count: int) -> list[tuple[int, ...]]:
    return [(number, *range(16)) for number in range(count)]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 31, 255, 1023, 1927, 1928, 2048, 5000])
def test_every_row_arrives_once_and_in_order(session: SqliteSession, count: int) -> None:
    session.insert("insert_things", wide(count))
    found = session.connection.execute("SELECT a FROM things ORDER BY rowid").fetchall()
    assert [row[0] for row in found] == list(range(count))


@pytest.mark.parametrize(("limit", "statements"), [(8_000, 4), (DEFAULT_LIMIT, 1)])
def test_as_many_rows_as_this_sqlite_allows_go_into_one_statement(
    session: SqliteSession, monkeypatch: pytest.MonkeyPatch, limit: int, statements: int
) -> None:
    monkeypatch.setitem(SQL, "insert_narrow", "INSERT INTO things (a, b, c) VALUES {rows}")
    connection, seen = session.connection, list[str]()
    connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, limit)
    connection.set_trace_callback(seen.append)
    SqliteSession(connection, "things").insert("insert_narrow", [(n, 1, 2) for n in range(8192)])
    connection.set_trace_callback(None)
    assert len(seen) == statements


@pytest.mark.parametrize("most", [0, 1, 7, 100])
def test_no_statement_has_more_rows_than_it_may(session: SqliteSession, most: int) -> None:
    seen: list[int] = []
    session.connection.set_trace_callback(lambda text: seen.append(text.count("),") + 1))
    session.insert("insert_things", wide(300), most=most)
    session.connection.set_trace_callback(None)
    assert sum(seen) == 300
    assert max(seen) <= max(most, 1)
