"""What is assumed before anything was observed: about batches, synchronous calls, cancels and flex."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

SYNC_CAP: Final = 600.0
_IN_FULL: Final = 4096  # output tokens


class Part(NamedTuple):
    """A log-normal component and its share of the batches."""

    share: float
    median: float
    sigma: float

    def survival(self, seconds: float) -> float:
        """The chance of taking longer than this."""
        return 0.5 * math.erfc((math.log(seconds) - math.log(self.median)) / (self.sigma * math.sqrt(2)))


# Half of the batches end within two or three minutes, one in ten takes more than an hour, and some don't end within a
# day: between the reports of single calls, which are quicker, and those of whole accounts, which are slower. To expect
# too little of batches costs a chance, which probes find; to expect too much of them costs money.
# The tail must be heavy: a forecast without one leads to late rescues, and to many at once.
PARTS: Final = (Part(0.55, 100.0, 0.4), Part(0.42, 1200.0, 1.1), Part(0.03, 21_600.0, 1.0))
STRETCH: Final = {"s": 1.0, "m": 1.5, "l": 3.0}  # factor per size class: long responses take longer

_LEAST: Final = 1e-12  # smaller chances of survival count as this one: its logarithm must exist


@dataclass(frozen=True, slots=True)
class Prior:
    parts: tuple[Part, ...] = PARTS
    cancel_seconds: float = 20.0  # from the cancel request to the end of the batch
    sync_floor: float = 5.0
    tokens_per_s: float = 50.0
    billed_chance: float = 0.25  # that a cancelled batch's line is billed nevertheless
    flex_refusal: float = 0.1

    def hazard(self, seconds: float) -> float:
        """The cumulative hazard of a batch of the smallest size class: minus the logarithm of its survival."""
        if seconds <= 0:
            return 0.0
        return -math.log(min(1.0, max(_LEAST, sum(part.share * part.survival(seconds) for part in self.parts))))

    def sync_seconds(self, output_tokens: int) -> float:
        """A high quantile of the latency of a synchronous call with this output limit.

        The first 4,096 tokens count in full, the rest to a quarter: agents set limits such as 32,000 by default, and
        would otherwise never have time for a batch.
        """
        counted = output_tokens if output_tokens <= _IN_FULL else _IN_FULL + (output_tokens - _IN_FULL) / 4
        seconds = self.sync_floor + counted / self.tokens_per_s
        return min(SYNC_CAP, seconds)

    def sync_written(self, output_tokens: int) -> float:
        """The same for a call that has written this many tokens: each counts in full."""
        return self.sync_floor + output_tokens / self.tokens_per_s
