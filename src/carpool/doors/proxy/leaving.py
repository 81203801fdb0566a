"""Clients that hang up: what is done for them ends, and the upstream request with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from carpool.doors.asgi import Disconnected, Scope
from carpool.doors.proxy.connection import Leaving, watcher
from carpool.engine.tasks import Crew
from carpool.errors import Closed

T = TypeVar("T")


class Cuttable(Protocol):
    """An answer that is given without a task."""

    def cut(self) -> None: ...


class Guard:
    """Does work for clients as long as they are there. `passing` holds what a stop may cut, and so does `relays`."""

    def __init__(self) -> None:
        self.crew = Crew()
        self.relays: set[Cuttable] = set()
        self._last = asyncio.Event()  # tells that no relay is left
        self.passing: set[_Errand] = set()
        self._others: set[_Errand] = set()

    def watch(self, scope: Scope, listen: Callable[[], Coroutine[Any, Any, None]]) -> Leaving:
        """Where the server does not say that a client hung up, a task of its own listens for it."""
        watch = watcher(scope)
        return self.crew.lend(listen(), "client") if watch is None else watch()

    async def unless_gone(self, work: Coroutine[Any, Any, T], leaving: Leaving, *, passing: bool = False) -> T:
        """Does the work, unless its client hangs up first: then it is cancelled, and its upstream request with it.

        It is done in the request's own task, since another one would be most of what a quick call costs.
        """
        errand, group = _Errand(), self.passing if passing else self._others
        group.add(errand)
        leaving.add_done_callback(errand.left)
        try:
            return await work
        except asyncio.CancelledError:
            errand.explain()
            raise
        finally:
            leaving.remove_done_callback(errand.left)
            group.discard(errand)
            errand.end()

    @property
    def busy(self) -> bool:
        return bool(self.passing or self._others or self.relays or self.crew.busy)

    def ended(self, relay: Cuttable) -> None:
        self.relays.discard(relay)
        if not self.relays:
            self._last.set()

    async def relayed(self) -> None:
        """Returns when nothing is relayed any more."""
        while self.relays:
            self._last.clear()
            await self._last.wait()

    async def cut(self) -> None:
        """Cuts what passes through."""
        for relay in list(self.relays):
            relay.cut()
        await _stop(self.passing)

    async def aclose(self) -> None:
        await _stop(self._others)
        await self.cut()
        await self.crew.rest(timeout=0.1)


class _Errand:
    """Work for one client, in the task of its request. Remembers why it was cancelled, if it was from here."""

    __slots__ = ("_why", "task")

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self._why: Exception | None = None

    def left(self, leaving: Leaving) -> None:
        if not leaving.cancelled():
            self.cancel(Disconnected())

    def cancel(self, why: Exception) -> None:
        if self._why is None:
            self._why = why
            self.task.cancel()

    def explain(self) -> None:
        """Somebody else's cancellation is not ours to explain."""
        if self._why is not None and self.task.cancelling() == 1:
            raise self._why from None

    def end(self) -> None:
        if self._why is not None:
            self.task.uncancel()


async def _stop(group: set[_Errand]) -> None:
    for errand in list(group):
        errand.cancel(Closed("carpool is stopping. Send this call again in a moment."))
    tasks = [errand.task for errand in group]
    if tasks:
        await asyncio.wait(tasks, timeout=1.0)
