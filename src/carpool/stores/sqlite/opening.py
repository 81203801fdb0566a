"""Opens a SQLite store: checks, file lock, pragmas, migrations, the secret, recovery.

Before anything is created or changed, `inspect_file` checks whether the store can be opened, and if not, why: a refusal
leaves no file behind and does not touch the files of another program. Then the lock is taken: only one process may use
the file, so all engines that are stored in it are dead, and what they owned is free. Last, the attempts on `now` that a
crash left next to the file are entered in the ledger.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import msgspec

from carpool.core.errors import ConfigError, StoreCorrupt, StoreError, StoreLocked, StoreTooNew, StoreUnwritable
from carpool.core.keys import VirtualKey
from carpool.core.model import Entry, Totals
from carpool.stores.encryption import check_sealing, unseal
from carpool.stores.operations import calls, forecasts, ledger
from carpool.stores.operations.session import migrations, no_store, older_store
from carpool.stores.operations.shapes import CallRecord
from carpool.stores.secret import find_secret, find_store_secret, load_secret, secret_file, settle_secret
from carpool.stores.sqlite.session import SqliteSession, translated

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


def take_lock(store: str) -> int:
    """Returns a descriptor that holds the lock until it is closed. The lock file contains the holder's pid, for the
    error message only. It stays: after a removal, two processes could lock two different files of the same name."""
    path = f"{store}.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreUnwritable(
            f"The store {store} can't be locked: {path} can't be written ({error.strerror})."
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 20).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        raise StoreLocked(
            f"The store {store} is in use by process {holder}. Stop that process, or choose another store."
        ) from None
    except OSError as error:
        os.close(descriptor)
        raise StoreUnwritable(f"{path} can't be locked ({error.strerror}). Use a local disk.") from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


def connect(path: str | None) -> sqlite3.Connection:
    """Opens a connection in autocommit mode, so that transactions begin only with an explicit BEGIN."""
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        raise StoreError(f"SQLite {sqlite3.sqlite_version} is too old: 3.38 or newer is needed.")
    if path is not None:
        check_header(path)
        try:  # private, because it holds prompts; SQLite gives its other files the same mode
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise StoreUnwritable(f"{path} can't be written ({error.strerror}). Check its permissions.") from error
    connection = sqlite3.connect(
        path or ":memory:", isolation_level=None, check_same_thread=False, cached_statements=512
    )
    with ExitStack() as stack:
        stack.callback(connection.close)
        for pragma in _PRAGMAS:
            connection.execute(pragma).fetchall()
        stack.pop_all()
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


def migrate(connection: sqlite3.Connection, name: str) -> None:
    """Brings the schema up to date, all steps in one transaction."""
    version, steps = version_of(connection, name), migrations()
    newest = max(steps)
    if version == newest:
        return
    with immediate(connection):
        statement = ""
        for line in "".join(steps[number] for number in range(version + 1, newest + 1)).splitlines(keepends=True):
            statement += line
            if sqlite3.complete_statement(statement):  # `executescript` would commit our transaction
                connection.execute(statement)
                statement = ""
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {newest}")


def version_of(connection: sqlite3.Connection, name: str) -> int:
    """Returns the schema version. Raises if the file belongs to another program or to a newer carpool."""
    connection.execute("BEGIN")  # all three from one snapshot: another process may be creating the store
    try:
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        owner = int(connection.execute("PRAGMA application_id").fetchone()[0])
        foreign = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] > 0
    finally:
        connection.execute("ROLLBACK")
    if owner != APPLICATION_ID and foreign:
        raise StoreCorrupt(f"{name} is a database of another program. Choose another file for the store.")
    newest = max(migrations())
    if version > newest:
        raise StoreTooNew(
            f"The store {name} has schema version {version}, this carpool knows {newest}. "
            "Upgrade carpool, or choose another store."
        )
    return version


# ------------------------------------------------------------ inspection


def real_path(path: str) -> str:
    """Resolves links, so that all names of one file share one lock. Raises if no store can be at that path."""
    try:
        real = os.path.realpath(path)
        file = Path(real)
        if file.is_dir():
            raise StoreUnwritable(f"{real} is a directory. Name a file in it, such as {real.rstrip('/')}/carpool.db.")
        if not file.parent.is_dir():
            raise StoreUnwritable(f"The directory {file.parent} does not exist. Create it, or choose another store.")
        if not os.access(file.parent, os.W_OK | os.X_OK):
            raise StoreUnwritable(f"The directory {file.parent} can't be written. Check its permissions.")
        if file.exists() and not os.access(file, os.R_OK | os.W_OK):
            raise StoreUnwritable(f"{real} can't be read and written. Check its permissions.")
    except (OSError, ValueError) as error:  # too long a name, a zero byte
        raise StoreUnwritable(f"{path!r} can't be a file ({error}). Choose another store.") from error
    return real


def is_there(real: str) -> bool:
    """Whether the file is a store; an empty file is not one yet."""
    file = Path(real)
    return file.exists() and file.stat().st_size > 0


def inspect_file(real: str, secret: bytes | None = None, *, encrypt: bool = False) -> list[VirtualKey]:
    """Raises what opening the store would raise, except for a lock held by another process. Returns its keys."""
    if is_there(real):
        check_header(real)
        with translated(real), closing(connect_to_read(real)) as connection:
            if version_of(connection, real) > 0:
                session = SqliteSession(connection, real)
                find_store_secret(session, secret, secret_file(real))
                check_sealing(session, encrypt=encrypt)
                known = session.execute("SELECT 1 FROM sqlite_schema WHERE name = 'virtual_keys'").fetchone()
                return calls.all_keys(session) if known else []
    find_secret(secret_file(real))
    check_sealing(None, encrypt=encrypt)
    return []


def read_totals(path: str) -> tuple[list[Totals], Mapping[str, int]]:
    """Returns the totals of the ledger and the counts by state. Reads without taking the lock, so that it does not
    disturb the process that uses the store."""
    if not os.path.isfile(path):  # noqa: PTH113  unlike Path.is_file it never raises
        raise StoreError(no_store(path))
    with translated(path), closing(connect_to_read(path)) as connection:
        if connection.execute("SELECT count(*) FROM sqlite_schema").fetchone() == (0,):
            return [], {}
        migrate(connection, path)  # on a read-only connection it only checks the version
        connection.execute("BEGIN")  # one snapshot for both queries
        session = SqliteSession(connection, path)
        return ledger.totals(session), calls.counts(session)


@contextmanager
def open_record(path: str) -> Iterator[CallRecord]:
    """Opens the record of calls to read it, from one snapshot, without taking the lock."""
    with _snapshot(path) as session:
        yield CallRecord(session)


def read_forecast(path: str) -> bytes:
    """Returns what the engines on the store have learned, without taking the lock."""
    with _snapshot(path) as session:
        return forecasts.forecast(session)[1]


@contextmanager
def _snapshot(path: str) -> Iterator[SqliteSession]:
    if not os.path.isfile(path):  # noqa: PTH113  unlike Path.is_file it never raises
        raise StoreError(no_store(path))
    with translated(path), closing(connect_to_read(path)) as connection:
        if (version := version_of(connection, path)) < max(migrations()):
            raise StoreError(older_store(path) if version else no_store(path))
        connection.execute("BEGIN")
        yield SqliteSession(connection, path)


# ------------------------------------------------------------ opening


def open_file(path: str | None, secret: bytes | None = None, encrypt: bool = False) -> SqliteSession:
    """Opens or creates a store; `path` None means in memory. Without a `secret`, uses the one from the environment or
    from the file next to the store."""
    if path is None:
        return _open_session(None, secret or load_secret(None), encrypt, None)
    real = real_path(path)
    inspect_file(real, secret, encrypt=encrypt)
    lock = take_lock(real)
    try:
        return _open_session(real, secret or load_secret(secret_file(real)), encrypt, lock)
    except BaseException:
        os.close(lock)
        raise


def _open_session(path: str | None, secret: bytes, encrypt: bool, lock: int | None) -> SqliteSession:
    name = path or "in memory"
    with translated(name), ExitStack() as stack:
        connection = stack.enter_context(closing(connect(path)))
        migrate(connection, name)
        session = SqliteSession(connection, name, lock)
        settle_secret(session, secret, secret_file(name))
        _recover(session, path, encrypt)
        stack.pop_all()
    return session


def _recover(session: SqliteSession, path: str | None, encrypt: bool) -> None:
    """Ends the leases and claims of all earlier users of the file: we hold the lock, so they are dead. Enters the
    attempts on `now` that a crash left out of the ledger."""
    with immediate(session.connection):
        for statement in ("void_engines", "void_leaders", "void_owners", "void_awaiters", "void_senders"):
            session.run(statement)
    unseal(session, encrypt=encrypt)
    session.forget()
    if path is not None:
        if entries := left_behind(path):
            with immediate(session.connection):
                ledger.record(session, entries)
        for file in attempt_files(path):
            file.unlink(missing_ok=True)


def attempt_files(path: str) -> list[Path]:
    return [Path(f"{path}.attempts-{number}") for number in (1, 2)]


def left_behind(path: str) -> list[Entry]:
    """Returns the attempts that a crash left out of the ledger, without incomplete lines."""
    entries = []
    for file in attempt_files(path):
        if file.exists():
            for line in file.read_bytes().split(b"\n"):
                with suppress(msgspec.DecodeError):
                    entries.append(msgspec.json.decode(line, type=Entry))
    return entries


@contextmanager
def immediate(connection: sqlite3.Connection) -> Iterator[None]:
    """A transaction that takes the write lock when it begins."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


@contextmanager
def open_keys(path: str | None, *, make: bool) -> Iterator[calls.KeyAdmin]:
    """Opens the keys of a store, even while another process uses it. A missing store is created only with `make`."""
    if path is None:
        raise ConfigError("Keys are kept in a store, and one in memory ends with this command. Name the store's file.")
    real = real_path(path)
    there = is_there(real)
    if not there and not make:
        raise StoreError(no_store(path))
    inspect_file(real)
    with translated(real):
        if there:
            with closing(connect(real)) as connection:
                if version_of(connection, real) == max(migrations()):
                    session = SqliteSession(connection, real)
                    settle_secret(session, None, secret_file(real))
                    yield calls.KeyAdmin(session, session.pepper, partial(immediate, connection))
                    return
        with closing(open_file(real)) as session:  # to create or migrate it, no other process may have it open
            yield calls.KeyAdmin(session, session.pepper, partial(immediate, session.connection))
