"""Which of OpenAI's relatives a provider is, and the settings that only some of them have."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from carpool.dialects import OPENAI, RELATIVES, Relative, relative_at
from carpool.errors import ConfigError
from carpool.settings import SWITCH, Choice, Shape, check

HOUR: Final = 3600.0
OTHERS: Final = {name: one for name, one in RELATIVES.items() if name != OPENAI.name}
_NAMES: Final = Choice(tuple(RELATIVES), f"one of {', '.join(sorted(RELATIVES))}")
_WINDOW: Final = re.compile(r"(\d{1,4})(h|d)")
_HOURS: Final = {"h": 1, "d": 24}
_VERSION: Final = Shape(re.compile(r"[A-Za-z0-9.-]{1,40}"), "a version such as preview or 2025-04-01-preview")

Shown = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Habits:
    """What a provider's section says beyond its address."""

    relative: str = ""  # empty for the dialect's own
    window: float | None = None
    api_version: str = ""


def home_of(name: str, given: Mapping[str, object]) -> str | None:
    """The base URL of a relative that is named, by the provider's own name or by its setting."""
    named = given.get("relative", name)
    return (OTHERS[named].home or None) if isinstance(named, str) and named in OTHERS else None


def read_habits(given: Mapping[str, object], path: str, dialect: str, base_url: str, shown: Shown) -> Habits:
    if dialect != OPENAI.name:
        _refuse(given, path, dialect, shown)
        return Habits()
    named = given.get("relative")
    if named is None and path.removeprefix("providers.") in OTHERS:
        named = path.removeprefix("providers.")
    if named is not None:
        check(_NAMES, named, shown(f"{path}.relative"))
    found = relative_at(base_url, None if named is None else str(named))
    name = found.name if named is not None or found.name != OPENAI.name else ""
    return Habits(name, _window(given, path, found, shown), _version(given, path, shown))


def based(habits: Habits, base_url: str) -> str:
    """A base URL that is a host alone, with the path that this relative has below it."""
    if not habits.relative or urlsplit(base_url).path.strip("/"):
        return base_url
    return base_url.rstrip("/") + RELATIVES[habits.relative].path


def batchable(given: Mapping[str, object], path: str, models: dict[str, dict[str, Any]], shown: Shown) -> Any:
    """What is said of models; where the provider is said to have no batches, none of them has."""
    value = given.get("batch", True)
    check(SWITCH, value, shown(f"{path}.batch"))
    if value:
        return models
    return {pattern: {**said, "batch": False} for pattern, said in (models | {"*": models.get("*", {})}).items()}


def _refuse(given: Mapping[str, object], path: str, dialect: str, shown: Shown) -> None:
    for key in ("relative", "window", "api_version"):
        if key in given:
            raise ConfigError(
                f"{shown(f'{path}.{key}')} is for OpenAI and its relatives, and the dialect is {dialect}: take it out."
            )


def _window(given: Mapping[str, object], path: str, relative: Relative, shown: Shown) -> float | None:
    value = given.get("window")
    if value is None:
        return None
    match = _WINDOW.fullmatch(value) if isinstance(value, str) else None
    longest = relative.longest_window
    seconds = 0.0 if match is None else int(match[1]) * _HOURS[match[2]] * HOUR
    if not relative.limits.window <= seconds <= longest:
        allowed = f"from 24h to {longest / HOUR:.0f}h" if longest > relative.limits.window else "24h, its only one"
        raise ConfigError(f"{shown(f'{path}.window')} is no window of {relative.said}: it must be {allowed}.")
    return seconds


def _version(given: Mapping[str, object], path: str, shown: Shown) -> str:
    value = given.get("api_version")
    if value is None:
        return ""
    check(_VERSION, value, shown(f"{path}.api_version"))
    return str(value)
