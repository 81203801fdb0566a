"""From flags, environment and file to what `carpool serve` runs with."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from carpool.config import Config, Flag, read_config
from carpool.dialects import DIALECTS
from carpool.dialects import get as get_dialect
from carpool.doors.proxy.lending import key_header
from carpool.engine import Upstream
from carpool.errors import ConfigError
from carpool.ports import Wire
from carpool.stores import sqlite_path


def gather(file: Path | None, upstream: str | None, providers: Iterable[str], store: str | None) -> Config:
    """The config as it holds for this run. Flags are the last word."""
    flags = []
    if upstream is not None:
        flags.append(Flag(("providers", "anthropic", "base_url"), upstream, "--upstream"))
    for text in providers:
        flags += _provider(text)
    if store is not None:
        flags.append(Flag(("store", "url"), store, "--store"))
    config = read_config(file, os.environ, flags)
    sqlite_path(config.store)
    return config


def _provider(text: str) -> list[Flag]:
    """`NAME=URL` for one that is known, `NAME=DIALECT:URL` for a new one."""
    name, equals, url = text.partition("=")
    if not equals or not name.strip() or not url.strip():
        raise ConfigError(
            "--provider takes a name and a base URL, as in --provider openai=https://api.openai.com/v1, and for a new "
            "name its dialect too, as in --provider local=openai:http://127.0.0.1:8000/v1."
        )
    name, shown = name.strip(), f"--provider {name.strip()}"
    dialect, _, rest = url.strip().partition(":")
    if dialect not in DIALECTS:
        return [Flag(("providers", name, "base_url"), url.strip(), shown)]
    return [
        Flag(("providers", name, "dialect"), dialect, shown),
        Flag(("providers", name, "base_url"), rest, shown),
    ]


def upstreams_of(config: Config, wire: Wire) -> dict[str, Upstream]:
    return {one.name: Upstream(one.name, one.base_url, get_dialect(one.dialect), wire) for one in config.providers}


def defaults_of(config: Config) -> list[str]:
    return [one.name for one in config.providers if one.default]


def keys_of(config: Config, environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """The header with the key of each provider whose variable is set."""
    keys = {}
    for one in config.providers:
        key = environ.get(one.api_key_env, "").strip() if one.api_key_env else ""
        if key:
            keys[one.name] = key_header(one.dialect, key)
    return keys
