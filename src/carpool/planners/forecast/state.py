"""What a forecast has learned, as bytes: the counts that are not zero, by class."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from carpool.core.model import Value

Key = tuple[str, str, str, str]  # kind, provider, model, size class
Row = tuple[Key, float, list[float]]  # with the time of the last observation, and the counts

_VERSION: Final = 1  # of the bins: a state with others is of no use


class _ClassState(Value, frozen=True, array_like=True):
    key: Key
    at: float
    counts: dict[int, float]
    size: int


class _State(Value, frozen=True):
    version: int
    classes: list[_ClassState]


def encode(rows: Iterable[Row]) -> bytes:
    classes = [_ClassState(key, at, _nonzero(counts), len(counts)) for key, at, counts in rows]
    return msgspec.msgpack.encode(_State(_VERSION, classes))


def _nonzero(counts: Iterable[float]) -> dict[int, float]:
    return {place: round(count, 6) for place, count in enumerate(counts) if count > 1e-6}


def decode(state: bytes) -> list[Row]:
    """Nothing if the state was written by a version with other bins, or is damaged: it is learned again."""
    try:
        decoded = msgspec.msgpack.decode(state, type=_State)
    except msgspec.DecodeError:
        return []
    if decoded.version != _VERSION:
        return []
    return [(one.key, one.at, [one.counts.get(place, 0.0) for place in range(one.size)]) for one in decoded.classes]
