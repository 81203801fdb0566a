"""The distribution of the time until a batch ends, from its hazard on logarithmic bins of its age.

The bins are 0 to 1 s and then `BINS` more, equally wide on a logarithmic scale, up to `HORIZON`. A position is a
place on the axis of bins: 3.25 is a quarter into the bin 3. Within a bin the hazard is constant per unit of position,
so the estimate of a bin's hazard is (ends in it) / (bins' worth of positions that batches passed in it), whether they
passed the whole bin or, in flight or cancelled, only a part of it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

BINS: Final = 40
PLACES: Final = BINS + 1  # with the bin up to 1 s
HORIZON: Final = 7 * 86_400.0  # beyond every provider's window: the value of a quantile that is never reached
WEIGHT: Final = 3.0  # of the wider class's estimate, in batches that passed each bin
_PER_E: Final = BINS / math.log(HORIZON)  # bins per factor e


def position(seconds: float) -> float:
    if seconds <= 1.0:
        return max(0.0, seconds)
    return min(1.0 + math.log(seconds) * _PER_E, float(PLACES))


def seconds_at(place: float) -> float:
    return place if place <= 1.0 else min(HORIZON, math.exp((place - 1.0) / _PER_E))


EDGES: Final = tuple(seconds_at(place) for place in range(PLACES + 1))


def bin_at(seconds: float) -> int:
    return min(int(position(seconds)), BINS)


def observations(from_age: float, to_age: float, *, ended: bool) -> list[tuple[int, float]]:
    """What to add to the counts of a class, which are the ends in all bins, and then the passages: how much of each bin
    lies between two ages, and whether the batch ended at the second."""
    start, end = position(from_age), position(to_age)
    added = [(min(int(end), BINS), 1.0)] if ended else []
    place = int(start)
    while start < end:
        upto = min(end, place + 1.0)
        added.append((PLACES + place, upto - start))
        start, place = upto, place + 1
    return added


class HazardCurve:
    """Reads the distribution from the cumulative hazard at the edges of the bins."""

    __slots__ = ("_areas", "rates", "sums")

    def __init__(self, rates: Sequence[float]) -> None:
        self.rates = (*rates, 0.0)  # nothing ends beyond the horizon
        sums = [0.0]
        for rate in rates:
            sums.append(sums[-1] + rate)
        self.sums = sums
        self._areas: list[float] | None = None

    @classmethod
    def learned(
        cls, ends: Sequence[float], passed: Sequence[float], scale: float, wider: Sequence[float]
    ) -> HazardCurve:
        """From the counts per bin, each to be divided by `scale`, and the hazards of the next wider class."""
        weight = WEIGHT * scale
        return cls(
            [
                (end + weight * rate) / (through + weight)
                for end, through, rate in zip(ends, passed, wider, strict=False)
            ]
        )

    @classmethod
    def of_hazard(cls, hazard: Callable[[float], float], stretch: float = 1.0) -> HazardCurve:
        """From a cumulative hazard, for batches that take `stretch` times as long."""
        sums = [hazard(edge / stretch) for edge in EDGES]
        return cls([max(0.0, after - before) for before, after in pairwise(sums)])

    def hazard(self, seconds: float) -> float:
        """The cumulative hazard up to this age."""
        if seconds <= 1.0:
            return self.rates[0] * seconds if seconds > 0 else 0.0
        if seconds >= HORIZON:
            return self.sums[PLACES]
        place = 1.0 + math.log(seconds) * _PER_E
        whole = int(place)
        return self.sums[whole] + (place - whole) * self.rates[whole]

    def cdf(self, seconds: float) -> float:
        if 1.0 < seconds < HORIZON:  # as in `hazard`, without a call: read for every lane of every call
            place = 1.0 + math.log(seconds) * _PER_E
            whole = int(place)
            return -math.expm1((whole - place) * self.rates[whole] - self.sums[whole])
        return -math.expm1(-self.hazard(seconds))

    def ends_within(self, seconds: float, age: float) -> float:
        return -math.expm1(self.hazard(age) - self.hazard(age + max(0.0, seconds)))

    def quantile(self, p: float) -> float:
        """The age at which a share p of the batches has ended; the horizon if that is never reached."""
        wanted = -math.log1p(-p) if p < 1 else math.inf
        if wanted <= 0:
            return 0.0
        place = bisect_left(self.sums, wanted)
        if place > PLACES:
            return HORIZON
        return seconds_at(place - 1 + (wanted - self.sums[place - 1]) / self.rates[place - 1])

    def mean(self, most: float) -> float:
        """The mean time until a batch has ended or is `most` seconds old: the area under its survival."""
        if most <= 0:
            return 0.0
        if self._areas is None:
            areas = [0.0]
            for place in range(PLACES):
                areas.append(areas[-1] + self._area(place, EDGES[place + 1]))
            self._areas = areas
        most = min(most, HORIZON)
        place = bin_at(most)
        return self._areas[place] + self._area(place, most)

    def _area(self, place: int, upto: float) -> float:
        """The area from the beginning of a bin. From 1 s on, survival within a bin is a power of the age."""
        start, rate = EDGES[place], self.rates[place]
        survival = math.exp(-self.sums[place])
        if place == 0:
            small = rate * upto < 1e-12  # where the quotient of two tiny numbers is not exact
            return survival * (upto if small else -math.expm1(-rate * upto) / rate)
        power, distance = 1.0 - rate * _PER_E, math.log(upto / start)
        return survival * start * (distance if abs(power) < 1e-9 else math.expm1(power * distance) / power)
