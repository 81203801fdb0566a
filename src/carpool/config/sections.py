"""The typed contents of a config: checks every section and builds its values."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final
from urllib.parse import urlsplit

from carpool.config.layers import CACHING_KEYS, TLS_KEYS, ConfigDocument, Flag, layered
from carpool.config.providers import (
    BUILT_IN,
    DIRECT,
    Provider,
    is_loopback,
    pem_path,
    proxy_url,
    read_providers,
    read_url,
    secret_in,
    variable,
)
from carpool.core.errors import ConfigError
from carpool.core.settings import SWITCH, Choice, Range, Shape, known, mapping, named
from carpool.planners.access.read_rules import read_budget, read_rules, read_zone
from carpool.planners.access.rules import RuleBook
from carpool.planners.policy import RoutingPolicy, read_settings, section_keys

_LABEL: Final = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST: Final = re.compile(rf"(\*\.)?{_LABEL}(\.{_LABEL})*")
_STORE: Final = Shape(re.compile(r"\S.{0,4000}"), "a path, or a URL such as sqlite:///carpool.db")
_BODY: Final = Range(0.001, 1000, whole=False)
_CACHING: Final = Choice(("off", "observe", "plan", False), "off, observe or plan")  # YAML parses a bare off as false
_LIMITS: Final[Mapping[str, Range]] = {
    "max_head_kb": Range(1, 1000, whole=True),
    "max_headers": Range(10, 10_000, whole=True),
    "max_connections": Range(1, 1_000_000, whole=True),
    "slow_sender_s": Range(0.1, 86_400, whole=False),
    "slow_reader_s": Range(0.1, 86_400, whole=False),
}


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of the proxy per connection and in total: a part of the section `limits`."""

    max_head_kb: int = 64
    max_headers: int = 256
    max_connections: int = 20_000
    slow_sender_s: float = 60.0
    slow_reader_s: float = 600.0

    @property
    def max_head(self) -> int:
        """The maximum size in bytes of a request line and headers together."""
        return self.max_head_kb * 1024


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths of a certificate and its key, in PEM format."""

    cert: str
    key: str


@dataclass(frozen=True, slots=True)
class Serving:
    """How clients reach carpool, and the outgoing proxy for providers without their own."""

    tls: Tls | None = None
    allowed_hosts: tuple[str, ...] = ()
    admin_token_env: str = "CARPOOL_ADMIN_TOKEN"  # noqa: S105  the variable's name
    trusted_proxies: tuple[str, ...] = ()
    outgoing_proxy: str | None = None
    outgoing_proxy_auth_env: str | None = None
    ca_file: str | None = None


@dataclass(frozen=True, slots=True)
class Config:
    providers: tuple[Provider, ...] = tuple(BUILT_IN.values())
    policy: RoutingPolicy = field(default_factory=RoutingPolicy)
    book: RuleBook = field(default_factory=RuleBook)
    timezone: str = "UTC"
    max_body_mb: float = 32.0
    store: str = "carpool.db"
    encrypt: bool = False  # whether calls and responses are encrypted in the store
    keys_required: bool | None = None  # None: required unless only this machine can connect
    caching: str = "observe"
    otlp_endpoint: str | None = None
    serving: Serving = field(default_factory=Serving)
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    origins: Mapping[str, str] = field(default_factory=dict)  # the origin of each key that was set
    notes: tuple[str, ...] = ()  # warnings for the user

    @property
    def max_body(self) -> int:
        """The maximum size in bytes of a call's body."""
        return int(self.max_body_mb * 1_000_000)


def read_config(
    path: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Iterable[Flag] = (),
) -> Config:
    """Load a config; the defaults without a file or any setting. Raises `ConfigError` for what is wrong."""
    environ = os.environ if environ is None else environ
    document = ConfigDocument()
    try:
        document = layered(path, environ, flags)
        config = _config(document)
        return replace(config, notes=tuple(_notes(config, environ)))
    except ConfigError as error:
        message = str(error)
        elsewhere = message.startswith(("CARPOOL_", "The value of CARPOOL_", *document.names.values()))
        if path is None or elsewhere:
            raise
        raise ConfigError(f"{os.fspath(path)}: {message}") from error


def _config(document: ConfigDocument) -> Config:
    if document.sections.get("budgets"):  # to ignore them would spend money that the user wants to keep
        raise ConfigError(
            f"{document.shown('budgets')} sets spending limits, and carpool does not enforce them yet: it would spend "
            "past them. Take the section out, and set limits at the provider."
        )
    policy = RoutingPolicy(**read_settings(document.sections, document.names))  # type: ignore[arg-type]
    serving = _serving(document)
    otlp = document.section("observability").get("otlp_endpoint")
    limits = {key: document.checked("limits", key, rule) for key, rule in _LIMITS.items()}
    timezone, book = _routing(document)
    given = {
        "max_body_mb": document.checked("limits", "max_body_mb", _BODY),
        "store": document.checked("store", "url", _STORE),
        "encrypt": document.checked("store", "encrypt", SWITCH),
        "keys_required": document.checked("keys", "required", SWITCH),
        "caching": _caching(document),
    }
    if otlp is not None:
        path = document.shown("observability.otlp_endpoint")
        given["otlp_endpoint"] = read_url(otlp, path, "the URL of a collector", "http://127.0.0.1:4318")
    return Config(
        providers=tuple(_with_outgoing_proxy(provider, serving) for provider in read_providers(document)),
        policy=policy,
        book=book,
        timezone=timezone,
        serving=serving,
        limits=ConnectionLimits(**{key: value for key, value in limits.items() if value is not None}),
        origins=document.origins,
        **{key: value for key, value in given.items() if value is not None},
    )


