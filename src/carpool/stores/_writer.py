"""Group commit: everything that is waiting is done in one transaction, and paid for with one sync of the disk."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Generator, Sequence
from functools import cache
from typing import Any, Protocol

from msgspec import Struct

from carpool.errors import CarpoolError, Closed, StoreError
from carpool.stores._session import Session
from carpool.stores._sqlite_session import SqliteSession
from carpool.stores._trouble import translate

Work = Callable[[Session, list[Any]], list[Any]]
Told = Callable[[BaseException | None], None]  # whether something was written, or why not

UNHURRIED_S = 0.02  # how long a job that nobody waits for may wait for company
LARGEST_GROUP = 10_000  # calls: bounds how long the first of a group waits for the last; results come by 8,192


@cache  # one work per operation: neighbours in the queue are recognised by it
def each(operation: Callable[..., Any]) -> Work:
    """The work of an operation that takes its items one at a time; an item is the tuple of its arguments."""

    def work(session: Session, items: list[Any]) -> list[Any]:
        return [operation(session, *item) for item in items]

    return work


class Job(Struct, eq=False):
    """One operation: `work` over a list of items. Neighbours with the same `work` are done in one go.

    An item of the answer that is an exception is raised for its own caller only.
    """

    work: Work
    item: Any
    weight: int = 1  # how many calls it concerns
    relaxed: bool = False  # outlives this process, but not a power cut
    future: asyncio.Future[Any] | None = None
    result: Any = None
    error: BaseException | None = None
    told: Told | None = None  # instead of a future, where only the end matters
    loop: asyncio.AbstractEventLoop | None = None  # where its caller is

    def __repr__(self) -> str:  # never what it writes
        return f"<Job {self.work.__name__}>"

    def resolve(self) -> None:
        if self.told is not None:
            self.told(self.error)
            return
        if self.future is None or self.future.done():  # a caller that was cancelled has gone; the work is done anyway
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


class Driver(Protocol):
    """Runs a group of jobs in one transaction."""

    def run(self, jobs: Sequence[Job]) -> None:
        """Leaves a result or an error in every job. Never raises."""
        ...


class Writer(Protocol):
    """Takes jobs, in order. An unhurried one keeps its place, but may wait for company."""

    def do(
        self, work: Work, item: Any, weight: int = 1, *, relaxed: bool = False, unhurried: bool = False
    ) -> Awaitable[Any]: ...

    def hand(self, work: Work, item: Any, told: Told) -> None: ...

    async def aclose(self) -> None: ...


class Groups:
    """Runs groups of jobs on SQLite, each in one transaction with a savepoint per run of equal jobs."""

    def __init__(self, session: SqliteSession) -> None:
        self._session = session
        self._strict = True  # as the file was opened
        self.commits = 0

    def run(self, jobs: Sequence[Job]) -> None:
        """Leaves a result or an error in every job. Never raises."""
        connection = self._session.connection
        try:
            self._sync(not all(job.relaxed for job in jobs))
            connection.execute("BEGIN IMMEDIATE")
            if len(jobs) == 1:  # the transaction itself is its savepoint
                self._work(jobs)
            else:
                for run in runs(jobs):
                    self._savepoint(run)
            connection.execute("COMMIT")
            self.commits += 1
        except Exception as error:  # noqa: BLE001  whatever it is, it belongs to the callers, not to the thread
            self._undo(jobs, error)

    def _sync(self, strictly: bool) -> None:
        """Whether the next commit waits for the disk. What was committed before is on it then, too."""
        if strictly is not self._strict:
            self._session.connection.execute(f"PRAGMA synchronous = {'FULL' if strictly else 'NORMAL'}")
            self._strict = strictly

    def _savepoint(self, run: list[Job]) -> None:
        connection = self._session.connection
        connection.execute("SAVEPOINT job")
        try:
            self._work(run)
        except Exception as error:
            if not connection.in_transaction:  # SQLite gave up the whole transaction: disk full, I/O error
                raise
            connection.execute("ROLLBACK TO job")
            connection.execute("RELEASE job")
            self._session.forget()
            self._alone(run, error)
            return
        connection.execute("RELEASE job")

    def _work(self, run: Sequence[Job]) -> None:
        work(self._session, run)

    def _alone(self, run: list[Job], error: Exception) -> None:
        """One of these failed: done one by one, each fails for itself only."""
        if len(run) == 1:
            run[0].error = self._worded(error)
            return
        for job in run:
            self._savepoint([job])

    def _undo(self, jobs: Sequence[Job], error: Exception) -> None:
        worded = self._worded(error)
        try:
            if self._session.connection.in_transaction:
                self._session.connection.execute("ROLLBACK")
            self._session.forget()
        except sqlite3.Error as second:
            worded = translate(second, self._session.name)
        for job in jobs:
            job.error = worded

    def _worded(self, error: Exception) -> Exception:
        if isinstance(error, CarpoolError):
            return error
        if isinstance(error, sqlite3.Error):
            worded = translate(error, self._session.name)
        elif isinstance(error, OverflowError | UnicodeError):
            worded = StoreError(f"The store {self._session.name} can't hold such a value: {error}.")
        else:
            return error
        worded.__cause__ = error
        return worded


def work(session: Session, run: Sequence[Job]) -> None:
    """Does a run of equal jobs."""
    results = run[0].work(session, [job.item for job in run])
    for job, result in zip(run, results, strict=True):
        if isinstance(result, BaseException):
            job.error = result
        else:
            job.result = result


def runs(jobs: Sequence[Job]) -> list[list[Job]]:
    runs: list[list[Job]] = []
    for job in jobs:
        if runs and runs[-1][0].work is job.work:
            runs[-1].append(job)
        else:
            runs.append([job])
    return runs


class _Done:
    """What is done already: awaiting it never suspends, and needs no event loop."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __await__(self) -> Generator[None, None, Any]:
        if self._job.error is not None:
            raise self._job.error
        return self._job.result
        yield


