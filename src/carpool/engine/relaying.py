"""Answers on `now` that are handed on while they come, without a task that waits for them.

A task, and what it waits on, is most of what a quick call costs. Here the connection's own events carry the answer:
from the wire through the books, which read along, to the door.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, cast

from msgspec import Struct

from carpool.engine.gating import Slot
from carpool.engine.tasks import Crew
from carpool.engine.unpacking import reading
from carpool.errors import NotConnected, WireError
from carpool.model import Entry, Headers, Usage
from carpool.ports import Dialect, PouringWire, Tether, UsageTap, WireRequest, WireResponse


class Outlet(Protocol):
    """Where an answer goes. One of the last two ends it."""

    def answered(self, status: int, headers: Headers) -> None: ...
    def add(self, chunk: bytes) -> None: ...
    def rest(self) -> None: ...
    def finish(self, entry: Entry) -> None: ...
    def fail(self, error: WireError, entry: Entry | None) -> None: ...


class Books(Protocol):
    """What becomes of an attempt in the ledger."""

    def close(self, entry: Entry, status: int, dialect: str, usage: Usage | None) -> Entry: ...
    def void(self, entry: Entry) -> None: ...


class Purchase(Struct, eq=False):
    """One purchase under way. It stands in the ledger as an attempt before it is started.

    `ports.Taker` for the wire. The door may pause it, and give it up: then its outlet hears no more of it.
    """

    books: Books
    dialect: Dialect
    attempt: Entry
    outlet: Outlet
    slot: Slot
    status: int = 0
    headers: Headers = ()
    tap: UsageTap | None = None
    read: Callable[[bytes], None] | None = None
    tether: Tether | None = None
    making: asyncio.Task[Any] | None = None  # of a new connection

    def __repr__(self) -> str:  # never what passes
        return f"<{type(self).__name__}>"

    def start(self, wire: PouringWire, request: WireRequest, crew: Crew) -> None:
        try:
            self.tether = wire.pour(request, self)
        except NotConnected as error:
            asyncio.get_running_loop().call_soon(self.fail, error)
            return
        if self.tether is None:
            self.making = crew.spawn(self._start_anew(wire, request), "connect")

    async def _start_anew(self, wire: PouringWire, request: WireRequest) -> None:
        try:
            self.tether = await wire.pour_anew(request, self)
        except NotConnected as error:
            self.fail(error)

    # ------------------------------------------------------------ told by the wire

    def answered(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers
        self.slot.answered(cast("WireResponse", self))  # it looks at the head only
        self.tap = self.dialect.usage_tap()
        self.read = reading(self.tap, headers)
        self.outlet.answered(status, headers)

    def add(self, chunk: bytes) -> None:
        assert self.read is not None
        self.read(chunk)
        self.outlet.add(chunk)

    def rest(self) -> None:
        self.outlet.rest()

    def finish(self) -> None:
        assert self.tap is not None
        self.tether = None
        self.outlet.finish(self._closed(self.tap.usage()))

    def fail(self, error: WireError) -> None:
        entry = self.tether = None
        self.slot.failed(error)
        if isinstance(error, NotConnected):
            self.books.void(self.attempt)
        elif self.status:
            entry = self._closed(None)  # cut short: what was billed is unknown
        self.outlet.fail(error, entry)

    def _closed(self, usage: Usage | None) -> Entry:
        return self.books.close(self.attempt, self.status, self.dialect.seller, usage)

    # ------------------------------------------------------------ held by the door

    def pause(self, paused: bool) -> None:
        if self.tether is not None:
            self.tether.pause(paused)

    def give_up(self) -> Entry | None:
        """Aborts the request; what it was billed stays unknown."""
        if self.making is not None:
            self.making.cancel()
        if self.tether is not None:
            self.tether.give_up()
        self.slot.failed(asyncio.CancelledError())
        return self._closed(None) if self.status else None
