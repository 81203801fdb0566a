"""Which rule a call meets, and what it makes of the call's options. The first that matches is the one that acts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from msgspec.structs import replace

from carpool.model import Lane
from carpool.options import Options
from carpool.rules.conditions import Condition
from carpool.rules.facts import Facts


@dataclass(frozen=True, slots=True)
class Rule:
    """`budget`, `lane` and `on_disconnect` are for clients that ask for nothing; `max_budget` and `refuse_budget` bind
    those that do."""

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
        """Whether what it makes of a call can be remembered for the next of its kind."""
        return all(condition.steady for rule in self.rules for condition in rule.match)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a rule matched or did not. `matched` is None for those behind the one that acted."""

    rule: str
    matched: bool | None
    because: str


class Ruling(NamedTuple):
    options: Options
    rule: str | None  # the name of the one that acted
    facts: Facts
    book: RuleBook
    at: float

    def explanation(self) -> list[Verdict]:
        """Made when it is asked for: no call waits for it."""
        verdicts: list[Verdict] = []
        acted = False
        for rule in self.book.rules:
            verdicts.append(_verdict(rule, self.facts, self.at) if not acted else _behind(rule))
            acted = acted or bool(verdicts[-1].matched)
        return verdicts


def decide(facts: Facts, options: Options, book: RuleBook, now: float) -> Ruling:
    for rule in book.rules:
        for condition in rule.match:
            if not condition.test(facts, now):
                break
        else:
            return Ruling(_ruled(options, rule, book, now), rule.name, facts, book, now)
    return Ruling(_by_default(options, book), None, facts, book, now)


# ---------------------------------------------------------------- what a rule does


def _ruled(options: Options, rule: Rule, book: RuleBook, now: float) -> Options:
    if rule.tags or rule.on_disconnect:
        options = replace(
            options,
            tags={**rule.tags, **options.tags},
            on_disconnect=options.on_disconnect or rule.on_disconnect,
        )
    if rule.refuse_budget and (options.timed or options.lane not in (None, Lane.NOW)):
        return _refused(options, rule)
    if not options.timed and options.lane is None:
        options = _suggested(options, rule, book)
    elif not options.timed and rule.budget is not None:
        options = replace(options, budget=rule.budget)
    return capped(options, rule.max_budget, f"The rule {rule.name}", now)


def _refused(options: Options, rule: Rule) -> Options:
    """What the client asked for does not count; what the rule itself gives does."""
    why = f": {rule.refuse_reason}" if rule.refuse_reason else ""
    note = f"The rule {rule.name} lets no budget of a client through{why}".rstrip(".") + "."
    lane = rule.lane or (Lane.NOW if rule.budget is None else None)
    return replace(options, budget=rule.budget, deadline=None, lane=lane, insists=lane is None, note=note)


def _suggested(options: Options, rule: Rule, book: RuleBook) -> Options:
    if rule.lane is not None:
        note = f"The rule {rule.name} asks for the lane {rule.lane}."
        return replace(options, lane=rule.lane, budget=rule.budget, insists=False, note=note)
    if rule.budget is not None:
        return replace(options, budget=rule.budget, note=f"The rule {rule.name} gives a budget.")
    return options if rule.refuse_budget else _by_default(options, book)


def capped(options: Options, most: float | None, whose: str, now: float) -> Options:
    """No more than `most` seconds, where there is such a bound; `whose` says who set it."""
    if most is None or options.lane is Lane.NOW:
        return options
    until = options.until(now)
    if until is None and options.lane is None:
        return options  # it goes at once, which no bound forbids
    if until is not None and until <= now + most:
        return options
    note = f"{whose} allows a budget of at most {span(most)}."
    return replace(options, budget=most, deadline=None, note=f"{options.note} {note}".lstrip())


def _by_default(options: Options, book: RuleBook) -> Options:
    if book.default_budget is None or options.timed or options.lane is not None:
        return options
    return replace(options, budget=book.default_budget)


# ---------------------------------------------------------------- what is said of it


def _verdict(rule: Rule, facts: Facts, now: float) -> Verdict:
    if not rule.match:
        return Verdict(rule.name, True, "it wants nothing in particular")
    for condition in rule.match:
        if not condition.test(facts, now):
            return Verdict(rule.name, False, condition.explain(facts, now, met=False))
    return Verdict(rule.name, True, ", ".join(one.explain(facts, now, met=True) for one in rule.match))


def _behind(rule: Rule) -> Verdict:
    return Verdict(rule.name, None, "a rule before it matched")


def span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
