"""Rate limits: a token bucket that knows how to say when to come back."""

import math


class TokenBucket:
    """Holds a minute's worth of requests, or `burst` of them, and refills evenly. `per_minute=None` never runs dry."""

    def __init__(self, per_minute: float | None, now: float, burst: float | None = None) -> None:
        self.per_minute = per_minute
        self._most = (per_minute or 0.0) if burst is None else burst
        self._level = self._most
        self._at = now

    @property
    def limit(self) -> int:
        """As the headers name it: the most that is ever there."""
        return 1_000_000 if self.per_minute is None else int(self._most)

    def take(self, now: float) -> float:
        """Takes one and returns 0, or takes none and returns the seconds until there is one."""
        if self.per_minute is None:
            return 0.0
        self._refill(now)
        if self._level < 1.0 - 1e-9:  # the wait that was promised must suffice, rounding included
            return (1.0 - self._level) * 60.0 / self.per_minute
        self._level -= 1.0
        return 0.0

    def remaining(self, now: float) -> int:
        if self.per_minute is None:
            return 1_000_000
        self._refill(now)
        return int(self._level)

    def full_at(self, now: float) -> float:
        """When everything taken will have been refilled."""
        if self.per_minute is None:
            return now
        self._refill(now)
        return now + (self._most - self._level) * 60.0 / self.per_minute

    def _refill(self, now: float) -> None:
        if self.per_minute is not None and now > self._at:
            self._level = min(self._most, self._level + (now - self._at) * self.per_minute / 60.0)
            self._at = now


def retry_after(seconds: float) -> str:
    return str(max(1, math.ceil(seconds)))
