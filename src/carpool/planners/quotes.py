"""Quotes: what each way of sending a call is expected to cost, now and later. Pure: no I/O, no clock.

A way is a lane and the life of the cache entries that its prompt writes there (0: nothing is marked). A call of a
conversation is not priced alone, because it decides what the next turns will pay: a prompt that was sent in a batch
leaves nothing on `now`. So the cost of a way has two parts.

**This turn.** With C tokens in the prompt, of which H are stored where the lane reads (and are still stored when it
reads them, with chance h), rates `read` and `write` of that lane, and o expected output tokens:

    h * (read * H + write * (C - H)) + (1 - h) * write * C + output * o

A batch with a deadline is back in time with chance p; otherwise the call is bought again on `now`, at what it costs
there today, and the batch copy is billed nevertheless with chance q:

    p * batch + (1 - p) * (now + q * batch)

A call that flex refuses takes the cheapest other lane, and the refusal costs nothing.

**The turns to come.** The outlook of a conversation says how many more are expected, by how much the prompt grows with
each, and how likely the next one comes within a cache entry's life. All further turns are assumed to go the same way
as this one, or all by the cheapest way of the other surface, which begins cold there. In batches the time between two
reads includes the latency of the next batch. Where the slack of a task does not last for all turns, the rest goes by
the cheapest way on `now`.

The cheapest sum wins. All costs are in nano-dollars, but only their ratios matter: without known prices the usual
multipliers do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from carpool.core.model import Lane
from carpool.core.prices import Rates

SHORT_LIFE: Final = 300.0
LONG_LIFE: Final = 3600.0
EQUAL_DIGITS: Final = 3  # of nano-dollars: sums are not exact, and of equal quotes the first is meant
MOST_PINGS: Final = 12
FLEX_TOLL: Final = 1.01  # flex uses up the synchronous rate limit, which an equally cheap batch leaves alone
PING_EARLY_S: Final = 10.0  # before the end of the entry's life


Way = tuple[Lane, float]  # a lane, and the life of what is stored there


class TokenPrices(NamedTuple):
    """Nano-dollars per token on one lane. The defaults are the usual multipliers of an uncached token's price."""

    fresh: float = 1.0
    output: float = 5.0
    read: float = 0.1
    write_short: float = 1.25
    write_long: float = 2.0

    def write(self, life: float) -> float:
        if life <= 0:
            return self.fresh
        return self.write_short if life <= SHORT_LIFE else self.write_long

    def times(self, factor: float) -> TokenPrices:
        return TokenPrices(*(price * factor for price in self))


def token_prices(rates: Rates) -> TokenPrices:
    """Unknown prices are estimated here, by the usual multipliers: a quote may be, a ledger entry never is."""
    fresh = (rates.input or 0) / rates.scale

    def known(rate: int | None, usual: float) -> float:
        return fresh * usual if rate is None else rate / rates.scale

    return TokenPrices(
        fresh,
        known(rates.output, 5.0),
        known(rates.cache_read, 1.0),
        known(rates.cache_write_5m, 1.0),
        known(rates.cache_write_1h, 2.0),
    )


class Stored(NamedTuple):
    """How much of a prompt is stored on a surface, and until when."""

    tokens: int = 0
    expires: float = 0.0


NOTHING: Final = Stored()


class Outlook(NamedTuple):
    """How a conversation is expected to go on after this call."""

    turns: float = 0.0  # expected to come
    growth: float = 0.0  # tokens that each adds to the prompt
    back: Callable[[float], float] = lambda _seconds: 0.0  # chance of the next turn within so long after the answer
    back_in_batch: Callable[[float], float] = lambda _seconds: 0.0  # the same, with the latency of its batch on top

    @property
    def ends(self) -> float:
        """The chance that no turn follows."""
        return 1 / (1 + self.turns)


ALONE: Final = Outlook()


class BatchOdds(NamedTuple):
    """What is expected of a batch."""

    on_time: float = 1.0  # chance to be back before a rescue is due
    later_on_time: float = 1.0  # the same for the turns to come
    ends_within: Callable[[float], float] = lambda _seconds: 1.0
    billed: float = 0.25  # chance that its copy of a rescued call is billed
    turns: float = math.inf  # how many more turns the slack of the task allows in batches


