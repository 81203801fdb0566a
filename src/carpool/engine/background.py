"""Background tasks. Every task of carpool is started here, so that none fails without a report and all end on close."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from carpool.core.errors import error_name

T = TypeVar("T")

log = logging.getLogger("carpool.engine")


class BackgroundTasks:
    """Keeps background tasks alive and ends them together. A task that fails is reported, never silent."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self.failures = 0

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Starts a task that nobody awaits."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def spawn_awaited(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Starts a task whose result the caller awaits. It is only kept alive, and cancelled on close."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.log_failure(error, task.get_name())

    def log_failure(self, error: BaseException | None, name: str = "in the background") -> None:
        """Reports the result of work done elsewhere; `error` is None if it succeeded."""
        if error is not None:
            self.failures += 1
            log.error("The task %s failed: %s", name, error_name(error))

    @property
    def busy(self) -> bool:
        return bool(self._tasks)

    def abort(self) -> None:
        """Cancels all tasks at once."""
        for task in list(self._tasks):
            task.cancel()

    async def finish(self, timeout: float) -> None:
        """Waits up to `timeout` for the running tasks, and cancels the rest."""
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=timeout)
        self.abort()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=5)
