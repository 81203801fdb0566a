"""The clock port and the system clock. Apart from the mock provider, no other module reads the time."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """The only source of time in carpool, so that a test can run a 24-hour batch in milliseconds."""

    def now(self) -> float:
        """Returns seconds since the epoch. May step back slightly when the host's clock is adjusted."""

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    now = staticmethod(time.time)  # without a wrapper: every call reads the time several times

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))
