"""The fuse of one account at one place: when the provider fails again and again, it is left alone for a while.

Then one call at a time is let through to see. A refusal (429) is no failure: a provider that refuses is well.
"""

from __future__ import annotations

import math
from typing import Final

FAILURES: Final = 6  # in a row, and
RECENT_S: Final = 60.0  # none of them older than this, open it
OPEN_S: Final = 1.0
OPEN_MAX_S: Final = 30.0
PROBE_S: Final = 30.0  # a probe that takes longer than this is no reason for the next one to wait


class Breaker:
    __slots__ = ("_failed_at", "_openings", "_probed_at", "failing", "open_until", "shut")

    def __init__(self) -> None:
        self.shut = True  # as a fuse is: everything flows
        self.open_until = 0.0
        self.failing = 0  # times in a row
        self._failed_at = 0.0
        self._openings = 0
        self._probed_at = -math.inf  # when the call left that is to show how it is

    def ready_at(self, now: float) -> float:
        """When the next call may go: at once, or as a probe."""
        if self.shut:
            return now
        return max(now, self.open_until, self._probed_at + PROBE_S)

    def take(self, now: float) -> bool:
        """A call goes out. Says whether it is a probe."""
        if self.shut:
            return False
        self._probed_at = now
        return True

    def left(self, probe: bool) -> None:
        """A call came back without news."""
        if probe:
            self._probed_at = -math.inf

    def answered(self) -> bool:
        """The provider is well. Says whether that is news."""
        self.failing = 0
        news = not self.shut
        self.shut = True
        self._openings = 0
        self._probed_at = -math.inf
        return news

    def failed(self, now: float, probe: bool, luck: float) -> bool:
        """It could not be reached, or failed. `luck`, from 0 to 1, spreads the probes. Says whether it opened now."""
        self.failing = self.failing + 1 if now - self._failed_at <= RECENT_S else 1
        self._failed_at = now
        if self.shut and self.failing < FAILURES:
            return False
        news = self.shut
        if news or probe:
            self.shut = False
            pause = min(OPEN_S * 2.0**self._openings, OPEN_MAX_S) * (0.75 + luck / 2)
            self._openings = min(self._openings + 1, 10)
            self.open_until = now + pause
            self._probed_at = -math.inf
        return news
