"""The port to time."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Tells time. Nothing else in carpool reads a clock, so a 24-hour batch is tested in milliseconds."""

    def now(self) -> float:
        """Seconds since the epoch. May step backwards by a little when the host's clock is corrected."""
        ...

    async def sleep(self, seconds: float) -> None: ...
