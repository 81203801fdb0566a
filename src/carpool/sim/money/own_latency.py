"""A world from one's own batches: how long they took, by model where a batch has only one.

A batch that was cancelled says only that it would have taken longer. To leave such batches out would flatter: they are
mostly slow ones. So the distribution is the estimate of Kaplan and Meier. What it does not reach, because the longest
ones were all cancelled, counts as never ended.

A store knows when a batch was *seen* to have ended, which is up to a poll later than it ended, and a run polls, too. So
waits come out a little too long, by about half the time between two polls.

A batch ends with its slowest call. The world has the times of single calls, and a run takes the slowest of them for a
batch; so where batches had several calls, each call counts as faster than its batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from types import MappingProxyType
from typing import Final

from carpool.core.model import TimedBatch
from carpool.sim.money.worlds import DAY, MeasuredTimes, ProviderWorld

ENOUGH: Final = 30  # batches; with fewer, the slow ones, which matter most, may be missing
POINTS: Final = 1000


def own_world(batches: Sequence[TimedBatch], otherwise: ProviderWorld) -> ProviderWorld | None:
    """The world of these batches; None if they are too few. Limits and refusals are those of `otherwise`."""
    if len(batches) < ENOUGH:
        return None
    by_model: dict[str, list[TimedBatch]] = defaultdict(list)
    for batch in batches:
        if batch.model:
            by_model[batch.model].append(batch)
    times = {model: call_times(found) for model, found in by_model.items() if len(found) >= ENOUGH}
    return replace(otherwise, name="your own batches", batch=MappingProxyType({**times, "*": call_times(batches)}))


def call_times(batches: Sequence[TimedBatch]) -> MeasuredTimes:
    """The times of single calls, as equally likely points."""
    curve = _ended_by(batches)
    size = max(1.0, median(batch.count for batch in batches))
    seconds, position = [], 0
    for number in range(POINTS):
        share = ((number + 0.5) / POINTS) ** size
        while position < len(curve) and curve[position][1] < share:
            position += 1
        seconds.append(curve[position][0] if position < len(curve) else DAY)
    return MeasuredTimes(tuple(seconds))


def _ended_by(batches: Sequence[TimedBatch]) -> list[tuple[float, float]]:
    """Seconds, and the share of batches that would have ended by then."""
    curve = []
    going_on = 1.0
    at_risk = len(batches)
    for batch in sorted(batches, key=lambda batch: (batch.seconds, not batch.whole)):
        if batch.whole:
            going_on *= 1 - 1 / at_risk
            curve.append((batch.seconds, 1 - going_on))
        at_risk -= 1
    return curve
