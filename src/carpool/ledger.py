"""The arithmetic of the books: what a purchase cost, what it would have cost on `now`, and the sums for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from msgspec.structs import replace

from carpool.model import Entry, EntryKind, Lane, Totals, Usage
from carpool.prices import PriceBook, half_even

_NANO = 1_000_000_000
_DIGITS = 4  # of an amount below a dollar


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
    """A purchase that is about to be tried. Its price is unknown until an answer says otherwise."""
    return Entry(ticket, purchase, at, lane, kind, provider, credential, model, reason=reason, tags=dict(tags or {}))


def bought(
    *,
    ticket: int,
    purchase: int,
    at: float,
    provider: str,
    dialect: str,
    credential: str,
    model: str,
    lane: Lane,
    kind: EntryKind,
    usage: Usage | None,
    book: PriceBook,
    reason: str = "",
    tags: Mapping[str, str] | None = None,
) -> Entry:
    """A purchase with its answer; without usage its price stays unknown."""
    entry = attempt(
        ticket=ticket,
        purchase=purchase,
        at=at,
        provider=provider,
        credential=credential,
        model=model,
        lane=lane,
        kind=kind,
        reason=reason,
        tags=tags,
    )
    return priced(entry, dialect, usage, book)


def priced(entry: Entry, dialect: str, usage: Usage | None, book: PriceBook) -> Entry:
    """The entry with its money: paid, and would have paid for the same usage on `now`.

    The same usage is a simplification: a synchronous call might have found a warm cache where a batch found none, and
    then `would_have_paid` is too high. Until the cache is planned, nobody knows how warm it would have been.

    Where `paid` is unknown, so is the other: half of the pair would bend the sums.
    """
    if usage is None:
        return entry
    paid, would = money(dialect, entry.model, usage, entry.lane, entry.at, book)
    return replace(entry, usage=usage, paid=paid, would_have_paid=would)


def money(
    dialect: str, model: str, usage: Usage, lane: Lane, at: float, book: PriceBook
) -> tuple[int | None, int | None]:
    """What was paid, and what would have been paid on `now`."""
    paid = book.price(dialect, model, usage, lane, at)
    if paid is None or lane is Lane.NOW:
        return paid, paid
    plain = replace(usage, speed=None) if lane is Lane.FLEX else usage  # the tier was carpool's choice
    return paid, book.price(dialect, model, plain, Lane.NOW, at)


def free(entry: Entry, reason: str = "") -> Entry:
    """Refused, given back or never sent: the provider bills nothing."""
    return replace(entry, paid=0, would_have_paid=0, reason=reason or entry.reason)


@dataclass(frozen=True, slots=True)
class Summary:
    """The books in one line. `paid` and `saved` leave out the `unknown` purchases."""

    purchases: int
    unknown: int
    paid: int
    would_have_paid: int

    @classmethod
    def of(cls, totals: Iterable[Totals]) -> Summary:
        rows = list(totals)
        return cls(
            purchases=sum(row.purchases for row in rows),
            unknown=sum(row.unknown for row in rows),
            paid=sum(row.paid for row in rows),
            # Without carpool nobody would have bought the same call twice.
            would_have_paid=sum(row.would_have_paid for row in rows if row.kind is not EntryKind.DUPLICATE),
        )

    @property
    def saved(self) -> int:
        return self.would_have_paid - self.paid

    @property
    def share(self) -> float | None:
        """The saved share of what would have been paid; None when there is nothing to compare with."""
        return self.saved / self.would_have_paid if self.would_have_paid else None


@lru_cache(maxsize=256)  # half price: what was paid is what was saved
def dollars(nano: int) -> str:
    """Nano-dollars for people: cents from a dollar on, below it four digits, and never finer than they are."""
    amount = abs(nano)
    finest = 10_000_000 if amount >= _NANO else 10 ** max(0, len(str(amount)) - _DIGITS)
    whole, rest = divmod(half_even(amount, finest) * finest, _NANO)
    return f"{'-' if nano < 0 else ''}${whole:,}.{f'{rest:09}'.rstrip('0').ljust(2, '0')}"
