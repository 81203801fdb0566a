"""The latencies of a trace's turns, for the mock: it knows a request by its fingerprint."""

from __future__ import annotations

from collections import Counter
from typing import Any

from carpool.mock import fingerprint
from carpool.sim.money.model import Trace
from carpool.sim.money.worlds import Latencies, ProviderWorld
from carpool.sim.timeline import START

Place = tuple[int, int]  # session, turn


class TurnLatencies:
    def __init__(self, world: ProviderWorld, trace: Trace, seed: int) -> None:
        self._latencies = Latencies(world, trace, seed)
        self.places: dict[str, Place] = {}
        self._batches: Counter[str] = Counter()

    def know(self, body: dict[str, Any], place: Place) -> None:
        """This is the request of that turn."""
        assert self.places.setdefault(fingerprint(body), place) == place, "two turns ask the same"

    def sync_s(self, name: str, now: float) -> float:
        return self._latencies.sync_s(*self.places[name], now - START)

    def batch_s(self, name: str, now: float) -> float:
        again = self._batches[name]
        self._batches[name] += 1
        return self._latencies.batch_s(*self.places[name], now - START, again)
