"""The store in one SQLite file, or in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Self

from carpool.core.model import Entry, Totals
from carpool.stores.operations import ledger
from carpool.stores.operations.store import OperatedStore
from carpool.stores.operations.writer import Groups, InlineWriter, ThreadWriter, Told
from carpool.stores.sqlite.attempts import Attempts, Pending
from carpool.stores.sqlite.files import FileLock, let_go, open_aside, open_here
from carpool.stores.sqlite.session import SqliteSession


class SqliteStore(OperatedStore):
    """A store that several engines of one process may share; a second process is locked out."""

    def __init__(self, session: SqliteSession, lock: FileLock | None, secret: bytes, threaded: bool) -> None:
        self._session = session
        self._lock = lock
        self._groups = Groups(session)
        super().__init__(ThreadWriter(self._groups) if threaded else InlineWriter(self._groups), secret)
        self._attempts = Attempts(session.name) if threaded and lock is not None else None
        self._pending = Pending(self._attempts, self._write_attempt) if threaded else None
        self._released = False

    @classmethod
    async def open(
        cls, path: str | None, *, threaded: bool = True, secret: bytes | None = None, encrypt: bool = False
    ) -> Self:
        """Opens or creates the store; `path` None means in memory. `threaded` False runs in the caller's thread."""
        opened = await open_aside(path, secret, encrypt) if threaded else open_here(path, secret, encrypt)
        return cls(*opened, threaded)

    @property
    def durable(self) -> bool:
        return self._lock is not None

    @property
    def commits(self) -> int:
        """The number of committed transactions."""
        return self._groups.commits

    # ledger: pending attempts count as part of it
    def attempted(self, entry: Entry) -> bool:
        if self._pending is not None:
            self._pending.add(entry)
        return self._pending is not None

    def _write_attempt(self, entry: Entry, told: Told) -> None:
        self._writer.hand(ledger.record, entry, told)

    def record(self, entry: Entry, *, unhurried: bool = False) -> Awaitable[None]:
        writing = self._writer.do(ledger.record, entry, relaxed=True, unhurried=unhurried)
        if self._pending is not None and isinstance(writing, asyncio.Future):
            written = self._pending.followed(entry, _ignore)
            writing.add_done_callback(lambda done: written(None if done.cancelled() else done.exception()))
        return writing

    def completed(self, entry: Entry, told: Told) -> None:
        if self._pending is not None:
            told = self._pending.followed(entry, told)
        self._writer.hand(ledger.record, entry, told)

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
        await self._writer.aclose()
        if not self._released:
            self._released = True
            if self._attempts is not None:
                self._attempts.close()
            let_go(self._session, self._lock)


def _ignore(error: BaseException | None) -> None:
    """The future of the write reports the error to its caller."""
