"""What a config comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from carpool.config.limits import Limits
from carpool.policy import RoutingPolicy
from carpool.rules import RuleBook

DEFAULT_STORE = "carpool.db"
DEFAULT_BODY_MB = 32.0


@dataclass(frozen=True, slots=True)
class Provider:
    """Where calls of one name go. `api_key_env` names the variable whose key is used for clients that send none."""

    name: str
    dialect: str
    base_url: str
    api_key_env: str | None = None
    default: bool = False  # the one of its dialect that a request goes to which names no provider
    allow_http: bool = False  # unencrypted, off this machine
    allow_link_local: bool = False  # where cloud metadata is served
    proxy: str | None = None  # through which it is reached
    ca_file: str | None = None  # who else may vouch for it
    webhook_secret_env: str | None = None  # the variable with the secret of its webhooks
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # what they can do, where the table is wrong
    relative: str = ""  # which of OpenAI's, where it speaks its wire
    window: float | None = None  # of its batches, in seconds, where it is not the usual one
    api_version: str = ""  # on every request, as a query


ANTHROPIC = Provider("anthropic", "anthropic", "https://api.anthropic.com", None, True)
OPENAI = Provider("openai", "openai", "https://api.openai.com/v1", None, True)
BUILT_IN: Mapping[str, Provider] = {one.name: one for one in (ANTHROPIC, OPENAI)}


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths of a certificate and of its key, in PEM form."""

    cert: str
    key: str


@dataclass(frozen=True, slots=True)
class Serving:
    """How carpool is reached, and the way out that holds for every provider without one of its own."""

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
    encrypt: bool = False  # what the store keeps of calls and answers
    keys_required: bool | None = None  # None: off this machine
    caching: str = "observe"
    otlp_endpoint: str | None = None
    serving: Serving = field(default_factory=Serving)
    limits: Limits = field(default_factory=Limits)
    origins: Mapping[str, str] = field(default_factory=dict)  # where each key that was set came from
    notes: tuple[str, ...] = ()  # what the user should know, though it is no mistake

    @property
    def max_body(self) -> int:
        """The most bytes that the body of a call may have."""
        return int(self.max_body_mb * 1_000_000)
