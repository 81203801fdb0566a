"""Implementations of `ports.Store`. `open_store` opens the one that a URL names."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from carpool.core.errors import ConfigError
from carpool.core.keys import VirtualKey
from carpool.core.model import Totals
from carpool.core.ports import Store
from carpool.stores.encryption import check_sealing
from carpool.stores.operations.calls import KeyAdmin
from carpool.stores.operations.shapes import CallRecord
from carpool.stores.secret import find_secret
from carpool.stores.sqlite import SqliteStore
from carpool.stores.sqlite.opening import inspect_file, is_there, read_forecast, read_totals, real_path
from carpool.stores.sqlite.opening import open_keys as sqlite_keys
from carpool.stores.sqlite.opening import open_record as sqlite_record

__all__ = ["CallRecord", "KeyAdmin", "SqliteStore", "carries_password", "check_url", "inspect_store", "is_postgres"]
__all__ += ["open_keys", "open_record", "open_store", "peek", "peek_forecast", "shown", "sqlite_path", "store_exists"]

_SQLITE = "sqlite://"
_IN_MEMORY = "A store in memory can't be read by another process. Name the store's file."


async def open_store(
    url: str | Path | None, *, secret: bytes | None = None, encrypt: bool = False, inline: bool = False
) -> Store:
    """Opens a store. None means in memory; a path or `sqlite:///path` is a SQLite file, `postgresql://…` a database
    that several processes may share. `encrypt`: contents of calls and answers are encrypted with the secret. `inline`,
    for a simulation: it runs in the caller's thread, never suspends, and uses the callers' time."""
    options: dict[str, Any] = {"secret": secret, "encrypt": encrypt, "threaded": not inline}
    if is_postgres(url):
        opened: Store = await postgres_module().PostgresStore.open(str(url), own_clock=not inline, **options)
        return opened
    return await SqliteStore.open(sqlite_path(url), **options)


async def peek(url: str | Path) -> tuple[list[Totals], Mapping[str, int]]:
    """Reads the totals of the ledger and the counts by state, even while another process uses the store."""
    if is_postgres(url):
        return await asyncio.to_thread(postgres_module().read_totals, str(url))
    path = sqlite_path(url)
    if path is None:
        raise ConfigError(_IN_MEMORY)
    return await asyncio.to_thread(read_totals, path)


def open_record(url: str | Path) -> AbstractContextManager[CallRecord]:
    """Opens the record of calls to read it, even while another process uses the store."""
    if is_postgres(url):
        record: AbstractContextManager[CallRecord] = postgres_module().open_record(str(url))
        return record
    path = sqlite_path(url)
    if path is None:
        raise ConfigError(_IN_MEMORY)
    return sqlite_record(path)


def peek_forecast(url: str | Path) -> bytes:
    """Reads what the engines on a store have learned, even while another process uses the store."""
    if is_postgres(url):
        state: bytes = postgres_module().read_forecast(str(url))
        return state
    path = sqlite_path(url)
    if path is None:
        raise ConfigError(_IN_MEMORY)
    return read_forecast(path)


def store_exists(url: str | Path | None) -> bool:
    """Whether the store exists, so that opening it would not create it; always true for one in memory."""
    if is_postgres(url):
        return bool(postgres_module().exists(str(url)))
    path = sqlite_path(url)
    return path is None or is_there(real_path(path))


def inspect_store(url: str | Path | None, *, encrypt: bool = False) -> list[VirtualKey]:
    """Raises what `open_store` would raise, except for a lock held by another process. Creates and changes nothing.
    Returns the store's virtual keys."""
    if is_postgres(url):
        keys: list[VirtualKey] = postgres_module().inspect(str(url), encrypt=encrypt)
        return keys
    path = sqlite_path(url)
    if path is not None:
        return inspect_file(real_path(path), encrypt=encrypt)
    find_secret(None)
    check_sealing(None, encrypt=encrypt)
    return []


def check_url(url: str | Path | None) -> None:
    """Raises if the URL does not name a store."""
    if is_postgres(url):
        postgres_module().address_of(str(url))
    else:
        sqlite_path(url)


def sqlite_path(url: str | Path | None) -> str | None:
    """Returns the file that a store URL names; None means in memory."""
    if url is None:
        return None
    text = str(url)
    scheme, separator, _ = text.partition("://")
    if not separator or isinstance(url, Path):
        return _file(text)
    if scheme != "sqlite":
        raise ConfigError(
            f"{scheme[:40]}:// is not a store. Name a path such as carpool.db, sqlite:///path, "
            "postgresql://user@host/database, or :memory: to keep nothing."
        )
    if not text.startswith(_SQLITE + "/"):
        raise ConfigError(f"{text} names no file. Write sqlite:///carpool.db, or sqlite:////var/lib/carpool.db.")
    return _file(unquote(text.removeprefix(_SQLITE + "/")))


def _file(text: str) -> str | None:
    if not text:
        raise ConfigError("The store's path is empty. Name a file such as carpool.db, or :memory: to keep nothing.")
    return None if text == ":memory:" else str(Path(text).expanduser())


def is_postgres(url: str | Path | None) -> bool:
    return isinstance(url, str) and url.partition("://")[0] in ("postgresql", "postgres")


def shown(url: str) -> str:
    """Returns a store's address without a password, for display."""
    if not is_postgres(url):
        return url
    parts = urlsplit(url)
    options = [(name, value) for name, value in parse_qsl(parts.query) if "password" not in name]
    user, at, host = parts.netloc.rpartition("@")
    query = f"?{urlencode(options, safe='/')}" if options else ""
    return f"{parts.scheme}://{user.partition(':')[0]}{at}{host}{parts.path}{query}"


def carries_password(url: str) -> bool:
    parts = urlsplit(url)
    return bool(parts.password) or any("password" in name for name, _ in parse_qsl(parts.query))


def postgres_module() -> ModuleType:
    """Imports the PostgreSQL store, whose driver is needed only by those who use it."""
    try:
        from carpool.stores import postgres
    except ImportError:
        raise ConfigError("A PostgreSQL store needs the package psycopg: pip install 'psycopg[binary]'.") from None
    return postgres


def open_keys(url: str | Path | None, *, make: bool = False) -> AbstractContextManager[KeyAdmin]:
    """Opens the keys of a store, even while `carpool serve` uses it. A missing store is created only with `make`."""
    if is_postgres(url):
        keys: AbstractContextManager[KeyAdmin] = postgres_module().open_keys(str(url), make=make)
        return keys
    return sqlite_keys(sqlite_path(url), make=make)
