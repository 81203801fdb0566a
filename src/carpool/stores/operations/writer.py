"""Group commit: all queued operations run in one transaction and share one sync of the disk.

A durable commit waits for the disk, which takes milliseconds, while the statements of one operation take microseconds.
With one commit per operation, the disk would limit a store to a few hundred operations per second. So each operation
becomes a `Job` in a queue, and one writer thread repeatedly takes everything that is waiting, runs it in one
transaction, commits, and only then resolves the callers' futures. While one group commits, the next one collects: the
group size adapts to the load by itself, and a single operation on an idle store still commits immediately.

What a caller may rely on:

- A job is resolved after the commit of its group, so a caller that gets its result knows that it is persisted.
- Jobs run in the order in which they were queued.
- A job that fails does not affect the others. Adjacent jobs with the same `work` run together as one call, inside a
  savepoint. If that fails, it is rolled back, and its jobs are repeated one by one, each in its own savepoint.
- If the transaction itself fails (disk full, I/O error), it is rolled back and every job of the group gets the error.

`relaxed` jobs may be lost in a power failure, though not when only the process dies. A group of nothing but relaxed
jobs commits without waiting for the disk; one strict job makes the whole group strict. `deferred` jobs do not wake the
thread, because waking it costs the caller more than the job itself: they wait up to `DEFER_S` for other jobs, and
keep their place in the queue. `LARGEST_GROUP` limits how long the first job of a group waits for the last one.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from functools import cache
from itertools import groupby
from operator import attrgetter
from typing import Any

from msgspec import Struct

from carpool.core.errors import CarpoolError, Closed, StoreError
from carpool.stores.operations.session import Session

Work = Callable[[Session, list[Any]], list[Any]]
OnDone = Callable[[BaseException | None], None]  # called with None once written, or with the error

DEFER_S = 0.02  # how long a deferred job may wait for other jobs
LARGEST_GROUP = 10_000  # calls in a group; batch results arrive in chunks of 8,192


@cache  # one `Work` per operation, because adjacent jobs are grouped by it
def each(operation: Callable[..., Any]) -> Work:
    """Turns an operation on one item into a `Work` on many; an item is the tuple of its arguments."""

    def work(session: Session, items: list[Any]) -> list[Any]:
        return [operation(session, *item) for item in items]

    return work


class Job(Struct, eq=False):
    """One queued operation. Adjacent jobs with the same `work` run as one call with a list of their items.

    If a result in the returned list is an exception, it is raised for that job's caller only.
    """

    work: Work
    item: Any
    weight: int = 1  # the number of calls it concerns
    relaxed: bool = False  # may be lost in a power failure, but survives the end of the process
    future: asyncio.Future[Any] | None = None
    result: Any = None
    error: BaseException | None = None
    on_done: OnDone | None = None  # callback used instead of a future if the result is not needed
    loop: asyncio.AbstractEventLoop | None = None  # the caller's event loop

    def __repr__(self) -> str:  # without the data
        return f"<Job {self.work.__name__}>"

    def resolve(self) -> None:
        """Notifies the caller and drops all references: an error refers to frames that refer to the job."""
        error, result = self.error, self.result
        self.item = self.result = self.error = None
        if self.on_done is not None:
            self.on_done(error)
            return
        if self.future is None or self.future.done():  # the caller was cancelled; the job has run anyway
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class Groups(ABC):
    """Runs groups of jobs, each in one transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.commits = 0

    @abstractmethod
    def run(self, jobs: Sequence[Job]) -> None:
        """Leaves a result or an error in every job. Never raises."""

    @abstractmethod
    def _must_end(self, error: Exception) -> bool:
        """Whether an error in a savepoint ends the whole transaction."""

    @abstractmethod
    def _translate(self, error: Exception) -> StoreError | None:
        """Translates an error of the driver; None for any other error."""

    def _savepoint(self, run: Sequence[Job]) -> None:
        """Runs jobs in a savepoint. If that fails, they are repeated one by one, so that only the faulty ones fail."""
        session = self._session
        session.execute("SAVEPOINT job")
        try:
            work(session, run)
        except Exception as error:
            if self._must_end(error):
                raise
            session.execute("ROLLBACK TO job")
            session.execute("RELEASE job")
            session.forget()
            if len(run) == 1:
                run[0].error = self._callers_error(error)
            else:
                for job in run:
                    self._savepoint([job])
            return
        session.execute("RELEASE job")

    def _callers_error(self, error: Exception) -> Exception:
        """Returns the error to be raised for the callers."""
        if isinstance(error, CarpoolError):
            return error
        if isinstance(error, OverflowError | UnicodeError):
            translated = StoreError(f"The store {self._session.name} can't hold such a value: {error}.")
            translated.__cause__ = error
            return translated
        return self._translate(error) or error