class InlineWriter:
    """Does each job at once in the caller's thread, and never suspends: for a simulator that must be deterministic."""

    def __init__(self, groups: Driver) -> None:
        self._groups = groups
        self._closed = False

    def do(
        self, work: Work, item: Any, weight: int = 1, *, relaxed: bool = False, unhurried: bool = False
    ) -> Awaitable[Any]:
        return _Done(self._done(Job(work, item, weight, relaxed)))

    def hand(self, work: Work, item: Any, told: Told) -> None:
        self._done(Job(work, item, relaxed=True, told=told)).resolve()

    def _done(self, job: Job) -> Job:
        if self._closed:
            job.error = Closed("The store is closed.")
        else:
            self._groups.run([job])
        return job

    async def aclose(self) -> None:
        self._closed = True


class ThreadWriter:
    """Hands jobs to one thread, which does all that are waiting as one group."""

    def __init__(self, groups: Driver) -> None:
        self._groups = groups
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._waiting: list[Job] = []
        self._called = False  # the thread knows that something waits
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="carpool-store", daemon=True)
        self._thread.start()

    def do(
        self, work: Work, item: Any, weight: int = 1, *, relaxed: bool = False, unhurried: bool = False
    ) -> asyncio.Future[Any]:
        """An unhurried job keeps its place in the queue, but the thread is not called for it alone: that costs the
        caller more than the job itself."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        with self._lock:
            if self._closing:
                future.set_exception(Closed("The store is closed."))
                return future
            self._waiting.append(Job(work, item, weight, relaxed, future, loop=loop))
            first, called = len(self._waiting) == 1, self._called
            self._called = called or not unhurried
        if unhurried and first:
            loop.call_later(UNHURRIED_S, self._wake.set)
        elif not unhurried and not called:
            self._wake.set()
        return future

    def hand(self, work: Work, item: Any, told: Told) -> None:
        """A relaxed and unhurried job of which nobody awaits the end; `told` hears of it on the event loop."""
        loop = asyncio.get_running_loop()
        job = Job(work, item, relaxed=True, told=told, loop=loop)
        with self._lock:
            if self._closing:
                job.error = Closed("The store is closed.")
            else:
                self._waiting.append(job)
            first = len(self._waiting) == 1
        if job.error is not None:
            loop.call_soon(job.resolve)
        elif first:
            loop.call_later(UNHURRIED_S, self._wake.set)

    async def aclose(self) -> None:
        """Finishes what was accepted, then ends the thread."""
        with self._lock:
            self._closing = True
        self._wake.set()
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    def _work(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            while group := self._next_group():
                self._groups.run(group)
                _resolve(group)
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


def _resolve(group: list[Job]) -> None:
    """Wakes the callers, with one call per event loop."""
    loops: dict[asyncio.AbstractEventLoop, list[Job]] = {}
    for job in group:
        if job.loop is not None:
            loops.setdefault(job.loop, []).append(job)
    for loop, jobs in loops.items():
        try:
            loop.call_soon_threadsafe(_resolve_all, jobs)
        except RuntimeError:  # that loop is closed, nobody is left to be told
            continue


def _resolve_all(jobs: list[Job]) -> None:
    for job in jobs:
        job.resolve()
