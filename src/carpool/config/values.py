"""What a config comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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


ANTHROPIC = Provider("anthropic", "anthropic", "https://api.anthropic.com", None, True)
OPENAI = Provider("openai", "openai", "https://api.openai.com/v1", None, True)
BUILT_IN: Mapping[str, Provider] = {one.name: one for one in (ANTHROPIC, OPENAI)}


@dataclass(frozen=True, slots=True)
class Config:
    providers: tuple[Provider, ...] = (ANTHROPIC, OPENAI)
    policy: RoutingPolicy = field(default_factory=RoutingPolicy)
    book: RuleBook = field(default_factory=RuleBook)
    timezone: str = "UTC"
    max_body_mb: float = DEFAULT_BODY_MB
    store: str = DEFAULT_STORE
    caching: str = "observe"
    otlp_endpoint: str | None = None
    origins: Mapping[str, str] = field(default_factory=dict)  # where each key that was set came from
    notes: tuple[str, ...] = ()  # what the user should know, though it is no mistake

    @property
    def max_body(self) -> int:
        """The most bytes that the body of a call may have."""
        return int(self.max_body_mb * 1_000_000)
