"""Plan when to ask a provider next which batches of an account have ended. Pure: no I/O, no clock.

One LIST shows all batches of an account, so the question is how much it is worth at a time, and what it costs:

- Worth: the lateness that it ends. A batch that ends between two polls waits for the second one, half of the interval
  on average. The forecast says with which chance each batch ends within an interval, given its age; the sum over all
  batches, times half of the interval, is the expected lateness. No forecast is sure, so a batch is taken to end with at
  least a small chance whenever its age has grown by a factor (`SURPRISE`): a batch that ends much sooner or later than
  all others did is found soon, too. Whoever has waited for hours minds another second less (`PATIENCE`).
- Cost: a request from the bucket that creates, results and cancels need as well. While the bucket is full, nobody
  misses it, and it costs next to nothing. The emptier the bucket, the higher the cost; the last requests (`RESERVE`)
  are left to the others. So polls spend what the others leave, without measuring what that is.

The next poll is due as soon as its worth reaches its cost, but never sooner than the quickest pace (`QUICK`, or a
user's `poll_interval_s`, or the pace that the provider prescribes) and no later than `SLOW` after the last. With only a
few creates a minute that is the quickest pace for the first minutes of a batch's life; a batch that is an hour old is
polled every few seconds, one of a day once a minute.

A thousand batches may be in flight. Ages that differ by a factor of less than `AGE_STEP` count as equal, so the
forecast is asked a few dozen times at most.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from carpool.planners.pressure.quota import TokenBucket

QUICK: Final = 2.0  # seconds between polls while nobody else needs the requests
SLOW: Final = 60.0  # the longest interval, but for a prescribed one
SURPRISE: Final = 0.1  # the chance of an end while the age grows by a factor e, whatever the forecast says
RARE: Final = 1000.0  # batches that end once in so many seconds are worth the quickest pace while the bucket is full
PATIENCE: Final = 1800.0  # after so long a wait a second more counts half
RESERVE: Final = 2.0  # requests that polls leave to creates, results and cancels
STEEPNESS: Final = 4  # how fast the cost of a request grows while the bucket empties
AGE_STEP: Final = 2**0.5
YOUNGEST: Final = 1.0  # seconds; younger batches count as this old

EndChance = Callable[[float, float], float]  # seconds, age → the chance that a batch of this age ends within them


@dataclass(frozen=True, slots=True)
class InFlight:
    """The batches of one class that are in flight: when they were bought, in order."""

    ends_within: EndChance
    bought: Sequence[float]


def next_poll(
    classes: Sequence[InFlight], last: float | None, pace: float | None, requests: TokenBucket, now: float
) -> float:
    """When to poll an account next after a poll at `last`. Infinite while nothing is in flight."""
    first = min((one.bought[0] for one in classes if one.bought), default=math.inf)
    if first == math.inf:
        return math.inf
    since = first if last is None else max(first, last)  # before the first purchase there was nothing to see
    quick = QUICK if pace is None else pace
    if since > now + max(SLOW, quick):  # the clock was set back: poll at once instead of waiting until it catches up
        return now if last is None or last > now else now + quick
    ages = [(one.ends_within, age, count) for one in classes for age, count in _ages(one.bought, since)]
    base = quick * quick / (2 * RARE)
    return max(now, since + _interval(ages, base, quick, lambda seconds: _scarcity(requests, since + seconds)))


def _ages(bought: Sequence[float], at: float) -> Iterator[tuple[float, int]]:
    """The ages at a time, with the number of batches that are about as old."""
    left = len(bought)
    while left:
        age = max(YOUNGEST, at - bought[left - 1])
        step = math.floor(math.log(age, AGE_STEP) + 1e-9)
        older = min(left - 1, bisect_right(bought, at - AGE_STEP ** (step + 1)))
        yield AGE_STEP ** (step + 0.5), left - older
        left = older


def _interval(
    ages: Sequence[tuple[EndChance, float, int]], base: float, quick: float, scarcity: Callable[[float], float]
) -> float:
    """The first interval after which the lateness to be expected is worth a request. The lateness grows with the
    interval, and the cost falls while the bucket fills, so there is one."""

    def worth_it(seconds: float) -> bool:
        cost, late = base * scarcity(seconds), 0.0
        for ends_within, age, count in ages:
            chance = max(ends_within(seconds, age), _surprise(seconds, age))
            late += count * chance * seconds / 2 * PATIENCE / (PATIENCE + age)
            if late >= cost:
                return True
        return False

    low, high = quick, max(SLOW, quick)
    if worth_it(low):
        return low
    while high - low > 0.02 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if worth_it(middle) else (middle, high)
    return high


def _surprise(seconds: float, age: float) -> float:
    return 1.0 - math.pow(1.0 + seconds / age, -SURPRISE)


def _scarcity(requests: TokenBucket, at: float) -> float:
    """How much dearer a request is than one from a full bucket."""
    left = requests.available(at) - RESERVE
    return math.inf if left <= 0 else max(1.0, ((requests.burst - RESERVE) / left) ** STEEPNESS)
