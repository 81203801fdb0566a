"""The store in a PostgreSQL database, shared by any number of processes."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit
from uuid import uuid4

import psycopg
from psycopg.types.numeric import Int8BinaryDumper, Int8Dumper

from carpool.core.errors import ConfigError, StoreError, StoreTooNew
from carpool.core.keys import VirtualKey
from carpool.core.model import Totals
from carpool.stores.encryption import check_sealing, unseal
from carpool.stores.operations import calls, forecasts, ledger
from carpool.stores.operations.session import Row, no_store, older_store
from carpool.stores.operations.session import migrations as numbered_migrations
from carpool.stores.operations.shapes import CallRecord
from carpool.stores.operations.store import OperatedStore, open_in_thread
from carpool.stores.postgres.groups import MAX_OUTAGE_S, PostgresGroups
from carpool.stores.postgres.notify import NotifyChannel
from carpool.stores.postgres.session import PostgresSession, for_driver, is_permanent, translate
from carpool.stores.secret import find_secret, find_store_secret, settle_secret

OLDEST_SERVER = 140000
SCHEMA = "carpool"
migrations = partial(numbered_migrations, "postgres")
_OPENING_PAUSES = (0.1, 0.2, 0.4, 0.8)  # the server may be starting up

# A process that is stopped in the middle of a transaction loses its locks after 5 s. Every frequent query has an index;
# outdated statistics of a growing table must not make the planner ignore it. Commits must be synchronous: a purchase
# that the server lost in a crash would be bought again.
_SETTINGS = """
SET search_path TO {schema};
SET idle_in_transaction_session_timeout = '5s';
SET statement_timeout = '60s';
SET enable_seqscan = off;
SET jit = off;
SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'
"""


class PostgresStore(OperatedStore):
    """A store that several engines in several processes may share.

    One connection, in one thread, runs the queued operations in groups; another one sends and receives notifications.
    """

    durable = True

    def __init__(self, session: PostgresSession, address: Address, threaded: bool, patience: float) -> None:
        groups = PostgresGroups(session, partial(connect, address), patience)
        super().__init__(session, groups, threaded=threaded)
        self._notify_channel: NotifyChannel | None = None
        if threaded:
            sign_in = for_driver(session.sql["sign_in"])
            self._notify_channel = NotifyChannel(partial(connect, address), address.schema, sign_in, super().notify)

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        threaded: bool = True,
        own_clock: bool = True,
        secret: bytes | None = None,
        encrypt: bool = False,
        patience: float = MAX_OUTAGE_S,
    ) -> Self:
        """Opens or creates the store. `threaded` False runs in the caller's thread. `own_clock` False uses the callers'
        time for leases instead of the database's clock. `patience`: how many seconds to wait for a server that can't be
        reached."""
        address = address_of(url)
        opening = partial(_open, address, secret, encrypt, own_clock)
        session = await open_in_thread(opening) if threaded else opening()
        return cls(session, address, threaded, patience)

    async def join(self, engine: str, now: float, ttl: float, pulse: float | None = None) -> bool:
        alive = await super().join(engine, now, ttl, pulse)
        if self._notify_channel is not None:
            self._notify_channel.register_engine(engine)
        return alive

    async def leave(self, engine: str) -> None:
        if self._notify_channel is not None:
            self._notify_channel.unregister_engine(engine)
        await super().leave(engine)

    def notify(self, topic: str, names: Sequence[Any]) -> None:
        super().notify(topic, names)
        if self._notify_channel is not None:
            self._notify_channel.send(topic, names)

    async def aclose(self) -> None:
        await self.writer.aclose()
        if self._notify_channel is not None:
            channel, self._notify_channel = self._notify_channel, None
            await asyncio.get_running_loop().run_in_executor(None, channel.close)
        self._session.close()


# ------------------------------------------------------------ connecting


@dataclass(frozen=True)
class Address:
    """The address of a store. `name` is for messages and contains no password."""

    conninfo: str = field(repr=False)
    schema: str
    name: str


def address_of(url: str) -> Address:
    """Parses `postgresql://user@host/database?schema=name`; other parameters are passed to the driver."""
    parts = urlsplit(url)
    asked = dict(parse_qsl(parts.query, keep_blank_values=True))
    schema = asked.pop("schema", SCHEMA)
    if not re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", schema) or schema.startswith("pg_"):
        raise ConfigError(f"{schema!r} can't be the store's schema. Use small letters, digits and underscores.")
    # Not with `urlunsplit`: without a host it drops the slashes, which the driver requires.
    conninfo = f"postgresql://{parts.netloc}{parts.path}" + (f"?{urlencode(asked)}" if asked else "")
    try:
        known = psycopg.conninfo.conninfo_to_dict(conninfo)
    except psycopg.Error:  # its message may quote a password
        raise ConfigError(
            "The store's address can't be understood. Write it as postgresql://user@host:5432/database."
        ) from None
    host = known.get("host") or "localhost"
    database = unquote(parts.path.strip("/")) or str(known.get("dbname") or "")
    return Address(
        conninfo, schema, f"postgresql://{host}/{database}" + (f"?schema={schema}" if schema != SCHEMA else "")
    )


def connect(address: Address) -> psycopg.Connection[Row]:
    """Opens a connection in autocommit mode, so that transactions begin only with an explicit BEGIN."""
    given = psycopg.conninfo.conninfo_to_dict(address.conninfo)
    defaults = {"connect_timeout": "5", "application_name": "carpool", "tcp_user_timeout": "15000"}
    defaults |= {"keepalives_idle": "10", "keepalives_interval": "5", "keepalives_count": "3"}
    extra = {name: value for name, value in defaults.items() if name not in given}
    connection = psycopg.connect(address.conninfo, autocommit=True, prepare_threshold=2, **extra)  # type: ignore[arg-type]
    with ExitStack() as stack:
        stack.callback(connection.close)
        version = connection.info.server_version
        if version < OLDEST_SERVER:
            raise StoreError(f"The store {address.name} is PostgreSQL {version // 10000}: 14 or newer is needed.")
        # All integers are sent as int8, the width of their columns: otherwise each width would be prepared separately.
        connection.adapters.register_dumper(int, Int8Dumper)
        connection.adapters.register_dumper(int, Int8BinaryDumper)
        connection.execute(_SETTINGS.format(schema=address.schema))
        stack.pop_all()
    return connection


def _connect_first(address: Address) -> psycopg.Connection[Row]:
    """As `connect`, with a few retries, and with translated errors."""
    pauses = iter(_OPENING_PAUSES)
    while True:
        try:
            return connect(address)
        except psycopg.Error as error:
            pause = next(pauses, None)
            if pause is None or is_permanent(error):
                raise translate(error, address.name) from None
        threading.Event().wait(pause)


@contextmanager
def _connected(url: str) -> Iterator[tuple[psycopg.Connection[Row], Address]]:
    address = address_of(url)
    with closing(_connect_first(address)) as connection:
        try:
            yield connection, address
        except psycopg.Error as error:
            raise translate(error, address.name) from None


# ------------------------------------------------------------ opening


def _open(address: Address, secret: bytes | None, encrypt: bool, own_clock: bool) -> PostgresSession:
    connection = _connect_first(address)
    try:
        _migrate(connection, address)
        session = PostgresSession(connection, address.name, own_clock=own_clock)
        session.make_meta("store_id", uuid4().hex)
        settle_secret(session, secret, _secret_file(session))
        unseal(session, encrypt=encrypt)
    except BaseException as error:
        connection.close()
        if isinstance(error, psycopg.Error):
            raise translate(error, address.name) from None
        raise
    return session


def _secret_file(session: PostgresSession) -> Path:
    """In the user's config folder, named after the store, for other processes of this user on this machine."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")  # noqa: PTH111
    return Path(base) / "carpool" / f"{session.meta('store_id') or ''}.secret"


