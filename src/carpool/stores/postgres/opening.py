"""Opens a PostgreSQL store: its address, a connection, the schema, the secret's check value."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit
from uuid import uuid4

import psycopg
from psycopg.types.numeric import Int8BinaryDumper, Int8Dumper

from carpool.core.errors import ConfigError, StoreError, StoreTooNew, WrongSecret
from carpool.stores import secret as secrets
from carpool.stores.operations.session import Row, Session
from carpool.stores.operations.session import migrations as numbered_migrations
from carpool.stores.postgres.session import hopeless, translate

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
    try:
        _check_version(connection.info.server_version, address)
        # All integers are sent as int8, the width of their columns: otherwise each width would be prepared separately.
        connection.adapters.register_dumper(int, Int8Dumper)
        connection.adapters.register_dumper(int, Int8BinaryDumper)
        connection.execute(_SETTINGS.format(schema=address.schema))
    except BaseException:
        connection.close()
        raise
    return connection


def _check_version(version: int, address: Address) -> None:
    if version < OLDEST_SERVER:
        raise StoreError(f"The store {address.name} is PostgreSQL {version // 10000}: 14 or newer is needed.")


def connect_first(address: Address) -> psycopg.Connection[Row]:
    """As `connect`, with a few retries, and with translated errors."""
    last_error: psycopg.Error | None = None
    for pause in (*_OPENING_PAUSES, None):
        try:
            return connect(address)
        except psycopg.Error as error:
            last_error = error
            if pause is None or hopeless(error):
                break
        threading.Event().wait(pause)
    assert last_error is not None
    raise translate(last_error, address.name) from None


def migrate(connection: psycopg.Connection[Row], address: Address) -> None:
    """Brings the schema up to date, one process at a time; older and newer versions may keep working meanwhile."""
    if standing(connection, address) >= max(migrations()):
        return
    with connection.transaction():
        key = f"carpool:migrate:{address.schema}"
        connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (key,))
        version = standing(connection, address)
        if not connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (address.schema,)).fetchone():
            connection.execute(f"CREATE SCHEMA {address.schema}")
        connection.execute("CREATE TABLE IF NOT EXISTS meta (name text PRIMARY KEY, value text NOT NULL)")
        for number, script in migrations().items():
            if number > version:
                connection.execute(script)
                _set_version(connection, number, script)


def is_there(connection: psycopg.Connection[Row], schema: str) -> bool:
    """Whether the store exists. Queries the catalogue tables, because after waiting for a lock the server's cached
    catalogue may be out of date."""
    query = "SELECT 1 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE nspname = %s AND relname = %s"
    return connection.execute(query, (schema, "meta")).fetchone() is not None


def standing(connection: psycopg.Connection[Row], address: Address) -> int:
    """Returns the schema version, 0 if there is no store. Raises if this carpool can't work with it."""
    if not is_there(connection, address.schema):
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


def _set_version(connection: psycopg.Connection[Row], number: int, script: str) -> None:
    """Stores the schema version. `-- oldest: 3` in a script means that a carpool that knows only version 3 may still
    work with this schema."""
    oldest = re.search(r"^-- oldest: (\d+)", script, re.MULTILINE)
    values = {"schema_version": number, "schema_oldest": int(oldest[1]) if oldest else number}
    for name, value in values.items():
        connection.execute(
            "INSERT INTO meta (name, value) VALUES (%s, %s) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
            (name, str(value)),
        )


def settle_secret(session: Session, given: bytes | None, address: Address, env: Mapping[str, str]) -> bytes:
    """Returns the store's secret after checking it. If the secret is not configured, it is kept in a file in the user's
    config folder, named after the store, for other processes of this user on this machine."""
    identity = session.make_meta("store_id", uuid4().hex)
    known = find_secret(session, given, address, env)
    secret = known or secrets.load_secret_at(_secret_file(identity, env), env)
    kept = session.make_meta("secret_check", secrets.check_value(secret))
    secrets.verify(secret, kept, address.name)
    return secret


def find_secret(session: Session, given: bytes | None, address: Address, env: Mapping[str, str]) -> bytes | None:
    """Returns the secret that this store was created with; None if it has none yet. Creates nothing."""
    file = _secret_file(session.meta("store_id") or "", env)
    kept = session.meta("secret_check")
    secret = given or secrets.find_secret_at(file, env)
    if kept is None:
        return secret
    if secret is None:
        raise WrongSecret(
            f"The store {address.name} was made with a secret that is not known here. Set {secrets.VARIABLE} to the "
            f"same value for every process that shares it, or copy {file} from the machine that made it."
        )
    secrets.verify(secret, kept, address.name)
    return secret


def _secret_file(identity: str, env: Mapping[str, str]) -> Path:
    base = env.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")  # noqa: PTH111
    return Path(base) / "carpool" / f"{identity}.secret"
