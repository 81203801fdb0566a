"""Calls that wait for a batch, pool by pool: the store's part in a run."""

from __future__ import annotations

import math
from heapq import heappop, heappush

from carpool.core.lifecycle import TicketState
from carpool.core.model import Lane, PoolKey, PoolView
from carpool.sim.money.run import RunCall


def waits(call: RunCall) -> bool:
    return call.state is TicketState.QUEUED and call.lane is Lane.BATCH


class Pools:
    def __init__(self) -> None:
        self._pools: dict[PoolKey, _Pool] = {}
        self._by_number: list[_Pool] = []

    def add(self, call: RunCall) -> None:
        pool = self._pools.get(call.pool)
        if pool is None:
            pool = self._pools[call.pool] = _Pool(len(self._by_number), call.pool)
            self._by_number.append(pool)
        pool.add(call)

    def views(self) -> list[PoolView]:
        return [view for pool in self._by_number if (view := pool.view()) is not None]

    def claim(self, number: int, max_count: int, max_bytes: int, now: float) -> list[RunCall]:
        return self._by_number[number].claim(max_count, max_bytes, now)

    def left(self, call: RunCall) -> None:
        """A call went elsewhere."""
        self._pools[call.pool].left(call)


class _Pool:
    """Heaps by urgency and by age; what does not wait any more is dropped when it comes up."""

    def __init__(self, number: int, key: PoolKey) -> None:
        self.number = number
        self.key = key
        self._count = 0
        self._bytes = 0
        self._newest = -math.inf
        self._urgent: list[tuple[float, float, int, RunCall]] = []
        self._old: list[tuple[float, int, RunCall]] = []

    def add(self, call: RunCall) -> None:
        arrived = call.call.arrived
        self._count += 1
        self._bytes += call.bytes
        self._newest = max(self._newest, arrived)
        heappush(self._urgent, (call.rescue_at, arrived, call.ticket, call))
        heappush(self._old, (arrived, call.ticket, call))

    def left(self, call: RunCall) -> None:
        self._count -= 1
        self._bytes -= call.bytes

    def view(self) -> PoolView | None:
        if self._count == 0:
            self._urgent.clear()
            self._old.clear()
            return None
        while not waits(self._urgent[0][-1]):
            heappop(self._urgent)
        while not waits(self._old[0][-1]):
            heappop(self._old)
        rescue = self._urgent[0][0]
        earliest = None if rescue == math.inf else rescue
        return PoolView(self.number, self.key, self._count, self._bytes, self._old[0][0], self._newest, earliest)

    def claim(self, max_count: int, max_bytes: int, now: float) -> list[RunCall]:
        """The most urgent calls, but none that is to be rescued by now."""
        claimed: list[RunCall] = []
        aside = []
        total = 0
        while self._urgent and len(claimed) < max_count:
            call = self._urgent[0][-1]
            if waits(call):
                if call.rescue_at <= now:
                    aside.append(heappop(self._urgent))
                    continue
                if claimed and total + call.bytes > max_bytes:
                    break
                claimed.append(call)
                total += call.bytes
                call.state = TicketState.BOARDED
                self.left(call)
            heappop(self._urgent)
        for entry in aside:
            heappush(self._urgent, entry)
        return claimed
