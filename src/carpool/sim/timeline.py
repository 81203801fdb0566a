"""Virtual time: an event loop whose clock jumps to the next scheduled event, so that waiting costs nothing."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

# Later than the first batch prices in the price table, so that everything has a price.
START = 1_794_000_000.0  # 2026-11-06


class Deadlock(Exception):
    """Nothing is scheduled, but a task still waits."""


class _Jumping(selectors.SelectSelector):
    """Never blocks: where the loop would sleep, virtual time advances. A simulation has no real I/O."""

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
    """`ports.Clock` on the timeline; `offset` is the difference of this host's clock from the provider's."""

    def __init__(self, timeline: Timeline, offset: float = 0.0) -> None:
        self._timeline = timeline
        self.offset = offset

    def now(self) -> float:
        return self._timeline.now() + self.offset

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def run(work: Coroutine[Any, Any, T], timeline: Timeline) -> T:
    """Run a coroutine to its end in virtual time, and leave no task behind."""
    runner = asyncio.Runner(loop_factory=lambda: timeline)
    try:
        result = runner.run(work)
    except BaseException:
        # The first failure is the one to report: tasks that it left half done may wait for each other.
        with suppress(Deadlock):
            runner.close()
        raise
    runner.close()
    return result
