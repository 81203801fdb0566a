"""Counts that lose weight with time: half of it in every `half_life` seconds of observed time.

A gap without observations counts as one half-life at most, so that a quiet night does not erase what is known.

Instead of reducing all counts again and again, new observations get an ever larger weight (`scale`). The counts are
divided by it when they are read, and all of them at once before they become too large for a float.

Several engines share what they learn: each of them loads the stored counts, adds what it has learned since its last
save, and stores the sum. `_saved` is what is stored already.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

_LARGEST_SCALE: Final = 1e9


class DecayedCounts:
    """A row of counts that decay together."""

    __slots__ = ("_counts", "_dumped", "_half_life", "_saved", "at", "scale")

    def __init__(self, size: int, half_life: float) -> None:
        self._half_life = half_life
        self._counts = [0.0] * size
        self._saved = self._dumped = (0.0,) * size
        self.scale = 1.0  # the weight of an observation that is made now
        self.at: float | None = None  # time of the last observation

    def add(self, amounts: Iterable[tuple[int, float]], now: float) -> None:
        self._advance(now)
        counts, scale = self._counts, self.scale
        for place, amount in amounts:
            counts[place] += amount * scale

    def raw(self) -> Sequence[float]:
        """The counts, each to be divided by `scale`."""
        return self._counts

    def dump(self) -> list[float]:
        """The counts, to be stored. If that succeeds, `saved` is to be called."""
        self._dumped = tuple(self._counts)
        return [count / self.scale for count in self._counts]

    def saved(self) -> None:
        self._saved = self._dumped

    def load(self, counts: Sequence[float], at: float) -> None:
        """Replaces what was saved by the stored counts of this time. What was learned since then is kept."""
        self._advance(at)
        assert self.at is not None
        weight = self.scale / self._growth(self.at - at)
        stored = tuple(count * weight for count in counts)
        self._counts = [
            max(0.0, count - saved) + there
            for count, saved, there in zip(self._counts, self._saved, stored, strict=True)
        ]
        self._saved = self._dumped = stored

    def _advance(self, now: float) -> None:
        if self.at is None:
            self.at = now
        elif now > self.at:
            self.scale *= self._growth(now - self.at)
            self.at = now
            if self.scale > _LARGEST_SCALE:
                self._shrink()

    def _growth(self, gap: float) -> float:
        return math.exp2(min(gap / self._half_life, 1.0))

    def _shrink(self) -> None:
        self._counts = [count / self.scale for count in self._counts]
        self._saved = tuple(count / self.scale for count in self._saved)
        self._dumped = tuple(count / self.scale for count in self._dumped)
        self.scale = 1.0
