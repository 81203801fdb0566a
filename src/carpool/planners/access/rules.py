"""The chain that proxy, library and `serve --check` share: parse a request, apply the rules, make its call. It is pure.

`understand` parses the request, `apply_rules` completes its options, and `routing.route` chooses the lane of the call
that `call_of` makes of both.

Rules add options that a client did not set: a budget, a lane, tags, or a limit on what a client may ask for. `Facts` is
what is known of a request, a `Condition` a test on it, compiled once (`read_rules`) and tested for every call. The
first rule whose conditions are all met applies, and then the profile of the client's virtual key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from msgspec.structs import replace

from carpool.core.errors import BadCall
from carpool.core.keys import VirtualKey
from carpool.core.model import CachingMode, Call, Lane, TaskTerms
from carpool.core.ports import Parsed, RawRequest
from carpool.core.upstream import Upstream
from carpool.planners.access.options import Options, capped
from carpool.planners.access.virtual_keys import apply_profile

NONE: Final[Mapping[str, str]] = MappingProxyType({})
LONGEST_MODEL: Final = 256  # characters; it goes into the ledger and the log
MAX_KINDS: Final = 64  # kinds of calls cached per head
CallKind = tuple[str, str, bool, bool]  # endpoint, model, streaming, tool turn


def understand(upstream: Upstream, raw: RawRequest) -> Parsed:
    """Parse a request. Raises `BadCall` if it is invalid."""
    parsed = upstream.dialect.parse(raw)
    if len(parsed.model) > LONGEST_MODEL:
        raise BadCall(f"`model` has {len(parsed.model)} characters; the name of a model has at most {LONGEST_MODEL}.")
    return parsed


def call_of(
    upstream: Upstream,
    parsed: Parsed,
    options: Options,
    arrived: float,
    *,
    ticket: int = 0,
    credential: str = "",
    payer: str = "",
    agent: str = "",
) -> Call:
    """The call of a parsed request, after the rules."""
    untimed = options.budget is None and options.deadline is None  # so are most calls on `now`
    untasked = options.task is None and options.task_budget is None and options.task_deadline is None
    return Call(
        ticket=ticket,
        provider=upstream.provider,
        dialect=upstream.dialect.name,
        endpoint=parsed.endpoint,
        body=parsed.body,
        headers=parsed.headers,
        credential=credential,
        model=parsed.model,
        arrived=arrived,
        deadline=None if untimed else options.until(arrived),
        task=options.task or options.tags.get("run", "") or parsed.session,
        task_terms=None if untasked else TaskTerms(options.task_budget, options.task_deadline, options.longest),
        stream=parsed.stream,
        max_output_tokens=parsed.max_output_tokens,
        unbatchable=parsed.unbatchable,
        lane=options.lane,
        tags=options.tags,
        key=options.key,
        retry=parsed.retry,
        conversation=parsed.conversation,
        insists=options.insists,
        note=options.note,
        on_disconnect=options.on_disconnect,
        caching=options.caching,
        flexible=parsed.flexible,
        payer=payer,
        agent=agent,
    )


# ------------------------------------------------------------ rules


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
    has_budget: bool = False  # the client set one, for the call or its task
    size: int = 0  # bytes of the body

    def __repr__(self) -> str:  # never the headers: they contain keys
        return f"<Facts of a call of {self.model or 'some model'} to {self.provider or 'some provider'}>"


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
        subagent=not headers.keys().isdisjoint(upstream.dialect.subagent_headers),
        has_budget=options.timed or options.tasked,
        size=len(raw.body),
    )


@dataclass(frozen=True, slots=True)
class Condition:
    """`key` and `wanted` are as in the config file; `describe` describes the actual value. `steady`: the result
    depends only on the head and on what `CallKind` holds, so it can be cached for similar calls of one client. A new
    fact of the body goes into `CallKind`, or its condition is not steady."""

    key: str
    wanted: str
    test: Callable[[Facts, float], bool]
    describe: Callable[[Facts, float], str]
    steady: bool = True


@dataclass(frozen=True, slots=True)
class Rule:
    """`budget`, `task_budget`, `lane`, `on_disconnect` and `caching` are defaults for clients that set none;
    `max_budget` and `refuse_budget` limit what clients may set."""

    name: str
    match: tuple[Condition, ...] = ()
    budget: float | None = None
    lane: Lane | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    max_budget: float | None = None
    refuse_budget: bool = False
    refuse_reason: str = ""
    on_disconnect: Literal["keep", "cancel"] | None = None
    task_budget: float | None = None
    caching: CachingMode | None = None


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


class RuleResult(NamedTuple):
    options: Options
    rule: str | None  # the name of the rule that applied
    facts: Facts
    book: RuleBook
    at: float

    def explanation(self) -> list[Verdict]:
        """The verdict on every rule. Computed on demand, because calls don't need it."""
        verdicts: list[Verdict] = []
        for rule in self.book.rules:
            described = [(f"{test.key} is {test.describe(self.facts, self.at)}", test) for test in rule.match]
            unmet = [(text, test) for text, test in described if not test.test(self.facts, self.at)]
            if any(verdict.matched for verdict in verdicts):
                verdicts.append(Verdict(rule.name, None, "a rule before it matched"))
            elif unmet:
                text, test = unmet[0]
                verdicts.append(Verdict(rule.name, False, f"{text}, and not {test.wanted}"))
            else:
                because = ", ".join(text for text, _ in described) or "it wants nothing in particular"
                verdicts.append(Verdict(rule.name, True, because))
        return verdicts


