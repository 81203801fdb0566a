"""The store in one SQLite file, or in memory; with attempts on `now`, persisted in two small files next to the database
before their requests are sent.

A call on lane `now` must leave a trace before its bytes go out. Otherwise a crash between sending and recording would
hide a purchase: the provider bills it, and the ledger knows nothing about it. The natural place for that trace is the
ledger itself, but a transaction per call means a switch to the writer thread and back, which is most of what carpool
adds to a fast call. Appending a line to a file is a single system call on the event loop's thread. The line survives
the end of the process, which is what matters here; like the ledger entry of such a call, it may be lost in a power
failure.

The life of an attempt:

1. `PendingAttempts.add` appends the line, or raises; only then is the request sent.
2. Usually the response arrives soon, and its ledger entry has the same identity (ticket and purchase). Once that entry
   is committed, the line has done its work (`PendingAttempts.followed`).
3. If no entry follows within one or two `TAKE_OVER_S`, the attempt itself is entered in the ledger with an unknown
   price; the later entry completes it. The same happens before the ledger is read and when the store is closed
   (`PendingAttempts.flush`), so that readers never miss an attempt.
4. After a crash, opening the store enters all lines that are left (`opening.left_behind`). Entries that the ledger has
   already stay as they are, because writing an entry is idempotent under its identity.

A file can be emptied only when the ledger has all its lines. With one file under constant load that moment may never
come, so there are two: when the current one has reached `TURN` bytes and the other has no pending line, they swap.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Self

import msgspec

from carpool.core.errors import StoreUnwritable
from carpool.core.model import Entry, Totals
from carpool.stores.operations.store import OperatedStore, open_in_thread
from carpool.stores.operations.writer import OnDone
from carpool.stores.sqlite.opening import attempt_files, open_file
from carpool.stores.sqlite.session import SqliteGroups, SqliteSession

TURN = 256_000  # bytes after which the files swap, once the ledger has all lines of the other one
TAKE_OVER_S = 0.5  # an attempt without an entry is written to the ledger after one or two of these


class SqliteStore(OperatedStore):
    """A store that several engines of one process may share; a second process is locked out."""

    def __init__(self, session: SqliteSession, *, threaded: bool) -> None:
        super().__init__(session, SqliteGroups(session), threaded=threaded)
        self.durable = session.lock is not None
        files = [_AttemptFile(path) for path in attempt_files(session.name)] if self.durable else []
        self._pending = PendingAttempts(files, super().completed) if threaded else None

    @classmethod
    async def open(
        cls, path: str | None, *, threaded: bool = True, secret: bytes | None = None, encrypt: bool = False
    ) -> Self:
        """Opens or creates the store; `path` None means in memory. `threaded` False runs in the caller's thread."""
        opening = partial(open_file, path, secret, encrypt)
        return cls(await open_in_thread(opening) if threaded else opening(), threaded=threaded)

    # ledger: pending attempts count as part of it
    def attempted(self, entry: Entry) -> bool:
        if self._pending is not None:
            self._pending.add(entry)
        return self._pending is not None

    def record(self, entry: Entry, *, deferred: bool = False) -> Awaitable[None]:
        writing = super().record(entry, deferred=deferred)
        if self._pending is not None and isinstance(writing, asyncio.Future):
            written = self._pending.followed(entry, _ignore)
            writing.add_done_callback(lambda done: written(None if done.cancelled() else done.exception()))
        return writing

    def completed(self, entry: Entry, on_done: OnDone) -> None:
        if self._pending is not None:
            on_done = self._pending.followed(entry, on_done)
        super().completed(entry, on_done)

    def _flush(self, ticket: int | None = None) -> None:
        """Writes pending attempts to the ledger before it is read."""
        if self._pending is not None:
            self._pending.flush(ticket)

    async def totals(self, credentials: Sequence[str] | None = None) -> list[Totals]:
        self._flush()
        return await super().totals(credentials)

    async def entries(self, ticket: int, credentials: Sequence[str] | None = None) -> list[Entry]:
        self._flush(ticket)
        return await super().entries(ticket, credentials)

    async def aclose(self) -> None:
        """Finishes all queued writes, then closes the file. May be called twice."""
        self._flush()
        await self.writer.aclose()
        if self._pending is not None:
            self._pending.close()
        self._session.close()


