"""What happens when, in a run without an event loop: a heap of times and actions."""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush

Action = Callable[[], None]


class Agenda:
    """Actions of equal time run in the order in which they were added, but those that shall come last after the others:
    an engine plans when everything that happened at that time has reached it."""

    def __init__(self, begins: float = 0.0) -> None:
        self.now = begins
        self._heap: list[tuple[float, bool, int, Action]] = []
        self._added = 0

    def at(self, time: float, action: Action, *, last: bool = False) -> None:
        self._added += 1
        heappush(self._heap, (max(time, self.now), last, self._added, action))

    def run(self, until: float = math.inf) -> None:
        """Run until nothing is left to do, or to a time."""
        while self._heap and self._heap[0][0] <= until:
            self.now, _, _, action = heappop(self._heap)
            action()


class Alarm:
    """Runs one action at the earliest of the times that were asked for, and then only when asked again."""

    def __init__(self, agenda: Agenda, action: Action) -> None:
        self._agenda = agenda
        self._action = action
        self._at = math.inf

    def by(self, time: float) -> None:
        if time < self._at:
            self._at = time
            self._agenda.at(time, self._ring, last=True)

    def _ring(self) -> None:
        if self._agenda.now >= self._at:  # otherwise it was brought forward, and has rung
            self._at = math.inf
            self._action()