def decide_rule(facts: Facts, options: Options, book: RuleBook, now: float) -> RuleResult:
    """Apply the first rule that matches."""
    for rule in book.rules:
        for condition in rule.match:
            if not condition.test(facts, now):
                break
        else:
            return RuleResult(_apply(options, rule, book, now), rule.name, facts, book, now)
    return RuleResult(_with_default(options, book), None, facts, book, now)


def _apply(options: Options, rule: Rule, book: RuleBook, now: float) -> Options:
    if rule.tags or rule.on_disconnect or rule.caching:
        on_disconnect, caching = options.on_disconnect or rule.on_disconnect, options.caching or rule.caching
        options = replace(options, tags={**rule.tags, **options.tags}, on_disconnect=on_disconnect, caching=caching)
    if rule.refuse_budget and (options.may_wait or options.lane not in (None, Lane.NOW)):
        return _refused(options, rule)
    asked = options.timed or options.tasked
    if rule.task_budget is not None and not options.tasked and options.lane is not Lane.NOW:
        note = options.note or f"The rule {rule.name} gives its task a budget."
        options = replace(options, task_budget=rule.task_budget, note=note)
    if asked or options.lane is not None:
        if not asked and rule.budget is not None:
            options = replace(options, budget=rule.budget)
    elif rule.lane is not None:
        note = f"The rule {rule.name} asks for the lane {rule.lane}."
        options = replace(options, lane=rule.lane, budget=rule.budget, insists=False, note=note)
    elif rule.budget is not None:
        options = replace(options, budget=rule.budget, note=f"The rule {rule.name} gives a budget.")
    elif not rule.refuse_budget:
        options = _with_default(options, book)
    return capped(options, rule.max_budget, f"The rule {rule.name}", now)


def _refused(options: Options, rule: Rule) -> Options:
    """The options without the client's budgets."""
    why = f": {rule.refuse_reason}" if rule.refuse_reason else ""
    note = f"The rule {rule.name} lets no budget of a client through{why}".rstrip(".") + "."
    lane = rule.lane or (Lane.NOW if rule.budget is None and rule.task_budget is None else None)
    own = {"budget": rule.budget, "deadline": None, "task_budget": rule.task_budget, "task_deadline": None}
    return replace(options, **own, lane=lane, insists=lane is None, note=note)


def _with_default(options: Options, book: RuleBook) -> Options:
    if book.default_budget is None or options.timed or options.tasked or options.lane is not None:
        return options
    return replace(options, budget=book.default_budget)


def apply_rules(
    book: RuleBook, upstream: Upstream, raw: RawRequest, parsed: Parsed, options: Options, now: float
) -> RuleResult:
    """The client's options, changed by the first rule that matches."""
    return decide_rule(facts_of(upstream, raw, parsed, options), options, book, now)


class RuleApplier:
    """Applies the rules and the profiles of virtual keys to all calls. If they depend neither on the time nor on the
    size of a call, the result is cached with the head of the request, for later calls of the same kind."""

    def __init__(self, book: RuleBook) -> None:
        self._book = book
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
        if not self._book and key is None:
            return options
        kind = (parsed.endpoint, parsed.model, parsed.stream, parsed.tool_turn)
        steady = self._steady and options.deadline is None and options.task_deadline is None
        ruled = cache.get(kind) if steady else None
        if ruled is None:
            ruled = apply_rules(self._book, upstream, raw, parsed, options, now).options if self._book else options
            ruled = ruled if key is None else apply_profile(key, options, ruled, now)
            if steady:
                if len(cache) >= MAX_KINDS:  # clients choose the model names
                    cache.clear()
                cache[kind] = ruled
        return ruled
