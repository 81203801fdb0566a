"""Build what `carpool serve` runs with from flags, environment and config file."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from carpool.cli.listen import admin_token, check_keys, listen, tls_context
from carpool.cli.workers import able
from carpool.config import Config, Flag, Provider, Serving, read_config, secret_in
from carpool.core.clock import SystemClock
from carpool.core.errors import CarpoolError, ConfigError
from carpool.core.keys import sent_in
from carpool.core.model import Headers
from carpool.core.ports import Dialect, HttpClient
from carpool.dialects import COMPATIBLE_PROVIDERS, DIALECTS, speaking
from carpool.engine import Upstream
from carpool.engine.cluster import SecretLookup
from carpool.http import Http1Client, OutgoingProxy
from carpool.stores import carries_password, check_url, inspect_store, is_postgres

UPSTREAM = "CARPOOL_UPSTREAM"  # alternative to the flag


def gather(
    file: Path | None,
    upstream: str | None,
    providers: Iterable[str],
    store: str | None,
    tls: tuple[str | None, str | None] = (None, None),
) -> Config:
    """The effective config of this run. Flags win."""
    flags = []
    if upstream is not None:
        flags.append(Flag(("providers", "anthropic", "base_url"), upstream, "--upstream"))
    elif os.environ.get(UPSTREAM):
        flags.append(Flag(("providers", "anthropic", "base_url"), os.environ[UPSTREAM], UPSTREAM))
    for text in providers:
        flags += _provider(text)
    if store is not None:
        _check_no_password(store)
        flags.append(Flag(("store", "url"), store, "--store"))
    for name, path in zip(("cert", "key"), tls, strict=True):
        if path is not None:
            flags.append(Flag(("server", "tls", name), path, f"--tls-{name}"))
    config = read_config(file, os.environ, flags)
    check_url(config.store)
    return config


def _provider(text: str) -> list[Flag]:
    """`NAME=URL` for a known provider, `NAME=DIALECT:URL` for a new one."""
    name, equals, url = text.partition("=")
    if not equals or not name.strip() or not url.strip():
        raise ConfigError(
            "--provider takes a name and a base URL, as in --provider openai=https://api.openai.com/v1, and for a new "
            "name its dialect too, as in --provider local=openai:http://127.0.0.1:8000/v1."
        )
    name, shown = name.strip(), f"--provider {name.strip()}"
    dialect, _, rest = url.strip().partition(":")
    if dialect not in DIALECTS and dialect not in COMPATIBLE_PROVIDERS:
        return [Flag(("providers", name, "base_url"), url.strip(), shown)]
    return [
        Flag(("providers", name, "dialect" if dialect in DIALECTS else "vendor"), dialect, shown),
        Flag(("providers", name, "base_url"), rest, shown),
    ]


def _check_no_password(store: str) -> None:
    """Refuse a password in a flag: every user of the machine can read the arguments of a process."""
    if is_postgres(store) and carries_password(store):
        raise ConfigError(
            "--store carries a password, and everybody on this machine can read a command line. Put the password into "
            "PGPASSWORD or ~/.pgpass, or the whole URL into CARPOOL_STORE__URL."
        )


class HttpClients:
    """HTTP clients: providers with equal network settings share one, and its connections."""

    def __init__(self, serving: Serving, environ: Mapping[str, str]) -> None:
        self._wires: dict[object, Http1Client] = {}
        self._login = _login(serving, environ)

    def to(self, one: Provider) -> Http1Client:
        way = (one.proxy, one.ca_file, one.allow_link_local)
        if way not in self._wires:
            proxy = None if one.proxy is None else OutgoingProxy(one.proxy, self._login)
            self._wires[way] = Http1Client(roots_pem=_roots(one), proxy=proxy, allow_link_local=one.allow_link_local)
        return self._wires[way]

    async def aclose(self) -> None:
        for http_client in self._wires.values():
            await http_client.aclose()


def check_ways(config: Config, environ: Mapping[str, str]) -> None:
    """Raise if a provider can't be reached as configured: no login for the proxy, or no usable certificates."""
    _login(config.serving, environ)
    for one in config.providers:
        _roots(one)


