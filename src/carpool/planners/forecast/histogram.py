"""Quantiles of times relative to what the prior assumes: 1 is the prior's own value.

The prior has the weight of some observations at 1. A quantile of 99.8 % therefore stays at 1 or above until hundreds
of calls were faster; slow calls raise it at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

STEPS: Final = 48  # bins on either side of 1
SIZE: Final = 2 * STEPS + 1
_FACTOR: Final = math.log(1.1)  # each bin reaches 10 % further: from 1/100 of the prior to 100 times


def bin_of(relative: float) -> int:
    if relative <= 0:
        return 0
    return STEPS + max(-STEPS, min(STEPS, math.ceil(math.log(relative) / _FACTOR - 1e-9)))


def quantile(counts: Sequence[float], scale: float, p: float, prior_weight: float) -> float:
    """The upper end of the bin in which the share p is reached. The counts are to be divided by `scale`."""
    prior = prior_weight * scale
    above = (1.0 - p) * (sum(counts) + prior)
    for place in range(SIZE - 1, 0, -1):
        above -= counts[place] + (prior if place == STEPS else 0.0)
        if above < 0:
            return math.exp((place - STEPS) * _FACTOR)
    return math.exp(-STEPS * _FACTOR)
