"""The settings of `carpool.yaml`, as a table: each field has its default and the reader of its value.

A field is in the file under its own name in the section of its class, unless it says `at`. The settings of routing and
batching are in `carpool.planners.policy`, rules in `carpool.planners.access`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Final

from carpool.config import values
from carpool.config.values import Reader, allowed
from carpool.core.settings import SWITCH, Check, Choice, Range, Shape
from carpool.dialects import COMPATIBLE_PROVIDERS, DEFAULT_DIALECT, DIALECTS
from carpool.planners.access.rules import RuleBook
from carpool.planners.policy import RoutingPolicy

_STORE: Final = Shape(re.compile(r"\S.{0,4000}"), "a path, or a URL such as sqlite:///carpool.db")
_VERSION: Final = Shape(re.compile(r"[A-Za-z0-9.-]{1,40}"), "a version such as preview or 2025-04-01-preview")
_WORKSPACE: Final = Shape(re.compile(r"[^\x00-\x1f\x7f]{1,100}"), "the name of a workspace, at most 100 characters")
_SECONDS: Final = Range(0.1, 86_400, whole=False)


def setting(default: Any, read: Reader | Check, at: str = "") -> Any:
    reader = read if callable(read) else allowed(read)
    return field(default=default, metadata={"read": reader, "at": at})


def one_of(names: Mapping[str, object]) -> Choice:
    return Choice(tuple(names), f"one of {', '.join(sorted(names))}")


@dataclass(frozen=True, slots=True)
class Provider:
    """A configured provider. `api_key_env` names the variable with the key for clients that send none."""

    name: str
    dialect: str = setting(MISSING, lambda value, path: allowed(one_of(DIALECTS))(value, path))
    base_url: str = setting(MISSING, values.base_url)
    api_key_env: str | None = setting(None, values.variable(DEFAULT_DIALECT.key_variable))
    default: bool = setting(False, SWITCH)  # used for requests of its dialect that name no provider
    allow_http: bool = setting(False, SWITCH)  # allow unencrypted connections to other machines
    allow_link_local: bool = setting(False, SWITCH)  # allow the addresses of cloud metadata services
    proxy: str | None = setting(None, values.proxy_url)  # URL of the outgoing proxy
    ca_file: str | None = setting(None, values.pem_path)  # additional certificate authorities
    webhook_secret_env: str | None = setting(None, values.variable("WEBHOOK_SECRET"))
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # overrides of the capability table
    vendor: str = setting("", one_of(COMPATIBLE_PROVIDERS))  # empty for the dialect's own
    window: float | None = None  # completion window of its batches in seconds; None: the usual one
    api_version: str = setting("", allowed(_VERSION))  # query parameter of every request
    workspace: str = setting("", allowed(_WORKSPACE))  # all keys of this provider belong to it; empty: unknown


PROVIDER_KEYS: Final = (*(field.name for field in fields(Provider) if field.name != "name"), "batch")

BUILT_IN: Mapping[str, Provider] = {
    name: Provider(name, name, dialect.home, None, True) for name, dialect in DIALECTS.items() if dialect.home
}


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of the proxy per connection and in total: a part of the section `limits`."""

    max_head_kb: int = setting(64, Range(1, 1000, whole=True))
    max_headers: int = setting(256, Range(10, 10_000, whole=True))
    max_connections: int = setting(20_000, Range(1, 1_000_000, whole=True))
    slow_sender_s: float = setting(60.0, _SECONDS)
    slow_reader_s: float = setting(600.0, _SECONDS)

    @property
    def max_head(self) -> int:
        """The maximum size in bytes of a request line and headers together."""
        return self.max_head_kb * 1024


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths of a certificate and its key, in PEM format."""

    cert: str = setting(MISSING, values.pem_path)
    key: str = setting(MISSING, values.pem_path)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How clients reach carpool, and the outgoing proxy for providers without their own: the section `server`."""

    tls: Tls | None = None
    allowed_hosts: tuple[str, ...] = setting((), values.list_of(values.host, "[carpool.example.com]"))
    admin_token_env: str = setting("CARPOOL_ADMIN_TOKEN", values.variable("CARPOOL_ADMIN_TOKEN"))
    trusted_proxies: tuple[str, ...] = setting((), values.list_of(values.network, "[10.0.0.0/8]"))
    outgoing_proxy: str | None = setting(None, values.proxy_url)
    outgoing_proxy_auth_env: str | None = setting(None, values.variable("PROXY_LOGIN"))
    ca_file: str | None = setting(None, values.pem_path)


@dataclass(frozen=True, slots=True)
class Config:
    providers: tuple[Provider, ...] = tuple(BUILT_IN.values())
    policy: RoutingPolicy = field(default_factory=RoutingPolicy)
    book: RuleBook = field(default_factory=RuleBook)
    timezone: str = setting("UTC", values.timezone, at="routing.timezone")
    max_body_mb: float = setting(32.0, Range(0.001, 1000, whole=False), at="limits.max_body_mb")
    store: str = setting("carpool.db", _STORE, at="store.url")
    encrypt: bool = setting(False, SWITCH, at="store.encrypt")  # encrypt calls and responses in the store
    # None: required unless only this machine can connect
    keys_required: bool | None = setting(None, SWITCH, at="keys.required")
    otlp_endpoint: str | None = setting(
        None, values.url("the URL of a collector", "http://127.0.0.1:4318"), at="observability.otlp_endpoint"
    )
    serving: ServerSettings = field(default_factory=ServerSettings)
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    origins: Mapping[str, str] = field(default_factory=dict)  # the origin of each key that was set
    notes: tuple[str, ...] = ()  # warnings for the user

    @property
    def max_body(self) -> int:
        """The maximum size in bytes of a call's body."""
        return int(self.max_body_mb * 1_000_000)
