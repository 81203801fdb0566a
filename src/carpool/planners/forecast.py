"""How long calls and batches take. A fixed prior: nothing is learned from observed batches. Everything about batches
derives from `batch_cdf`, so a learning estimator only has to replace that method."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

SYNC_CAP: Final = 600.0
HORIZON: Final = 7 * 86_400.0  # beyond every provider's window: the value of a quantile that is never reached


class Part(NamedTuple):
    """A log-normal component and its share of the batches."""

    share: float
    median: float
    sigma: float

    def cdf(self, seconds: float) -> float:
        return 0.5 * math.erfc((math.log(self.median) - math.log(seconds)) / (self.sigma * math.sqrt(2)))


# Small batches mostly end within two minutes, one in ten takes an hour, and some don't end within a day.
# The tail must be heavy: a forecast without one leads to late rescues, and to many at once.
PRIOR: Final = (Part(0.60, 110.0, 0.5), Part(0.37, 900.0, 1.0), Part(0.03, 21_600.0, 1.0))
STRETCH: Final = {"s": 1.0, "m": 1.5, "l": 3.0}  # factor per size class: long responses take longer


@dataclass(frozen=True, slots=True)
class Forecast:
    parts: tuple[Part, ...] = PRIOR
    cancel_seconds: float = 20.0  # from the cancel request to the end of the batch
    sync_floor: float = 5.0
    tokens_per_s: float = 50.0

    def batch_cdf(self, seconds: float, model: str, size_class: str) -> float:
        """The chance that a batch ends within this many seconds of its purchase."""
        scaled = seconds / STRETCH.get(size_class, 1.0)
        if scaled <= 0:
            return 0.0
        return min(1.0, sum(part.share * part.cdf(scaled) for part in self.parts))

    def batch_quantile(self, p: float, model: str, size_class: str) -> float:
        """The seconds after which a share p of the batches has ended. A bisection of thirty steps."""
        low, high = 0.0, HORIZON
        while high - low > 0.01:
            middle = (low + high) / 2
            if self.batch_cdf(middle, model, size_class) < p:
                low = middle
            else:
                high = middle
        return high

    def sync_seconds(self, max_output_tokens: int) -> float:
        """A high quantile of the latency of a synchronous call with this output limit.

        The first 4,096 tokens count in full, the rest to a quarter: agents set limits such as 32,000 by default, and
        would otherwise never have time for a batch.
        """
        small = min(max_output_tokens, 4096)
        counted = small + max(0, max_output_tokens - small) / 4
        return min(SYNC_CAP, self.sync_floor + counted / self.tokens_per_s)
