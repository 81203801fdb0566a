"""A queue of waiting calls: round robin between tag sets, first in first out within one.

A call whose deadline is near is served early, and its tag set skips its next turn in exchange. At most every other call
is served early, so calls with deadlines take at most half of the capacity from calls without.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")
Tags = tuple[tuple[str, str], ...]

MAX_STALE = 64

_UNTAGGED: Tags = ()


def tag_set(tags: Mapping[str, str] | None) -> Tags:
    return tuple(sorted(tags.items())) if tags else _UNTAGGED


@dataclass(slots=True, eq=False)
class QueueEntry(Generic[T]):
    """A waiting call. From `press_at` on its deadline is near; None without a deadline."""

    item: T
    tags: Tags
    press_at: float | None
    tokens: float


class FairQueue(Generic[T]):
    def __init__(self) -> None:
        # In the order of turns. Ordered dictionaries, because entries leave from anywhere in their queue.
        self._queues: dict[Tags, OrderedDict[QueueEntry[T], None]] = {}
        self._pressing: list[tuple[float, int, QueueEntry[T]]] = []  # a heap, also of entries that left
        self._owing: set[Tags] = set()
        self._number = count()
        self._hurried = False  # the last call was served early

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __contains__(self, place: QueueEntry[T]) -> bool:
        return place in self._queues.get(place.tags, ())

    def __iter__(self) -> Iterator[QueueEntry[T]]:
        return iter([place for queue in self._queues.values() for place in queue])

    def join(self, item: T, tags: Tags, press_at: float | None, tokens: float = 0.0) -> QueueEntry[T]:
        place = QueueEntry(item, tags, press_at, tokens)
        self._queues.setdefault(tags, OrderedDict())[place] = None
        if press_at is not None:
            if len(self._pressing) > 2 * len(self) + MAX_STALE:
                self._pressing = [entry for entry in self._pressing if entry[2] in self]
                heapq.heapify(self._pressing)
            heapq.heappush(self._pressing, (press_at, next(self._number), place))
        return place

    def leave(self, place: QueueEntry[T]) -> None:
        """Remove an entry. Safe to call twice."""
        if place in self:
            queue = self._queues[place.tags]
            del queue[place]
            if not queue:
                del self._queues[place.tags]
                self._owing.discard(place.tags)

    def next(self, now: float) -> QueueEntry[T]:
        """The entry whose turn it is. It stays in the queue until it leaves, so a second call returns the same."""
        if not self._queues:
            raise LookupError("Nobody waits here.")
        return self._most_urgent(now) or self._first()

    def called(self, place: QueueEntry[T], now: float) -> None:
        """Remove the entry whose turn it was, and pass the turn on."""
        self._hurried = place is self._most_urgent(now)
        queue = self._queues[place.tags]
        if self._hurried and next(iter(queue)) is not place:
            self._owing.add(place.tags)
        else:
            self._queues[place.tags] = self._queues.pop(place.tags)  # behind the others again
        self.leave(place)

    def _most_urgent(self, now: float) -> QueueEntry[T] | None:
        """The entry with the nearest deadline, unless the last one was already served early."""
        heap = self._pressing
        while heap and heap[0][2] not in self:
            heapq.heappop(heap)
        return heap[0][2] if heap and heap[0][0] <= now and not self._hurried else None

    def _first(self) -> QueueEntry[T]:
        while True:
            tags = next(iter(self._queues))
            if tags not in self._owing or len(self._queues) == 1:
                self._owing.discard(tags)
                return next(iter(self._queues[tags]))
            self._owing.discard(tags)
            self._queues[tags] = self._queues.pop(tags)
