"""The system clock. Apart from the mock provider, no other module reads the time."""

from __future__ import annotations

import asyncio
import time


class SystemClock:
    now = staticmethod(time.time)  # without a wrapper: every call reads the time several times

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))
