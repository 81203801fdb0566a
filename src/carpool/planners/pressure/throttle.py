"""Flow control for calls on `now` when a provider is overloaded. Pure: no I/O, no clock.

Limit how fast the calls of one account and model are sent, so that a fleet slows down instead of failing.

Three limits work together:

Rate-limit headers. Two `Meter`s mirror the provider's buckets of requests and tokens. Each response states what was
left when its request was accepted; the meter subtracts what was sent since and adds what was refilled since. Headers
are parsed once a second, or more often when little is left: while there is ample room a call costs two comparisons.

Concurrency, by AIMD. A refusal (429, 529) cuts `limit`, the number of calls in flight, to `CUT` of what was in flight.
Every response adds to it, and so does time, because a call may take minutes and no response would mean no growth. Below
the level at which the provider refused (`_was`) growth is faster than above it, as in TCP's slow start. Refusals of
calls that were sent before the gate closed belong to the same event, and do not cut again.

Pace. A refusal closes the gate for the time of `retry-after`, at most a minute, or for an exponential backoff with
jitter. Afterwards waiting calls leave one by one: at first at half (`FIRST`) of the rate that the headers state, or of
the rate that was measured before the refusal, then faster from second to second. Without the pace all waiting calls
would be sent in the moment when the gate opens, and be refused again. The pace may exceed the stated rate (`CATCH_UP`),
because the rate is an estimate: if it is too low, calls that never go faster would never find out.

After `RECOVERY_S` without a refusal and without waiting calls the throttle is calm again, and every limit but the
meters is lifted. After an outage (`reopened`) a few calls go first, and the limit doubles with the responses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, Protocol

from carpool.core.bounded import backoff
from carpool.core.ports import Allowance, Allowances
from carpool.planners.rescue_room import FreeRate

CUT: Final = 0.8  # a refusal cuts the limit to this share of the calls in flight
GROWTH_SHARE: Final = 0.1  # the limit grows by this share per second even without a response: calls may take minutes
GROWTH: Final = 1.0  # plus this many calls per second
SLOWEST: Final = 0.5  # minimum pace in calls per second; slower limits are the meter's job
FIRST: Final = 0.5  # share of the known rate at which the gate opens again
RAMP_METERED: Final = 1.0  # growth of that share per second where the provider states its rate
RAMP_GUESSED: Final = 0.1  # and where the rate is only measured
RETURNING: Final = 4.0  # calls in flight after an outage; doubles with the responses,
RETURNED: Final = 64.0  # up to this
WINDOW_S: Final = 10.0  # over which the accepted rate is measured
SPEND_S: Final = 4.0  # over which the remaining allowance may be spent
CATCH_UP: Final = 2.0  # maximum pace relative to the stated rate, to make up for the time when the gate was closed
BACKOFF_S: Final = 0.5
BACKOFF_MAX_S: Final = 30.0
MAX_CLOSED_S: Final = 60.0  # then one call tries again, whatever `retry-after` said
RECOVERY_S: Final = 10.0  # without a refusal and without waiting calls for so long, the throttle is calm again
UPDATE_S: Final = 1.0
LATE_S: Final = 0.05  # timers fire late: the pace makes up for this much

MINUTE_S: Final = 60.0
RESERVE: Final = 0.02  # share of the limit that is not used: our copy of the provider's bucket is slightly stale
MAX_RESERVE: Final = 20.0
GUESS_S: Final = 5.0  # the longest wait based on an estimate alone: then one call asks the provider itself
STALE_S: Final = 1.0
_MIN_RESET_S: Final = 5.0  # resets are in whole seconds, so a nearer one is too coarse, unless much is used
_SOONEST_S: Final = 0.05


@dataclass(slots=True, eq=False)
class Meter:
    """A bucket that refills evenly. Until the provider states a limit it allows everything.

    A response states what was left when its request was accepted. The meter subtracts what was sent since and adds what
    was refilled since, so it is right however long responses take.
    """

    limit: float = 0.0  # 0: the provider has not stated one
    rate: float = 0.0  # refilled per second
    spent: float = 0.0  # total so far; every request records its value at the time of sending
    ample: float = math.inf  # while `spent` is at most this, no level has to be computed
    _left: float = 0.0
    _at: float = 0.0
    _mark: float = 0.0
    _reserve: float = 0.0

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

    def update(self, allowance: Allowance, sent_at: float, sent_mark: float) -> None:
        """Take over a stated allowance. `sent_at` and `sent_mark` are the time and the value of `spent` when the
        request of this response was sent."""
        if allowance.limit != self.limit:
            self.limit = float(allowance.limit)
            self.rate = self.limit / MINUTE_S
            self._reserve = min(self.limit * RESERVE, MAX_RESERVE)
        used, full_in = allowance.limit - allowance.remaining, allowance.full_in or 0.0
        if (full_in >= _MIN_RESET_S and used > 0) or (full_in > 0.0 and used * 2 >= allowance.limit):
            self.rate = used / max(full_in, _SOONEST_S)  # not all limits are per minute
        self._left, self._at, self._mark = float(allowance.remaining), sent_at, sent_mark
        self.ample = sent_mark + allowance.remaining - self._reserve


class Mark(Protocol):
    """When a request was sent, and what had been spent by then."""

    at: float
    requests: float
    tokens: float


@dataclass(slots=True, eq=False)
class Throttle:
    _counted_at: float  # since when `_kept` is counted
    requests: Meter = field(default_factory=Meter)
    tokens: Meter = field(default_factory=Meter)
    in_flight: int = 0  # calls sent and not answered yet
    limit: float = math.inf  # the maximum of `in_flight`
    pressed: bool = False
    paused_until: float = 0.0
    _was: float = 0.0  # the limit before it was cut
    _grown_at: float = 0.0
    _refused_at: float = -math.inf
    _opened_at: float = 0.0
    _refusals_in_a_row: int = 0  # refusals in a row
    _share: float = FIRST
    _base: float = SLOWEST  # calls per second that the provider was measured to accept
    _recent: float = 0.0  # calls per second in the window before
    _kept: int = 0  # requests not refused since `_counted_at`
    _next_at: float = 0.0  # when the pace allows the next call
    _update_at: float = 0.0
    _update_at_requests: float = 0.0
    _update_at_tokens: float = 0.0

    # ------------------------------------------------------------ sending

    def can_send(self, now: float, tokens: float) -> bool:
        """Whether a call at the head of the queue may be sent now."""
        if self.pressed:
            return self.ready_at(now, tokens) <= now
        requests, sizes = self.requests, self.tokens
        if requests.spent < requests.ample and sizes.spent + tokens <= sizes.ample:
            return True
        return requests.allows(now, 1.0) and sizes.allows(now, tokens)

    def ready_at(self, now: float, tokens: float) -> float:
        """When the next call may be sent, unless a response changes that."""
        ready = max(self.requests.ready_at(now, 1.0), self.tokens.ready_at(now, tokens), self._next_at)
        if self.pressed:
            ready = max(ready, self.paused_until, self._slot_at(now))
        return max(now, ready)

    def take(self, now: float, tokens: float, *, waited: bool = False) -> None:
        """A call is sent. Calls that waited are paced, so that they are not all sent in the same moment."""
        if self.pressed or waited:
            self._grow(now)
            self._next_at = max(now - LATE_S, self._next_at) + 1.0 / self.pace(now)
        elif now - self._counted_at > WINDOW_S:
            self._measure(now)
        self.in_flight += 1
        self._kept += 1
        self.requests.spend(now, 1.0)
        self.tokens.spend(now, tokens)

    def pace(self, now: float) -> float:
        """Calls per second for calls that waited."""
        meter, passed = self.requests, max(0.0, now - self._opened_at)
        if meter.limit == 0.0:
            return max(SLOWEST, self._base * (self._share + passed * RAMP_GUESSED)) if self.pressed else math.inf
        share = self._share + passed * RAMP_METERED
        if self.pressed and share < CATCH_UP:
            return max(SLOWEST, meter.rate * share)
        # The refill rate is an estimate. If it is too low, calls that go no faster would never find out, so the
        # remaining allowance may be spent as well.
        return max(SLOWEST, meter.rate * CATCH_UP, meter.level(now) / SPEND_S)

    def free_rate(self, now: float) -> FreeRate:
        """What is left for rescues: what other calls do not use, and at least half, because a call whose deadline is
        near gets every other slot (`FairQueue`)."""
        requests = self.requests.rate if self.requests.limit else math.inf
        if self.pressed:
            requests = min(requests, self._base)
        tokens = self.tokens.rate if self.tokens.limit else math.inf
        used = 0.0 if self.pressed else self._used(now)
        mean_tokens = self.tokens.spent / max(1.0, self.requests.spent)
        return FreeRate(
            max(requests - used, requests / 2),
            max(tokens - used * mean_tokens, tokens / 2),
            max(1.0, self.requests.level(now)) if self.requests.limit and not self.pressed else 1.0,
            max(0.0, self.tokens.level(now)) if self.tokens.limit else math.inf,
            self.paused_until if self.pressed else 0.0,
        )

    def _used(self, now: float) -> float:
        """Calls per second that were sent recently."""
        passed = now - self._counted_at
        return max(self._recent if passed <= WINDOW_S else 0.0, self._kept / max(WINDOW_S, passed))

    def _slot_at(self, now: float) -> float:
        limit = self._grown(now)
        missing = self.in_flight + 1 - limit
        if missing < 1.0:
            return now
        return max(now, self.paused_until) + missing / (GROWTH + GROWTH_SHARE * limit)

    def _grown(self, now: float) -> float:
        """The limit, with its growth since the last change of it."""
        passed = max(0.0, now - max(self._grown_at, self.paused_until))
        return self.limit + passed * (GROWTH + GROWTH_SHARE * self.limit)

    def _grow(self, now: float) -> None:
        if self.pressed:
            self.limit, self._grown_at = self._grown(now), max(self._grown_at, now)

    # ------------------------------------------------------------ responses

    def needs_update(self, now: float) -> bool:
        """Whether to parse the headers of this response: while there is ample room, not all of them are."""
        return (
            now >= self._update_at
            or self.pressed
            or self.requests.spent >= self._update_at_requests
            or self.tokens.spent >= self._update_at_tokens
        )

    def update(self, now: float, allowances: Allowances | None, mark: Mark) -> None:
        self._update_at = now + UPDATE_S
        self._update_at_requests = self._update_at_tokens = math.inf
        if allowances is None:
            return
        if allowances.requests is not None:
            self.requests.update(allowances.requests, mark.at, mark.requests)
            self._update_at_requests = mark.requests + allowances.requests.remaining // 4
        if allowances.tokens is not None:
            self.tokens.update(allowances.tokens, mark.at, mark.tokens)
            self._update_at_tokens = mark.tokens + allowances.tokens.remaining // 4

    def left(self) -> None:
        """A call ended without a response: cancelled, cut off, or never sent."""
        self.in_flight -= 1

    def answered(self, now: float) -> None:
        """The provider accepted the call."""
        self.in_flight -= 1
        if self.pressed:
            self._grow(now)
            self._refusals_in_a_row = 0
            self.limit += 1.0 if self.limit < self._was else GROWTH_SHARE

    def refused(self, now: float, mark: Mark, retry_after: float | None, jitter: float) -> bool:
        """The provider refused (429, 529). `jitter` is from 0 to 1. Returns whether this is a new event:
        calls sent before the gate closed belong to the refusal that closed it."""
        news = mark.at > self._refused_at or not self.pressed
        self._grow(now)
        if news:
            self._refusals_in_a_row += 1
            self._measure(now)
            self._press(now, min(self.limit, float(self.in_flight)))
            self._refused_at = now
        self.in_flight -= 1
        self._kept -= 1
        pause = backoff(self._refusals_in_a_row, BACKOFF_S, BACKOFF_MAX_S) if retry_after is None else retry_after
        until = now + min(max(pause, 0.05), MAX_CLOSED_S) * (1.0 + jitter / 4)
        if until > self.paused_until:
            self.paused_until = self._opened_at = self._next_at = until
        return news

    def reopened(self, now: float) -> None:
        """The provider can be reached again. The calls that waited are not all sent at once."""
        self._measure(now)
        self._press(now, RETURNED)
        self.limit = RETURNING
        self._refused_at = self._opened_at = self._next_at = now

    def _press(self, now: float, was: float) -> None:
        self._was = max(was, self._was if self.pressed else 0.0)
        self.limit = max(1.0, was * CUT)
        self._grown_at = now
        self._share = FIRST
        self.pressed = True

    def _measure(self, now: float) -> None:
        """Measure how many calls per second the provider has accepted recently."""
        passed = now - max(self._counted_at, self._opened_at if self.pressed else 0.0)
        rate = self._kept / max(1.0, passed)
        self._recent = self._kept / max(WINDOW_S, passed)
        long_enough = self.pressed or passed >= 2.0
        self._base = max(SLOWEST, rate if long_enough else max(rate, self._base))
        self._kept, self._counted_at = 0, now

    def reset_if_idle(self, now: float) -> bool:
        """Called while no call waits: without a refusal for a while, become calm again. Returns whether it is calm."""
        if self.pressed and now >= max(self._refused_at, self.paused_until) + RECOVERY_S:
            self.pressed = False
            self.limit = math.inf
            self._refusals_in_a_row = 0
            self._kept, self._counted_at = 0, now
        return not self.pressed
