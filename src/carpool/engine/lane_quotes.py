"""What each lane would cost for a call: asks the forecast, the prices, and what is known of its prompt."""

from __future__ import annotations

from collections.abc import Sequence

from carpool.core.model import Call, Lane, PromptChain
from carpool.core.ports import Dialect
from carpool.engine.context import EngineContext
from carpool.planners.caching.index import DEFAULT_TTL, IMPLICIT_TTL, LIVES, Surface, WarmPrefix
from carpool.planners.caching.plan import marked
from carpool.planners.quoter import KnownPrompt, Quoter, lane_prices
from carpool.planners.quotes import NOTHING, Quote, Stored
from carpool.planners.routing import BatchDeadlines, Capabilities


class LaneQuotes:
    def __init__(self, context: EngineContext, capabilities: Capabilities) -> None:
        self._context = context
        self._capabilities = capabilities
        self._quoter = Quoter(context.forecast, context.prompt_caches.agents)

    def quote(self, call: Call, lanes: Sequence[Lane], times: BatchDeadlines) -> Sequence[Quote]:
        """The cheapest way first."""
        now, dialect = self._context.now(), self._context.upstreams[call.provider].dialect
        book, able = self._context.prices, self._capabilities.of(call.provider, dialect, call.model)
        prices = {lane: lane_prices(book, able, dialect, call.model, lane, now) for lane in lanes}
        return self._quoter.quote(call, self._prompt(call, dialect, lanes, now), prices, times, now)

    def _prompt(self, call: Call, dialect: Dialect, lanes: Sequence[Lane], now: float) -> KnownPrompt:
        tokens, chain, caches = dialect.estimate_tokens(call.body), call.prompt, self._context.prompt_caches
        if chain is None:
            return KnownPrompt(tokens, kind=call.agent)
        as_sent = {lane: marked(chain, caches.plan(call, lane)) for lane in lanes}
        lives = {lane: (_life(prompt),) for lane, prompt in as_sent.items()}
        scope = caches.scope(call.provider, call.credential)
        conversation = (scope, chain.conversation)
        if lives[Lane.NOW] == (0.0,) or not (chain.marks or caches.agents.continues(conversation, call.agent)):
            return KnownPrompt(tokens, kind=call.agent)
        on_sync = caches.index.lookup(scope, as_sent[Lane.NOW], Surface.SYNCHRONOUS, now)
        on_batch = caches.index.lookup(scope, as_sent.get(Lane.BATCH, chain), Surface.BATCH, now)
        return KnownPrompt(tokens, conversation, call.agent, _stored(on_sync), _stored(on_batch), lives)


def _life(chain: PromptChain) -> float:
    """How long what the client marks is kept; 0 if it marks nothing."""
    if chain.implicit:
        return float(LIVES[IMPLICIT_TTL])
    return float(max((LIVES.get(mark.ttl or DEFAULT_TTL, 0) for mark in chain.marks), default=0))


def _stored(prefix: WarmPrefix | None) -> Stored:
    return NOTHING if prefix is None else Stored(prefix.tokens, prefix.expires)
