"""How fast the calls of one account and model may go out, so that a fleet slows down instead of failing.

Calm: the provider never refused, and its heads show room. Then nothing waits and next to nothing is computed.
Pressed: it refused (429, 529). The gate closes for as long as it asked, or for a jittered back-off, and opens again
gradually: at a pace that begins below the known or measured rate and rises with time, and with no more calls unanswered
at a time than a limit that is cut by every refusal and grows with every answer and with time.
"""

from __future__ import annotations

import math
from typing import Final, Protocol

from carpool.ports import Allowances
from carpool.pressure.meter import Meter

CUT: Final = 0.8  # of the calls that were unanswered when the provider refused, so many may be next
GROWTH_SHARE: Final = 0.1  # of the limit a second, without any answer: calls may take minutes
GROWTH: Final = 1.0  # and at least so many a second
SLOWEST: Final = 0.5  # calls per second, whatever was refused: the meter knows slower limits
FIRST: Final = 0.5  # the share of the rate with which the gate opens again
RAMP_METERED: Final = 1.0  # by how much that share rises a second, where the provider names its rate
RAMP_GUESSED: Final = 0.1
RETURNING: Final = 4.0  # calls at a time after the provider could not be reached; it doubles with the answers,
RETURNED: Final = 64.0  # until it is this
WINDOW_S: Final = 10.0  # over which it is measured how much the provider takes
SPEND_S: Final = 4.0  # over which what is left is spent
CATCH_UP: Final = 2.0  # the most: what was missed while the gate was closed may be caught up on
BACKOFF_S: Final = 0.5
BACKOFF_MAX_S: Final = 30.0
CLOSED_MOST_S: Final = 60.0  # then one call asks again, whatever a `retry-after` said
CALM_S: Final = 10.0  # after so long without a refusal, and with nobody waiting, all is forgotten
LOOK_S: Final = 1.0
LATE_S: Final = 0.05  # timers ring late: so much of the pace is made up for


class Mark(Protocol):
    """What is remembered of a request that left: when, and what had been spent by then."""

    @property
    def at(self) -> float: ...
    @property
    def requests(self) -> float: ...
    @property
    def tokens(self) -> float: ...


