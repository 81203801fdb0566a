"""The engine's events as server-sent events, at `/carpool/events`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection

import msgspec

from carpool.core.errors import TimedOut
from carpool.engine import Event
from carpool.engine.events import EventHooks
from carpool.frontends.proxy.http.asgi import EVENT_STREAM, Disconnected, send_chunk, send_head
from carpool.frontends.proxy.request_context import RequestContext

MOST_UNREAD = 1000  # events that a slow reader may lag behind
SILENCE_S = 15.0  # between keep-alive comments
SLOWEST_READ_S = 30.0  # for the client to read a chunk

KEEP_ALIVE = b": still here\n\n"
TOO_SLOW = b": %d events were missed, because they were not read in time. Connect again.\n\n"
GOOD_BYE = b": carpool is stopping.\n\n"


class _Subscriber:
    """One client. `viewer`: the credentials whose events it may see; None: all."""

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


class EventStream:
    """Sends events to subscribers. Hooks into the engine only while there are any."""

    def __init__(self, event_hooks: EventHooks) -> None:
        self._event_hooks = event_hooks
        self._subscribers: set[_Subscriber] = set()
        self._stopping = False

    def _publish(self, event: Event) -> None:
        for subscriber in self._subscribers:
            subscriber.tell(event)

    def stop(self) -> None:
        """Ends every subscriber's stream."""
        self._stopping = True
        for subscriber in self._subscribers:
            subscriber.woken.set()

    async def listen(self, request: RequestContext, viewer: Collection[str] | None = None) -> None:
        subscriber = _Subscriber(viewer)
        if not self._subscribers:
            self._event_hooks.add(self._publish)
        self._subscribers.add(subscriber)
        try:
            await send_head(request.send, 200, [EVENT_STREAM, ("cache-control", "no-cache")])
            await self._pump(subscriber, request)
        finally:
            self._subscribers.discard(subscriber)
            if not self._subscribers:
                self._event_hooks.remove(self._publish)

    async def _pump(self, subscriber: _Subscriber, request: RequestContext) -> None:
        request.leaving.add_done_callback(lambda _: subscriber.woken.set())
        while not request.gone:
            chunk = b"".join(map(_encoded, _drain(subscriber.unread))) or KEEP_ALIVE
            await _send_in_time(SLOWEST_READ_S, request, chunk)
            if subscriber.missed and not subscriber.unread:
                await _send_in_time(SLOWEST_READ_S, request, TOO_SLOW % subscriber.missed, more=False)
                return
            if self._stopping:
                await _send_in_time(SLOWEST_READ_S, request, GOOD_BYE, more=False)
                return
            await _wait_for_events(subscriber)
        raise Disconnected


async def _wait_for_events(subscriber: _Subscriber) -> None:
    try:
        async with asyncio.timeout(SILENCE_S):
            await subscriber.woken.wait()
    except TimeoutError:
        return
    subscriber.woken.clear()


async def _send_in_time(seconds: float, request: RequestContext, chunk: bytes, *, more: bool = True) -> None:
    try:
        async with asyncio.timeout(seconds):
            await send_chunk(request.send, chunk, more=more)
    except TimeoutError:
        raise TimedOut("A listener at /carpool/events reads nothing. Its connection is closed.") from None


def _drain(unread: deque[Event]) -> list[Event]:
    events = list(unread)
    unread.clear()
    return events


def _encoded(event: Event) -> bytes:
    name = type(event).__name__
    fields = {"type": name, **msgspec.to_builtins(event), "credential": event.credential[:8]}
    return b"event: %b\ndata: %b\n\n" % (
        name.encode(),
        msgspec.json.encode(fields),
    )