def _ignore(error: BaseException | None) -> None:
    """Where no file has the attempt, there is none to fall back on; the purchase's own entry reports the error."""


class PendingAttempts:
    """Attempts that are not in the ledger yet. `hand_over` writes one for which no entry has come. `files` are two, the
    current one first; none in a store in memory."""

    def __init__(self, files: list[_AttemptFile], hand_over: Callable[[Entry, OnDone], None]) -> None:
        self._lock = threading.Lock()
        self._files = files
        self._hand_over = hand_over
        self._young: dict[tuple[int, int], tuple[Entry, _AttemptFile | None]] = {}
        self._old: dict[tuple[int, int], tuple[Entry, _AttemptFile | None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None  # the loop whose timer is running

    def add(self, entry: Entry) -> None:
        """Persists an attempt, or raises."""
        file = self._write_line(entry) if self._files else None
        self._young[entry.ticket, entry.purchase] = (entry, file)
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            loop.call_later(TAKE_OVER_S, self._age)

    def _write_line(self, entry: Entry) -> _AttemptFile:
        """Returns the file, whose `written` must be called once the ledger has the line."""
        line = b"\n" + msgspec.json.encode(entry)  # line break first: half a line on a full disk spoils no other line
        with self._lock:
            current, other = self._files
            if current.size >= TURN and not other.waiting:
                other.clear()
                self._files.reverse()
                current = other
            current.write(line)
            return current

    def followed(self, entry: Entry, on_done: OnDone) -> OnDone:
        """Drops the attempt of an entry that is about to be written. Returns the callback to use for `on_done`: it
        also releases the attempt's line once the entry is written."""
        identity = (entry.ticket, entry.purchase)
        attempt = self._young.pop(identity, None) or self._old.pop(identity, None)
        file = None if attempt is None else attempt[1]
        return on_done if file is None else partial(_both, file.written, on_done)

    def flush(self, ticket: int | None = None) -> None:
        """Writes all attempts to the ledger, or those of one ticket."""
        for attempts in (self._old, self._young):
            for identity in list(attempts):
                if ticket in (None, identity[0]):
                    self._enter(*attempts.pop(identity))

    def _age(self) -> None:
        while self._old:
            self._enter(*self._old.popitem()[1])
        self._old, self._young = self._young, self._old
        self._loop = asyncio.get_running_loop() if self._old else None
        if self._loop is not None:
            self._loop.call_later(TAKE_OVER_S, self._age)

    def _enter(self, entry: Entry, file: _AttemptFile | None) -> None:
        self._hand_over(entry, _ignore if file is None else file.written)

    def close(self) -> None:
        """Called after the last transaction. Lines that are not in the ledger stay for the next opening."""
        for file in self._files:
            file.close()


def _both(first: OnDone, second: OnDone, error: BaseException | None) -> None:
    first(error)
    second(error)


class _AttemptFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self.size = 0
        self.waiting = 0  # lines that are not in the ledger yet

    def write(self, line: bytes) -> None:
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if os.write(self._descriptor, line) < len(line):
                raise StoreUnwritable(f"{self._path} can't be written: the disk is full.")
        except OSError as error:
            raise StoreUnwritable(f"{self._path} can't be written ({error.strerror}).") from error
        self.size += len(line)
        self.waiting += 1

    def written(self, error: BaseException | None) -> None:
        """Counts a line as done; after a failed transaction it stays pending."""
        if error is None:
            self.waiting -= 1

    def clear(self) -> None:
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
        self.size = 0

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            if not self.waiting:
                self._path.unlink(missing_ok=True)
