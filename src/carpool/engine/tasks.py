"""The tasks of this engine: binds calls to the deadline of their task, counts what happens to them, and shares both
with other engines through the store.

The first call that is bound by a task waits until the store has told what it knows of that task, because another
process may have begun it hours ago. Afterwards what happens is written every few seconds, and what others wrote comes
back with it. A crash loses the last seconds of counts and costs, but no deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import islice

from carpool.core.errors import CarpoolError
from carpool.core.model import Call, Entry, Outcome, OutcomeKind
from carpool.core.ports import Clock, TaskStore
from carpool.engine.background import BackgroundTasks
from carpool.planners.forecast import Forecast
from carpool.planners.tasks import CONVERSATION, Task, TaskBook, TaskSummary, summarised

WRITE_S = 3.0  # what a crash may lose
GROUP = 500  # tasks written together
_CONVERSATIONS = 8192  # names cached: every turn of a conversation needs its name


class Tasks:
    """`key` is a secret: the name of a conversation says nothing of its content to those who don't have it."""

    def __init__(
        self,
        store: TaskStore,
        clock: Clock,
        key: bytes,
        forecast: Forecast,
        book: TaskBook,
        background: BackgroundTasks,
        trouble: Callable[[str, BaseException], None],
    ) -> None:
        self._store = store
        self._clock = clock
        self._key = key
        self._forecast = forecast
        self._background = background
        self._trouble = trouble
        self._book = book
        self._merging = asyncio.Lock()
        self._writing: asyncio.Task[None] | None = None
        self.tickets = self._book.tickets
        self.conversation_name: Callable[[str, int], str] = lru_cache(_CONVERSATIONS)(self._conversation_name)

    def _conversation_name(self, credential: str, conversation: int) -> str:
        """The name of the task of a call that only its conversation tells."""
        text = f"{credential} {conversation}".encode()
        return CONVERSATION + blake2b(text, digest_size=6, key=self._key).hexdigest()

    # ------------------------------------------------------------ deadlines

    def knows(self, call: Call) -> bool:
        """Whether `bound` knows what other processes know of the call's task."""
        return self._book.knows(call, self._clock.now())

    def bound(self, call: Call) -> Call:
        """The call with the deadline that its task leaves it."""
        bound = self._book.bound(call, self._clock.now(), self._forecast)
        self._write_soon()
        return bound

    async def learn(self, call: Call) -> None:
        """Asks the store for the call's task, if this engine does not know it."""
        if not self.knows(call):
            task = self._book.opened(call, self._clock.now())
            try:
                await self._merge([task])
            except CarpoolError as error:  # a call on `now` needs no store
                self._trouble("looking up a task", error)

    # ------------------------------------------------------------ what happens to the calls

    def asked(self, call: Call, *, again: bool = False) -> None:
        self._book.asked(call, self._clock.now(), again=again)
        self._write_soon()

    def closed(self, entry: Entry, *, answered: bool) -> None:
        """A call that is not on disk has ended, with this purchase."""
        self._book.bought(entry)
        self._book.ended(entry.ticket, self._clock.now(), answered=answered)
        self._write_soon()

    def failed(self, ticket: int) -> None:
        """A call that is not on disk has no answer."""
        self._book.ended(ticket, self._clock.now(), answered=False)

    def settled(self, ticket: int, outcome: Outcome | None, entry: Entry | None) -> None:
        """Something was bought for a call on disk, or it has its outcome."""
        if entry is not None:
            self._book.bought(entry)
        if outcome is not None:
            succeeded = outcome.kind is OutcomeKind.SUCCEEDED
            self._book.ended(ticket, self._clock.now(), answered=succeeded)
        self._write_soon()

    # ------------------------------------------------------------ the store

    def _write_soon(self) -> None:
        if self._writing is None and self._book.changed:
            self._writing = self._background.spawn(self._write_later(), "tasks")

    async def _write_later(self) -> None:
        try:
            while self._book.changed:
                await self._clock.sleep(WRITE_S)
                await self.flush()
        finally:
            self._writing = None

    async def flush(self) -> None:
        """Writes what happened so far. What the store does not take now is tried again."""
        try:
            while tasks := list(islice(self._book.changed.values(), GROUP)):
                await self._merge(tasks)
        except CarpoolError as error:
            self._trouble("writing tasks", error)

    async def listed(self, since: float, limit: int, credentials: Sequence[str] | None) -> list[TaskSummary]:
        """The tasks that were active lately, the latest first; with `credentials` only theirs."""
        await self.flush()
        now = self._clock.now()
        return [summarised(record, now) for record in await self._store.tasks(since, limit, credentials)]

    async def _merge(self, tasks: Sequence[Task]) -> None:
        async with self._merging:  # a change begins where the one before ended
            changes = [self._book.change(task) for task in tasks]
            try:
                stored = await self._store.merge_tasks(changes)
            except BaseException:
                self._book.changed |= {(task.credential, task.name): task for task in tasks}
                raise
            for task, record in zip(tasks, stored, strict=True):
                self._book.merged(task, record)

    async def close(self) -> None:
        """Writes the rest at once, instead of when it would be due."""
        if self._writing is not None:
            self._writing.cancel()
        await self.flush()
