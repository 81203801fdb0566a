"""Token prices: rate cards built from genai-prices and from the prices that a program sets (`PriceBook`).

A look-up in genai-prices is too slow to be made for every line of a batch. So prices are converted to cards of exact
integers, cached per provider, model, lane and quarter of an hour (prices change on dates or at times of day, at most
every quarter of an hour). A price that a card lacks is None: unknown, never free and never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from decimal import Decimal
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from msgspec.structs import astuple, replace

from carpool.core.errors import ConfigError
from carpool.core.model import Entry, Lane, Usage
from carpool.core.ports import Dialect, Pricing

Amount = int | float | str | Decimal

_NANO_PER_MTOK_DOLLAR = 1000  # $1 per million tokens is 1,000 nano-dollars per token
_NANO_PER_KCOUNT_DOLLAR = 1_000_000  # $1 per thousand searches is 1,000,000 nano-dollars per search
SLOT_S = 900

# The priced items in the order of `Rates`, under their names in genai-prices.
_TOKEN_KEYS = ("input_mtok", "output_mtok", "cache_read_mtok", "cache_write_mtok", "cache_write_1h_mtok")
_SEARCH_KEY = "web_searches_kcount"
_REQUEST_KEY = "requests_kcount"

_STANDARD: Mapping[str, str] = {}
_CONTEXTS: Mapping[Lane, Mapping[str, str]] = {
    Lane.NOW: _STANDARD,
    Lane.FLEX: {"service_tier": "flex"},
    Lane.BATCH: {"processing": "batch"},
}

_NO_TIER = (None, "", "standard")


@dataclass(frozen=True, slots=True)
class Price:
    """A price that a program sets, in USD per million tokens (`web_search`: per thousand searches).

    It replaces all prices of its model in the table: a price not given here is unknown. Without
    `batch_multiplier` the batch price is unknown too.
    """

    input: Amount
    output: Amount
    cache_read: Amount | None = None
    cache_write_5m: Amount | None = None
    cache_write_1h: Amount | None = None
    batch_multiplier: Amount | None = None
    web_search: Amount | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not _is_price(value):
                raise ConfigError(f"The price `{field.name}` is {value!r}: give a number of dollars, zero or more.")


Overrides = Mapping[str, Mapping[str, Price]]  # provider -> model name or glob -> price


class Rates(NamedTuple):
    """Nano-dollars per unit, multiplied by `scale`, so that every rate is an integer."""

    input: int | None
    output: int | None
    cache_read: int | None
    cache_write_5m: int | None
    cache_write_1h: int | None
    web_search: int | None
    scale: int


Card = tuple[tuple[int, Rates], ...]  # (threshold of input tokens, rates above it), highest first, the last is -1


class PriceBook:
    """Prices usage in integer nano-dollars."""

    def __init__(self, overrides: Overrides | None = None) -> None:
        self._overrides = overrides or {}
        self._card = lru_cache(maxsize=4096)(self._make_card)

    def load(self) -> None:
        """Loads the table, so that the first answer need not wait for it."""
        _snapshot()

    def price(self, dialect: Dialect, model: str, usage: Usage, lane: Lane, at: float) -> int | None:
        """Returns the cost of `usage` on `lane` at that time; None if any part of it is unknown."""
        card = self._card(dialect, model, lane, int(at // SLOT_S), usage.inference_geo, usage.speed)
        if card is None:
            return None
        if len(card) == 1:
            return _cost(card[0][1], usage)
        total = usage.total_input
        return _cost(next(rates for above, rates in card if total > above), usage)

    def rates(self, dialect: Dialect, model: str, lane: Lane, at: float) -> Rates | None:
        """The rates of a short prompt, to compare lanes by; None if they are unknown."""
        card = self._card(dialect, model, lane, int(at // SLOT_S), None, "flex" if lane is Lane.FLEX else None)
        return None if card is None else card[-1][1]

    def paid_and_would_have_paid(
        self, dialect: Dialect, model: str, usage: Usage, lane: Lane, at: float
    ) -> tuple[int | None, int | None]:
        """What was paid, and what the same usage would have cost on `now`.

        The same usage is a simplification: a synchronous call might have hit a prompt cache that a batch missed, and
        then the second amount is too high. Caches are not modelled yet, so the difference is unknown.

        Where the first is unknown, so is the second: one without the other would distort the totals.
        """
        paid = self.price(dialect, model, usage, lane, at)
        if paid is None or lane is Lane.NOW:
            return paid, paid
        plain = replace(usage, speed=None) if lane is Lane.FLEX else usage  # carpool chose the tier, not the client
        return paid, self.price(dialect, model, plain, Lane.NOW, at)

    def priced(self, entry: Entry, dialect: Dialect, usage: Usage | None) -> Entry:
        """A ledger entry with its usage and prices; unchanged without a usage."""
        if usage is None:
            return entry
        paid, would = self.paid_and_would_have_paid(dialect, entry.model, usage, entry.lane, entry.at)
        return replace(entry, usage=usage, paid=paid, would_have_paid=would)

    def _make_card(
        self, dialect: Dialect, model: str, lane: Lane, slot: int, geo: str | None, speed: str | None
    ) -> Card | None:
        surcharge = dialect.surcharge(model, lane, geo, speed)
        if surcharge is None:
            return None
        context = _context(dialect.pricing, lane, speed)
        prices = self._overrides.get(dialect.seller, {})
        patterns = (price for pattern, price in prices.items() if fnmatchcase(model, pattern))
        override = prices[model] if model in prices else next(patterns, None)
        if override is not None:
            return _card_of_override(override, lane, surcharge) if context is _CONTEXTS[lane] else None
        if any(fnmatchcase(model, pattern) for pattern in dialect.pricing.free):
            return ((-1, _rates([Fraction(0)] * (len(_TOKEN_KEYS) + 1))),)
        return _card_of_table(dialect, model, context, datetime.fromtimestamp(slot * SLOT_S, UTC), surcharge)


def _cost(rates: Rates, usage: Usage) -> int | None:
    rest = usage.cache_read_tokens or usage.cache_write_5m_tokens or usage.cache_write_1h_tokens or usage.web_searches
    if not rest and rates.input is not None and rates.output is not None:  # the common case
        return _half_even(usage.input_tokens * rates.input + usage.output_tokens * rates.output, rates.scale)
    total = 0
    for count, rate in zip(astuple(usage), rates[:-1], strict=False):  # the counts come first, in the order of `Rates`
        if count:
            if rate is None:
                return None
            total += count * rate
    return _half_even(total, rates.scale)


def _half_even(numerator: int, denominator: int) -> int:
    whole, rest = divmod(numerator, denominator)
    if 2 * rest > denominator or (2 * rest == denominator and whole % 2):
        return whole + 1
    return whole


# ---------------------------------------------------------------- cards


def _card_of_override(price: Price, lane: Lane, surcharge: Fraction) -> Card | None:
    factor = surcharge
    if _CONTEXTS[lane] is not _STANDARD:
        if lane is not Lane.BATCH or price.batch_multiplier is None:
            return None
        factor *= Fraction(str(price.batch_multiplier))
    amounts = (price.input, price.output, price.cache_read, price.cache_write_5m, price.cache_write_1h)
    tokens = [_times(_nano(amount, _NANO_PER_MTOK_DOLLAR), factor) for amount in amounts]
    return ((-1, _rates([*tokens, _nano(price.web_search, _NANO_PER_KCOUNT_DOLLAR)])),)


def _context(pricing: Pricing, lane: Lane, speed: str | None) -> Mapping[str, str]:
    """Returns the table's context for a lane. Where answers state the tier that served them, such as flex or
    priority, the table has prices per tier; the price of a tier that it lacks is unknown."""
    if pricing.flex_at_now and lane is not Lane.BATCH:
        return _STANDARD
    if pricing.tiered and lane is Lane.NOW and speed not in _NO_TIER:
        return {"service_tier": str(speed)}
    if pricing.tiered and lane is Lane.FLEX and speed != _CONTEXTS[lane]["service_tier"]:
        return _STANDARD if speed in _NO_TIER else {"service_tier": str(speed)}  # flex was requested but not granted
    return _CONTEXTS[lane]


def _card_of_table(
    dialect: Dialect, model: str, context: Mapping[str, str], at: datetime, surcharge: Fraction
) -> Card | None:
    pricing = dialect.pricing
    table = _table_prices(dialect.seller, pricing.names.get(model, model), at, context)
    in_batch = table is None and context is _CONTEXTS[Lane.BATCH]
    if in_batch and model in pricing.batch_shares:
        return _card_of_table(dialect, model, _STANDARD, at, surcharge * pricing.batch_shares[model])
    if in_batch and pricing.batch_share is not None:
        card = _card_of_table(dialect, model, _STANDARD, at, surcharge * pricing.batch_share)
        return None if card is None else tuple((above, rates._replace(cache_read=None)) for above, rates in card)
    if table is None:
        return None
    starts = sorted({-1, *(tier.start for price in table.values() for tier in _tiers(price))}, reverse=True)
    return tuple((start, _rates_above(table, start, surcharge)) for start in starts)


def _rates_above(table: Mapping[str, Any], start: int, surcharge: Fraction) -> Rates:
    dollars = [_amount_above(table.get(key), start) for key in _TOKEN_KEYS]
    tokens = [_times(_nano(amount, _NANO_PER_MTOK_DOLLAR), surcharge) for amount in dollars]
    return _rates([*tokens, _nano(_amount_above(table.get(_SEARCH_KEY), start), _NANO_PER_KCOUNT_DOLLAR)])


def _table_prices(provider: str, model: str, at: datetime, context: Mapping[str, str]) -> Mapping[str, Any] | None:
    """The prices of a model under genai-prices' own keys; None if it has none for this context.

    genai-prices fills gaps of a variant with the standard price, and a variant that has not started yet consists of
    gaps only: either would label the full price as a discount. So with a context, token prices count only if an active
    variant sets them. Fees (searches) have no variants and are used as they are.
    """
    try:
        _, entry = _snapshot().find_provider_model(model, None, provider, None)
    except LookupError:
        return None
    resolved: dict[str, Any] = dict(entry.get_prices(at, context or None).__dict__)
    if resolved.get(_REQUEST_KEY) is not None:
        return None  # also charged per request, which usage does not count
    if context:
        covered = {
            key
            for variant in entry.price_variants or ()
            if variant.constraint is None or variant.constraint.active(at)
            if all(context.get(name) == value for name, value in variant.when.items())
            for key, price in variant.prices.__dict__.items()
            if price is not None
        }
        resolved = {key: price for key, price in resolved.items() if key in covered or key == _SEARCH_KEY}
    if resolved.get("input_mtok") is None:  # the output price may be missing: embeddings have no output
        return None
    return resolved


def _snapshot() -> Any:
    # Imported on first use: the table takes a quarter of a second to load, and not every command needs it.
    from genai_prices.data_snapshot import get_snapshot

    return get_snapshot()


def _tiers(price: Any) -> Iterable[Any]:
    return getattr(price, "tiers", ())


def _amount_above(price: Any, start: int) -> Amount | None:
    """The price that applies above `start` input tokens: crossing a threshold reprices all tokens."""
    amount: Amount | None = getattr(price, "base", price)
    for tier in _tiers(price):  # ascending
        if tier.start <= start:
            amount = tier.price
    return amount


# ---------------------------------------------------------------- exact numbers


def _is_price(value: object) -> bool:
    try:
        number = Decimal(str(value))
    except ArithmeticError:
        return False
    return not isinstance(value, bool) and number.is_finite() and number >= 0


def _nano(amount: Amount | None, per_dollar: int) -> Fraction | None:
    # Converted through `str`, so that a float from a config file means the digits written there.
    return None if amount is None else Fraction(str(amount)) * per_dollar


def _times(rate: Fraction | None, factor: Fraction) -> Fraction | None:
    return None if rate is None else rate * factor


def _rates(rates: Iterable[Fraction | None]) -> Rates:
    """Scales the rates to a common denominator."""
    exact = tuple(rates)
    scale = math.lcm(*(rate.denominator for rate in exact if rate is not None))
    fresh, output, read, write_5m, write_1h, search = (None if rate is None else int(rate * scale) for rate in exact)
    return Rates(fresh, output, read, write_5m, write_1h, search, scale)
