"""The conditions of rules. Each is compiled once and tested for every call."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, tzinfo
from fnmatch import translate
from functools import lru_cache
from types import MappingProxyType
from typing import Final, NamedTuple

from carpool.dialects.headers import ONE_REQUEST

# ------------------------------------------------------------ facts
# What a rule can test about a request.

# Clients send these headers with the requests of their subagents.
SUBAGENT_HEADERS: Final = ("x-claude-code-agent-id", "x-claude-code-parent-agent-id", "x-openai-subagent")
NONE: Final[Mapping[str, str]] = MappingProxyType({})


class Facts(NamedTuple):
    """What is known about a request. Texts are in lower case: matching ignores case, and many rules read them."""

    dialect: str = ""
    provider: str = ""
    endpoint: str = ""
    model: str = ""
    user_agent: str = ""
    headers: Mapping[str, str] = NONE  # names in lower case, values unchanged
    tags: Mapping[str, str] = NONE
    streaming: bool = False
    tool_turn: bool = False  # the last message carries tool results: an agent loop is running
    subagent: bool = False
    has_budget: bool = False  # the client set one
    size: int = 0  # bytes of the body

    def __repr__(self) -> str:  # never the headers: they contain keys
        return f"<Facts of a call of {self.model or 'some model'} to {self.provider or 'some provider'}>"


def is_subagent(headers: Mapping[str, str]) -> bool:
    return not headers.keys().isdisjoint(SUBAGENT_HEADERS)


Test = Callable[[Facts, float], bool]
Tell = Callable[[Facts, float], str]

DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_PLAIN: Final = re.compile(r"(\*?)([^*?\[\]]*)(\*?)")


@dataclass(frozen=True, slots=True)
class Condition:
    """`key` and `wanted` are as in the config file; `tell` describes the actual value. `steady`: the result does not
    depend on the time or on the size of a call, so it can be cached for similar calls of one client."""

    key: str
    wanted: str
    test: Test
    tell: Tell
    steady: bool = True

    def explain(self, facts: Facts, now: float, *, met: bool) -> str:
        if met:
            return f"{self.key} is {self.tell(facts, now)}"
        return f"{self.key} is {self.tell(facts, now)}, and not {self.wanted}"


# ---------------------------------------------------------------- texts


def glob(pattern: str) -> Callable[[str], bool]:
    """Compile a pattern to a test for lower-case text; * stands for anything and ? for one character."""
    pattern = pattern.lower()
    plain = _PLAIN.fullmatch(pattern)
    if plain is None:
        matches = re.compile(translate(pattern)).match
        return lambda text: matches(text) is not None
    before, word, after = plain.groups()
    # Common patterns need no regular expression.
    if before and after:
        return lambda text: word in text
    if before:
        return lambda text: text.endswith(word)
    if after:
        return lambda text: text.startswith(word)
    return lambda text: text == word


def any_glob(patterns: Sequence[str]) -> Callable[[str], bool]:
    tests = [glob(pattern) for pattern in patterns]
    if len(tests) == 1:
        return tests[0]

    def fits(text: str) -> bool:
        for test in tests:  # noqa: SIM110  `any` over a generator takes twice as long
            if test(text):
                return True
        return False

    return fits


def text(key: str, patterns: Sequence[str]) -> Condition:
    fits, place = any_glob(patterns), Facts._fields.index(key)

    def test(facts: Facts, _: float) -> bool:
        return fits(facts[place])  # type: ignore[arg-type]  # a field of text

    return Condition(key, " or ".join(patterns), test, lambda facts, _: str(facts[place]) or "empty")


def switch(key: str, wanted: bool) -> Condition:
    place = Facts._fields.index(key)
    return Condition(
        key, str(wanted).lower(), lambda facts, _: facts[place] is wanted, lambda facts, _: str(facts[place]).lower()
    )


def header(name: str, patterns: Sequence[str] | bool) -> Condition:
    """A header's value may be a secret, so the explanation never shows it."""
    key, steady = f"header.{name}", name != "content-length" and name not in ONE_REQUEST
    there: Tell = lambda facts, _: "there" if name in facts.headers else "missing"  # noqa: E731
    if isinstance(patterns, bool):
        wanted = "there" if patterns else "missing"
        return Condition(key, wanted, lambda facts, _: (name in facts.headers) is patterns, there, steady)
    fits = any_glob(patterns)

    def test(facts: Facts, _: float) -> bool:
        value = facts.headers.get(name)
        return value is not None and fits(value.lower())

    return Condition(key, " or ".join(patterns), test, there, steady)


def tag(name: str, patterns: Sequence[str] | bool) -> Condition:
    key = f"tag.{name}"
    tell: Tell = lambda facts, _: facts.tags.get(name, "missing")  # noqa: E731
    if isinstance(patterns, bool):
        wanted = "there" if patterns else "missing"
        return Condition(key, wanted, lambda facts, _: (name in facts.tags) is patterns, tell)
    fits = any_glob(patterns)
    return Condition(
        key, " or ".join(patterns), lambda facts, _: name in facts.tags and fits(facts.tags[name].lower()), tell
    )


# ---------------------------------------------------------------- size and time


def size(wanted: str, sign: str, bound: float) -> Condition:
    tests: dict[str, Test] = {
        ">": lambda facts, _: facts.size > bound,
        ">=": lambda facts, _: facts.size >= bound,
        "<": lambda facts, _: facts.size < bound,
        "<=": lambda facts, _: facts.size <= bound,
    }
    return Condition("size", wanted, tests[sign], lambda facts, _: f"{facts.size:,} bytes", steady=False)


@dataclass(frozen=True, slots=True)
class Window:
    """A time of day in minutes, and the days on which it begins: a window may run past midnight."""

    start: int = 0
    end: int = 24 * 60
    days: frozenset[int] = frozenset(range(7))

    def holds(self, day: int, minute: int) -> bool:
        if self.start < self.end:
            return day in self.days and self.start <= minute < self.end
        if minute >= self.start:
            return day in self.days
        return minute < self.end and (day - 1) % 7 in self.days


def window(key: str, wanted: str, hours: Window, zone: tzinfo) -> Condition:
    @lru_cache(maxsize=4)  # the result changes with the minute only, and every call needs it
    def holds(minute: int) -> bool:
        then = datetime.fromtimestamp(minute * 60, zone)
        return hours.holds(then.weekday(), then.hour * 60 + then.minute)

    def tell(_: Facts, now: float) -> str:
        then = datetime.fromtimestamp(now, zone)
        return f"{DAYS[then.weekday()]} {then:%H:%M} in {zone}"

    return Condition(key, wanted, lambda _, now: holds(int(now // 60)), tell, steady=False)
