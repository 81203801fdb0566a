"""What happens when a provider fails: a circuit breaker, and a budget of retries. Both belong to an account.

When the provider keeps failing, the breaker opens, and calls pause for a while. Then one call at a time is sent as a
probe. A refusal (429) is not a failure: the provider works.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from carpool.core.bounded import backoff

FAILURES: Final = 6  # this many failures in a row open the breaker,
RECENT_S: Final = 60.0  # if no two of them are further apart than this
OPEN_S: Final = 1.0
OPEN_MAX_S: Final = 30.0
PROBE_S: Final = 30.0  # the next probe does not wait longer than this for the last one


@dataclass(slots=True, eq=False)
class Breaker:
    closed: bool = True  # the normal state: calls pass
    open_until: float = 0.0
    failing: int = 0  # failures in a row
    _failed_at: float = 0.0
    _openings: int = 0
    _probed_at: float = -math.inf  # when the current probe was sent

    def ready_at(self, now: float) -> float:
        """When the next call may be sent: at once, or as a probe."""
        if self.closed:
            return now
        return max(now, self.open_until, self._probed_at + PROBE_S)

    def take(self, now: float) -> bool:
        """A call is sent. Returns whether it is a probe."""
        if self.closed:
            return False
        self._probed_at = now
        return True

    def left(self, probe: bool) -> None:
        """A call ended without a result that says anything about the provider."""
        if probe:
            self._probed_at = -math.inf

    def answered(self) -> bool:
        """The provider works. Returns whether the breaker closes now."""
        self.failing = 0
        news = not self.closed
        self.closed = True
        self._openings = 0
        self._probed_at = -math.inf
        return news

    def failed(self, now: float, probe: bool, jitter: float) -> bool:
        """The provider failed or could not be reached. `jitter`, from 0 to 1, is that of the next probe. Returns
        whether the breaker opens now."""
        self.failing = self.failing + 1 if now - self._failed_at <= RECENT_S else 1
        self._failed_at = now
        if self.closed and self.failing < FAILURES:
            return False
        news = self.closed
        if news or probe:
            self.closed = False
            self._openings += 1
            self.open_until = now + backoff(self._openings, OPEN_S, OPEN_MAX_S, jitter)
            self._probed_at = -math.inf
        return news


# ------------------------------------------------------------ retry budget
# Shared by the calls of an account: when many calls fail, retrying all of them makes it worse.

SHARE: Final = 0.2  # retries per call,
FLOOR_PER_S: Final = 0.5  # plus this many retries per second without any calls
MOST: Final = 20.0


@dataclass(slots=True, eq=False)
class RetryBudget:
    """May go into debt: a retry beyond the budget is delayed, not dropped, and the next one is delayed longer."""

    _at: float
    _left: float = MOST / 2
    _made: float = 0.0

    def wait(self, now: float, made: float) -> float:
        """Seconds that the next retry has to wait. `made` is the total number of calls of the account."""
        earned = max(0.0, made - self._made) * SHARE + max(0.0, now - self._at) * FLOOR_PER_S
        self._left = min(MOST, self._left + earned)
        self._made, self._at = made, now  # also when the clock was set back
        return max(0.0, (1.0 - self._left) / FLOOR_PER_S)

    def spend(self) -> None:
        self._left -= 1.0
