"""From flags, environment and file to what `carpool serve` runs with."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from carpool.config import Config, Flag, Provider, Serving, read_config
from carpool.dialects import DIALECTS, RELATIVES, speaking
from carpool.doors.proxy.lending import forms, key_header
from carpool.engine import Upstream
from carpool.engine.guests import Lender
from carpool.errors import ConfigError
from carpool.model import Headers
from carpool.ports import Dialect, Wire
from carpool.stores import carries_password, check_url
from carpool.wires import OutgoingProxy, StraightWire


def gather(
    file: Path | None,
    upstream: str | None,
    providers: Iterable[str],
    store: str | None,
    tls: tuple[str | None, str | None] = (None, None),
) -> Config:
    """The config as it holds for this run. Flags are the last word."""
    flags = []
    if upstream is not None:
        flags.append(Flag(("providers", "anthropic", "base_url"), upstream, "--upstream"))
    for text in providers:
        flags += _provider(text)
    if store is not None:
        flags.append(Flag(("store", "url"), store, "--store"))
    for name, path in zip(("cert", "key"), tls, strict=True):
        if path is not None:
            flags.append(Flag(("server", "tls", name), path, f"--tls-{name}"))
    config = read_config(file, os.environ, [_no_login(flag) for flag in flags])
    check_url(config.store)
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
    if dialect not in DIALECTS and dialect not in RELATIVES:
        return [Flag(("providers", name, "base_url"), url.strip(), shown)]
    return [
        Flag(("providers", name, "dialect" if dialect in DIALECTS else "relative"), dialect, shown),
        Flag(("providers", name, "base_url"), rest, shown),
    ]


def _no_login(flag: Flag) -> Flag:
    """A process's arguments can be read by every user of the machine. A database's user name alone opens nothing."""
    if isinstance(flag.value, str) and _tells(flag.shown, flag.value):
        raise ConfigError(
            f"{flag.shown} carries a user name or a password, and everybody on this machine can read a command line. "
            "Put it into the config file or into an environment variable."
        )
    return flag


def _tells(flag: str, url: str) -> bool:
    if flag == "--store":
        return carries_password(url)
    return "@" in url.partition("://")[2].partition("/")[0]


class Wires:
    """The ways out: providers that are reached alike share their connections' client."""

    def __init__(self, serving: Serving, environ: Mapping[str, str]) -> None:
        self._wires: dict[object, StraightWire] = {}
        self._login = _login(serving, environ)

    def to(self, one: Provider) -> StraightWire:
        way = (one.proxy, one.ca_file, one.allow_link_local)
        if way not in self._wires:
            proxy = None if one.proxy is None else OutgoingProxy(one.proxy, self._login)
            self._wires[way] = StraightWire(roots_pem=_roots(one), proxy=proxy, allow_link_local=one.allow_link_local)
        return self._wires[way]

    async def aclose(self) -> None:
        for wire in self._wires.values():
            await wire.aclose()


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
    except (OSError, ValueError) as error:  # ssl's errors are among them
        raise ConfigError(
            f"The certificates in {one.ca_file} can't be used: providers.{one.name}.ca_file, or server.ca_file, must "
            "name a file in PEM form."
        ) from error
    return pem


def upstreams_of(config: Config, wire_to: Callable[[Provider], Wire]) -> dict[str, Upstream]:
    return {one.name: Upstream(one.name, one.base_url, dialect_of(one), wire_to(one)) for one in config.providers}


def dialect_of(one: Provider) -> Dialect:
    return speaking(one.dialect, one.base_url, one.relative or None, window=one.window, api_version=one.api_version)


def defaults_of(config: Config) -> list[str]:
    return [one.name for one in config.providers if one.default]


def lender_of(config: Config, environ: Mapping[str, str]) -> Lender:
    """What virtual keys buy with: the key in a variable, in every form in which its provider is sent one."""
    wires = {one.name: (one.dialect, one.relative) for one in config.providers}

    def lend(provider: str, variable: str) -> list[Headers]:
        key = environ.get(variable, "").strip()
        return forms(wires[provider][0], key, wires[provider][1]) if key and provider in wires else []

    return lend


def house_keys(config: Config, environ: Mapping[str, str]) -> list[tuple[str, Headers]]:
    """The keys of `api_key_env`, in every form in which a client may have passed them."""
    named = [(one, environ.get(one.api_key_env, "").strip()) for one in config.providers if one.api_key_env]
    return [(one.name, secret) for one, key in named if key for secret in forms(one.dialect, key, one.relative)]


def hook_secrets_of(config: Config, environ: Mapping[str, str]) -> dict[str, str]:
    """The secrets under which providers sign their webhooks, where their variable is set."""
    named = {one.name: environ.get(one.webhook_secret_env or "", "").strip() for one in config.providers}
    return {name: secret for name, secret in named.items() if secret}


def keys_of(config: Config, environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """The header with the key of each provider whose variable is set."""
    keys = {}
    for one in config.providers:
        key = environ.get(one.api_key_env, "").strip() if one.api_key_env else ""
        if key:
            keys[one.name] = key_header(one.dialect, key, one.relative)
    return keys
