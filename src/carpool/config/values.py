"""The types of a parsed config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from carpool.config.layers import ConfigDocument
from carpool.core.settings import Range, check, mapping
from carpool.planners.access.rules import RuleBook
from carpool.planners.policy import RoutingPolicy

# ------------------------------------------------------------ limits
# Limits of the proxy per connection and in total: a part of the section `limits`.

_RANGES: Final[Mapping[str, Range]] = {
    "max_head_kb": Range(1, 1000, whole=True),
    "max_headers": Range(10, 10_000, whole=True),
    "max_connections": Range(1, 1_000_000, whole=True),
    "slow_sender_s": Range(0.1, 86_400, whole=False),
    "slow_reader_s": Range(0.1, 86_400, whole=False),
}


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    max_head_kb: int = 64
    max_headers: int = 256
    max_connections: int = 20_000
    slow_sender_s: float = 60.0
    slow_reader_s: float = 600.0

    @property
    def max_head(self) -> int:
        """The maximum size in bytes of a request line and headers together."""
        return self.max_head_kb * 1024


def read_limits(document: ConfigDocument) -> ConnectionLimits:
    section = mapping(document.sections.get("limits"), "The section limits")
    given = {name: section[name] for name in _RANGES if section.get(name) is not None}
    for name, value in given.items():
        check(_RANGES[name], value, document.shown(f"limits.{name}"))
    return ConnectionLimits(**given)  # type: ignore[arg-type]


DEFAULT_STORE = "carpool.db"
DEFAULT_BODY_MB = 32.0


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
    vendor: str = ""  # which OpenAI-compatible provider it is
    window: float | None = None  # completion window of its batches in seconds; None: the usual one
    api_version: str = ""  # query parameter of every request


ANTHROPIC = Provider("anthropic", "anthropic", "https://api.anthropic.com", None, True)
OPENAI = Provider("openai", "openai", "https://api.openai.com/v1", None, True)
BUILT_IN: Mapping[str, Provider] = {provider.name: provider for provider in (ANTHROPIC, OPENAI)}


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
    providers: tuple[Provider, ...] = (ANTHROPIC, OPENAI)
    policy: RoutingPolicy = field(default_factory=RoutingPolicy)
    book: RuleBook = field(default_factory=RuleBook)
    timezone: str = "UTC"
    max_body_mb: float = DEFAULT_BODY_MB
    store: str = DEFAULT_STORE
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
