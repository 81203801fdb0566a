"""Which database a store's address names. Only those who use PostgreSQL need its driver."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from urllib.parse import parse_qsl, urlencode, urlsplit

from carpool.errors import ConfigError


def is_postgres(url: str | Path | None) -> bool:
    return isinstance(url, str) and url.partition("://")[0] in ("postgresql", "postgres")


def shown(url: str) -> str:
    """A store's address as people may see it: without a password."""
    if not is_postgres(url):
        return url
    parts = urlsplit(url)
    asked = [(name, value) for name, value in parse_qsl(parts.query) if "password" not in name]
    who, at, where = parts.netloc.rpartition("@")
    rest = f"?{urlencode(asked, safe='/')}" if asked else ""
    return f"{parts.scheme}://{who.partition(':')[0]}{at}{where}{parts.path}{rest}"


def carries_password(url: str) -> bool:
    parts = urlsplit(url)
    return bool(parts.password) or any("password" in name for name, _ in parse_qsl(parts.query))


def postgres_module() -> ModuleType:
    try:
        from carpool.stores import postgres
    except ImportError:
        raise ConfigError(
            "A PostgreSQL store needs the package psycopg: install carpool with it, as carpool[postgres]."
        ) from None
    return postgres
