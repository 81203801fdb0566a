"""The clock port."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """The only source of time in carpool, so that a test can run a 24-hour batch in milliseconds."""

    def now(self) -> float:
        """Returns seconds since the epoch. May step back slightly when the host's clock is adjusted."""
        ...

    async def sleep(self, seconds: float) -> None: ...
