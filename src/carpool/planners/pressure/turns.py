"""Whose turn it is to make a batch: the creates of an account are shared evenly by its tenants, whoever asks most.

Every tenant has a place, which each of its creates moves on by one; the tenant at the first place is next. A tenant
that had nothing to ask for comes back at the place of the first of those who wait: time off earns no credit, and nobody
who asked for a lot alone has to make up for it when another comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

AHEAD: Final = 2.0  # creates that a pressing tenant may be ahead of the first


@dataclass(frozen=True, slots=True)
class Turns:
    first: float = 0.0  # nobody's place is before this
    _places: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))  # of those beyond it

    def place(self, tenant: str) -> float:
        return max(self.first, self._places.get(tenant, 0.0))

    def may_press(self, tenant: str, waiting: Iterable[str]) -> bool:
        """Whether a tenant in a hurry may go before its turn: it must not be far ahead of all others that wait."""
        return self.place(tenant) < min(map(self.place, waiting)) + AHEAD

    def taken(self, tenant: str, waiting: Iterable[str]) -> Turns:
        """After a create of this tenant, one of those that wait."""
        first = min(map(self.place, waiting))
        places = {one: place for one, place in self._places.items() if place > first}
        places[tenant] = max(first, self.place(tenant)) + 1
        return Turns(first, MappingProxyType(places))


FRESH: Final = Turns()
