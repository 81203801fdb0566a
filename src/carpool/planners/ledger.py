"""Ledger entries that cost nothing, and totals and amounts for display. `core.prices` prices the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from msgspec.structs import replace

from carpool.core.model import Entry, EntryKind, Totals

_NANO = 1_000_000_000


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
    rounded = round(amount, -7 if amount >= _NANO else 4 - max(4, len(str(amount))))  # exact: half to even
    whole, rest = divmod(rounded, _NANO)
    return f"{'-' if nano < 0 else ''}${whole:,}.{f'{rest:09}'.rstrip('0').ljust(2, '0')}"
