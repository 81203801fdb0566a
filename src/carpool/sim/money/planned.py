"""The routers of a run: fixed ones, and the one that plans with the production's quotes.

The planning router knows what the engine would know: which prefixes were stored when and where, how the conversations
of each kind went on, and how long batches took. It learns of a purchase when its answer is there, not before.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol

from msgspec.structs import replace

from carpool.core.model import Call, Lane, TaskTerms
from carpool.planners.agents import Agents
from carpool.planners.forecast import BatchClass, Forecast
from carpool.planners.quoter import KnownPrompt, Quoter
from carpool.planners.quotes import LONG_LIFE, NOTHING, SHORT_LIFE, Quote, Stored, TokenPrices, token_prices
from carpool.planners.routing import BatchDeadlines, Decision, noted, route
from carpool.planners.tasks import TaskBook
from carpool.sim.money.billing import PRICED_AT
from carpool.sim.money.cache import CacheRules, Surface, cache_rules, surface
from carpool.sim.money.model import BYTES_PER_TOKEN, LIVES, ROOT, Node, RunPurchase

if TYPE_CHECKING:
    from carpool.sim.money.run import FleetRun, RunCall
    from carpool.sim.money.worlds import ProviderWorld

Caching = Literal["observe", "plan"]


SIZE_CLASSES: Final = "sml"
TAUGHT: Final = 100  # batches of each class
SURFACES: Final[tuple[Surface, Surface]] = ("synchronous", "batch")


class RoutedTurn(NamedTuple):
    decision: Decision
    now_life: float = 0.0  # of the marks, if it is sent on `now`
    batch_life: float = 0.0
    pings: int = 0


class RunRouter(Protocol):
    def choose(self, call: RunCall, now: float) -> RoutedTurn: ...
    def bought(self, purchase: RunPurchase, sent: float) -> None: ...
    def answered(self, call: RunCall, output_tokens: int, lane: Lane, now: float) -> None: ...


@dataclass(slots=True)
class Knowledge:
    """What a router has learned, which may come from an earlier run."""

    forecast: Forecast = field(default_factory=Forecast)
    agents: Agents = field(default_factory=Agents)
    until: float = 0.0  # the time of what was learned last


def taught(world: ProviderWorld, provider: str, models: Iterable[str], at: float) -> Forecast:
    """A forecast that has seen some batches of a world end, as that of a carpool which has been running for a while."""
    forecast, rng = Forecast(), random.Random(0)  # noqa: S311  the same every time
    for model in models:
        for size in SIZE_CLASSES:
            for _ in range(TAUGHT):
                seconds = world.times(model).quantile(rng.random(), rng.random())
                forecast.batch_ended(BatchClass(provider, model, size), 0.0, seconds, at)
    return forecast


class PrefixStore:
    """Which nodes were stored where, and until when, as far as answers told."""

    def __init__(self, nodes: Sequence[Node], rules: CacheRules) -> None:
        self._nodes = nodes
        self._rules = rules
        self._entries: dict[Surface, dict[int, tuple[float, float]]] = {"synchronous": {}, "batch": {}}

    def bought(self, purchase: RunPurchase, sent: float) -> None:
        """Lives are counted from when a request was sent: nobody is told when a batch begins with it."""
        entries, life = self._entries[surface(purchase.lane)], LIVES[purchase.ttl]
        if life <= 0:
            return
        hit = self._hit(entries, purchase.node, sent)
        for node in {hit, purchase.node, purchase.system} - {ROOT}:
            expires, kept = entries.get(node, (-math.inf, life))
            if expires > sent:
                entries[node] = (max(expires, sent + kept), kept)
            elif self._nodes[node].tokens >= self._rules.minimum:
                entries[node] = (sent + life, life)

    def _hit(self, entries: Mapping[int, tuple[float, float]], node: int, at: float) -> int:
        for _ in range(self._rules.lookback + 1):
            if node == ROOT:
                break
            if node in entries and entries[node][0] > at:
                return node
            node = self._nodes[node].parent
        return ROOT

    def lookup(self, where: Surface, node: int, system: int, at: float) -> Stored:
        entries = self._entries[where]
        hit = self._hit(entries, node, at)
        if hit == ROOT and system in entries and entries[system][0] > at:
            hit = system
        return NOTHING if hit == ROOT else Stored(self._nodes[hit].tokens, entries[hit][0])


class PlannedRouter:
    """Decides as the engine does: tasks bind the call, and `route` takes the cheapest lane."""

    def __init__(self, run: FleetRun, knowledge: Knowledge, caching: Caching, *, pings: bool = False) -> None:
        self._run = run
        self._known = knowledge
        self._plans = caching == "plan"
        self._pings = pings
        self._quoter = Quoter(knowledge.forecast, knowledge.agents)
        self._tasks = TaskBook(knowledge.agents.turns_left, knowledge.agents.turn_seconds)
        self._stores: dict[str, PrefixStore] = {}
        self._prices: dict[str, Mapping[Lane, TokenPrices]] = {}

    # ------------------------------------------------------------ learning

    def bought(self, purchase: RunPurchase, sent: float) -> None:
        self._store(self._run.trace.sessions[purchase.session].model).bought(purchase, sent)

    def answered(self, call: RunCall, output_tokens: int, lane: Lane, now: float) -> None:
        seconds = now - call.call.arrived if lane is Lane.NOW and call.lane is Lane.NOW else None
        self._known.agents.answered(self._conversation(call), output_tokens, now, seconds)
        self._tasks.ended(call.ticket, now)

    def _conversation(self, call: RunCall) -> tuple[int, int]:
        return self._run.seed, call.session

    def _store(self, model: str) -> PrefixStore:
        if model not in self._stores:
            self._stores[model] = PrefixStore(self._run.trace.nodes, cache_rules(self._run.dialect, model))
        return self._stores[model]

    # ------------------------------------------------------------ choosing

    def choose(self, call: RunCall, now: float) -> RoutedTurn:
        run, agents, conversation = self._run, self._known.agents, self._conversation(call)
        prompt = self._prompt(call, now)
        bound = self._tasks.bound(self._asked(call), now, self._known.forecast)

        def quote(lanes: Sequence[Lane], times: BatchDeadlines) -> Sequence[Quote]:
            prices = {lane: self._prices_of(bound.model)[lane] for lane in lanes}
            return self._quoter.quote(bound, prompt, prices, times, now)

        settings, default = run.policy.settings, run.policy.patient
        decision = noted(bound, route(bound, settings, self._known.forecast, now, quote, default=default))
        quotes = decision.quotes or quote(tuple({Lane.NOW, decision.lane}), BatchDeadlines())
        agents.asked(conversation, prompt.kind, prompt.tokens, now)
        if not (decision.quotes and decision.quotes[0].probe):
            agents.sent(conversation, in_batch=decision.lane is Lane.BATCH)
        self._tasks.asked(bound, now)
        chosen = next(quote for quote in quotes if quote.lane is decision.lane)
        instead = min((quote for quote in quotes if quote.lane is Lane.NOW), key=lambda quote: quote.cost)
        if decision.lane is Lane.NOW:
            return RoutedTurn(decision, chosen.life, 0.0, chosen.pings)
        return RoutedTurn(decision, instead.life, chosen.life)

    def _asked(self, call: RunCall) -> Call:
        """The call as its client would ask for it: with a budget of its own, or for its task, or without any."""
        own = (
            None if call.budget == math.inf or self._run.policy.patient is Lane.NOW else call.call.arrived + call.budget
        )
        if call.task_ends == math.inf:
            return replace(call.call, deadline=own)
        terms = TaskTerms(deadline=call.task_ends, longest=None if own is None else call.budget)
        return replace(call.call, deadline=None, task=f"session {call.session}", task_terms=terms)

    def _prompt(self, call: RunCall, now: float) -> KnownPrompt:
        run, store = self._run, self._store(call.call.model)
        session = run.trace.sessions[call.session]
        node = session.turns[call.turn].node
        on_sync, on_batch = (store.lookup(where, node, session.system, now) for where in SURFACES)
        tokens, lives = (call.bytes + BYTES_PER_TOKEN - 1) // BYTES_PER_TOKEN, self._lives(call.session, node)
        if lives[Lane.NOW] == (0.0,):
            return KnownPrompt(tokens, kind=session.client)  # without a cache, no turn concerns another
        conversation = self._conversation(call)
        return KnownPrompt(tokens, conversation, session.client, on_sync, on_batch, lives, self._pings)

    def _lives(self, session: int, node: int) -> Mapping[Lane, Sequence[float]]:
        if self._plans:
            return dict.fromkeys((Lane.NOW, Lane.BATCH), (0.0, SHORT_LIFE, LONG_LIFE))
        marks = self._run.client_marks(session)
        ttl = marks.ttl if marks is not None else "5m" if self._run.worth_marking(node) else None
        return dict.fromkeys((Lane.NOW, Lane.BATCH), (LIVES[ttl],))

    def _prices_of(self, model: str) -> Mapping[Lane, TokenPrices]:
        if model not in self._prices:
            table, dialect = self._run.table, self._run.dialect
            rates = {lane: table.rates(dialect, model, lane, PRICED_AT) for lane in (Lane.NOW, Lane.BATCH)}
            self._prices[model] = {lane: token_prices(rate) for lane, rate in rates.items() if rate is not None}
        return self._prices[model]
