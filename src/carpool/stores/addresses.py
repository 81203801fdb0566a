"""Store addresses. The PostgreSQL driver is imported only if it is needed."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from urllib.parse import parse_qsl, urlencode, urlsplit

from carpool.core.errors import ConfigError


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


def no_store(name: str) -> str:
    return f"There is no store at {name}. Name one with --store or --config; carpool serve makes it when it starts."


def carries_password(url: str) -> bool:
    parts = urlsplit(url)
    return bool(parts.password) or any("password" in name for name, _ in parse_qsl(parts.query))


def postgres_module() -> ModuleType:
    try:
        from carpool.stores import postgres
    except ImportError:
        raise ConfigError("A PostgreSQL store needs the package psycopg: pip install 'psycopg[binary]'.") from None
    return postgres
