"""Opens a SQLite file: checks, pragmas, migrations, the secret's check value."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from carpool.core.errors import StoreCorrupt, StoreError, StoreTooNew, StoreUnwritable
from carpool.core.keys import VirtualKey
from carpool.stores import secret as secrets
from carpool.stores.encryption import check_sealing, salt_of
from carpool.stores.operations import keys
from carpool.stores.operations.statements import SQL, migrations
from carpool.stores.secret import find_secret, verify_found
from carpool.stores.sqlite.session import SqliteSession, translate

APPLICATION_ID = 0x63617270  # "carp", so that another program's database is recognised
BUSY_MS = 5_000
MAGIC = b"SQLite format 3\0"
OLDEST_SQLITE = (3, 38, 0)

# FULL: an intent must survive a power failure, because money is spent right after it.
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
    """Raises with an explanation if no store can be at this path, before any file is created."""
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
    """Opens a connection in autocommit mode, so that transactions begin only with an explicit BEGIN."""
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        raise StoreError(f"SQLite {sqlite3.sqlite_version} is too old: 3.38 or newer is needed.")
    if path is not None:
        check_header(path)
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


def connect_to_read(path: str) -> sqlite3.Connection:
    """Opens a read-only connection that leaves no traces. A file that no process has open has no WAL, and SQLite would
    create one in order to read it; `immutable` prevents that."""
    still = "" if Path(f"{path}-wal").exists() else "&immutable=1"
    uri = f"{Path(path).absolute().as_uri()}?mode=ro{still}"
    return sqlite3.connect(uri, uri=True, isolation_level=None)


def check_header(path: str) -> None:
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
    """Creates the file with mode 0600, because it holds prompts. SQLite gives its other files the same mode."""
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
    """Returns the schema version. Raises if the file belongs to another program or to a newer carpool."""
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
    """Splits a script into statements; `executescript` would commit our transaction."""
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
    """Ends the leases and claims of all earlier users of the file: we hold the lock, so they are dead."""
    connection.execute("BEGIN IMMEDIATE")
    for statement in ("void_engines", "void_leaders", "void_owners", "void_awaiters", "void_senders"):
        connection.execute(SQL[statement])
    connection.execute("COMMIT")


# ------------------------------------------------------------ inspection
# Checks without any change whether a store can be opened, and if not, why. Opening a store does this first, so that a
# refusal leaves no file behind and does not touch the files of another program.


def real_path(path: str) -> str:
    """Resolves links, so that all names of one file share one lock. Raises if no store can be at that path."""
    try:
        real = os.path.realpath(path)
        check_path(real)
    except (OSError, ValueError) as error:  # too long a name, a zero byte
        raise StoreUnwritable(f"{path!r} can't be a file ({error}). Choose another store.") from error
    return real


def is_there(real: str) -> bool:
    """Whether the file is a store; an empty file is not one yet."""
    file = Path(real)
    return file.exists() and file.stat().st_size > 0


def inspect_file(real: str, secret: bytes | None = None, *, encrypt: bool = False) -> list[VirtualKey]:
    """Raises what opening the store would raise, except for a lock held by another process. Returns its keys."""
    if not is_there(real):
        return _inspect_new(real, encrypt)
    check_header(real)
    try:
        with closing(connect_to_read(real)) as connection:
            return _inspect(connection, real, secret, encrypt)
    except sqlite3.Error as error:
        raise translate(error, real) from error


def _inspect_new(real: str, encrypt: bool) -> list[VirtualKey]:
    find_secret(real, os.environ)
    check_sealing(None, real, encrypt=encrypt)
    return []


def _inspect(connection: sqlite3.Connection, real: str, secret: bytes | None, encrypt: bool) -> list[VirtualKey]:
    if version_of(connection, real) == 0:
        return _inspect_new(real, encrypt)
    meta = SqliteMeta(connection)
    check = meta.get("secret_check")  # read before the secret, which a process that creates the store writes first
    verify_found(secret or find_secret(real, os.environ), check, real)
    check_sealing(salt_of(meta), real, encrypt=encrypt)
    if not connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'virtual_keys'").fetchone():
        return []
    return keys.all_keys(SqliteSession(connection, real, numbers=False))