class Throttle:
    __slots__ = (
        "_base",
        "_counted_at",
        "_grown_at",
        "_kept",
        "_look_at",
        "_look_requests",
        "_look_tokens",
        "_next_at",
        "_opened_at",
        "_refused_at",
        "_share",
        "_strikes",
        "_was",
        "closed_until",
        "in_flight",
        "limit",
        "pressed",
        "requests",
        "tokens",
    )

    def __init__(self, now: float) -> None:
        self.requests = Meter()
        self.tokens = Meter()
        self.in_flight = 0  # sent, and not answered yet
        self.limit = math.inf  # the most of those
        self.pressed = False
        self.closed_until = 0.0
        self._was = 0.0  # the limit before it was cut
        self._grown_at = 0.0
        self._refused_at = -math.inf
        self._opened_at = 0.0
        self._strikes = 0  # refusals in a row
        self._share = FIRST
        self._base = SLOWEST  # calls per second that the provider was seen to take
        self._kept = 0  # requests that were not refused, since `_counted_at`
        self._counted_at = now
        self._next_at = 0.0  # of the pace
        self._look_at = 0.0
        self._look_requests = 0.0
        self._look_tokens = 0.0

    # ------------------------------------------------------------ going out

    def may_go(self, now: float, tokens: float) -> bool:
        """Whether a call that nobody stands before may go at once."""
        if self.pressed:
            return self.ready_at(now, tokens) <= now
        requests, sizes = self.requests, self.tokens
        if requests.spent < requests.ample and sizes.spent + tokens <= sizes.ample:
            return True
        return requests.allows(now, 1.0) and sizes.allows(now, tokens)

    def ready_at(self, now: float, tokens: float) -> float:
        """When the next call may go, if nothing is heard before."""
        ready = max(self.requests.ready_at(now, 1.0), self.tokens.ready_at(now, tokens), self._next_at)
        if self.pressed:
            ready = max(ready, self.closed_until, self._slot_at(now))
        return max(now, ready)

    def take(self, now: float, tokens: float, *, waited: bool = False) -> None:
        """One call goes out. Those that waited go at a pace, so that they do not all go in the moment that they may."""
        if self.pressed or waited:
            self._next_at = max(now - LATE_S, self._next_at) + 1.0 / self.pace(now)
        elif now - self._counted_at > WINDOW_S:
            self._measure(now)
        self.in_flight += 1
        self._kept += 1
        self.requests.spend(now, 1.0)
        self.tokens.spend(now, tokens)

    def pace(self, now: float) -> float:
        """Calls per second for those that waited."""
        metered = self.requests.limit > 0.0
        if not self.pressed:
            return max(SLOWEST, self._told(now)) if metered else math.inf
        share = self._share + max(0.0, now - self._opened_at) * (RAMP_METERED if metered else RAMP_GUESSED)
        if metered:
            return max(SLOWEST, self._told(now) if share >= CATCH_UP else self.requests.rate * share)
        return max(SLOWEST, self._base * share)

    def _told(self, now: float) -> float:
        """Calls per second as the provider's heads would have it. How fast it refills is an estimate, and a low one
        would never be found out by calls that go no faster: so what is left may be used up, too."""
        return max(self.requests.rate * CATCH_UP, self.requests.level(now) / SPEND_S)

    def _slot_at(self, now: float) -> float:
        self._grow(now)
        missing = self.in_flight + 1 - self.limit
        if missing < 1.0:
            return now
        return max(now, self.closed_until) + missing / (GROWTH + GROWTH_SHARE * self.limit)

    def _grow(self, now: float) -> None:
        passed = now - max(self._grown_at, self.closed_until)
        if passed > 0:
            self.limit += passed * (GROWTH + GROWTH_SHARE * self.limit)
            self._grown_at = now

    # ------------------------------------------------------------ coming back

    def wants_look(self, now: float) -> bool:
        """Whether the head of this answer is worth reading: while there is ample room, not every one is."""
        return (
            now >= self._look_at
            or self.pressed
            or self.requests.spent >= self._look_requests
            or self.tokens.spent >= self._look_tokens
        )

    def looked(self, now: float, said: Allowances | None, mark: Mark) -> None:
        self._look_at = now + LOOK_S
        self._look_requests = self._look_tokens = math.inf
        if said is None:
            return
        if said.requests is not None:
            self.requests.heard(said.requests, mark.at, mark.requests)
            self._look_requests = mark.requests + said.requests.remaining // 4
        if said.tokens is not None:
            self.tokens.heard(said.tokens, mark.at, mark.tokens)
            self._look_tokens = mark.tokens + said.tokens.remaining // 4

    def left(self) -> None:
        """A call came back without news: cancelled, cut, or never sent."""
        self.in_flight -= 1

    def answered(self, now: float) -> None:
        """The provider took it."""
        self.in_flight -= 1
        if self.pressed:
            self._strikes = 0
            self.limit += 1.0 if self.limit < self._was else GROWTH_SHARE

    def refused(self, now: float, mark: Mark, retry_after: float | None, luck: float) -> bool:
        """The provider wants less. `luck`, from 0 to 1, spreads the return. Says whether this is news: what was sent
        before the gate closed is part of the refusal that closed it."""
        news = mark.at > self._refused_at or not self.pressed
        if news:
            self._slow_down(now)
        self.in_flight -= 1
        self._kept -= 1
        pause = min(BACKOFF_S * 2 ** (self._strikes - 1), BACKOFF_MAX_S) if retry_after is None else retry_after
        until = now + min(max(pause, 0.05), CLOSED_MOST_S) * (1.0 + luck / 4)
        if until > self.closed_until:
            self.closed_until = self._opened_at = self._next_at = until
        return news

    def reopened(self, now: float) -> None:
        """The provider is back after it could not be reached: those who waited for it do not all go at once."""
        self._measure(now)
        self._press(now, RETURNED)
        self.limit = RETURNING
        self._refused_at = self._opened_at = self._next_at = now

    def _slow_down(self, now: float) -> None:
        self._strikes += 1
        self._measure(now)
        self._press(now, min(self.limit, float(self.in_flight)))
        self._refused_at = now

    def _press(self, now: float, was: float) -> None:
        self._was = max(was, self._was if self.pressed else 0.0)
        self.limit = max(1.0, was * CUT)
        self._grown_at = now
        self._share = FIRST
        self.pressed = True

    def _measure(self, now: float) -> None:
        """How many calls a second the provider has taken of late."""
        passed = now - max(self._counted_at, self._opened_at if self.pressed else 0.0)
        fresh = self._kept / max(1.0, passed)
        long = self.pressed or passed >= 2.0
        self._base = max(SLOWEST, fresh if long else max(fresh, self._base))
        self._kept, self._counted_at = 0, now

    def rest(self, now: float) -> bool:
        """With nobody waiting and no refusal for a while, the account is calm again. Says whether it is."""
        if self.pressed and now >= max(self._refused_at, self.closed_until) + CALM_S:
            self.pressed = False
            self.limit = math.inf
            self._strikes = 0
            self._kept, self._counted_at = 0, now
        return not self.pressed
