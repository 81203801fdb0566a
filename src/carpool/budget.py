"""The budget of requests per minute that one credential has on a provider's batch API."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

CREATE_BURST: Final = 3.0


@dataclass(frozen=True, slots=True)
class Bucket:
    """A token bucket as a value. It may go into debt: what had to be sent was sent, and later ones wait longer."""

    rate_per_s: float
    burst: float
    tokens: float
    at: float

    def available(self, now: float) -> float:
        # A clock that was set back adds nothing; it must not take away either.
        return min(self.burst, self.tokens + max(0.0, now - self.at) * self.rate_per_s)

    def take(self, now: float, n: float = 1) -> Bucket:
        return replace(self, tokens=self.available(now) - n, at=now)

    def ready_at(self, n: float = 1) -> float:
        """When n tokens are there, if nobody takes any before."""
        return self.at + max(0.0, n - self.tokens) / self.rate_per_s

    def wait_until(self, now: float, n: float = 1) -> float:
        """The earliest time from `now` on. Readiness is asked through this alone, so that at the time it names
        the tokens *are* there, whatever floating point makes of the division."""
        return now if self.available(now) >= n else max(now, self.ready_at(n))

    def paced(self, rate_per_s: float, burst: float) -> Bucket:
        return replace(self, rate_per_s=rate_per_s, burst=burst, tokens=min(self.tokens, burst))


def create_rate(rpm: float, poll_interval: float) -> float:
    """Creates per minute: what polling leaves over, halved because each batch's results must be fetched too.

    Polling that would eat everything is stretched instead: a third of the budget always buys and collects.
    """
    return max((rpm - 60 / poll_interval) / 2, rpm / 6)


@dataclass(frozen=True, slots=True)
class Road:
    """One credential's way to the batch API: every request draws on `requests`, a create on `creates` as well."""

    rpm: int
    poll_interval: float
    requests: Bucket
    creates: Bucket
    most: int  # requests per minute, as far as is known; `rpm` is what refusals leave of it
    paused_until: float = 0.0

    @classmethod
    def new(cls, rpm: int, poll_interval: float, now: float) -> Road:
        burst = _burst(rpm)
        creates = create_rate(rpm, poll_interval) / 60
        return cls(
            rpm,
            poll_interval,
            Bucket(rpm / 60, burst, burst, now),
            Bucket(creates, CREATE_BURST, CREATE_BURST, now),
            most=rpm,
        )

    def create_ready_at(self, now: float) -> float:
        return max(self.paused_until, self.creates.wait_until(now), self.requests.wait_until(now))

    def can_create(self, now: float) -> bool:
        return self.create_ready_at(now) <= now

    def spend_create(self, now: float) -> Road:
        return replace(self, requests=self.requests.take(now), creates=self.creates.take(now))

    def ask_ready_at(self, now: float) -> float:
        # The last token is left to a create that is allowed, or eager polling would starve the buying.
        one = self.requests.wait_until(now)
        ready = one if one < self.creates.wait_until(now) else self.requests.wait_until(now, 2)
        return max(self.paused_until, ready)

    def can_ask(self, now: float) -> bool:
        return self.ask_ready_at(now) <= now

    def spend(self, now: float) -> Road:
        """For everything but a create: a LIST, a look, results, a cancel."""
        return replace(self, requests=self.requests.take(now), creates=self.creates.take(now, 0))

    def paused(self, until: float) -> Road:
        """The provider said 429: nothing goes out before `until`."""
        return replace(self, paused_until=max(self.paused_until, until))

    def learned(self, rpm: int) -> Road:
        """The provider named another limit. What was spent stays spent."""
        return self if rpm < 1 or rpm == self.rpm == self.most else replace(self._paced(rpm), most=rpm)

    def slowed(self, now: float) -> Road:
        """The provider said 429 and does not name its limit: half of the pace. The refusals of one burst are one."""
        return self if now < self.paused_until else self._paced(max(1, self.rpm // 2))

    def eased(self) -> Road:
        """A request was taken in: a little more may go, up to what is known to be allowed."""
        return self._paced(min(self.rpm + 1, self.most))

    def _paced(self, rpm: int) -> Road:
        if rpm == self.rpm:
            return self
        requests = self.requests.paced(rpm / 60, _burst(rpm))
        creates = self.creates.paced(create_rate(rpm, self.poll_interval) / 60, CREATE_BURST)
        return replace(self, rpm=rpm, requests=requests, creates=creates)


def _burst(rpm: int) -> float:
    # Enough for a burst of creates and a look beside it, far below the minute's sum.
    return max(CREATE_BURST + 1, rpm / 10)