CERTAIN: Final = BatchOdds()


@dataclass(frozen=True, slots=True)
class PricedCall:
    """A call, as far as quotes need it."""

    tokens: int  # of its prompt
    output: float  # tokens expected
    prices: Mapping[Lane, TokenPrices]  # of the lanes that it can take
    lives: Mapping[Lane, Sequence[float]]  # lives that may be chosen on each lane; 0: no mark
    sync_s: float  # what its answer takes on `now`, typically
    now: float
    on_sync: Stored = NOTHING
    on_batch: Stored = NOTHING
    outlook: Outlook = ALONE
    odds: BatchOdds = CERTAIN
    flex_refusal: float = 0.0
    pings: bool = False  # whether the prefix may be kept alive on `now`


class Quote(NamedTuple):
    lane: Lane
    life: float  # of the cache entries that it writes
    cost: float  # of this turn, with the chance of a rescue
    later: float  # of the turns to come
    on_time: float  # the chance that no rescue is needed
    turns: float = 0.0  # to come, that `later` is about
    pings: int = 0  # how often to keep the prefix alive, at most
    probe: bool = False  # it is not the cheapest, but is tried to learn from it

    @property
    def total(self) -> float:
        return self.cost + self.later


class Gap(NamedTuple):
    """What is expected between two turns on `now` with a life: the chance that the prefix is still stored if a turn
    comes, and how often it is pinged until then, on average over all turns."""

    stored: float
    pings: int = 0
    pinged: float = 0.0


def quotes(call: PricedCall) -> list[Quote]:
    """What every way costs, the cheapest first."""
    ways = [(lane, life) for lane in call.prices for life in call.lives[lane]]
    gaps = {way: _gap(call, *way) for way in ways}
    later = _all_later(call, ways, gaps) if call.outlook.turns > 0 else dict.fromkeys(ways, 0.0)
    found = []
    for way in ways:
        lane, life = way
        on_time, turns = call.odds.on_time if lane is Lane.BATCH else 1.0, call.outlook.turns
        found.append(Quote(lane, life, _this_turn(call, lane, life, ways), later[way], on_time, turns, gaps[way].pings))
    return sorted(found, key=lambda quote: round(quote.total, EQUAL_DIGITS))


# ------------------------------------------------------------ this turn


def _turn(prices: TokenPrices, life: float, tokens: float, stored: float, output: float) -> float:
    if life <= 0:
        stored = 0.0  # what is not marked is not read
    stored = min(stored, tokens)  # the size of a prompt is an estimate, what is stored of it was counted
    return prices.read * stored + prices.write(life) * (tokens - stored) + prices.output * output


def _this_turn(call: PricedCall, lane: Lane, life: float, ways: Sequence[Way]) -> float:
    prices = call.prices[lane]
    if lane is Lane.NOW:
        return _at_once(call, prices, life)
    if lane is Lane.FLEX:
        others = (_this_turn(call, *way, ways) for way in ways if way[0] is not Lane.FLEX)
        flex = _at_once(call, prices, life) * FLEX_TOLL
        return (1 - call.flex_refusal) * flex + call.flex_refusal * min(others)
    odds, stored = call.odds, call.on_batch
    cold = _turn(prices, life, call.tokens, 0, call.output)
    left = stored.expires - call.now + call.sync_s  # it is read when the provider begins with the call
    warm_chance = odds.ends_within(left) if stored.tokens and left > 0 else 0.0
    batch = cold + warm_chance * (_turn(prices, life, call.tokens, stored.tokens, call.output) - cold)
    if odds.on_time >= 1:
        return batch
    rescue = min(_at_once(call, call.prices[Lane.NOW], life) for lane, life in ways if lane is Lane.NOW)
    return odds.on_time * batch + (1 - odds.on_time) * (rescue + odds.billed * batch)


def _at_once(call: PricedCall, prices: TokenPrices, life: float) -> float:
    stored = call.on_sync.tokens if call.on_sync.expires > call.now else 0
    return _turn(prices, life, call.tokens, stored, call.output)