def _migrate(connection: psycopg.Connection[Row], address: Address) -> None:
    """Brings the schema up to date, one process at a time; older and newer versions may keep working meanwhile.

    `-- oldest: 3` in a script means that a carpool that knows only version 3 may still work with its schema.
    """
    if _version_of(connection, address) >= max(migrations()):
        return
    with connection.transaction():
        key = f"carpool:migrate:{address.schema}"
        connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (key,))
        version = _version_of(connection, address)
        if not connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (address.schema,)).fetchone():
            connection.execute(f"CREATE SCHEMA {address.schema}")
        connection.execute("CREATE TABLE IF NOT EXISTS meta (name text PRIMARY KEY, value text NOT NULL)")
        for number, script in migrations().items():
            if number > version:
                connection.execute(script)
                oldest = re.search(r"^-- oldest: (\d+)", script, re.MULTILINE)
                kept = {"schema_version": str(number), "schema_oldest": oldest[1] if oldest else str(number)}
                for name, value in kept.items():
                    connection.execute(
                        "INSERT INTO meta (name, value) VALUES (%s, %s) "
                        "ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                        (name, value),
                    )


def _is_there(connection: psycopg.Connection[Row], schema: str) -> bool:
    """Whether the store exists. Queries the catalogue tables, because after waiting for a lock the server's cached
    catalogue may be out of date."""
    query = "SELECT 1 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE nspname = %s AND relname = %s"
    return connection.execute(query, (schema, "meta")).fetchone() is not None


