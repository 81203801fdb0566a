"""Opens a SQLite file: checks, pragmas, migrations, the secret's check value."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from carpool.errors import StoreCorrupt, StoreError, StoreTooNew, StoreUnwritable
from carpool.stores import secret as secrets
from carpool.stores._statements import SQL, migrations

APPLICATION_ID = 0x63617270  # "carp", so that a stranger's database is not taken for ours
BUSY_MS = 5_000
MAGIC = b"SQLite format 3\0"
OLDEST_SQLITE = (3, 38, 0)

# FULL: an intent must be on the platter before money is spent, power cut or not.
_PRAGMAS = (
    f"PRAGMA busy_timeout = {BUSY_MS}",
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    "PRAGMA wal_autocheckpoint = 16000",
    "PRAGMA journal_size_limit = 67108864",
    "PRAGMA cache_size = -65536",
    "PRAGMA temp_store = MEMORY",
)


def check_path(path: str) -> None:
    """Says in a sentence what is wrong with the path, before anything is made there."""
    file = Path(path)
    if file.is_dir():
        raise StoreUnwritable(f"{path} is a directory. Name a file in it, such as {path.rstrip('/')}/carpool.db.")
    if not file.parent.is_dir():
        raise StoreUnwritable(f"The directory {file.parent} does not exist. Make it, or choose another store.")
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise StoreUnwritable(f"The directory {file.parent} can't be written. Check its permissions.")
    if file.exists() and not os.access(file, os.R_OK | os.W_OK):
        raise StoreUnwritable(f"{path} can't be read and written. Check its permissions.")


def connect(path: str | None) -> sqlite3.Connection:
    """A connection in autocommit mode, so that every transaction is begun in so many words."""
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        raise StoreError(f"SQLite {sqlite3.sqlite_version} is too old: 3.38 or newer is needed.")
    if path is not None:
        _check_header(path)
        _make_private(path)
    connection = sqlite3.connect(
        path or ":memory:", isolation_level=None, check_same_thread=False, cached_statements=512
    )
    try:
        for pragma in _PRAGMAS:
            connection.execute(pragma).fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


def _check_header(path: str) -> None:
    try:
        with Path(path).open("rb") as file:
            head = file.read(len(MAGIC))
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreUnwritable(f"{path} can't be read ({error.strerror}).") from error
    if head and head != MAGIC:
        raise StoreCorrupt(f"{path} is not a store: it is no SQLite file. Choose another file, or move it away.")


def _make_private(path: str) -> None:
    """Prompts are nobody else's business; SQLite gives its side files the mode of the main one."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise StoreUnwritable(f"{path} can't be written ({error.strerror}). Check its permissions.") from error


def migrate(connection: sqlite3.Connection, name: str) -> None:
    """Brings the schema up to date, all steps in one transaction."""
    version = version_of(connection, name)
    steps = migrations()
    newest = max(steps)
    if version == newest:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        for number in range(version + 1, newest + 1):
            for statement in _split(steps[number]):
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {newest}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def version_of(connection: sqlite3.Connection, name: str) -> int:
    """The schema's version. Raises where the file is another program's, or of a carpool to come."""
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    owner = int(connection.execute("PRAGMA application_id").fetchone()[0])
    foreign = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] > 0
    if owner != APPLICATION_ID and foreign:
        raise StoreCorrupt(f"{name} is a database of another program. Choose another file for the store.")
    newest = max(migrations())
    if version > newest:
        raise StoreTooNew(
            f"The store {name} has schema version {version}, this carpool knows {newest}. "
            "Upgrade carpool, or choose another store."
        )
    return version


def _split(script: str) -> list[str]:
    """The statements of a script; `executescript` would commit our transaction."""
    statements, current = [], ""
    for line in script.splitlines(keepends=True):
        current += line
        if sqlite3.complete_statement(current):
            statements.append(current)
            current = ""
    return statements


class SqliteMeta:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def get(self, name: str) -> str | None:
        row = self._connection.execute(SQL["meta"], (name,)).fetchone()
        return None if row is None else str(row[0])

    def make(self, name: str, value: str) -> str:
        self._connection.execute(SQL["make_meta"], (name, value))
        return self.get(name) or value


def check_secret(connection: sqlite3.Connection, secret: bytes, name: str) -> None:
    secrets.verify(secret, SqliteMeta(connection).make("secret_check", secrets.check_value(secret)), name)


def void_the_dead(connection: sqlite3.Connection) -> None:
    """Whoever used the file before us is dead, or we would not have its lock: nothing of theirs is held any more."""
    connection.execute("BEGIN IMMEDIATE")
    for statement in ("void_engines", "void_leaders", "void_owners", "void_awaiters", "void_senders"):
        connection.execute(SQL[statement])
    connection.execute("COMMIT")
