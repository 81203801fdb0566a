"""A retry budget shared by the calls of an account: when many calls fail, retrying all of them makes it worse."""

from __future__ import annotations

from typing import Final

SHARE: Final = 0.2  # retries per call,
FLOOR_PER_S: Final = 0.5  # plus this many retries per second without any calls
MOST: Final = 20.0


class RetryBudget:
    """May go into debt: a retry beyond the budget is delayed, not dropped, and the next one is delayed longer."""

    __slots__ = ("_at", "_left", "_made")

    def __init__(self, now: float) -> None:
        self._left = MOST / 2
        self._at = now
        self._made = 0.0

    def wait(self, now: float, made: float) -> float:
        """Seconds that the next retry has to wait. `made` is the total number of calls of the account."""
        earned = max(0.0, made - self._made) * SHARE + max(0.0, now - self._at) * FLOOR_PER_S
        self._left = min(MOST, self._left + earned)
        self._made, self._at = made, now  # also when the clock was set back
        return max(0.0, (1.0 - self._left) / FLOOR_PER_S)

    def spend(self) -> None:
        self._left -= 1.0
