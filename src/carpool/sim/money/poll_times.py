"""When to poll next, as `planners.poll_pace` decides, without sorting all batches in flight for every plan."""

from __future__ import annotations

from bisect import bisect_left, insort
from functools import partial

from carpool.planners.forecast import BatchClass, Forecast
from carpool.planners.poll_pace import InFlight, next_poll
from carpool.planners.pressure.quota import TokenBucket


class PollTimes:
    def __init__(self, poll_interval: float | None, forecast: Forecast) -> None:
        self._poll_interval = poll_interval
        self._forecast = forecast
        self._bought: dict[BatchClass, list[float]] = {}  # times of purchase, sorted
        self._in_flight: dict[BatchClass, InFlight] = {}  # the same lists

    def add(self, bought_at: float, of: BatchClass) -> None:
        if of not in self._bought:
            times = self._bought[of] = []
            self._in_flight[of] = InFlight(partial(self._forecast.ends_within, of=of), times)
        insort(self._bought[of], bought_at)

    def remove(self, bought_at: float, of: BatchClass) -> None:
        times = self._bought[of]
        del times[bisect_left(times, bought_at)]

    def next(self, last: float | None, requests: TokenBucket, now: float) -> float:
        """When to poll after a poll at `last`. Infinite while nothing is in flight."""
        return next_poll(list(self._in_flight.values()), last, self._poll_interval, requests, now)
