"""Rules add options that a client did not set: a budget, a lane, tags, or a limit on what a client may ask for.

`Facts` is what is known of a request, a `Condition` a test on it, compiled once and tested for every call. The first
rule whose conditions are all met applies. `apply_rules` applies the rules and then the profile of the client's virtual
key. All of it is pure: the caller passes the time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, tzinfo
from fnmatch import translate
from functools import lru_cache
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from msgspec.structs import replace

from carpool.core.keys import VirtualKey
from carpool.core.model import Lane
from carpool.core.ports import Parsed, RawRequest
from carpool.core.upstream import Upstream
from carpool.dialects.headers import ONE_REQUEST
from carpool.planners.access.options import Options, capped
from carpool.planners.access.virtual_keys import apply_profile

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


def facts_of(upstream: Upstream, raw: RawRequest, parsed: Parsed, options: Options) -> Facts:
    headers = dict(raw.headers)
    return Facts(
        dialect=upstream.dialect.name,
        provider=upstream.provider.lower(),
        endpoint=parsed.endpoint.lower(),
        model=parsed.model.lower(),
        user_agent=headers.get("user-agent", "").lower(),
        headers=headers,
        tags=options.tags,
        streaming=parsed.stream,
        tool_turn=parsed.tool_turn,
        subagent=is_subagent(headers),
        has_budget=options.timed,
        size=len(raw.body),
    )


MOST_KINDS: Final = 64  # kinds of calls cached per head
LONGEST_CACHED: Final = 256  # characters of a cached model name
CallKind = tuple[str, str, bool, bool]  # endpoint, model, streaming, tool turn

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


def text_condition(key: str, patterns: Sequence[str]) -> Condition:
    fits, place = any_glob(patterns), Facts._fields.index(key)

    def test(facts: Facts, _: float) -> bool:
        return fits(facts[place])  # type: ignore[arg-type]  # a field of text

    return Condition(key, " or ".join(patterns), test, lambda facts, _: str(facts[place]) or "empty")


def switch_condition(key: str, wanted: bool) -> Condition:
    place = Facts._fields.index(key)
    return Condition(
        key, str(wanted).lower(), lambda facts, _: facts[place] is wanted, lambda facts, _: str(facts[place]).lower()
    )


def header_condition(name: str, patterns: Sequence[str] | bool) -> Condition:
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


def tag_condition(name: str, patterns: Sequence[str] | bool) -> Condition:
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


def size_condition(wanted: str, sign: str, bound: float) -> Condition:
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


def time_condition(key: str, wanted: str, hours: Window, zone: tzinfo) -> Condition:
    @lru_cache(maxsize=4)  # the result changes with the minute only, and every call needs it
    def holds(minute: int) -> bool:
        then = datetime.fromtimestamp(minute * 60, zone)
        return hours.holds(then.weekday(), then.hour * 60 + then.minute)

    def tell(_: Facts, now: float) -> str:
        then = datetime.fromtimestamp(now, zone)
        return f"{DAYS[then.weekday()]} {then:%H:%M} in {zone}"

    return Condition(key, wanted, lambda _, now: holds(int(now // 60)), tell, steady=False)


# ---------------------------------------------------------------- rules


@dataclass(frozen=True, slots=True)
class Rule:
    """`budget`, `lane` and `on_disconnect` are defaults for clients that set none; `max_budget` and `refuse_budget`
    limit what clients may set."""

    name: str
    match: tuple[Condition, ...] = ()
    budget: float | None = None
    lane: Lane | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    max_budget: float | None = None
    refuse_budget: bool = False
    refuse_reason: str = ""
    on_disconnect: Literal["keep", "cancel"] | None = None


@dataclass(frozen=True, slots=True)
class RuleBook:
    rules: tuple[Rule, ...] = ()
    default_budget: float | None = None

    def __bool__(self) -> bool:
        return bool(self.rules) or self.default_budget is not None

    @property
    def steady(self) -> bool:
        """Whether the result for a call can be cached for similar calls."""
        return all(condition.steady for rule in self.rules for condition in rule.match)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a rule matched or did not. `matched` is None for rules after the one that applied."""

    rule: str
    matched: bool | None
    because: str


class Ruling(NamedTuple):
    options: Options
    rule: str | None  # the name of the rule that applied
    facts: Facts
    book: RuleBook
    at: float

    def explanation(self) -> list[Verdict]:
        """The verdict on every rule. Computed on demand, because calls don't need it."""
        verdicts: list[Verdict] = []
        applied = False
        for rule in self.book.rules:
            verdicts.append(_verdict(rule, self.facts, self.at) if not applied else _not_reached(rule))
            applied = applied or bool(verdicts[-1].matched)
        return verdicts


