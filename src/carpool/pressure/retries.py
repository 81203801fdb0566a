"""A budget of retries that the calls of an account share: when much fails, repeating it all makes it worse."""

from __future__ import annotations

from typing import Final

SHARE: Final = 0.2  # of the calls may be repeated,
FLOOR_PER_S: Final = 0.5  # and so many a second whatever there was before
MOST: Final = 20.0


class Retries:
    """May go into debt: a retry beyond the budget is made, but later, and the next one later still."""

    __slots__ = ("_at", "_left", "_made")

    def __init__(self, now: float) -> None:
        self._left = MOST / 2
        self._at = now
        self._made = 0.0

    def wait(self, now: float, made: float) -> float:
        """How long the next retry has to wait. `made`: how many calls the account ever made."""
        earned = max(0.0, made - self._made) * SHARE + max(0.0, now - self._at) * FLOOR_PER_S
        self._left = min(MOST, self._left + earned)
        self._made, self._at = made, now  # also when the clock was set back
        return max(0.0, (1.0 - self._left) / FLOOR_PER_S)

    def spend(self) -> None:
        self._left -= 1.0
