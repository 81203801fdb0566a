"""Virtual time: an event loop whose clock jumps to the next thing that happens. A day of waiting costs nothing."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

# After the price table's first batch prices, so that everything has a price.
START = 1_794_000_000.0  # 2026-11-06


class Deadlock(Exception):
    """Nothing is scheduled any more, and somebody still waits."""


class _Jumping(selectors.SelectSelector):
    """Never waits: where the loop would sleep, time passes instead. There is no real I/O in a simulation."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock("The simulation stands still: nothing is scheduled, and somebody still waits.")
        self.time += max(0.0, timeout)
        return []


class Timeline(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.time

    def now(self) -> float:
        """Virtual seconds since the epoch."""
        return START + self._jumping.time


class VirtualClock:
    """`ports.Clock` on the timeline; `offset` sets this host's clock apart from the provider's."""

    def __init__(self, timeline: Timeline, offset: float = 0.0) -> None:
        self._timeline = timeline
        self.offset = offset

    def now(self) -> float:
        return self._timeline.now() + self.offset

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def run(work: Coroutine[Any, Any, T], timeline: Timeline) -> T:
    """Runs to the end in virtual time, and leaves no task behind."""
    with asyncio.Runner(loop_factory=lambda: timeline) as runner:
        return runner.run(work)
