"""The arithmetic of the ledger: what a purchase cost, what it would have cost on `now`, and totals for display."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from msgspec.structs import replace

from carpool.core.model import Entry, EntryKind, Lane, Totals, Usage
from carpool.core.prices import PriceBook, half_even

_NANO = 1_000_000_000
_DIGITS = 4  # significant digits of an amount below a dollar


def attempt(
    *,
    ticket: int,
    purchase: int,
    at: float,
    provider: str,
    credential: str,
    model: str,
    lane: Lane = Lane.NOW,
    kind: EntryKind = EntryKind.PURCHASE,
    reason: str = "",
    tags: Mapping[str, str] | None = None,
) -> Entry:
    """The entry of a purchase before it is sent. Its price is unknown until a response states the usage."""
    return Entry(ticket, purchase, at, lane, kind, provider, credential, model, reason=reason, tags=dict(tags or {}))


def priced(entry: Entry, dialect: str, usage: Usage | None, book: PriceBook) -> Entry:
    """Add the prices: what was paid, and what the same usage would have cost on `now`.

    The same usage is a simplification: a synchronous call might have hit a prompt cache that a batch missed, and then
    `would_have_paid` is too high. Caches are not modelled yet, so the difference is unknown.

    Where `paid` is unknown, so is `would_have_paid`: one without the other would distort the totals.
    """
    if usage is None:
        return entry
    paid, would = money(dialect, entry.model, usage, entry.lane, entry.at, book)
    return replace(entry, usage=usage, paid=paid, would_have_paid=would)


def unfinished(entry: Entry, usage: Usage | None) -> Entry:
    """The entry of a response that broke off: its usage so far is kept, its price stays unknown."""
    return replace(entry, usage=usage)


def money(
    dialect: str, model: str, usage: Usage, lane: Lane, at: float, book: PriceBook
) -> tuple[int | None, int | None]:
    """What was paid, and what the same would have cost on `now`."""
    paid = book.price(dialect, model, usage, lane, at)
    if paid is None or lane is Lane.NOW:
        return paid, paid
    plain = replace(usage, speed=None) if lane is Lane.FLEX else usage  # carpool chose the tier, not the client
    return paid, book.price(dialect, model, plain, Lane.NOW, at)


def free(entry: Entry, reason: str = "") -> Entry:
    """The entry of a call that was refused, returned or never sent: the provider bills nothing."""
    return replace(entry, paid=0, would_have_paid=0, reason=reason or entry.reason)


@dataclass(frozen=True, slots=True)
class LedgerSummary:
    """The totals of the ledger. `paid` and `saved` leave out the `unknown` purchases."""

    purchases: int
    unknown: int
    paid: int
    would_have_paid: int

    @classmethod
    def of(cls, totals: Iterable[Totals]) -> LedgerSummary:
        rows = list(totals)
        return cls(
            purchases=sum(row.purchases for row in rows),
            unknown=sum(row.unknown for row in rows),
            paid=sum(row.paid for row in rows),
            # Without carpool no call would have been bought twice.
            would_have_paid=sum(row.would_have_paid for row in rows if row.kind is not EntryKind.DUPLICATE),
        )

    @property
    def saved(self) -> int:
        return self.would_have_paid - self.paid

    @property
    def share(self) -> float | None:
        """The saved share of `would_have_paid`; None when that is zero."""
        return self.saved / self.would_have_paid if self.would_have_paid else None


@lru_cache(maxsize=256)  # at half price the amounts paid and saved are equal, so amounts repeat
def dollars(nano: int) -> str:
    """Format nano-dollars: cents from a dollar on, four significant digits below."""
    amount = abs(nano)
    finest = 10_000_000 if amount >= _NANO else 10 ** max(0, len(str(amount)) - _DIGITS)
    whole, rest = divmod(half_even(amount, finest) * finest, _NANO)
    return f"{'-' if nano < 0 else ''}${whole:,}.{f'{rest:09}'.rstrip('0').ljust(2, '0')}"