# ------------------------------------------------------------ the turns to come


def _all_later(call: PricedCall, ways: Sequence[Way], gaps: Mapping[Way, Gap]) -> dict[Way, float]:
    steady = {way: _steady(call, *way, gaps[way]) for way in ways}
    on_now, in_batch = (_cheapest(call, steady, in_batch=in_batch) for in_batch in (False, True))
    return {way: _later(call, way[0], steady[way], on_now, in_batch) for way in ways}


def _gap(call: PricedCall, lane: Lane, life: float) -> Gap:
    outlook = call.outlook
    if life <= 0 or outlook.turns <= 0:
        return Gap(0.0)
    returns = 1 - outlook.ends
    if lane is Lane.BATCH:
        return Gap(min(1.0, outlook.back_in_batch(life) / returns))
    stored = min(1.0, outlook.back(life - call.sync_s) / returns)
    if not call.pings:
        return Gap(stored)
    return _kept_alive(call, call.prices[lane], life, returns)


def _kept_alive(call: PricedCall, prices: TokenPrices, life: float, returns: float) -> Gap:
    """The number of pings that saves most: each costs a read if the conversation is still silent, and what comes within
    the life of the last one is read instead of written."""
    back, saved = call.outlook.back, prices.write(life) - prices.read
    ends = life - call.sync_s  # after the answer, as the life counts from the request
    best = Gap(min(1.0, back(ends) / returns))
    gained, pinged, most = back(ends) * saved, 0.0, 0.0
    for pings in range(1, MOST_PINGS + 1):
        at = ends - PING_EARLY_S
        pinged, ends = pinged + 1 - back(at), at + life
        gain = back(ends) * saved - pinged * prices.read - gained
        if gain > most:
            most, best = gain, Gap(min(1.0, back(ends) / returns), pings, pinged)
    return best


def _steady(call: PricedCall, lane: Lane, life: float, gap: Gap) -> float:
    """What each of the turns to come costs on average, if all go this way."""
    outlook, prices = call.outlook, call.prices[lane]
    before = call.tokens + outlook.growth * outlook.turns / 2
    tokens = before + outlook.growth
    warm = _turn(prices, life, tokens, before, call.output)
    cold = _turn(prices, life, tokens, 0, call.output)
    cost = gap.stored * warm + (1 - gap.stored) * cold + gap.pinged * prices.read * before
    if lane is not Lane.BATCH or call.odds.later_on_time >= 1:
        return cost
    on_time, rescue = call.odds.later_on_time, _turn(call.prices[Lane.NOW], 0, tokens, 0, call.output)
    return on_time * cost + (1 - on_time) * (rescue + call.odds.billed * cost)


class _Cheapest(NamedTuple):
    """The cheapest way of a surface for the turns to come: what each costs, and what the first costs more, cold."""

    steady: float
    switch: float


def _cheapest(call: PricedCall, steady: Mapping[Way, float], *, in_batch: bool) -> _Cheapest | None:
    ways = [way for way in steady if (way[0] is Lane.BATCH) is in_batch]
    if not ways:
        return None
    lane, life = min(ways, key=lambda way: steady[way])
    prices, tokens = call.prices[lane], call.tokens + call.outlook.growth
    switch = _turn(prices, life, tokens, 0, 0) - _turn(prices, life, tokens, call.tokens, 0)
    return _Cheapest(steady[lane, life], max(0.0, switch))


def _later(call: PricedCall, lane: Lane, steady: float, on_now: _Cheapest | None, in_batch: _Cheapest | None) -> float:
    turns = call.outlook.turns
    allowed = min(turns, call.odds.turns)
    if lane is Lane.BATCH:
        rest = turns - allowed
        stay = allowed * steady
        if on_now is None:
            return turns * steady
        if rest > 0:
            stay += rest * on_now.steady + on_now.switch
        return min(stay, turns * on_now.steady + on_now.switch)
    if in_batch is None or not 0 < allowed < turns:
        return turns * steady  # whoever wants to change does so now: a later change writes a longer context
    return min(turns * steady, (turns - allowed) * steady + allowed * in_batch.steady + in_batch.switch)
