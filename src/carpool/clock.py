"""The real clock: besides the mock, the only module that reads the time."""

from __future__ import annotations

import asyncio
import time


class SystemClock:
    now = staticmethod(time.time)  # every call asks several times

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))
