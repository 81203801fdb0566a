"""Stores: they implement `ports.Store`. `open_store` finds the right one for a URL."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

from carpool.errors import ConfigError
from carpool.ports import Store
from carpool.stores.secret import load_secret
from carpool.stores.sqlite import SqliteStore

__all__ = ["SqliteStore", "load_secret", "open_store", "sqlite_path"]

_SQLITE = "sqlite://"


async def open_store(url: str | Path | None, *, secret: bytes | None = None) -> Store:
    """None keeps everything in memory; a path or `sqlite:///path` is a SQLite file."""
    return await SqliteStore.open(sqlite_path(url), secret=secret)


def sqlite_path(url: str | Path | None) -> str | None:
    """The file that a store URL names; None means memory."""
    if url is None:
        return None
    text = str(url)
    scheme, separator, _ = text.partition("://")
    if not separator or isinstance(url, Path):
        return _file(text)
    if scheme in ("postgresql", "postgres"):
        raise ConfigError("A PostgreSQL store is not there yet. Use a file, such as sqlite:///carpool.db.")
    if scheme != "sqlite":
        raise ConfigError(f"{scheme}:// is not a store. Use a path, sqlite:///path, or leave it out to use memory.")
    if not text.startswith(_SQLITE + "/"):
        raise ConfigError(
            f"{text} names no file. A relative file is sqlite:///carpool.db, an absolute one sqlite:////…"
        )
    return _file(unquote(text.removeprefix(_SQLITE + "/")))


def _file(text: str) -> str | None:
    if not text:
        raise ConfigError("The store's path is empty. Name a file, or leave the store out to use memory.")
    return None if text == ":memory:" else str(Path(text).expanduser())
