"""The user's settings. None means "not set: the planners decide".

A wrong setting fails at construction, with an error that names the setting, its value and what is allowed.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Final, Literal

from carpool.core.errors import BadCall, ConfigError
from carpool.core.settings import SWITCH, Check, Choice, Range, Shape, check, known, load, mapping

DAY: Final = 86_400.0
MAX_BUDGET: Final = 30 * DAY
_PREFIX: Final = Shape(
    re.compile(r"[A-Za-z_][A-Za-z0-9_:.\-]{0,99}"),
    "a name of letters, digits, '_', ':', '.' and '-' that begins with a letter",
)


_CACHING: Final = Choice(("off", "observe", "plan"), "off, observe or plan")


def _setting(rule: Check, default: object = None) -> Any:
    return field(default=default, metadata={"rule": rule})


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingPolicy:
    sync_max_latency_ms: float | None = _setting(Range(0, MAX_BUDGET * 1000, whole=False))
    batch_window_ms: float | None = _setting(Range(0, DAY * 1000, whole=False))
    batch_min_size: int | None = _setting(Range(1, 1_000_000, whole=True))
    batch_max_size: int | None = _setting(Range(1, 1_000_000, whole=True))
    poll_interval_s: float | None = _setting(Range(0.01, 3600, whole=False))
    batch_rpm: int | None = _setting(Range(1, 1_000_000, whole=True))
    linger_ms: float = _setting(Range(0, 600_000, whole=False), 500)
    sync_rpm: int | None = _setting(Range(1, 10_000_000, whole=True))  # rate limit of rescues
    max_input_tokens: int | None = _setting(Range(1, 1_000_000_000, whole=True))
    enforce_pre_queue_validation: bool = _setting(SWITCH, default=True)
    metrics_prefix: str = _setting(_PREFIX, "carpool")
    track_sync_batch_split: bool = _setting(SWITCH, default=True)
    alert_on_batch_failure_rate: float | None = _setting(Range(0, 1, whole=False))
    max_attempts: int = _setting(Range(1, 100, whole=True), 3)
    on_disconnect: Literal["keep", "cancel"] = _setting(Choice(("keep", "cancel"), "keep or cancel"), "keep")
    max_waiting_calls: int = _setting(Range(1, 100_000_000, whole=True), 200_000)
    max_waiting_calls_per_credential: int | None = _setting(Range(1, 100_000_000, whole=True))
    max_waiting_now: int = _setting(Range(0, 1_000_000, whole=True), 2000)
    max_wait_now_s: float = _setting(Range(0, 600, whole=False), 30)
    caching: Literal["off", "observe", "plan"] = _setting(_CACHING, "observe")
    keep_alive_usd_per_day: float = _setting(Range(0, 1_000_000, whole=False), 0)  # most to spend on pings
    retain_days: float = _setting(Range(0, 3650, whole=False), 7)
    delete_provider_files: bool = _setting(SWITCH, default=True)
    record_calls: bool = _setting(SWITCH, default=True)  # sizes and times of calls, for what-if reports
    record_max_calls: int = _setting(Range(0, 1_000_000_000, whole=True), 1_000_000)
    record_days: float = _setting(Range(0, 3650, whole=False), 30)

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if value is not None or setting.default is not None:
                check(setting.metadata["rule"], value, setting.name)
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


_CHECKS: Final[Mapping[str, Check]] = {setting.name: setting.metadata["rule"] for setting in fields(RoutingPolicy)}


def _same(*names: str) -> dict[str, str]:
    return dict(zip(names, names, strict=True))


# Each key of the config file maps to a setting, or to None where another part of carpool reads it.
_SIZES: Final = {
    **_same("batch_window_ms", "poll_interval_s"),
    "min_batch_size": "batch_min_size",
    "max_batch_size": "batch_max_size",
}
_TOKENS: Final = {"max_input_tokens_per_request": "max_input_tokens", **_same("enforce_pre_queue_validation")}
_SECTIONS: Final[Mapping[str, Mapping[str, str | None] | None]] = {
    "routing": {
        **_SIZES,
        "sync_latency_cap_ms": "sync_max_latency_ms",
        **_same("sync_rpm", "max_attempts", "on_disconnect"),
        **dict.fromkeys(("default_budget", "rules", "timezone")),
    },
    "batching": {**_SIZES, "rpm": "batch_rpm", **_same("linger_ms", "delete_provider_files")},
    "token_budgets": _TOKENS,
    "limits": {
        **_TOKENS,
        **_same("max_waiting_calls", "max_waiting_calls_per_credential", "max_waiting_now", "max_wait_now_s"),
        **dict.fromkeys(("max_body_mb", "max_head_kb", "max_headers")),
        **dict.fromkeys(("max_connections", "slow_sender_s", "slow_reader_s")),
    },
    "observability": {
        **_same("metrics_prefix", "track_sync_batch_split", "alert_on_batch_failure_rate"),
        "otlp_endpoint": None,
    },
    "store": {**_same("retain_days"), "url": None, "encrypt": None},
    "recording": {"enabled": "record_calls", "max_calls": "record_max_calls", "days": "record_days"},
    "keys": {"required": None},
    "server": {
        **dict.fromkeys(("tls", "allowed_hosts", "admin_token_env", "trusted_proxies")),
        **dict.fromkeys(("outgoing_proxy", "outgoing_proxy_auth_env", "ca_file")),
    },
    "caching": {"mode": "caching", "keep_alive": "keep_alive_usd_per_day"},
    **dict.fromkeys(("providers", "budgets")),
}


def read_settings(document: Mapping[object, object], names: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
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
            if setting == "caching" and value is False:
                value = "off"  # YAML parses a bare off as false
            elif setting == "keep_alive_usd_per_day" and value is not None:
                path, value = _inner(path, value, "max_usd_per_day")
                path = names.get(path, path)
            if setting is None or value is None:
                continue
            check(_CHECKS[setting], value, path)
            if settings.setdefault(setting, value) != value:
                raise ConfigError(f"{path} is {value!r}, but {origin[setting]} says {settings[setting]!r}: keep one.")
            origin.setdefault(setting, path)
    return settings


def _inner(path: str, value: object, key: str) -> tuple[str, object]:
    """The only key of a section within a section: its path, and its value."""
    content = mapping(value, path)
    for other in content:
        known(other, (key,), f"{path}.")
    return f"{path}.{key}", content.get(key)


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


def span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
