"""Price what a run bought, under several price tables at once.

What a purchase reads and writes does not depend on prices. So the cache model runs once, and its usage is priced by
the production price book as often as wanted: whole nano-dollars, rounded half to even once per purchase, as the
provider bills. All prices are those of one moment: a trace is replayed at no date of its own.

How much cache reads cost is the number that decides most, and differs by model. So beside the true table stand tables
that replace the price of reads by a multiple of the input's on the same lane, and keep all other prices.

An independent script priced the recorded sessions of Claude Code too: docs/savings.md compares its figures with these.
Tools and system prompt are not billed here as if another session had just used them: sessions of different people share
no workspace, and after a pause beyond the entry's life those tokens are written again like all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from carpool import dialects
from carpool.core.errors import ConfigError
from carpool.core.model import Lane, Usage
from carpool.core.ports import Dialect
from carpool.core.prices import SLOT_S, Card, PriceBook, Rates
from carpool.sim.money.cache import CacheModel, CacheRules, cache_rules
from carpool.sim.money.model import RunPurchase, Trace

PRICED_AT = 1_795_046_400.0  # 2026-11-19: all batch prices in the table have started
MULTIPLIERS = (Fraction(1, 10), Fraction(1, 20), Fraction(1, 40))


class PriceTable(PriceBook):
    """The prices of `PRICED_AT`, with the price of cache reads as it is or as a multiple of the input's."""

    def __init__(self, read_multiplier: Fraction | None = None) -> None:
        super().__init__()
        self.read_multiplier = read_multiplier

    @property
    def name(self) -> str:
        return "true" if self.read_multiplier is None else f"{float(self.read_multiplier):g}"

    def cost(self, dialect: Dialect, model: str, usage: Usage, lane: Lane) -> int:
        paid = self.price(dialect, model, usage, lane, PRICED_AT)
        if paid is None:
            raise ConfigError(f"Nobody knows what {model} costs on {lane} with that use of the cache: leave it out.")
        return paid

    def card(self, dialect: Dialect, model: str, lane: Lane) -> Card | None:
        """The rates of a model on a lane; None if they are unknown."""
        return self._card(dialect, model, lane, int(PRICED_AT // SLOT_S), None, "flex" if lane is Lane.FLEX else None)

    def _make_card(
        self, dialect: Dialect, model: str, lane: Lane, slot: int, geo: str | None, speed: str | None
    ) -> Card | None:
        card = super()._make_card(dialect, model, lane, slot, geo, speed)
        if card is None or self.read_multiplier is None:
            return card
        return tuple((above, _with_reads(rates, self.read_multiplier)) for above, rates in card)


def _with_reads(rates: Rates, multiplier: Fraction) -> Rates:
    fresh, output, _, write_5m, write_1h, search, scale = (
        None if rate is None else rate * multiplier.denominator for rate in rates
    )
    read = None if rates.input is None else rates.input * multiplier.numerator
    return Rates(fresh, output, read, write_5m, write_1h, search, scale or 1)


@dataclass(frozen=True, slots=True)
class RunBill:
    """What a run cost, in nano-dollars, under one table."""

    table: str
    cost: int
    by_lane: Mapping[Lane, int]
    by_session: Sequence[int]
    input_tokens: int
    read_tokens: int

    @property
    def cache_share(self) -> float:
        return self.read_tokens / self.input_tokens if self.input_tokens else 0.0


def usages(trace: Trace, purchases: Sequence[RunPurchase]) -> list[Usage]:
    """The usage of each purchase, in their order, which is that of their start."""
    dialect, cache = dialects.get(trace.provider), CacheModel(trace.nodes)
    models = {session.model for session in trace.sessions}
    rules: Mapping[str, CacheRules] = {model: cache_rules(dialect, model) for model in models}
    models_of = [session.model for session in trace.sessions]
    return [
        cache.use(purchase, model, rules[model]) for purchase in purchases for model in (models_of[purchase.session],)
    ]


def bill(trace: Trace, purchases: Sequence[RunPurchase], tables: Sequence[PriceTable]) -> tuple[RunBill, ...]:
    """The bill of a run's purchases under each of the tables."""
    used = usages(trace, purchases)
    total, read = sum(usage.total_input for usage in used), sum(usage.cache_read_tokens for usage in used)
    return tuple(_bill(trace, purchases, used, table, total, read) for table in tables)


def _bill(
    trace: Trace, purchases: Sequence[RunPurchase], used: Sequence[Usage], table: PriceTable, total: int, read: int
) -> RunBill:
    dialect = dialects.get(trace.provider)
    models = [session.model for session in trace.sessions]
    by_lane = dict.fromkeys(Lane, 0)
    by_session = [0] * len(models)
    for purchase, usage in zip(purchases, used, strict=True):
        cost = table.cost(dialect, models[purchase.session], usage, purchase.lane)
        by_lane[purchase.lane] += cost
        by_session[purchase.session] += cost
    return RunBill(table.name, sum(by_session), by_lane, by_session, total, read)
