"""Put together what a quote needs: prices, forecasts, what is known of the prompt, and how its conversation goes on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from carpool.core.bounded import BoundedMap
from carpool.core.model import Call, Lane
from carpool.core.ports import Capability, Dialect
from carpool.core.prices import PriceBook
from carpool.planners.agents import Agents
from carpool.planners.forecast import Forecast
from carpool.planners.policy import DAY
from carpool.planners.quotes import (
    ALONE,
    EQUAL_DIGITS,
    NOTHING,
    BatchOdds,
    PricedCall,
    Quote,
    Stored,
    TokenPrices,
    quotes,
    token_prices,
)
from carpool.planners.routing import BatchDeadlines, batch_class

SHORTEST_SLACK_S: Final = 60.0
PROBE_SHARE: Final = 0.01  # of what calls cost
DOUBT: Final = 0.15  # by what share batches must be cheaper for a conversation where none was observed
MAX_PAYERS: Final = 10_000
ENOUGH_OBSERVED: Final = 5.0  # batches that ended lately

Payer = tuple[str, str, str]  # provider, credential, model


def lane_prices(book: PriceBook, able: Capability, dialect: Dialect, model: str, lane: Lane, at: float) -> TokenPrices:
    """The prices of a model on a lane. Where nobody knows them, what the lane usually costs compared with `now`."""
    rates = book.rates(dialect, model, lane, at)
    if rates is not None:
        return token_prices(rates)
    share = {Lane.BATCH: able.batch_price, Lane.FLEX: able.flex_price}.get(lane)
    return TokenPrices() if share is None else lane_prices(book, able, dialect, model, Lane.NOW, at).times(share)


class KnownPrompt(NamedTuple):
    """What is known of a call's prompt and of its conversation."""

    tokens: int
    conversation: object | None = None  # None: the call stands alone
    kind: str = ""  # of agent
    on_sync: Stored = NOTHING
    on_batch: Stored = NOTHING
    lives: Mapping[Lane, Sequence[float]] | None = None  # that may be chosen
    pings: bool = False


class Quoter:
    def __init__(self, forecast: Forecast, agents: Agents) -> None:
        self._forecast = forecast
        self._agents = agents
        self._probes = ProbeBudget()

    def quote(
        self, call: Call, prompt: KnownPrompt, prices: Mapping[Lane, TokenPrices], times: BatchDeadlines, now: float
    ) -> list[Quote]:
        """What each way costs, the cheapest first. `prices` has the lanes that the call can take."""
        forecast, of = self._forecast, batch_class(call)

        def ends_within(seconds: float) -> float:
            return forecast.batch_cdf(seconds, of)

        kind = self._agents.kind(prompt.kind)
        output = min(kind.output(), call.max_output_tokens or math.inf)
        sync_s = forecast.sync_typical(call.provider, call.model, int(output))
        outlook = ALONE
        if prompt.conversation is not None:
            outlook = self._agents.outlook(prompt.conversation, prompt.kind, of, ends_within, now)
        odds = BatchOdds(
            ends_within(times.latest_end - times.wait - now),
            ends_within(times.later - times.wait),
            ends_within,
            forecast.billed_chance(call.provider),
            turns=self._turns_in_batches(call, times, sync_s, now),
        )
        lives = prompt.lives or dict.fromkeys(prices, (0.0,))
        found = quotes(
            PricedCall(
                prompt.tokens,
                output,
                prices,
                lives,
                sync_s,
                now,
                prompt.on_sync,
                prompt.on_batch,
                outlook,
                odds,
                forecast.flex_refusal(call.provider, call.model) if Lane.FLEX in prices else 0.0,
                prompt.pings,
            )
        )
        observed = forecast.observed(of)
        found = self._with_reluctance(found, prompt, observed)
        probe = self._probes.probe((call.provider, call.credential, call.model), found, observed)
        return found if probe is None else [probe, *found]

    def _turns_in_batches(self, call: Call, times: BatchDeadlines, sync_s: float, now: float) -> float:
        """How many of the turns to come may go in batches before the task needs the rest of its time on `now`."""
        if call.task_deadline is None:
            return math.inf
        slack = max(0.0, times.latest_end - now)
        mean = self._forecast.batch_mean(max(SHORTEST_SLACK_S, min(slack, DAY)), batch_class(call))
        return max(0.0, slack / max(1.0, mean - sync_s) - 1)

    def _with_reluctance(self, found: list[Quote], prompt: KnownPrompt, observed: float) -> list[Quote]:
        doubt = 0.0 if prompt.conversation is None else DOUBT * 3 / (3 + observed)
        share = {
            in_batch: self._agents.reluctance(prompt.conversation, in_batch=in_batch) for in_batch in (True, False)
        }
        share[True] += doubt
        return sorted(found, key=lambda quote: round(quote.total * (1 + share[quote.lane is Lane.BATCH]), EQUAL_DIGITS))


class ProbeBudget:
    """What may be spent on learning how long batches take.

    A forecast that only learns from what it sent would never notice that batches have become quick. So a call whose
    quotes advise against a batch goes there nevertheless, as a probe, as long as few batches were observed lately and
    the expected losses stay below a share of what calls cost. Nobody pays for the probes of others: each credential
    saves for its own, by model.
    """

    def __init__(self) -> None:
        self._saved: BoundedMap[Payer, float] = BoundedMap(MAX_PAYERS)

    def probe(self, payer: Payer, quotes: Sequence[Quote], observed: float) -> Quote | None:
        """The batch that is worth a probe; None if the cheapest way is to be taken."""
        best = quotes[0]
        saved = self._saved[payer] = self._saved.get(payer, 0.0) + PROBE_SHARE * best.cost
        if observed >= ENOUGH_OBSERVED or best.lane is Lane.BATCH:
            return None
        batch = next((quote for quote in quotes if quote.lane is Lane.BATCH), None)
        if batch is None or batch.total - best.total > saved:
            return None
        self._saved[payer] = saved - max(0.0, batch.total - best.total)
        return batch._replace(probe=True)
