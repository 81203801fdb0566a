"""What a provider still allows in one currency, requests or tokens, as far as the heads of its answers tell."""

from __future__ import annotations

import math
from typing import Final

from carpool.ports import Allowance

MINUTE_S: Final = 60.0
RESERVE: Final = 0.02  # of the limit is left alone: our picture of the provider's bucket is a little old
MOST_RESERVE: Final = 20.0
GUESS_S: Final = 5.0  # an estimate alone holds nobody longer than this: then one call asks the provider itself
STALE_S: Final = 1.0
_TELLING_S: Final = 5.0  # a reset nearer than this says little, unless much is used: dates are in whole seconds
_SOONEST_S: Final = 0.05


class Meter:
    """A bucket that refills evenly. Without a word from the provider it allows everything.

    An answer tells what was left when its request was taken. What was sent since is subtracted, what has been refilled
    since is added, so that the picture is right however long answers take.
    """

    __slots__ = ("_at", "_left", "_mark", "_reserve", "ample", "limit", "rate", "spent")

    def __init__(self) -> None:
        self.limit = 0.0  # 0: the provider has not named one
        self.rate = 0.0  # refilled per second
        self.spent = 0.0  # ever; a request remembers what it was when it left
        self.ample = math.inf  # while no more than this is spent, nothing needs to be reckoned
        self._left = 0.0
        self._at = 0.0
        self._mark = 0.0
        self._reserve = 0.0

    def level(self, now: float) -> float:
        """What is left, by our reckoning. May be negative: more was sent than was allowed."""
        refilled = max(0.0, now - self._at) * self.rate
        return min(self.limit, self._left - (self.spent - self._mark) + refilled)

    def spend(self, now: float, cost: float) -> None:
        # What is refilled in a pause is reckoned before what is spent after it: a full bucket takes no more.
        if now - self._at > STALE_S and self.limit > 0.0:
            self._left, self._at, self._mark = self.level(now), now, self.spent
            self.ample = self.spent + self._left - self._reserve
        self.spent += cost

    def allows(self, now: float, cost: float) -> bool:
        if self.spent + cost <= self.ample:
            return True
        return self.limit == 0.0 or self.level(now) >= min(cost + self._reserve, self.limit)

    def ready_at(self, now: float, cost: float) -> float:
        """When it will allow so much; at the latest when the estimate is worth being tried."""
        if self.limit == 0.0:
            return now
        missing = min(cost + self._reserve, self.limit) - self.level(now)
        return now if missing <= 0 else now + min(missing / self.rate, GUESS_S)

    def heard(self, said: Allowance, sent_at: float, sent_mark: float) -> None:
        """`sent_at` and `sent_mark`: when the request left that was answered so, and what was spent by then."""
        if said.limit != self.limit:
            self.limit = float(said.limit)
            self.rate = self.limit / MINUTE_S
            self._reserve = min(self.limit * RESERVE, MOST_RESERVE)
        used, full_in = said.limit - said.remaining, said.full_in or 0.0
        if (full_in >= _TELLING_S and used > 0) or (full_in > 0.0 and used * 2 >= said.limit):
            self.rate = used / max(full_in, _SOONEST_S)  # not all limits are per minute
        self._left, self._at, self._mark = float(said.remaining), sent_at, sent_mark
        self.ample = sent_mark + said.remaining - self._reserve
