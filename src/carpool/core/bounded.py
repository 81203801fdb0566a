"""Limits on what would otherwise grow without end: caches whose keys others choose, and pauses that double."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

_MAX_DOUBLINGS = 60  # well beyond any limit in use, and well below the exponent at which a float overflows


class BoundedMap(OrderedDict[K, V]):
    """Holds at most `max_size` keys: a new key removes the one that was set longest ago."""

    def __init__(self, max_size: int) -> None:
        super().__init__()
        self._max_size = max_size

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._max_size:
            self.popitem(last=False)


def backoff(failures: int, first: float, maximum: float, jitter: float = 0.5) -> float:
    """Returns the seconds to wait after `failures` consecutive failures: `first` after one, doubled after each further
    one, at most `maximum`. `jitter` (0 to 1) varies it by up to 25 % in either direction, so that clients that failed
    together do not retry together; 0.5 means no jitter."""
    pause: float = min(first * 2.0 ** min(max(failures - 1, 0), _MAX_DOUBLINGS), maximum)
    return pause * (0.75 + jitter / 2)
