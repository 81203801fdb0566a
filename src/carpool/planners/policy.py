"""The user's settings. None means "not set: the planners decide".

A wrong setting fails at construction, with an error that names the setting, its value and what is allowed.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Final, Literal

from carpool.core.errors import BadCall, ConfigError
from carpool.core.settings import SWITCH, Check, Choice, Range, Shape, check, known, load, mapping

DAY: Final = 86_400.0
NO_NAMES: Final[Mapping[str, str]] = MappingProxyType({})
MAX_BUDGET: Final = 30 * DAY

_RULES: Final[Mapping[str, Check]] = {
    "sync_max_latency_ms": Range(0, MAX_BUDGET * 1000, whole=False),
    "batch_window_ms": Range(0, DAY * 1000, whole=False),
    "batch_min_size": Range(1, 1_000_000, whole=True),
    "batch_max_size": Range(1, 1_000_000, whole=True),
    "poll_interval_s": Range(0.01, 3600, whole=False),
    "batch_rpm": Range(1, 1_000_000, whole=True),
    "linger_ms": Range(0, 600_000, whole=False),
    "sync_rpm": Range(1, 10_000_000, whole=True),
    "max_input_tokens": Range(1, 1_000_000_000, whole=True),
    "enforce_pre_queue_validation": SWITCH,
    "metrics_prefix": Shape(
        re.compile(r"[A-Za-z_][A-Za-z0-9_:.\-]{0,99}"),
        "a name of letters, digits, '_', ':', '.' and '-' that begins with a letter",
    ),
    "track_sync_batch_split": SWITCH,
    "alert_on_batch_failure_rate": Range(0, 1, whole=False),
    "max_attempts": Range(1, 100, whole=True),
    "on_disconnect": Choice(("keep", "cancel"), "keep or cancel"),
    "max_waiting_calls": Range(1, 100_000_000, whole=True),
    "max_waiting_calls_per_credential": Range(1, 100_000_000, whole=True),
    "max_waiting_now": Range(0, 1_000_000, whole=True),
    "max_wait_now_s": Range(0, 600, whole=False),
    "retain_days": Range(0, 3650, whole=False),
    "delete_provider_files": SWITCH,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingPolicy:
    sync_max_latency_ms: float | None = None
    batch_window_ms: float | None = None
    batch_min_size: int | None = None
    batch_max_size: int | None = None
    poll_interval_s: float | None = None
    batch_rpm: int | None = None
    linger_ms: float = 500
    sync_rpm: int | None = None  # rate limit of rescues
    max_input_tokens: int | None = None
    enforce_pre_queue_validation: bool = True
    metrics_prefix: str = "carpool"
    track_sync_batch_split: bool = True
    alert_on_batch_failure_rate: float | None = None
    max_attempts: int = 3
    on_disconnect: Literal["keep", "cancel"] = "keep"
    max_waiting_calls: int = 200_000
    max_waiting_calls_per_credential: int | None = None
    max_waiting_now: int = 2000
    max_wait_now_s: float = 30
    retain_days: float = 7
    delete_provider_files: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                check(_RULES[field.name], value, field.name)
        low, high = self.batch_min_size, self.batch_max_size
        if low is not None and high is not None and low > high:
            raise ConfigError(f"batch_min_size is {low}, which is more than batch_max_size, {high}.")

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> RoutingPolicy:
        """Read the settings of a policy from a config file; other parts of carpool read the other sections."""
        try:
            return cls(**read_settings(load(path)))
        except ConfigError as error:
            raise ConfigError(f"{os.fspath(path)}: {error}") from error


# Each key of the config file maps to a setting, or to None where another part of carpool reads it.
_SIZES: Final = {
    "batch_window_ms": "batch_window_ms",
    "min_batch_size": "batch_min_size",
    "max_batch_size": "batch_max_size",
    "poll_interval_s": "poll_interval_s",
}
_TOKENS: Final = {
    "max_input_tokens_per_request": "max_input_tokens",
    "enforce_pre_queue_validation": "enforce_pre_queue_validation",
}
_NOW: Final = {"max_waiting_now": "max_waiting_now", "max_wait_now_s": "max_wait_now_s"}
_SECTIONS: Final[Mapping[str, Mapping[str, str | None] | None]] = {
    "routing": {
        **_SIZES,
        "sync_latency_cap_ms": "sync_max_latency_ms",
        "sync_rpm": "sync_rpm",
        "max_attempts": "max_attempts",
        "on_disconnect": "on_disconnect",
        "default_budget": None,
        "rules": None,
        "timezone": None,
    },
    "batching": {
        **_SIZES,
        "rpm": "batch_rpm",
        "linger_ms": "linger_ms",
        "delete_provider_files": "delete_provider_files",
    },
    "token_budgets": _TOKENS,
    "limits": {
        **_TOKENS,
        "max_waiting_calls": "max_waiting_calls",
        "max_waiting_calls_per_credential": "max_waiting_calls_per_credential",
        **_NOW,
        "max_body_mb": None,
        **dict.fromkeys(("max_head_kb", "max_headers", "max_connections", "slow_sender_s", "slow_reader_s")),
    },
    "observability": {
        "metrics_prefix": "metrics_prefix",
        "track_sync_batch_split": "track_sync_batch_split",
        "alert_on_batch_failure_rate": "alert_on_batch_failure_rate",
        "otlp_endpoint": None,
    },
    "store": {"retain_days": "retain_days", "url": None, "encrypt": None},
    "keys": {"required": None},
    "server": dict.fromkeys(
        (
            *("tls", "allowed_hosts", "admin_token_env", "trusted_proxies"),
            *("outgoing_proxy", "outgoing_proxy_auth_env", "ca_file"),
        )
    ),
    "providers": None,
    "caching": None,
    "budgets": None,
}


def read_settings(document: Mapping[object, object], names: Mapping[str, str] = NO_NAMES) -> dict[str, Any]:
    """The policy settings of a whole config. `names` maps keys to the names to show for them in errors."""
    settings: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for section, content in document.items():
        keys = _SECTIONS[known(section, _SECTIONS, "")]
        if keys is None:
            continue
        for key, value in mapping(content, f"The section {section}").items():
            setting = keys[known(key, keys, f"{section}.")]
            path = names.get(f"{section}.{key}", f"{section}.{key}")
            if setting is None or value is None:
                continue
            check(_RULES[setting], value, path)
            if settings.setdefault(setting, value) != value:
                raise ConfigError(f"{path} is {value!r}, but {origin[setting]} says {settings[setting]!r}: keep one.")
            origin.setdefault(setting, path)
    return settings


def places(setting: str) -> list[tuple[str, str]]:
    """Every section and key of a config file that can hold a setting; the last one is preferred."""
    return [(place, name) for place, keys in _SECTIONS.items() for name, to in (keys or {}).items() if to == setting]


def same_setting(section: str, key: str) -> list[tuple[str, str]]:
    """Every section and key of a config file that holds the same setting as this one."""
    setting = (_SECTIONS.get(section) or {}).get(key)
    return [(section, key)] if setting is None else places(setting)


def section_keys(section: str) -> tuple[str, ...]:
    """The keys of a section; none for sections that are not flat."""
    return tuple(_SECTIONS[section] or ())


def sections() -> tuple[str, ...]:
    return tuple(_SECTIONS)


_BUDGET: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*(ms|s|m|h|)\s*")
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}


def parse_budget(text: str) -> float:
    """Parse a budget such as `500ms`, `30s`, `10m`, `1.5h` or `45` (seconds) into seconds."""
    match = _BUDGET.fullmatch(text)
    if match is None:
        raise BadCall(f"{text[:40]!r} is not a budget: write a number and a unit, as in 500ms, 30s, 10m or 2h.")
    seconds = float(match[1]) * _SECONDS[match[2]]
    if not (math.isfinite(seconds) and 0 < seconds <= MAX_BUDGET):
        raise BadCall(f"The budget {text[:40]!r} is out of range: it must be more than 0 and at most 30 days (720h).")
    return seconds
