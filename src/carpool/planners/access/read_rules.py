"""Parse and check the rules of a config file, and compile their conditions. Errors name the path of the wrong value."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, tzinfo
from fnmatch import translate
from functools import lru_cache
from operator import itemgetter
from typing import Any, Final
from zoneinfo import ZoneInfo

from carpool.core.errors import BadCall, ConfigError
from carpool.core.model import CachingMode, Lane
from carpool.core.settings import SWITCH, Choice, Shape, check, known, mapping, named
from carpool.dialects import key_headers
from carpool.dialects.headers import ONE_REQUEST
from carpool.planners.access.rules import Condition, Facts, Rule
from carpool.planners.policy import parse_budget

EFFECTS: Final = ("budget", "task_budget", "lane", "tags", "max_budget", "refuse_budget", "on_disconnect", "caching")
_PARTS: Final = ("name", "match", *EFFECTS)
_TEXTS: Final = ("dialect", "provider", "endpoint", "model", "user_agent")
_SWITCHES: Final = ("tool_turn", "subagent", "streaming", "has_budget")
MATCHES: Final = (*_TEXTS, *_SWITCHES, "size", "between", "days", "timezone", "header.NAME", "tag.NAME")
_SECRET: Final = {"proxy-authorization", "cookie"}  # in addition to the headers that carry a key

_LINE: Final = Shape(re.compile(r"[^\x00-\x1f\x7f]{1,200}"), "one line of text, at most 200 characters")
_NAME: Final = Shape(re.compile(r"[^\x00-\x1f\x7f]{1,60}"), "a name, at most 60 characters")
_LANES: Final = Choice(("now", "batch"), "now or batch")
_GONE: Final = Choice(("keep", "cancel"), "keep or cancel")
_CACHING: Final = Choice(("off", "observe", "plan", False), "off, observe or plan")  # YAML parses off as false
_SIZE: Final = re.compile(r"\s*(<=|>=|<|>)\s*([0-9]+(?:\.[0-9]+)?)\s*(b|kb|mb|)\s*", re.IGNORECASE)
_COMPARE: Final = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_BYTES: Final = {"": 1, "b": 1, "kb": 1_000, "mb": 1_000_000}
_MINUTES: Final = 24 * 60  # of a day
_HOURS: Final = re.compile(r"\s*([01]?\d|2[0-4]):([0-5]\d)\s*-\s*([01]?\d|2[0-4]):([0-5]\d)\s*")
DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY_WORDS: Final = {"weekdays": "mon-fri", "weekend": "sat-sun", "daily": "mon-sun"}


def read_rules(value: object, path: str, timezone: str = "UTC") -> tuple[Rule, ...]:
    """Parse a list of rules. `path` is its place in the config; `timezone` applies to rules that name none."""
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConfigError(f"{path} must be a list of rules, each with `match` and what it does; it is {named(value)}.")
    rules = [_rule(item, f"{path}[{place}]", place, timezone) for place, item in enumerate(value)]
    names = [rule.name for rule in rules]
    for place, name in enumerate(names):
        if name in names[:place]:
            first = names.index(name)
            raise ConfigError(f"{path}[{place}].name is {name!r}, as {path}[{first}].name is: give each its own.")
    return tuple(rules)


def _rule(value: object, path: str, place: int, timezone: str) -> Rule:
    parts = mapping(value, path)
    for part in parts:
        if part in MATCHES or str(part).startswith(("header.", "tag.")):
            raise ConfigError(f"{path}.{part} belongs under `match`: write match: {{{part}: …}}.")
        known(part, _PARTS, f"{path}.")
    given = {str(part): content for part, content in parts.items() if content is not None}
    if not given.keys() & set(EFFECTS):
        raise ConfigError(f"{path} does nothing: give it {', '.join(EFFECTS[:-1])} or {EFFECTS[-1]}.")
    name = given.get("name", f"#{place + 1}")
    check(_NAME, name, f"{path}.name")
    rule = Rule(str(name), _match(given.get("match"), f"{path}.match", timezone))
    for effect in EFFECTS:
        if effect in given:
            rule = replace(rule, **_effect(effect, given[effect], f"{path}.{effect}"))
    _check_together(rule, path)
    return rule


# ---------------------------------------------------------------- effects


def _effect(name: str, value: object, path: str) -> dict[str, Any]:
    if name in ("budget", "task_budget", "max_budget"):
        return {name: read_budget(value, path)}
    if name == "lane":
        check(_LANES, value, path)
        return {"lane": Lane(str(value))}
    if name == "on_disconnect":
        check(_GONE, value, path)
        return {"on_disconnect": value}
    if name == "caching":
        check(_CACHING, value, path)
        return {"caching": CachingMode(str(value or "off"))}
    if name == "tags":
        return {"tags": _tags(value, path)}
    if isinstance(value, bool):
        return {"refuse_budget": value}
    check(_LINE, value, path)
    return {"refuse_budget": True, "refuse_reason": value}


def read_budget(value: object, path: str) -> float:
    """Parse a budget into seconds. A bare number is in seconds."""
    text = str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else ""
    try:
        return parse_budget(text)
    except BadCall:
        raise ConfigError(
            f"{path} is {named(value)}; it must be a budget up to 30 days, as in 500ms, 30s, 10m or 2h."
        ) from None


def _tags(value: object, path: str) -> dict[str, str]:
    tags = {}
    for name, content in mapping(value, path).items():
        check(_NAME, name, f"A tag's name in {path}")
        check(_LINE, str(content) if isinstance(content, int | float) else content, f"{path}.{name}")
        tags[str(name)] = str(content)
    return tags


def _check_together(rule: Rule, path: str) -> None:
    if rule.refuse_budget and rule.max_budget is not None:
        raise ConfigError(
            f"{path} has refuse_budget and max_budget: a budget that is refused needs no bound. Keep one."
        )
    if rule.budget is not None and rule.max_budget is not None and rule.budget > rule.max_budget:
        raise ConfigError(f"{path}.budget is more than {path}.max_budget: give at most what the rule itself allows.")
    if rule.lane is Lane.NOW and (rule.budget is not None or rule.task_budget is not None):
        raise ConfigError(f"{path} has `lane: now` and a budget: a call that goes at once needs none. Keep one.")


# ---------------------------------------------------------------- match


def _match(value: object, path: str, timezone: str) -> tuple[Condition, ...]:
    wants = {str(key): want for key, want in mapping(value, path).items() if want is not None}
    zone = read_zone(wants.pop("timezone", timezone), f"{path}.timezone")
    tests = [_condition(key, want, f"{path}.{key}") for key, want in wants.items() if key not in ("between", "days")]
    hours = _window(wants, path, zone)
    return tuple(tests if hours is None else [*tests, hours])


def _condition(key: str, want: object, path: str) -> Condition:
    kind, dot, name = key.partition(".")
    if key in _TEXTS:
        return _text_condition(key, _patterns(want, path))
    if key in _SWITCHES:
        check(SWITCH, want, path)
        read = itemgetter(Facts._fields.index(key))
        wanted, describe = str(want).lower(), lambda facts, _: str(read(facts)).lower()
        return Condition(key, wanted, lambda facts, _: read(facts) is want, describe)
    if key == "size":
        match = _SIZE.fullmatch(want) if isinstance(want, str) else None
        if match is None:
            raise ConfigError(f"{path} is {named(want)}; it must be a bound for the body, as in '>100kb' or '<1mb'.")
        compare, bound = _COMPARE[match[1]], float(match[2]) * _BYTES[match[3].lower()]
        test = lambda facts, _: compare(facts.size, bound)  # noqa: E731
        return Condition(key, str(want).strip(), test, lambda facts, _: f"{facts.size:,} bytes", steady=False)
    if not dot or not name or kind not in ("header", "tag"):
        known(key, MATCHES, path.removesuffix(key))
        raise ConfigError(f"{path} needs a name in place of NAME, as in header.x-team or tag.team.")
    if kind == "header":
        key = key.lower()
        if name.lower() in _SECRET | key_headers():
            raise ConfigError(f"{path} holds a secret, which a rule may not read: match a tag or another header.")
    return _text_condition(key, want if isinstance(want, bool) else _patterns(want, path))


def _patterns(want: object, path: str) -> list[str]:
    listed = list(want) if isinstance(want, Sequence) and not isinstance(want, str) else [want]
    if not listed or not all(isinstance(item, str) and item for item in listed):
        raise ConfigError(f"{path} is {named(want)}; it must be text, in which * matches anything, or a list of such.")
    return [str(item) for item in listed]


def _window(wants: Mapping[str, object], path: str, zone: tzinfo) -> Condition | None:
    """On a time of day and the days on which it begins: it may run past midnight. None if it is always met."""
    start, end = _between(wants["between"], f"{path}.between") if "between" in wants else (0, _MINUTES)
    days = _days(wants["days"], f"{path}.days") if "days" in wants else frozenset(range(7))
    if (start, end, len(days)) == (0, _MINUTES, 7):
        return None
    wanted = " ".join(str(wants[key]) for key in ("between", "days") if isinstance(wants.get(key), str))
    if not isinstance(wants.get("days", ""), str):
        wanted = f"{wanted} {', '.join(DAYS[day] for day in sorted(days))}".lstrip()

    @lru_cache(maxsize=4)  # the result changes with the minute only, and every call needs it
    def holds(minute_of_epoch: int) -> bool:
        then = datetime.fromtimestamp(minute_of_epoch * 60, zone)
        day, minute = then.weekday(), then.hour * 60 + then.minute
        if start < end:
            return day in days and start <= minute < end
        if minute >= start:
            return day in days
        return minute < end and (day - 1) % 7 in days

    def describe(_: Facts, now: float) -> str:
        then = datetime.fromtimestamp(now, zone)
        return f"{DAYS[then.weekday()]} {then:%H:%M} in {zone}"

    return Condition("the time", wanted, lambda _, now: holds(int(now // 60)), describe, steady=False)


def _between(want: object, path: str) -> tuple[int, int]:
    match = _HOURS.fullmatch(want) if isinstance(want, str) else None
    if match is None:
        raise ConfigError(f"{path} is {named(want)}; it must be two times of day, as in '22:00-06:00'.")
    start, end = int(match[1]) * 60 + int(match[2]), int(match[3]) * 60 + int(match[4])
    if start == end or max(start, end) > _MINUTES:
        raise ConfigError(f"{path} is {named(want)}, which is no part of a day: write one as in '22:00-06:00'.")
    return start, end


def _days(want: object, path: str) -> frozenset[int]:
    listed = list(want) if isinstance(want, Sequence) and not isinstance(want, str) else [want]
    parts = [part.strip() for item in listed if isinstance(item, str) for part in item.lower().split(",")]
    spans = [_DAY_WORDS.get(part, part).partition("-") for part in parts]
    if not spans or len(parts) < len(listed) or not all(a in DAYS and (not dash or b in DAYS) for a, dash, b in spans):
        raise ConfigError(f"{path} is {named(want)}; it must be days such as mon-fri, sat, or [mon, wed].")
    days = set()
    for first, dash, last in spans:
        start, end = DAYS.index(first), DAYS.index(last if dash else first)
        days |= {day % 7 for day in range(start, end + 1 if end >= start else end + 8)}
    return frozenset(days)


def read_zone(want: object, path: str) -> tzinfo:
    if want == "UTC":  # works on machines without a time-zone database, too
        return UTC
    if isinstance(want, str):
        with suppress(LookupError, ValueError, OSError):
            return ZoneInfo(want)
    raise ConfigError(f"{path} is {named(want)}; it must be a time zone that this machine knows, as in Europe/Berlin.")


# ---------------------------------------------------------------- conditions


def glob(*patterns: str) -> Callable[[str], bool]:
    """Compile patterns to a test for lower-case text, which must match one of them: * stands for anything and ? for one
    character."""
    matches = re.compile("|".join(translate(pattern.lower()) for pattern in patterns)).match
    return lambda text: matches(text) is not None


def _text_condition(key: str, patterns: Sequence[str] | bool) -> Condition:
    """On a text of the request, a header or a tag; a bool asks whether the header or tag is there. A header's value may
    be a secret, so the explanation never shows it."""
    kind, _, name = key.partition(".")
    steady = kind != "header" or (name != "content-length" and name not in ONE_REQUEST)
    value: Callable[[Facts], str | None]
    if kind == "header":
        value = lambda facts: facts.headers.get(name)  # noqa: E731
    elif kind == "tag":
        value = lambda facts: facts.tags.get(name)  # noqa: E731
    else:
        value = itemgetter(Facts._fields.index(key))

    def describe(facts: Facts, _: float) -> str:
        text = value(facts)
        if text is None:
            return "missing"
        return "there" if kind == "header" else text or "empty"

    if isinstance(patterns, bool):
        wanted = "there" if patterns else "missing"
        return Condition(key, wanted, lambda facts, _: (value(facts) is not None) is patterns, describe, steady)
    fits = glob(*patterns)

    def test(facts: Facts, _: float) -> bool:
        text = value(facts)
        return text is not None and fits(text.lower())

    return Condition(key, " or ".join(patterns), test, describe, steady)
