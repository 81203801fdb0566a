"""How settings are read. What is wrong is said in a sentence: the key's path, what is allowed, and what was meant.

A value that stands where a secret may stand by mistake is never repeated in a sentence.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import yaml

from carpool.errors import ConfigError


class Check(Protocol):
    def problem(self, value: object) -> str | None:
        """What is allowed, where the value is not."""
        ...


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
    said: str

    def problem(self, value: object) -> str | None:
        # `is` for the truth values, because 1 == True and a number is no switch.
        fits = any(value is one or (isinstance(value, str) and value == one) for one in self.allowed)
        return None if fits else self.said


class Shape(NamedTuple):
    """Text of a certain shape."""

    pattern: re.Pattern[str]
    said: str

    def problem(self, value: object) -> str | None:
        return None if isinstance(value, str) and self.pattern.fullmatch(value) else self.said


# What is no key may look like one, too: then a sentence is a little vague.
_KEY: Final = re.compile(r"\b(sk|rk|pk|cpk|gsk|xai|ghp)[-_][\w-]{8,}|\bAIza[\w-]{20,}|\bbearer\s+\S", re.IGNORECASE)
SWITCH: Final = Choice((True, False), "true or false")

# What PyYAML is known to raise on hostile or odd input, beside its own error.
_TROUBLE: Final = (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


def load(path: str | os.PathLike[str]) -> Mapping[object, object]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"The file can't be read: {error}.") from error
    try:
        loaded = yaml.safe_load(text)
    except _TROUBLE as error:
        raise ConfigError(f"This is not valid YAML: {error}") from error
    return mapping(loaded, "The file")


def value_of(text: str, shown: str) -> object:
    """The value of an environment variable, written as it would be in the file."""
    try:
        return yaml.safe_load(text)
    except _TROUBLE as error:
        raise ConfigError(f"The value of {shown} is not valid YAML: write it as it would stand in the file.") from error


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
    """A value as an error may show it. A few nested YAML aliases make a `repr` that fills the memory, so a collection
    is only named."""
    if isinstance(value, Collection) and not isinstance(value, str):
        return f"a {type(value).__name__}"
    if isinstance(value, str) and _KEY.search(value):
        return "a text that looks like a key"
    return repr(value)[:80]


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)
