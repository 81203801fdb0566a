"""What the user sets. None means "not set: the planners decide"; what is set is obeyed.

Wrong settings fail at construction, in a sentence that names the setting, its value and what is allowed.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import yaml

from carpool.errors import BadCall, ConfigError

DAY: Final = 86_400.0
MAX_BUDGET: Final = 30 * DAY


class _Range(NamedTuple):
    low: float
    high: float
    whole: bool

    def problem(self, value: object) -> str | None:
        kinds = (int,) if self.whole else (int, float)
        right_kind = isinstance(value, kinds) and not isinstance(value, bool)
        if right_kind and self.low <= value <= self.high:  # type: ignore[operator]  # NaN fails here too
            return None
        return f"a {'whole number' if self.whole else 'number'} from {_plain(self.low)} to {_plain(self.high)}"


class _Choice(NamedTuple):
    allowed: tuple[object, ...]
    said: str

    def problem(self, value: object) -> str | None:
        # `is` for the truth values, because 1 == True and a number is no switch.
        fits = any(value is one or (isinstance(value, str) and value == one) for one in self.allowed)
        return None if fits else self.said


class _Name(NamedTuple):
    pattern: re.Pattern[str]

    def problem(self, value: object) -> str | None:
        fits = isinstance(value, str) and self.pattern.fullmatch(value)
        return None if fits else "a name of letters, digits, '_', ':', '.' and '-' that begins with a letter"


_SWITCH: Final = _Choice((True, False), "true or false")
_RULES: Final[Mapping[str, _Range | _Choice | _Name]] = {
    "sync_max_latency_ms": _Range(0, MAX_BUDGET * 1000, whole=False),
    "batch_window_ms": _Range(0, DAY * 1000, whole=False),
    "batch_min_size": _Range(1, 1_000_000, whole=True),
    "batch_max_size": _Range(1, 1_000_000, whole=True),
    "poll_interval_s": _Range(0.01, 3600, whole=False),
    "batch_rpm": _Range(1, 1_000_000, whole=True),
    "linger_ms": _Range(0, 600_000, whole=False),
    "sync_rpm": _Range(1, 10_000_000, whole=True),
    "max_input_tokens": _Range(1, 1_000_000_000, whole=True),
    "enforce_pre_queue_validation": _SWITCH,
    "metrics_prefix": _Name(re.compile(r"[A-Za-z_][A-Za-z0-9_:.\-]{0,99}")),
    "track_sync_batch_split": _SWITCH,
    "alert_on_batch_failure_rate": _Range(0, 1, whole=False),
    "max_attempts": _Range(1, 100, whole=True),
    "on_disconnect": _Choice(("keep", "cancel"), "keep or cancel"),
    "max_waiting_calls": _Range(1, 100_000_000, whole=True),
    "retain_days": _Range(0, 3650, whole=False),
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
    sync_rpm: int | None = None  # how fast rescues may be sent
    max_input_tokens: int | None = None
    enforce_pre_queue_validation: bool = True
    metrics_prefix: str = "carpool"
    track_sync_batch_split: bool = True
    alert_on_batch_failure_rate: float | None = None
    max_attempts: int = 3
    on_disconnect: Literal["keep", "cancel"] = "keep"
    max_waiting_calls: int = 200_000
    retain_days: float = 7

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                _check(field.name, value, field.name)
        low, high = self.batch_min_size, self.batch_max_size
        if low is not None and high is not None and low > high:
            raise ConfigError(f"batch_min_size is {low}, which is more than batch_max_size, {high}.")

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> RoutingPolicy:
        """Reads the sections that concern routing; those of other parts of carpool are left to them."""
        try:
            return cls(**_settings(_load(path)))
        except ConfigError as error:
            raise ConfigError(f"{os.fspath(path)}: {error}") from error


# Where each key of the file goes: to a setting, or (None) to another part of carpool that reads it.
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
_SECTIONS: Final[Mapping[str, Mapping[str, str | None] | None]] = {
    "routing": {
        **_SIZES,
        "sync_latency_cap_ms": "sync_max_latency_ms",
        "sync_rpm": "sync_rpm",
        "max_attempts": "max_attempts",
        "on_disconnect": "on_disconnect",
        "default_budget": None,
        "rules": None,
    },
    "batching": {**_SIZES, "rpm": "batch_rpm", "linger_ms": "linger_ms"},
    "token_budgets": _TOKENS,
    "limits": {**_TOKENS, "max_waiting_calls": "max_waiting_calls", "max_body_mb": None},
    "observability": {
        "metrics_prefix": "metrics_prefix",
        "track_sync_batch_split": "track_sync_batch_split",
        "alert_on_batch_failure_rate": "alert_on_batch_failure_rate",
        "otlp_endpoint": None,
    },
    "store": {"retain_days": "retain_days", "url": None},
    "providers": None,
    "caching": None,
    "budgets": None,
}

# What PyYAML is known to raise on hostile or odd input, beside its own error.
_TROUBLE: Final = (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


def _load(path: str | os.PathLike[str]) -> Mapping[object, object]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"The file can't be read: {error}.") from error
    try:
        loaded = yaml.safe_load(text)
    except _TROUBLE as error:
        raise ConfigError(f"This is not valid YAML: {error}") from error
    return _mapping(loaded, "The file")


def _settings(document: Mapping[object, object]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for section, content in document.items():
        keys = _SECTIONS[_known(section, _SECTIONS, "")]
        if keys is None:
            continue
        for key, value in _mapping(content, f"The section {section}").items():
            path = f"{section}.{key}"
            setting = keys[_known(key, keys, f"{section}.")]
            if setting is None or value is None:
                continue
            _check(setting, value, path)
            if settings.setdefault(setting, value) != value:
                raise ConfigError(f"{path} is {value!r}, but {origin[setting]} says {settings[setting]!r}: keep one.")
            origin.setdefault(setting, path)
    return settings


def _mapping(value: object, what: str) -> Mapping[object, object]:
    if value is None:  # an empty file or section sets nothing
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what} must hold `key: value` pairs, but holds {type(value).__name__}.")
    return value


def _known(key: object, known: Mapping[str, object], prefix: str) -> str:
    if isinstance(key, str) and key in known:
        return key
    name = str(key)[:60]
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {prefix}{near[0]}?" if near else f"known are {', '.join(known)}."
    raise ConfigError(f"{prefix}{name} is not a setting: {hint}")


def _check(setting: str, value: object, shown: str) -> None:
    allowed = _RULES[setting].problem(value)
    if allowed is not None:
        # A few nested YAML aliases make a `repr` that fills the memory, so a collection is only named.
        said = (
            f"a {type(value).__name__}" if isinstance(value, Collection) and not isinstance(value, str) else repr(value)
        )
        raise ConfigError(f"{shown} is {said[:80]}; it must be {allowed}.")


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)


_BUDGET: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*(ms|s|m|h|)\s*")
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}


def parse_budget(text: str) -> float:
    """Seconds of a budget such as `500ms`, `30s`, `10m`, `1.5h` or `45` (seconds)."""
    match = _BUDGET.fullmatch(text)
    if match is None:
        raise BadCall(f"{text[:40]!r} is not a budget: write a number and a unit, as in 500ms, 30s, 10m or 2h.")
    seconds = float(match[1]) * _SECONDS[match[2]]
    if not (math.isfinite(seconds) and 0 < seconds <= MAX_BUDGET):
        raise BadCall(f"The budget {text[:40]!r} is out of range: it must be more than 0 and at most 30 days (720h).")
    return seconds
