"""Which database a store's address names. Only those who use PostgreSQL need its driver."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from carpool.errors import ConfigError


def is_postgres(url: str | Path | None) -> bool:
    return isinstance(url, str) and url.partition("://")[0] in ("postgresql", "postgres")


def postgres_module() -> ModuleType:
    try:
        from carpool.stores import postgres
    except ImportError:
        raise ConfigError(
            "A PostgreSQL store needs the package psycopg: install carpool with it, as carpool[postgres]."
        ) from None
    return postgres
