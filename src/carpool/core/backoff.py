"""Exponential backoff with jitter."""

from __future__ import annotations

_MOST_DOUBLINGS = 60  # well beyond any limit in use, and well below the exponent at which a float overflows


def backoff(failures: int, first: float, most: float, luck: float = 0.5) -> float:
    """Returns the seconds to wait after `failures` consecutive failures: `first` after one, doubled after each further
    one, at most `most`. `luck` (0 to 1) adds jitter of up to 25 % in either direction, so that clients that failed
    together do not retry together; 0.5 means no jitter."""
    pause: float = min(first * 2.0 ** min(max(failures - 1, 0), _MOST_DOUBLINGS), most)
    return pause * (0.75 + luck / 2)
