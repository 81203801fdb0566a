"""The section `providers`, and checks of the addresses, paths and variables in any section."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple
from urllib.parse import SplitResult, urlsplit

from carpool.config.layers import PROVIDER_KEYS, ConfigDocument
from carpool.core.errors import ConfigError
from carpool.core.settings import SWITCH, Check, Choice, Shape, check, known, mapping, named
from carpool.dialects import COMPATIBLE_PROVIDERS, DIALECTS, OPENAI, compatible_provider
from carpool.planners.routing import read_models

HOUR: Final = 3600.0
DIRECT: Final = "direct"  # as a provider's proxy: none, even if the section server sets one
_OTHERS: Final = {name: row for name, row in COMPATIBLE_PROVIDERS.items() if name != OPENAI.name}
_NAME: Final = Shape(re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,59}"), "a name of letters, digits, '_', '.' and '-'")
_DIALECT: Final = Choice(tuple(DIALECTS), f"one of {', '.join(sorted(DIALECTS))}")
_VENDOR: Final = Choice(tuple(COMPATIBLE_PROVIDERS), f"one of {', '.join(sorted(COMPATIBLE_PROVIDERS))}")
_VERSION: Final = Shape(re.compile(r"[A-Za-z0-9.-]{1,40}"), "a version such as preview or 2025-04-01-preview")
_WINDOW: Final = re.compile(r"(\d{1,4})(h|d)")
_VARIABLE: Final = re.compile(r"[A-Z_][A-Z0-9_]{0,99}")
_PATH: Final = Shape(re.compile(r"\S.{0,4000}"), "the path of a file in PEM form, such as /etc/carpool/cert.pem")
_METADATA: Final = frozenset({"metadata", "metadata.google.internal", "metadata.goog", "instance-data"})
_AWS_V6: Final = ipaddress.ip_address("fd00:ec2::254")


@dataclass(frozen=True, slots=True)
class Provider:
    """A configured provider. `api_key_env` names the variable with the key for clients that send none."""

    name: str
    dialect: str
    base_url: str
    api_key_env: str | None = None
    default: bool = False  # used for requests of its dialect that name no provider
    allow_http: bool = False  # allow unencrypted connections to other machines
    allow_link_local: bool = False  # allow the addresses of cloud metadata services
    proxy: str | None = None  # URL of the outgoing proxy
    ca_file: str | None = None  # additional certificate authorities
    webhook_secret_env: str | None = None  # the variable with the secret of its webhooks
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # overrides of the capability table
    vendor: str = ""  # which OpenAI-compatible provider it is; empty for the dialect's own
    window: float | None = None  # completion window of its batches in seconds; None: the usual one
    api_version: str = ""  # query parameter of every request


BUILT_IN: Mapping[str, Provider] = {
    "anthropic": Provider("anthropic", "anthropic", "https://api.anthropic.com", None, True),
    "openai": Provider("openai", "openai", "https://api.openai.com/v1", None, True),
}


class _Given(NamedTuple):
    """The keys that are set for one provider. `shown` is how the user wrote the path of a key."""

    path: str
    keys: Mapping[str, object]
    shown: Callable[[str], str]

    def name(self, key: str) -> str:
        return self.shown(f"{self.path}.{key}")

    def checked(self, key: str, rule: Check, default: object) -> Any:
        value = self.keys.get(key, default)
        if key in self.keys:
            check(rule, value, self.name(key))
        return value


def read_providers(document: ConfigDocument) -> list[Provider]:
    """Also picks the default of each dialect: the marked provider, the only one, or the one named like the dialect."""
    listed = document.section("providers")
    names = [str(name) for name in listed]
    if not document.lists_providers:  # flags and variables change or add providers; a list in a file is complete
        names = [*BUILT_IN, *(name for name in names if name not in BUILT_IN)]
    providers, resolved = [_provider(name, listed.get(name), document) for name in names], []
    for provider in providers:
        same = [other for other in providers if other.dialect == provider.dialect]
        marked = [other.name for other in same if other.default]
        if len(marked) > 1:
            raise ConfigError(
                f"providers.{marked[0]} and providers.{marked[1]} are both the default of the dialect "
                f"{provider.dialect}: mark one."
            )
        by_name = len(same) == 1 or provider.name == provider.dialect
        resolved.append(replace(provider, default=provider.default if marked else by_name))
    return resolved


def _provider(name: str, value: object, document: ConfigDocument) -> Provider:
    path = f"providers.{name}"
    check(_NAME, name, f"The name of {path[:80]}")
    content = mapping(value, path)
    if "api_key" in content:
        raise ConfigError(
            f"{path}.api_key would put a key into a file. Put it into an environment variable, and write the "
            f"variable's name as {path}.api_key_env."
        )
    keys = {known(key, PROVIDER_KEYS, f"{path}."): item for key, item in content.items() if item is not None}
    given = _Given(path, keys, document.shown)
    dialect = _dialect(name, given)
    base_url = _base_url(name, dialect, given)
    vendor, window, api_version = _compatibility(name, dialect, base_url, given)
    if vendor and not urlsplit(base_url).path.strip("/"):  # the provider's usual path
        base_url = base_url.rstrip("/") + COMPATIBLE_PROVIDERS[vendor].path
    models = read_models(keys.get("models"), given.name("models"))
    if not given.checked("batch", SWITCH, True):
        patterns = models | {"*": models.get("*", {})}
        models = {pattern: {**row, "batch": False} for pattern, row in patterns.items()}
    webhook_secret_env = variable(
        keys.get("webhook_secret_env"), given.name("webhook_secret_env"), "OPENAI_WEBHOOK_SECRET"
    )
    family = COMPATIBLE_PROVIDERS.get(vendor or dialect)
    if webhook_secret_env is not None and (family is None or not family.hooks):
        raise ConfigError(
            f"{given.name('webhook_secret_env')} is for providers with webhooks, and this one has none: take it out."
        )
    provider = Provider(
        name,
        dialect,
        base_url,
        variable(keys.get("api_key_env"), given.name("api_key_env"), "ANTHROPIC_API_KEY"),
        default=given.checked("default", SWITCH, False),
        allow_http=given.checked("allow_http", SWITCH, False),
        allow_link_local=given.checked("allow_link_local", SWITCH, False),
        proxy=proxy_url(keys.get("proxy"), given.name("proxy")),
        ca_file=pem_path(keys.get("ca_file"), given.name("ca_file")),
        webhook_secret_env=webhook_secret_env,
        models=models,
        vendor=vendor,
        window=window,
        api_version=api_version,
    )
    _check_address(provider, given)
    return provider


def _dialect(name: str, given: _Given) -> str:
    usual = name if name in DIALECTS else OPENAI.name if "vendor" in given.keys or name in _OTHERS else None
    dialect = given.checked("dialect", _DIALECT, usual)
    if dialect is None:
        known_dialects = " or ".join(sorted(DIALECTS))
        raise ConfigError(f"{given.path}.dialect is missing: say which wire it speaks, {known_dialects}.")
    return str(dialect)


def _base_url(name: str, dialect: str, given: _Given) -> str:
    built_in, vendor = BUILT_IN.get(name), given.keys.get("vendor", name)
    home: str | None = None
    if built_in and dialect == built_in.dialect:
        home = built_in.base_url
    elif isinstance(vendor, str) and vendor in _OTHERS:
        home = _OTHERS[vendor].home or None
    base_url = given.keys.get("base_url", home)
    if base_url is None:
        raise ConfigError(
            f"{given.path}.base_url is missing: say where the provider is, as in https://api.openai.com/v1."
        )
    return read_url(base_url, given.name("base_url"))


def _compatibility(name: str, dialect: str, base_url: str, given: _Given) -> tuple[str, float | None, str]:
    """Which OpenAI-compatible provider it is, its window and its API version."""
    if dialect != OPENAI.name:
        for key in ("vendor", "window", "api_version"):
            if key in given.keys:
                raise ConfigError(
                    f"{given.name(key)} is for OpenAI-compatible providers, not for {dialect}: take it out."
                )
        return "", None, ""
    vendor = given.checked("vendor", _VENDOR, name if name in _OTHERS else None)
    row = compatible_provider(base_url, vendor)
    seconds = None
    if (window := given.keys.get("window")) is not None:
        match = _WINDOW.fullmatch(window) if isinstance(window, str) else None
        seconds = 0.0 if match is None else int(match[1]) * {"h": 1, "d": 24}[match[2]] * HOUR
        shortest, longest = row.limits.window, row.longest_window
        if not shortest <= seconds <= longest:
            allowed = f"from 24h to {longest / HOUR:.0f}h" if longest > shortest else "24h, its only one"
            raise ConfigError(f"{given.name('window')} is no window of {row.said}: it must be {allowed}.")
    is_known = vendor is not None or row.name != OPENAI.name
    return row.name if is_known else "", seconds, given.checked("api_version", _VERSION, "")


def _check_address(provider: Provider, given: _Given) -> None:
    """Refuse to send keys unencrypted, or to the address of a cloud metadata service."""
    parts, shown = urlsplit(provider.base_url), given.name("base_url")
    host = parts.hostname or ""
    if parts.scheme == "http" and not is_loopback(host) and not provider.allow_http:
        raise ConfigError(
            f"{shown} begins with http://, so keys would travel to {host} unencrypted: write https://, or "
            f"{given.path}.allow_http: true where the way is safe."
        )
    try:
        address = _address(host)
        is_metadata = address.is_link_local or address == _AWS_V6
    except ValueError:
        is_metadata = host.rstrip(".") in _METADATA
    if is_metadata and not provider.allow_link_local:
        raise ConfigError(
            f"{shown} leads to {host}, an address of the machine's own network where cloud metadata is served: write "
            f"the provider's address, or {given.path}.allow_link_local: true if it really is there."
        )
    if provider.proxy not in (None, DIRECT) and parts.scheme != "https":
        raise ConfigError(
            f"{given.name('proxy')} is for a provider that is reached by https://, and {given.path}.base_url is not: "
            "take one of them out."
        )


# ---------------------------------------------------------------- values of any section


def variable(value: object, path: str, example: str) -> str | None:
    """Check the name of an environment variable. A wrong one is not shown: it is most likely a secret."""
    if value is None:
        return None
    if not isinstance(value, str) or not _VARIABLE.fullmatch(value):
        raise ConfigError(
            f"{path} is not the name of an environment variable: write a name such as {example}, not the secret itself."
        )
    return value


def secret_in(variable: str | None, environ: Mapping[str, str]) -> str:
    """The value of an environment variable; empty if it is not set. Raises unless it is a valid header value."""
    secret = environ.get(variable, "").strip() if variable else ""
    if not (secret.isascii() and secret.isprintable()):
        raise ConfigError(f"{variable} holds a character that no key has. Set it to the key itself.")
    return secret


def pem_path(value: object, path: str) -> str | None:
    if value is None:
        return None
    check(_PATH, value, path)
    return str(value)


def proxy_url(value: object, path: str) -> str | None:
    if value is None or value == DIRECT:
        return None if value is None else DIRECT
    parts = _split_url(value)
    if parts is not None and "@" in parts.netloc:
        raise ConfigError(
            f"{path} carries a user name or a password: put user:password into an environment variable, and write the "
            "variable's name as server.outgoing_proxy_auth_env."
        )
    if parts is None or parts.scheme != "http" or parts.path.strip("/") or parts.query or parts.fragment:
        raise ConfigError(
            f"{path} is {named(value)}; it must be the URL of an HTTP proxy, such as http://proxy.example.com:3128, "
            f"or {DIRECT}."
        )
    return f"http://{parts.netloc}"


def read_url(
    value: object, path: str, what: str = "a provider's base URL", example: str = "https://api.anthropic.com"
) -> str:
    parts = _split_url(value)
    if parts is not None and "@" in parts.netloc:
        raise ConfigError(
            f"{path} carries a user name or a password. Take it out: clients bring their own key, or the provider's "
            "api_key_env names the variable that holds one."
        )
    if parts is None or parts.scheme not in ("http", "https") or parts.query or parts.fragment:
        raise ConfigError(f"{path} is {named(value)}, which is not {what}: write one such as {example}.")
    return str(value)


def _split_url(value: object) -> SplitResult | None:
    """None unless it is a URL with a host. With a user name the host is not checked: the caller reports the user
    name."""
    try:
        parts = urlsplit(value) if isinstance(value, str) else None
        if parts is None or not ("@" in parts.netloc or (parts.hostname and parts.port != 0)):
            return None
    except ValueError:
        return None
    return parts


def is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return _address(host).is_loopback
    except ValueError:
        return False


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(host.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address
