"""Clients that disconnect: their work is cancelled, and the upstream request with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from carpool.core.errors import Closed
from carpool.engine.context import BackgroundTasks
from carpool.frontends.proxy.http.asgi import Disconnected, Scope
from carpool.frontends.proxy.http.connection import Leaving, watcher

T = TypeVar("T")


class Cuttable(Protocol):
    """A response in progress that has no task."""

    def cut(self) -> None: ...


class DisconnectGuard:
    """Runs work for clients while they are connected. A shutdown may cut off `passing` and `relays`."""

    def __init__(self) -> None:
        self.background = BackgroundTasks()
        self.relays: set[Cuttable] = set()
        self._no_relays = asyncio.Event()  # set when no relay is left
        self.passing: set[_ClientWork] = set()
        self._others: set[_ClientWork] = set()

    def watch(self, scope: Scope, listen: Callable[[], Coroutine[Any, Any, None]]) -> Leaving:
        """A future for the client's disconnect. If the server offers none, a task listens for it."""
        watch = watcher(scope)
        return self.background.lend(listen(), "client") if watch is None else watch()

    async def unless_gone(self, work: Coroutine[Any, Any, T], leaving: Leaving, *, passing: bool = False) -> T:
        """Runs the work; cancels it and its upstream request if the client disconnects first.

        It runs in the request's own task, because another task would be most of the cost of a quick call.
        """
        client_work, group = _ClientWork(), self.passing if passing else self._others
        group.add(client_work)
        leaving.add_done_callback(client_work.left)
        try:
            return await work
        except asyncio.CancelledError:
            client_work.explain()
            raise
        finally:
            leaving.remove_done_callback(client_work.left)
            group.discard(client_work)
            client_work.end()

    @property
    def busy(self) -> bool:
        return bool(self.passing or self._others or self.relays or self.background.busy)

    def ended(self, relay: Cuttable) -> None:
        self.relays.discard(relay)
        if not self.relays:
            self._no_relays.set()

    async def relayed(self) -> None:
        """Returns when no relay is left."""
        while self.relays:
            self._no_relays.clear()
            await self._no_relays.wait()

    async def cut(self) -> None:
        """Cuts off everything that passes through."""
        for relay in list(self.relays):
            relay.cut()
        await _stop(self.passing)

    async def aclose(self) -> None:
        await _stop(self._others)
        await self.cut()
        await self.background.rest(timeout=0.1)


class _ClientWork:
    """Work for one client, in the task of its request. Records reason this module cancelled it."""

    __slots__ = ("_reason", "task")

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self._reason: Exception | None = None

    def left(self, leaving: Leaving) -> None:
        if not leaving.cancelled():
            self.cancel(Disconnected())

    def cancel(self, reason: Exception) -> None:
        if self._reason is None:
            self._reason = reason
            self.task.cancel()

    def explain(self) -> None:
        """Raises the reason, unless the task was also cancelled from elsewhere."""
        if self._reason is not None and self.task.cancelling() == 1:
            raise self._reason from None

    def end(self) -> None:
        if self._reason is not None:
            self._reason = None  # breaks the cycle: the raised exception holds the frames that hold this
            self.task.uncancel()


async def _stop(group: set[_ClientWork]) -> None:
    for client_work in list(group):
        client_work.cancel(Closed("carpool is stopping. Send this call again in a moment."))
    tasks = [client_work.task for client_work in group]
    if tasks:
        await asyncio.wait(tasks, timeout=1.0)
