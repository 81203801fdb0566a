"""The store in one SQLite file, or in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Self

from carpool.core.model import Entry, Totals
from carpool.stores.operations.store import OperatedStore, open_in_thread
from carpool.stores.operations.writer import Told
from carpool.stores.sqlite.attempts import Attempts, Pending
from carpool.stores.sqlite.opening import Opened, close, open_file
from carpool.stores.sqlite.session import SqliteGroups


class SqliteStore(OperatedStore):
    """A store that several engines of one process may share; a second process is locked out."""

    def __init__(self, opened: Opened, *, threaded: bool) -> None:
        self._opened = opened
        self._session, lock, secret = opened
        super().__init__(SqliteGroups(self._session), secret, threaded=threaded)
        self.durable = lock is not None
        self._attempts = Attempts(self._session.name) if threaded and self.durable else None
        self._pending = Pending(self._attempts, super().completed) if threaded else None
        self._released = False

    @classmethod
    async def open(
        cls, path: str | None, *, threaded: bool = True, secret: bytes | None = None, encrypt: bool = False
    ) -> Self:
        """Opens or creates the store; `path` None means in memory. `threaded` False runs in the caller's thread."""
        opening = partial(open_file, path, secret, encrypt)
        return cls(await open_in_thread(opening, close) if threaded else opening(), threaded=threaded)

    # ledger: pending attempts count as part of it
    def attempted(self, entry: Entry) -> bool:
        if self._pending is not None:
            self._pending.add(entry)
        return self._pending is not None

    def record(self, entry: Entry, *, unhurried: bool = False) -> Awaitable[None]:
        writing = super().record(entry, unhurried=unhurried)
        if self._pending is not None and isinstance(writing, asyncio.Future):
            written = self._pending.followed(entry, _ignore)
            writing.add_done_callback(lambda done: written(None if done.cancelled() else done.exception()))
        return writing

    def completed(self, entry: Entry, told: Told) -> None:
        if self._pending is not None:
            told = self._pending.followed(entry, told)
        super().completed(entry, told)

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
        if not self._released:
            self._released = True
            if self._attempts is not None:
                self._attempts.close()
            close(self._opened)


def _ignore(error: BaseException | None) -> None:
    """The future of the write reports the error to its caller."""