def work(session: Session, run: Sequence[Job]) -> None:
    """Runs adjacent jobs with the same work as one call."""
    results = run[0].work(session, [job.item for job in run])
    for job, result in zip(run, results, strict=True):
        if isinstance(result, BaseException):
            job.error = result
        else:
            job.result = result


def runs(jobs: Sequence[Job]) -> Iterator[list[Job]]:
    """Splits jobs into runs of adjacent ones with the same work."""
    for _, run in groupby(jobs, key=attrgetter("work")):
        yield list(run)


class _Done:
    """A completed job as an awaitable: awaiting it never suspends and needs no event loop."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __await__(self) -> Generator[None, None, Any]:
        if self._job.error is not None:
            raise self._job.error
        return self._job.result
        yield


class Writer:
    """Runs jobs in order: in one thread, which runs all that are waiting as one group; or, if it is not `threaded`, at
    once in the caller's thread without ever suspending, for the deterministic simulator."""

    def __init__(self, groups: Groups, *, threaded: bool) -> None:
        self._groups = groups
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._waiting: list[Job] = []
        self._called = False  # the thread was already woken for the waiting jobs
        self._closing = False
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._work, name="carpool-store", daemon=True)
            self._thread.start()

    def do(
        self, work: Work, item: Any, weight: int = 1, *, relaxed: bool = False, deferred: bool = False
    ) -> Awaitable[Any]:
        """Queues a job. For a deferred one the thread is not woken at once: that costs the caller more than the job
        itself."""
        job = Job(work, item, weight, relaxed)
        if self._thread is None:
            self._run_here(job)
            return _Done(job)
        loop = asyncio.get_running_loop()
        job.future = loop.create_future()
        self._queue(job, loop, deferred)
        return job.future

    def enqueue(self, work: Work, item: Any, on_done: OnDone) -> None:
        """Queues a relaxed, deferred job that is not awaited; `on_done` is called on the event loop at its end."""
        job = Job(work, item, relaxed=True, on_done=on_done)
        if self._thread is None:
            self._run_here(job)
            job.resolve()
        else:
            self._queue(job, asyncio.get_running_loop(), deferred=True)

    def _run_here(self, job: Job) -> None:
        if self._closing:
            job.error = Closed("The store is closed.")
        else:
            self._groups.run([job])

    def _queue(self, job: Job, loop: asyncio.AbstractEventLoop, deferred: bool) -> None:
        job.loop = loop
        with self._lock:
            if self._closing:
                job.error = Closed("The store is closed.")
                loop.call_soon(job.resolve)
                return
            self._waiting.append(job)
            first, called = len(self._waiting) == 1, self._called
            self._called = called or not deferred
        if deferred and first:
            loop.call_later(DEFER_S, self._wake.set)
        elif not deferred and not called:
            self._wake.set()

    async def aclose(self) -> None:
        """Finishes all queued jobs, then ends the thread."""
        with self._lock:
            self._closing = True
        self._wake.set()
        if self._thread is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    def _work(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            while group := self._next_group():
                self._groups.run(group)
                _notify_callers(group)
            if self._closing and not self._waiting:
                return

    def _next_group(self) -> list[Job]:
        with self._lock:
            count, weight = 0, 0
            for job in self._waiting:
                weight += job.weight
                if count and weight > LARGEST_GROUP:
                    break
                count += 1
            group = self._waiting[:count]
            del self._waiting[:count]
            self._called = bool(self._waiting)
            return group


def _notify_callers(group: list[Job]) -> None:
    """Resolves the jobs, with one call per event loop."""
    loops: dict[asyncio.AbstractEventLoop, list[Job]] = {}
    for job in group:
        if job.loop is not None:
            loops.setdefault(job.loop, []).append(job)
    for loop, jobs in loops.items():
        try:
            loop.call_soon_threadsafe(_resolve_all, jobs)
        except RuntimeError:  # that loop is closed, so no caller is left
            continue


def _resolve_all(jobs: list[Job]) -> None:
    for job in jobs:
        job.resolve()