def rule_for(
    book: RuleBook, upstream: Upstream, raw: RawRequest, parsed: Parsed, options: Options, now: float
) -> Ruling:
    """Apply the first rule that matches a request."""
    return decide_rule(facts_of(upstream, raw, parsed, options), options, book, now)


def decide_rule(facts: Facts, options: Options, book: RuleBook, now: float) -> Ruling:
    for rule in book.rules:
        for condition in rule.match:
            if not condition.test(facts, now):
                break
        else:
            return Ruling(_apply(options, rule, book, now), rule.name, facts, book, now)
    return Ruling(_with_default(options, book), None, facts, book, now)


# ---------------------------------------------------------------- effects


def _apply(options: Options, rule: Rule, book: RuleBook, now: float) -> Options:
    if rule.tags or rule.on_disconnect:
        options = replace(
            options,
            tags={**rule.tags, **options.tags},
            on_disconnect=options.on_disconnect or rule.on_disconnect,
        )
    if rule.refuse_budget and (options.timed or options.lane not in (None, Lane.NOW)):
        return _refused(options, rule)
    if not options.timed and options.lane is None:
        options = _with_rule_defaults(options, rule, book)
    elif not options.timed and rule.budget is not None:
        options = replace(options, budget=rule.budget)
    return capped(options, rule.max_budget, f"The rule {rule.name}", now)


def _refused(options: Options, rule: Rule) -> Options:
    """Replace the client's budget and lane by those of the rule."""
    why = f": {rule.refuse_reason}" if rule.refuse_reason else ""
    note = f"The rule {rule.name} lets no budget of a client through{why}".rstrip(".") + "."
    lane = rule.lane or (Lane.NOW if rule.budget is None else None)
    return replace(options, budget=rule.budget, deadline=None, lane=lane, insists=lane is None, note=note)


def _with_rule_defaults(options: Options, rule: Rule, book: RuleBook) -> Options:
    if rule.lane is not None:
        note = f"The rule {rule.name} asks for the lane {rule.lane}."
        return replace(options, lane=rule.lane, budget=rule.budget, insists=False, note=note)
    if rule.budget is not None:
        return replace(options, budget=rule.budget, note=f"The rule {rule.name} gives a budget.")
    return options if rule.refuse_budget else _with_default(options, book)


def _with_default(options: Options, book: RuleBook) -> Options:
    if book.default_budget is None or options.timed or options.lane is not None:
        return options
    return replace(options, budget=book.default_budget)


# ---------------------------------------------------------------- explanation


def _verdict(rule: Rule, facts: Facts, now: float) -> Verdict:
    if not rule.match:
        return Verdict(rule.name, True, "it wants nothing in particular")
    for condition in rule.match:
        if not condition.test(facts, now):
            return Verdict(rule.name, False, condition.explain(facts, now, met=False))
    return Verdict(rule.name, True, ", ".join(condition.explain(facts, now, met=True) for condition in rule.match))


def _not_reached(rule: Rule) -> Verdict:
    return Verdict(rule.name, None, "a rule before it matched")


# ---------------------------------------------------------------- all of it for one request


def apply_rules(
    book: RuleBook | None,
    key: VirtualKey | None,
    upstream: Upstream,
    raw: RawRequest,
    parsed: Parsed,
    options: Options,
    now: float,
) -> Options:
    """The client's options, changed by the rules and the profile of its key."""
    ruled = options
    if book is not None:
        ruled = rule_for(book, upstream, raw, parsed, options, now).options
    return ruled if key is None else apply_profile(key, options, ruled, now)


class RuleApplier:
    """Applies the rules to all calls. If they depend neither on the time nor on the size of a call, the result is
    cached with the head of the request, for later calls of the same kind."""

    def __init__(self, book: RuleBook) -> None:
        self._book = book or None
        self._steady = book.steady

    def apply(
        self,
        cache: dict[CallKind, Options],
        key: VirtualKey | None,
        upstream: Upstream,
        raw: RawRequest,
        parsed: Parsed,
        options: Options,
        now: float,
    ) -> Options:
        if self._book is None and key is None:
            return options
        if not self._steady or options.deadline is not None or len(parsed.model) > LONGEST_CACHED:
            return apply_rules(self._book, key, upstream, raw, parsed, options, now)
        kind = (parsed.endpoint, parsed.model, parsed.stream, parsed.tool_turn)
        ruled = cache.get(kind)
        if ruled is None:
            if len(cache) >= MOST_KINDS:  # clients choose the model names
                cache.clear()
            ruled = cache[kind] = apply_rules(self._book, key, upstream, raw, parsed, options, now)
        return ruled
