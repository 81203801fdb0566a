"""The engine's crew: every background task has an owner, a name, and somebody who hears of its failure."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from carpool.crashes import named

T = TypeVar("T")

log = logging.getLogger("carpool.engine")


class Crew:
    """Keeps background tasks alive and ends them together. A task that fails is reported, never silent."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Future[Any]] = set()
        self.failures = 0

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Work that nobody awaits."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def lend(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Work whose result, or failure, somebody awaits; it is only kept alive and ended here."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def mind(self, work: Awaitable[Any], name: str) -> None:
        """Work that is under way already, and that nobody awaits. A future needs no task of its own for that."""
        if isinstance(work, asyncio.Future):
            self._tasks.add(work)
            work.add_done_callback(self._done)
        else:
            self.spawn(_awaited(work), name)

    def _done(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.told(error, task.get_name() if isinstance(task, asyncio.Task) else "in the background")

    def told(self, error: BaseException | None, name: str = "in the background") -> None:
        """What became of work that others do; None where it went well."""
        if error is not None:
            self.failures += 1
            log.error("The task %s failed: %s", name, named(error))

    @property
    def busy(self) -> bool:
        return bool(self._tasks)

    def abort(self) -> None:
        """Cancels everything at once."""
        for task in list(self._tasks):
            task.cancel()

    async def rest(self, timeout: float) -> None:
        """Waits for what is under way, at most so long, and cancels the rest."""
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=timeout)
        self.abort()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=5)


async def _awaited(work: Awaitable[Any]) -> None:
    await work
