"""Build what `carpool serve` runs with from flags, environment and config file."""

from __future__ import annotations

import os
import ssl
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from carpool.cli.listen import admin_token, check_keys, listen, tls_context
from carpool.config import Config, Flag, Provider, ServerSettings, read_config, secret_in
from carpool.core.clock import SystemClock
from carpool.core.errors import CarpoolError, ConfigError
from carpool.core.keys import header_forms
from carpool.core.model import Headers
from carpool.core.ports import Dialect, HttpClient
from carpool.dialects import COMPATIBLE_PROVIDERS, DEFAULT_DIALECT, DIALECTS, configured_dialect
from carpool.engine import Upstream
from carpool.engine.virtual_keys import SecretLookup
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
    base_url = upstream if upstream is not None else os.environ.get(UPSTREAM) or None
    if base_url is not None:
        place = ("providers", DEFAULT_DIALECT.name, "base_url")
        flags.append(Flag(place, base_url, UPSTREAM if upstream is None else "--upstream"))
    for text in providers:
        flags += _provider(text)
    if store is not None:
        if is_postgres(store) and carries_password(store):
            raise ConfigError(
                "--store carries a password, and everybody on this machine can read a command line. Put the password "
                "into PGPASSWORD or ~/.pgpass, or the whole URL into CARPOOL_STORE__URL."
            )
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


class HttpClients:
    """HTTP clients: providers with equal network settings share one, and its connections."""

    def __init__(self, serving: ServerSettings, environ: Mapping[str, str]) -> None:
        self._clients: dict[object, Http1Client] = {}
        self._login = _login(serving, environ)

    def to(self, provider: Provider) -> Http1Client:
        settings = (provider.proxy, provider.ca_file, provider.allow_link_local)
        if settings not in self._clients:
            proxy = None if provider.proxy is None else OutgoingProxy(provider.proxy, self._login)
            self._clients[settings] = Http1Client(
                roots_pem=_roots(provider), proxy=proxy, allow_link_local=provider.allow_link_local
            )
        return self._clients[settings]

    async def aclose(self) -> None:
        for http_client in self._clients.values():
            await http_client.aclose()


def _login(serving: ServerSettings, environ: Mapping[str, str]) -> str | None:
    variable = serving.outgoing_proxy_auth_env
    login = environ.get(variable, "").strip() if variable else ""
    if variable and (":" not in login or not login.isascii() or not login.isprintable()):
        raise ConfigError(
            f"server.outgoing_proxy_auth_env names {variable}, which must hold user:password in plain characters."
        )
    return login or None


def _roots(provider: Provider) -> bytes | None:
    if provider.ca_file is None:
        return None
    try:
        pem = Path(provider.ca_file).read_bytes()
        ssl.create_default_context().load_verify_locations(cadata=pem.decode("ascii"))
    except (OSError, ValueError) as error:  # includes ssl's errors
        raise ConfigError(
            f"The certificates in {provider.ca_file} can't be used: providers.{provider.name}.ca_file, or "
            "server.ca_file, must name a file in PEM form."
        ) from error
    return pem


def upstreams_of(config: Config, client_for: Callable[[Provider], HttpClient]) -> dict[str, Upstream]:
    return {
        provider.name: Upstream(
            provider.name, provider.base_url, dialect_of(provider), client_for(provider), provider.workspace
        )
        for provider in config.providers
    }


def dialect_of(provider: Provider) -> Dialect:
    return configured_dialect(
        provider.dialect,
        provider.base_url,
        provider.vendor or None,
        window=provider.window,
        api_version=provider.api_version,
    )


def defaults_of(config: Config) -> list[str]:
    return [provider.name for provider in config.providers if provider.default]


def secret_lookup_of(config: Config, environ: Mapping[str, str]) -> SecretLookup:
    """The lookup of provider keys for virtual keys: the key in a variable, for every header its provider accepts."""
    dialects = {provider.name: dialect_of(provider) for provider in config.providers}

    def find_secrets(provider: str, variable: str) -> list[Headers]:
        key = secret_in(variable, environ)
        return header_forms(dialects[provider].key_headers, key) if key and provider in dialects else []

    return find_secrets


def configured_keys(config: Config, environ: Mapping[str, str]) -> dict[str, Headers]:
    """The keys in `api_key_env` variables, as secrets of their providers."""
    keys = [(provider, secret_in(provider.api_key_env, environ)) for provider in config.providers]
    return {provider.name: header_forms(dialect_of(provider).key_headers, key)[0] for provider, key in keys if key}


def hook_secrets_of(config: Config, environ: Mapping[str, str]) -> dict[str, str]:
    """The webhook secrets of providers whose variable is set."""
    secrets = {provider.name: secret_in(provider.webhook_secret_env, environ) for provider in config.providers}
    return {name: secret for name, secret in secrets.items() if secret}


# ------------------------------------------------------------ preconditions
# `serve` checks these before it opens or creates anything, and `serve --check` checks the same. So both refuse the same
# configs, and a refused start leaves no file behind.


def problems(config: Config, host: str, port: int, workers: int) -> list[CarpoolError]:
    """Everything that keeps carpool from starting, except a store that another process uses."""
    checks: tuple[Callable[[], object], ...] = (
        lambda: listen(host, port).close(),
        lambda: admin_token(host, config.serving, os.environ),
        lambda: None if config.serving.tls is None else tls_context(config.serving.tls),
        lambda: (_login(config.serving, os.environ), *map(_roots, config.providers)),
        lambda: _check_store(config, host),
        lambda: _check_workers(workers),
    )
    errors = []
    for check in checks if host else checks[:1]:  # without an address only the config can be checked
        try:
            check()
        except CarpoolError as error:
            errors.append(error)
    return errors


def _check_store(config: Config, host: str) -> None:
    keys, now = inspect_store(config.store, encrypt=config.encrypt), SystemClock().now()
    usable = any(key.live(now) for key in keys)
    check_keys(host, config.serving, configured=usable and config.keys_required is not False)


def _check_workers(count: int) -> None:
    # Where several processes can share a port, each with its own accept queue.
    if count > 1 and not (sys.platform == "linux" and hasattr(os, "fork")):
        raise ConfigError("--workers needs Linux, where several processes can share a port. Leave it out here.")
