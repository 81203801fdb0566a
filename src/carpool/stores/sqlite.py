"""The store in one SQLite file, or in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Self

from carpool.model import Entry, Totals
from carpool.stores import _ledger
from carpool.stores._attempts import Attempts, Pending
from carpool.stores._files import let_go, open_aside, open_here
from carpool.stores._lock import FileLock
from carpool.stores._sqlite_session import SqliteSession
from carpool.stores._store import OperatedStore
from carpool.stores._writer import Groups, InlineWriter, ThreadWriter, Told


class SqliteStore(OperatedStore):
    """Several engines of one process may share it; a second process is kept out."""

    def __init__(self, session: SqliteSession, lock: FileLock | None, secret: bytes, threaded: bool) -> None:
        self._session = session
        self._lock = lock
        self._groups = Groups(session)
        super().__init__(ThreadWriter(self._groups) if threaded else InlineWriter(self._groups), secret)
        self._attempts = Attempts(session.name) if threaded and lock is not None else None
        self._pending = Pending(self._attempts, self._hand_over) if threaded else None
        self._released = False

    @classmethod
    async def open(
        cls, path: str | None, *, threaded: bool = True, secret: bytes | None = None, encrypt: bool = False
    ) -> Self:
        """Opens or makes the store; `path` None keeps it in memory. `threaded` False works in the caller's thread."""
        opened = await open_aside(path, secret, encrypt) if threaded else open_here(path, secret, encrypt)
        return cls(*opened, threaded)

    @property
    def durable(self) -> bool:
        return self._lock is not None

    @property
    def commits(self) -> int:
        """How many transactions were committed."""
        return self._groups.commits

    # books: attempts are a part of the ledger before it has them
    def attempted(self, entry: Entry) -> bool:
        if self._pending is not None:
            self._pending.add(entry)
        return self._pending is not None

    def _hand_over(self, entry: Entry, told: Told) -> None:
        self._writer.hand(_ledger.record, entry, told)

    def record(self, entry: Entry, *, unhurried: bool = False) -> Awaitable[None]:
        writing = self._writer.do(_ledger.record, entry, relaxed=True, unhurried=unhurried)
        if self._pending is not None and isinstance(writing, asyncio.Future):
            written = self._pending.followed(entry, _nobody)
            writing.add_done_callback(lambda done: written(None if done.cancelled() else done.exception()))
        return writing

    def completed(self, entry: Entry, told: Told) -> None:
        if self._pending is not None:
            told = self._pending.followed(entry, told)
        self._writer.hand(_ledger.record, entry, told)

    def _flush(self) -> None:
        """Before the ledger is read: attempts are a part of it."""
        if self._pending is not None:
            self._pending.flush()

    async def totals(self, credentials: Sequence[str] | None = None) -> list[Totals]:
        self._flush()
        return await super().totals(credentials)

    async def entries(self, ticket: int) -> list[Entry]:
        self._flush()
        return await super().entries(ticket)

    async def aclose(self) -> None:
        """Finishes what was accepted, then lets go of the file. May be called twice."""
        self._flush()
        await self._writer.aclose()
        if not self._released:
            self._released = True
            if self._attempts is not None:
                self._attempts.close()
            let_go(self._session, self._lock)


def _nobody(error: BaseException | None) -> None:
    """Whoever awaits the writing is told by it."""
