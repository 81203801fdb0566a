"""When to poll next: the pace of `planners.tracking`, without asking it about every batch in flight.

With a thousand batches in flight, `next_poll` over all of them is most of the work of a run. Of batches that are
expected to take equally long, the first to be looked at is the youngest, which may end at once, or one of the two whose
age is next to the expected time. So only those are passed to `next_poll`. A test compares this with the whole set.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict

from carpool.planners.tracking import next_poll


class Looks:
    def __init__(self, poll_interval: float | None) -> None:
        self._poll_interval = poll_interval
        self._bought: defaultdict[float, list[float]] = defaultdict(list)  # expected time → times of purchase, sorted

    def add(self, bought_at: float, takes: float) -> None:
        insort(self._bought[takes], bought_at)

    def remove(self, bought_at: float, takes: float) -> None:
        times = self._bought[takes]
        del times[bisect_left(times, bought_at)]

    def next(self, last: float | None, now: float) -> float:
        """When to look after a poll at `last`. Infinite while nothing is in flight."""
        since = now if last is None else last
        chosen = [
            (bought_at, bought_at if last is None else last, bought_at + takes)
            for takes, times in self._bought.items()
            for bought_at in _first_to_look_at(times, since - takes)
        ]
        return next_poll(chosen, self._poll_interval, now) if chosen else math.inf


def _first_to_look_at(times: list[float], expected: float) -> set[float]:
    """The youngest, and those bought next to the time at which a batch that should end now was bought."""
    if not times:
        return set()
    near = bisect_left(times, expected)
    return {times[-1], times[max(0, near - 1)], times[min(near, len(times) - 1)]}
