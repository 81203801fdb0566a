"""Rate limits: a token bucket that reports when to retry."""

import math


class TokenBucket:
    """Holds the requests of a minute, or `burst` of them, and refills evenly. `per_minute=None`: never empty."""

    def __init__(self, per_minute: float | None, now: float, burst: float | None = None) -> None:
        self.per_minute = per_minute
        self._most = (per_minute or 0.0) if burst is None else burst
        self._level = self._most
        self._at = now

    @property
    def limit(self) -> int:
        """The capacity, as shown in the headers."""
        return 1_000_000 if self.per_minute is None else int(self._most)

    def take(self, now: float) -> float:
        """Takes one and returns 0, or takes none and returns the seconds until there is one."""
        if self.per_minute is None:
            return 0.0
        self._refill(now)
        if self._level < 1.0 - 1e-9:  # the announced wait must suffice, including rounding
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
