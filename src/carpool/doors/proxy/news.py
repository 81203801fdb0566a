"""What happens in the engine, told to whoever listens at `/carpool/events`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection

import msgspec

from carpool.doors.asgi import EVENT_STREAM, Disconnected, send_chunk, send_head
from carpool.doors.proxy.visit import Visit
from carpool.engine import Event
from carpool.engine.events import Bulletin
from carpool.errors import TimedOut

MOST_UNREAD = 1000  # events, before a reader is too slow
SILENCE_S = 15.0
SLOWEST_READ_S = 30.0

KEEP_ALIVE = b": still here\n\n"
TOO_SLOW = b": %d events were missed, because they were not read in time. Connect again.\n\n"
GOOD_BYE = b": carpool is stopping.\n\n"


class _Listener:
    """`viewer` names the credentials whose events it may hear; None: all."""

    def __init__(self, viewer: Collection[str] | None) -> None:
        self._viewer = viewer
        self.unread: deque[Event] = deque()
        self.missed = 0
        self.woken = asyncio.Event()

    def tell(self, event: Event) -> None:
        if self._viewer is not None and event.credential not in self._viewer:
            return
        if len(self.unread) < MOST_UNREAD and not self.missed:
            self.unread.append(event)
        else:
            self.missed += 1
        self.woken.set()


class News:
    """Events are put into words only while somebody listens."""

    def __init__(self, bulletin: Bulletin) -> None:
        self._bulletin = bulletin
        self._listeners: set[_Listener] = set()
        self._stopping = False

    def _tell(self, event: Event) -> None:
        for listener in self._listeners:
            listener.tell(event)

    def stop(self) -> None:
        """Ends every listener's stream."""
        self._stopping = True
        for listener in self._listeners:
            listener.woken.set()

    async def listen(self, visit: Visit, viewer: Collection[str] | None = None) -> None:
        listener = _Listener(viewer)
        if not self._listeners:
            self._bulletin.add(self._tell)
        self._listeners.add(listener)
        try:
            await send_head(visit.send, 200, [EVENT_STREAM, ("cache-control", "no-cache")])
            await self._pump(listener, visit)
        finally:
            self._listeners.discard(listener)
            if not self._listeners:
                self._bulletin.remove(self._tell)

    async def _pump(self, listener: _Listener, visit: Visit) -> None:
        visit.leaving.add_done_callback(lambda _: listener.woken.set())
        while not visit.gone:
            chunk = b"".join(map(_words, _taken(listener.unread))) or KEEP_ALIVE
            await _within(SLOWEST_READ_S, visit, chunk)
            if listener.missed and not listener.unread:
                await _within(SLOWEST_READ_S, visit, TOO_SLOW % listener.missed, more=False)
                return
            if self._stopping:
                await _within(SLOWEST_READ_S, visit, GOOD_BYE, more=False)
                return
            await _silence(listener)
        raise Disconnected


async def _silence(listener: _Listener) -> None:
    try:
        async with asyncio.timeout(SILENCE_S):
            await listener.woken.wait()
    except TimeoutError:
        return
    listener.woken.clear()


async def _within(seconds: float, visit: Visit, chunk: bytes, *, more: bool = True) -> None:
    try:
        async with asyncio.timeout(seconds):
            await send_chunk(visit.send, chunk, more=more)
    except TimeoutError:
        raise TimedOut("A listener at /carpool/events reads nothing. Its connection is closed.") from None


def _taken(unread: deque[Event]) -> list[Event]:
    events = list(unread)
    unread.clear()
    return events


def _words(event: Event) -> bytes:
    name = type(event).__name__
    said = {"type": name, **msgspec.to_builtins(event), "credential": event.credential[:8]}
    return b"event: %b\ndata: %b\n\n" % (
        name.encode(),
        msgspec.json.encode(said),
    )