def _version_of(connection: psycopg.Connection[Row], address: Address) -> int:
    """Returns the schema version, 0 if there is no store. Raises if this carpool can't work with it."""
    if not _is_there(connection, address.schema):
        return 0
    kept: dict[str, str] = dict(connection.execute("SELECT name, value FROM meta WHERE name LIKE 'schema%'").fetchall())
    version, oldest = int(kept.get("schema_version", 0)), int(kept.get("schema_oldest", 0))
    newest = max(migrations())
    if oldest > newest:
        raise StoreTooNew(
            f"The store {address.name} has schema version {version}, which needs a carpool that knows {oldest}; this "
            f"one knows {newest}. Upgrade carpool, or choose another store."
        )
    return version


# ------------------------------------------------------------ looking at a store


@contextmanager
def open_keys(url: str, *, make: bool) -> Iterator[calls.KeyAdmin]:
    address = address_of(url)
    if not make and not exists(url):
        raise StoreError(no_store(address.name))
    with closing(_open(address, None, encrypt=False, own_clock=True)) as session:
        try:
            yield calls.KeyAdmin(session, session.pepper, partial(_lock_keys, session.connection))
        except psycopg.Error as error:
            raise translate(error, address.name) from None


@contextmanager
def _lock_keys(connection: psycopg.Connection[Row]) -> Iterator[None]:
    with connection.transaction():
        connection.execute("LOCK TABLE virtual_keys IN SHARE ROW EXCLUSIVE MODE")
        yield


def exists(url: str) -> bool:
    with _connected(url) as (connection, address):
        return _is_there(connection, address.schema)


def inspect(url: str, *, encrypt: bool) -> list[VirtualKey]:
    """Raises what opening the store would raise, and creates nothing. Returns its keys."""
    with _connected(url) as (connection, address):
        if _version_of(connection, address) == 0:
            find_secret(None)
            check_sealing(None, encrypt=encrypt)
            return []
        session = PostgresSession(connection, address.name)
        find_store_secret(session, None, _secret_file(session))
        check_sealing(session, encrypt=encrypt)
        return calls.all_keys(session)


@contextmanager
def open_record(url: str) -> Iterator[CallRecord]:
    """Opens the record of calls to read it, from one snapshot."""
    with _snapshot(url) as session:
        yield CallRecord(session)


def read_forecast(url: str) -> bytes:
    """Returns what the engines on the store have learned."""
    with _snapshot(url) as session:
        return forecasts.forecast(session)[1]


@contextmanager
def _snapshot(url: str) -> Iterator[PostgresSession]:
    with _connected(url) as (connection, address):
        if not _is_there(connection, address.schema):
            raise StoreError(no_store(address.name))
        if _version_of(connection, address) < max(migrations()):
            raise StoreError(older_store(address.name))
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        yield PostgresSession(connection, address.name)


def read_totals(url: str) -> tuple[list[Totals], Mapping[str, int]]:
    """Returns the totals of the ledger and the counts by state, from one snapshot; changes nothing."""
    with _connected(url) as (connection, address):
        if not _is_there(connection, address.schema):
            raise StoreError(no_store(address.name))
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        session = PostgresSession(connection, address.name)
        return ledger.totals(session), calls.counts(session)
