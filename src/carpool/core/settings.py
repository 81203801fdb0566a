"""Reads and checks settings. Error messages name the setting's path, the allowed values and the closest match.

Error messages never repeat a value that may be a secret entered in the wrong place.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import yaml

from carpool.core.errors import ConfigError


class Check(Protocol):
    def problem(self, value: object) -> str | None:
        """Returns what is allowed if the value is not; None if it is."""


class Range(NamedTuple):
    low: float
    high: float
    whole: bool

    def problem(self, value: object) -> str | None:
        kinds = (int,) if self.whole else (int, float)
        right_kind = isinstance(value, kinds) and not isinstance(value, bool)
        if right_kind and self.low <= value <= self.high:  # type: ignore[operator]  # NaN fails here too
            return None
        return f"a {'whole number' if self.whole else 'number'} from {_plain(self.low)} to {_plain(self.high)}"


class Choice(NamedTuple):
    allowed: tuple[object, ...]
    expected: str

    def problem(self, value: object) -> str | None:
        # Booleans are compared with `is`, because 1 == True and a number is not a switch.
        matches = any(value is option or (isinstance(value, str) and value == option) for option in self.allowed)
        return None if matches else self.expected


class Shape(NamedTuple):
    """Text that matches a pattern."""

    pattern: re.Pattern[str]
    expected: str

    def problem(self, value: object) -> str | None:
        return None if isinstance(value, str) and self.pattern.fullmatch(value) else self.expected


# May also match text that is not a key; then the error message is merely less specific.
_KEY: Final = re.compile(r"\b(sk|rk|pk|cpk|gsk|xai|ghp)[-_][\w-]{8,}|\bAIza[\w-]{20,}|\bbearer\s+\S", re.IGNORECASE)
SWITCH: Final = Choice((True, False), "true or false")

# Exceptions that PyYAML is known to raise on hostile or odd input, in addition to its own.
_TROUBLE: Final = (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


def load(path: str | os.PathLike[str]) -> Mapping[object, object]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"The file can't be read: {error}.") from error
    try:
        loaded = yaml.safe_load(text)
    except _TROUBLE as error:
        where = ""  # the position only: the source lines that PyYAML would show may hold a secret
        if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark) is not None:
            where = f" at line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
        raise ConfigError(f"This is not valid YAML{where}.") from error
    return mapping(loaded, "The file")


def value_of(text: str, shown: str) -> object:
    """Parses the value of an environment variable as YAML, as in the config file."""
    try:
        return yaml.safe_load(text)
    except _TROUBLE as error:
        raise ConfigError(f"The value of {shown} is not valid YAML: write it as in the file.") from error


def mapping(value: object, what: str) -> Mapping[object, object]:
    if value is None:  # an empty file or section sets nothing
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what} must hold `key: value` pairs, but holds {type(value).__name__}.")
    return value


def known(key: object, allowed: Iterable[str], prefix: str, shown: str | None = None) -> str:
    names = tuple(allowed)
    if isinstance(key, str) and key in names:
        return key
    name = str(key)[:60]
    near = get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {prefix}{near[0]}?" if near else f"known are {', '.join(names)}."
    raise ConfigError(f"{shown or prefix + name} is not a setting: {hint}")


def check(rule: Check, value: object, shown: str) -> None:
    allowed = rule.problem(value)
    if allowed is not None:
        raise ConfigError(f"{shown} is {named(value)}; it must be {allowed}.")


def named(value: object) -> str:
    """Describes a value for an error message. Collections are described by type only: a few nested YAML aliases can
    make a `repr` that fills the memory."""
    if isinstance(value, Collection) and not isinstance(value, str):
        return f"a {type(value).__name__}"
    if isinstance(value, str) and _KEY.search(value):
        return "a text that looks like a key"
    return repr(value)[:80]


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)