def _with_outgoing_proxy(provider: Provider, serving: Serving) -> Provider:
    """Apply the server's outgoing proxy to a remote provider without its own."""
    proxy, url = provider.proxy, provider.base_url
    if proxy is None and url.startswith("https:") and not is_loopback(urlsplit(url).hostname or ""):
        proxy = serving.outgoing_proxy
    return replace(provider, proxy=None if proxy == DIRECT else proxy, ca_file=provider.ca_file or serving.ca_file)


def _routing(document: ConfigDocument) -> tuple[str, RuleBook]:
    section, shown = document.section("routing"), document.shown
    timezone, budget = section.get("timezone") or "UTC", section.get("default_budget")
    read_zone(timezone, shown("routing.timezone"))  # checked even if no rule uses the time
    rules = read_rules(section.get("rules"), shown("routing.rules"), str(timezone))
    return str(timezone), RuleBook(
        rules, None if budget is None else read_budget(budget, shown("routing.default_budget"))
    )


def _caching(document: ConfigDocument) -> str | None:
    for key in document.section("caching"):
        known(key, CACHING_KEYS, "caching.")
    mode = document.checked("caching", "mode", _CACHING)
    if mode == "plan":
        raise ConfigError(
            f"{document.shown('caching.mode')} is plan, and carpool does not plan caches yet: write observe or off."
        )
    return "off" if mode is False else mode


def _notes(config: Config, environ: Mapping[str, str]) -> Iterable[str]:
    if config.otlp_endpoint:
        yield "observability.otlp_endpoint is set, but traces are not sent yet."
    for provider in config.providers:
        parts = urlsplit(provider.base_url)
        if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
            yield f"Keys travel to the provider {provider.name} unencrypted: its base URL begins with http://."
        secret_in(provider.webhook_secret_env, environ)
        if provider.api_key_env and not secret_in(provider.api_key_env, environ):
            yield (
                f"providers.{provider.name}.api_key_env names {provider.api_key_env}, which is not set: "
                "clients must bring a key."
            )


# ---------------------------------------------------------------- section server


def _serving(document: ConfigDocument) -> Serving:
    section, shown = document.section("server"), document.shown
    given = {known(key, section_keys("server"), "server."): value for key, value in section.items()}
    return Serving(
        tls=_tls(given.get("tls"), document),
        allowed_hosts=_each(given, "allowed_hosts", _host, "[carpool.example.com]", document),
        admin_token_env=variable(given.get("admin_token_env"), shown("server.admin_token_env"), "CARPOOL_ADMIN_TOKEN")
        or Serving().admin_token_env,
        trusted_proxies=_each(given, "trusted_proxies", _network, "[10.0.0.0/8]", document),
        outgoing_proxy=proxy_url(given.get("outgoing_proxy"), shown("server.outgoing_proxy")),
        outgoing_proxy_auth_env=variable(
            given.get("outgoing_proxy_auth_env"), shown("server.outgoing_proxy_auth_env"), "PROXY_LOGIN"
        ),
        ca_file=pem_path(given.get("ca_file"), shown("server.ca_file")),
    )


def _tls(value: object, document: ConfigDocument) -> Tls | None:
    content = mapping(value, path := document.shown("server.tls"))
    given = {known(key, TLS_KEYS, f"{path}."): item for key, item in content.items() if item is not None}
    if not given:
        return None
    for key in TLS_KEYS:
        if key not in given:
            raise ConfigError(
                f"server.tls.{key} is missing: TLS needs the paths of both, server.tls.cert and server.tls.key."
            )
    return Tls(*(str(pem_path(given[key], document.shown(f"server.tls.{key}"))) for key in TLS_KEYS))


def _each(
    given: Mapping[str, object], key: str, read: Callable[[object, str], str], example: str, document: ConfigDocument
) -> tuple[str, ...]:
    value, path = given.get(key), document.shown(f"server.{key}")
    if value is None:
        return ()
    if not isinstance(value, list):
        raise ConfigError(f"{path} is {named(value)}; it must be a list, such as {example}.")
    return tuple(read(item, document.shown(f"{path}[{number}]")) for number, item in enumerate(value))


def _host(value: object, path: str) -> str:
    name = value.lower().rstrip(".") if isinstance(value, str) else ""
    with suppress(ValueError):  # then it must be a name
        return str(ipaddress.ip_address(name.strip("[]")))
    if not _HOST.fullmatch(name):
        raise ConfigError(
            f"{path} is {named(value)}; it must be a host without scheme or port, such as carpool.example.com, "
            "*.example.com or 10.1.2.3."
        )
    return name


def _network(value: object, path: str) -> str:
    try:
        return str(ipaddress.ip_network(value if isinstance(value, str) else ""))
    except ValueError:
        raise ConfigError(
            f"{path} is {named(value)}; it must be an address or a network, such as 10.0.0.7 or 10.0.0.0/8."
        ) from None