def _login(serving: Serving, environ: Mapping[str, str]) -> str | None:
    variable = serving.outgoing_proxy_auth_env
    login = environ.get(variable, "").strip() if variable else ""
    if variable and (":" not in login or not login.isascii() or not login.isprintable()):
        raise ConfigError(
            f"server.outgoing_proxy_auth_env names {variable}, which must hold user:password in plain characters."
        )
    return login or None


def _roots(one: Provider) -> bytes | None:
    if one.ca_file is None:
        return None
    try:
        pem = Path(one.ca_file).read_bytes()
        ssl.create_default_context().load_verify_locations(cadata=pem.decode("ascii"))
    except (OSError, ValueError) as error:  # includes ssl's errors
        raise ConfigError(
            f"The certificates in {one.ca_file} can't be used: providers.{one.name}.ca_file, or server.ca_file, must "
            "name a file in PEM form."
        ) from error
    return pem


def upstreams_of(config: Config, wire_to: Callable[[Provider], HttpClient]) -> dict[str, Upstream]:
    return {one.name: Upstream(one.name, one.base_url, dialect_of(one), wire_to(one)) for one in config.providers}


def dialect_of(one: Provider) -> Dialect:
    return speaking(one.dialect, one.base_url, one.vendor or None, window=one.window, api_version=one.api_version)


def defaults_of(config: Config) -> list[str]:
    return [one.name for one in config.providers if one.default]


def lender_of(config: Config, environ: Mapping[str, str]) -> SecretLookup:
    """The lookup of provider keys for virtual keys: the key in a variable, for every header its provider accepts."""
    dialects = {one.name: dialect_of(one) for one in config.providers}

    def lend(provider: str, variable: str) -> list[Headers]:
        key = secret_in(variable, environ)
        return sent_in(dialects[provider].key_headers, key) if key and provider in dialects else []

    return lend


def house_keys(config: Config, environ: Mapping[str, str]) -> list[tuple[str, Headers]]:
    """The keys in `api_key_env` variables, as secrets of their providers."""
    named = [(one, secret_in(one.api_key_env, environ)) for one in config.providers]
    return [(one.name, sent_in(dialect_of(one).key_headers, key)[0]) for one, key in named if key]


def hook_secrets_of(config: Config, environ: Mapping[str, str]) -> dict[str, str]:
    """The webhook secrets of providers whose variable is set."""
    named = {one.name: secret_in(one.webhook_secret_env, environ) for one in config.providers}
    return {name: secret for name, secret in named.items() if secret}


def keys_of(config: Config, environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """The key header of each provider whose variable is set."""
    return {name: secret[0] for name, secret in house_keys(config, environ)}


# ------------------------------------------------------------ preconditions
# `serve` checks these before it opens or creates anything, and `serve --check` checks the same. So both refuse the same
# configs, and a refused start leaves no file behind.


class Start(NamedTuple):
    """The parameters of `carpool serve` beside the config."""

    host: str
    port: int
    workers: int


def problems(config: Config, start: Start) -> list[CarpoolError]:
    """Everything that keeps carpool from starting, except a store that another process uses."""
    looks: tuple[Callable[[], object], ...] = (
        lambda: listen(start.host, start.port).close(),
        lambda: admin_token(start.host, config.serving, os.environ),
        lambda: None if config.serving.tls is None else tls_context(config.serving.tls),
        lambda: check_ways(config, os.environ),
        lambda: _check_store(config, start.host),
        lambda: _check_workers(start.workers),
    )
    found = []
    for look in looks if start.host else looks[:1]:  # without an address only the config can be checked
        try:
            look()
        except CarpoolError as error:
            found.append(error)
    return found


def _check_store(config: Config, host: str) -> None:
    keys, now = inspect_store(config.store, encrypt=config.encrypt), SystemClock().now()
    good = any(key.live(now) for key in keys)
    check_keys(host, config.serving, configured=good and config.keys_required is not False)


def _check_workers(count: int) -> None:
    if count > 1 and not able():
        raise ConfigError("--workers needs Linux, where several processes can share a port. Leave it out here.")
