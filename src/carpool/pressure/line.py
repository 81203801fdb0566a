"""Who waits at a gate, and whose turn it is: fair between tag sets, first come first served within one.

A call whose deadline presses goes before its turn, and its tag set pays with its next one. That is so for every other
call at most: whoever sets deadlines takes no more than half from those who set none.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")
Tags = tuple[tuple[str, str], ...]

MOST_STALE = 64

_UNTAGGED: Tags = ()


def tag_set(tags: Mapping[str, str] | None) -> Tags:
    return tuple(sorted(tags.items())) if tags else _UNTAGGED


class Place(Generic[T]):
    """One who waits. `press_at`: from when on its deadline presses; None where there is none."""

    __slots__ = ("gone", "item", "press_at", "tags", "tokens")

    def __init__(self, item: T, tags: Tags, press_at: float | None, tokens: float) -> None:
        self.item = item
        self.tags = tags
        self.press_at = press_at
        self.tokens = tokens
        self.gone = False


class Line(Generic[T]):
    def __init__(self) -> None:
        self._queues: dict[Tags, deque[Place[T]]] = {}  # in the order of their turns
        self._pressing: list[tuple[float, int, Place[T]]] = []
        self._owing: set[Tags] = set()
        self._number = count()
        self._length = 0
        self._hurried = False  # the last one went before its turn
        self._stale = 0  # those who left from the middle, and are still in the queues

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Place[T]]:
        return (place for queue in list(self._queues.values()) for place in list(queue) if not place.gone)

    def join(self, item: T, tags: Tags, press_at: float | None, tokens: float = 0.0) -> Place[T]:
        place = Place(item, tags, press_at, tokens)
        self._queues.setdefault(tags, deque()).append(place)
        if press_at is not None:
            heapq.heappush(self._pressing, (press_at, next(self._number), place))
        self._length += 1
        return place

    def leave(self, place: Place[T]) -> None:
        """It waits no more. Safe to call twice."""
        if not place.gone:
            place.gone = True
            self._length -= 1
            self._stale += 1
            self._sweep(place.tags)
            if self._stale > self._length + MOST_STALE:
                self._compact()

    def next(self, now: float) -> Place[T]:
        """Whose turn it is. It stays until it leaves; asking twice gives the same one."""
        if not self._length:
            raise LookupError("Nobody waits here.")
        return self._hasty(now) or self._first()

    def called(self, place: Place[T], now: float) -> None:
        """The one whose turn it was goes."""
        self._hurried = place is self._hasty(now)
        queue = self._queues[place.tags]
        if self._hurried and queue[0] is not place:
            self._owing.add(place.tags)
        else:
            self._queues[place.tags] = self._queues.pop(place.tags)  # behind the others again
        self.leave(place)

    def _hasty(self, now: float) -> Place[T] | None:
        """The one whose deadline presses most, unless the last turn was taken so."""
        heap = self._pressing
        while heap and heap[0][2].gone:
            heapq.heappop(heap)
        return heap[0][2] if heap and heap[0][0] <= now and not self._hurried else None

    def _first(self) -> Place[T]:
        while True:
            tags = next(iter(self._queues))
            if tags not in self._owing or len(self._queues) == 1:
                self._owing.discard(tags)
                return self._queues[tags][0]
            self._owing.discard(tags)
            self._queues[tags] = self._queues.pop(tags)

    def _sweep(self, tags: Tags) -> None:
        """At the head of a queue stands one who waits; a queue of nobody is none."""
        queue = self._queues[tags]
        while queue and queue[0].gone:
            queue.popleft()
        if not queue:
            del self._queues[tags]
            self._owing.discard(tags)

    def _compact(self) -> None:
        """Forgets those who left behind others that still wait."""
        kept = ((tags, deque(place for place in queue if not place.gone)) for tags, queue in self._queues.items())
        self._queues = {tags: queue for tags, queue in kept if queue}
        self._pressing = [entry for entry in self._pressing if not entry[2].gone]
        heapq.heapify(self._pressing)
        self._stale = 0
