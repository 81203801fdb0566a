"""What a provider still allows of requests or of tokens, according to its rate-limit headers."""

from __future__ import annotations

import math
from typing import Final

from carpool.core.ports import Allowance

MINUTE_S: Final = 60.0
RESERVE: Final = 0.02  # share of the limit that is not used: our copy of the provider's bucket is slightly stale
MOST_RESERVE: Final = 20.0
GUESS_S: Final = 5.0  # the longest wait based on an estimate alone: then one call asks the provider itself
STALE_S: Final = 1.0
_TELLING_S: Final = 5.0  # resets are in whole seconds, so a nearer one is too coarse, unless much is used
_SOONEST_S: Final = 0.05


class Meter:
    """A bucket that refills evenly. Until the provider states a limit it allows everything.

    A response states what was left when its request was accepted. The meter subtracts what was sent since and adds what
    was refilled since, so it is right however long responses take.
    """

    __slots__ = ("_at", "_left", "_mark", "_reserve", "ample", "limit", "rate", "spent")

    def __init__(self) -> None:
        self.limit = 0.0  # 0: the provider has not stated one
        self.rate = 0.0  # refilled per second
        self.spent = 0.0  # total so far; every request records its value at the time of sending
        self.ample = math.inf  # while `spent` is at most this, no level has to be computed
        self._left = 0.0
        self._at = 0.0
        self._mark = 0.0
        self._reserve = 0.0

    def level(self, now: float) -> float:
        """The estimated remaining allowance. Negative when more was sent than allowed."""
        refilled = max(0.0, now - self._at) * self.rate
        return min(self.limit, self._left - (self.spent - self._mark) + refilled)

    def spend(self, now: float, cost: float) -> None:
        # Add what a pause refilled before subtracting what is spent after it: a full bucket does not overflow.
        if now - self._at > STALE_S and self.limit > 0.0:
            self._left, self._at, self._mark = self.level(now), now, self.spent
            self.ample = self.spent + self._left - self._reserve
        self.spent += cost

    def allows(self, now: float, cost: float) -> bool:
        if self.spent + cost <= self.ample:
            return True
        return self.limit == 0.0 or self.level(now) >= min(cost + self._reserve, self.limit)

    def ready_at(self, now: float, cost: float) -> float:
        """When it allows this cost; at most `GUESS_S` from now, when the estimate is tested by a call."""
        if self.limit == 0.0:
            return now
        missing = min(cost + self._reserve, self.limit) - self.level(now)
        return now if missing <= 0 else now + min(missing / self.rate, GUESS_S)

    def heard(self, said: Allowance, sent_at: float, sent_mark: float) -> None:
        """Take over a stated allowance. `sent_at` and `sent_mark` are the time and the value of `spent` when the
        request of this response was sent."""
        if said.limit != self.limit:
            self.limit = float(said.limit)
            self.rate = self.limit / MINUTE_S
            self._reserve = min(self.limit * RESERVE, MOST_RESERVE)
        used, full_in = said.limit - said.remaining, said.full_in or 0.0
        if (full_in >= _TELLING_S and used > 0) or (full_in > 0.0 and used * 2 >= said.limit):
            self.rate = used / max(full_in, _SOONEST_S)  # not all limits are per minute
        self._left, self._at, self._mark = float(said.remaining), sent_at, sent_mark
        self.ample = sent_mark + said.remaining - self._reserve
