"""Everything random about a batch, drawn when it is created, so that polling it changes nothing."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

from carpool.mock.core.batch import FOREVER, Batch
from carpool.mock.core.config import MockConfig
from carpool.mock.core.faults import LINE_FAULTS, FaultBox
from carpool.mock.core.latency import Latency, RequestLatencies


class Fate:
    def __init__(self, config: MockConfig, rng: random.Random, box: FaultBox) -> None:
        self.config = config
        self.rng = rng
        self.box = box

    def times(
        self, now: float, requests: Sequence[object], latency: Latency, not_before: float = 0.0
    ) -> tuple[array[float], array[float]]:
        """When each request starts and ends."""
        config, rng, count = self.config, self.rng, len(requests)
        if config.request_latencies is not None:
            return _own_times(config.request_latencies, requests, max(now, not_before))
        draws = count if config.per_request else 1
        ends = array("d", (max(not_before, now + latency.draw(rng)) for _ in range(draws)))
        starts = array("d", (max(now, not_before, end - config.batch_execution.draw(rng)) for end in ends))
        return (starts, ends) if config.per_request else (starts * count, ends * count)

    def line_faults(self, count: int, stranger: bool) -> dict[str, frozenset[int]]:
        box = self.box
        return {
            name: frozenset(i for i in range(count) if box.roll(name))
            if not stranger and box.possible(name)
            else frozenset()
            for name in LINE_FAULTS
        }

    def listed_from(self, now: float, stranger: bool) -> float:
        return now + self.box.faults.list_lag_s if not stranger and self.box.roll("list_lag") else now

    def may_be_forgotten(self, batch: Batch, now: float) -> None:
        if not batch.stranger and self.box.roll("batch_forgotten"):
            batch.forgotten_from = now + self.box.faults.forget_after_s
            batch.forgotten_until = batch.forgotten_from + self.box.faults.forgotten_s

    def may_stick(self, batch: Batch, now: float) -> None:
        if not batch.stranger and self.box.roll("batch_stuck"):
            batch.hold(now)
            if self.box.faults.stuck_s < FOREVER:
                batch.release(now + self.box.faults.stuck_s)


def _own_times(
    latencies: RequestLatencies, requests: Sequence[object], now: float
) -> tuple[array[float], array[float]]:
    starts, ends = array("d"), array("d")
    for request in requests:
        name = getattr(request, "fingerprint", "")  # one that will be refused has none
        end = now + latencies.batch_s(name, now)
        starts.append(end if end == FOREVER else max(now, end - latencies.sync_s(name, end)))
        ends.append(end)
    return starts, ends
