"""Clients that hold a connection and do nothing with it: all of them are looked at now and then, by one timer.

A timer for each would be among the dearest things that a quick request costs, and the time is not critical: who is
given a minute may have a quarter more.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection
from typing import Any, Protocol
from weakref import WeakKeyDictionary

LOOKS = 4  # in the shortest time that is given to anybody
SELDOM_S = 15.0


class Looked(Protocol):
    def look(self, sender: int, reader: int) -> None:
        """Called again and again. Who sends nothing is cut after `sender` looks, who reads nothing after `reader`."""
        ...


class Pace:
    """Looks at the connections of one server as long as there are any."""

    def __init__(self, connections: Collection[Looked], sender_s: float, reader_s: float) -> None:
        self._connections = connections
        self._every = min(sender_s / LOOKS, reader_s / LOOKS, SELDOM_S)
        self._sender, self._reader = math.ceil(sender_s / self._every), math.ceil(reader_s / self._every)
        self._timer: asyncio.TimerHandle | None = None

    def keep(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is None:
            self._timer = loop.call_later(self._every, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        for one in list(self._connections):
            one.look(self._sender, self._reader)
        if self._connections:
            self.keep(loop)


_PACES: WeakKeyDictionary[Any, Pace] = WeakKeyDictionary()


def pace_of(server: Any, connections: Collection[Looked], sender_s: float, reader_s: float) -> Pace:
    """The one of a server, which is known by its state."""
    pace = _PACES.get(server)
    if pace is None:
        pace = _PACES[server] = Pace(connections, sender_s, reader_s)
    return pace
