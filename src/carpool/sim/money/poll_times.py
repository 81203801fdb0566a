"""When to poll next: the pace of `planners.tracking`, without asking it about every batch in flight.

With a thousand batches in flight, `next_poll` over all of them is most of the work of a run. Of batches that are
expected to take equally long and were there at the last poll, the first to be looked at again is the youngest, which
may end at once, or one of the two whose age is next to the expected time. Of those bought since, it is the oldest. So
only these are passed to `next_poll`. A test compares this with the whole set.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict

from carpool.planners.tracking import next_poll


class PollTimes:
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
        chosen = [
            (bought_at, bought_at if last is None else last, bought_at + takes)
            for takes, times in self._bought.items()
            for bought_at in _first_to_poll(times, last, takes)
        ]
        return next_poll(chosen, self._poll_interval, now) if chosen else math.inf


def _first_to_poll(times: list[float], last: float | None, takes: float) -> set[float]:
    if last is None:
        return set(times[:1])
    since, near = bisect_right(times, last), bisect_left(times, last - takes)
    places = (since, since - 1, near, near - 1)
    return {times[place] for place in places if 0 <= place < len(times)}
