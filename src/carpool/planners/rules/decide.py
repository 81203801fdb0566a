"""Pick the rule of a call and apply it to the call's options. The first rule that matches applies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from msgspec.structs import replace

from carpool.core.model import Lane
from carpool.planners.options import Options
from carpool.planners.rules.conditions import Condition, Facts


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


def decide(facts: Facts, options: Options, book: RuleBook, now: float) -> Ruling:
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


def capped(options: Options, most: float | None, whose: str, now: float) -> Options:
    """Limit the budget to `most` seconds (None: no limit). `whose` names the origin of the limit in the note."""
    if most is None or options.lane is Lane.NOW:
        return options
    until = options.until(now)
    if until is None and options.lane is None:
        return options  # it is sent at once, which no limit forbids
    if until is not None and until <= now + most:
        return options
    note = f"{whose} allows a budget of at most {span(most)}."
    return replace(options, budget=most, deadline=None, note=f"{options.note} {note}".lstrip())


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


def span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
