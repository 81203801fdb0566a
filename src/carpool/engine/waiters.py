"""Futures of the clients that wait for a ticket in this process."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator

from carpool.core.model import Entry, Outcome, Settled, Value


class Reply(Value, frozen=True, gc=False):
    """What a frontend gets back: the ticket, the outcome of the call, and the ledger entry if it is known."""

    ticket: int
    outcome: Outcome
    entry: Entry | None = None
    reason: str = ""  # why the call took this lane

    @classmethod
    def of(cls, settled: Settled) -> Reply:
        """Built from the store, whichever engine settled the call."""
        return cls(settled.ticket, settled.outcome, settled.entry)


class Waiters:
    """Nearly every ticket has one waiter. The few with more keep the others in a list."""

    def __init__(self) -> None:
        self._first: dict[int, asyncio.Future[Reply]] = {}
        self._more: dict[int, list[asyncio.Future[Reply]]] = {}
        self._credentials: dict[int, str] = {}  # ticket → credential, if its calls are counted
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._first)

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._first

    def __iter__(self) -> Iterator[int]:
        return iter(self._first)

    def of(self, credential: str) -> int:
        """Number of waiting calls of a credential, as far as they are counted."""
        return self._counts.get(credential, 0)

    def count(self, ticket: int, credential: str) -> None:
        """Counts a waiting ticket for this credential."""
        if ticket in self._first and ticket not in self._credentials:
            self._credentials[ticket] = credential
            self._counts[credential] = self._counts.get(credential, 0) + 1

    def add(self, ticket: int) -> asyncio.Future[Reply]:
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.put(ticket, future)
        return future

    def put(self, ticket: int, future: asyncio.Future[Reply]) -> None:
        if self._first.setdefault(ticket, future) is not future:
            self._more.setdefault(ticket, []).append(future)

    def drop(self, ticket: int, future: asyncio.Future[Reply]) -> bool:
        """Removes a waiter. Returns whether the ticket has none left."""
        remaining = [waiter for waiter in self._all(ticket) if waiter is not future]
        credential = self._credentials.get(ticket)
        self._forget(ticket)
        if remaining:
            self._first[ticket], *more = remaining
            if more:
                self._more[ticket] = more
            if credential is not None:
                self.count(ticket, credential)
        return not remaining

    def resolve(self, reply: Reply) -> None:
        ticket = reply.ticket
        if self._more or self._credentials:
            futures = self._all(ticket)
            self._forget(ticket)
        else:  # the usual case
            first = self._first.pop(ticket, None)
            futures = [] if first is None else [first]
        for future in futures:
            if not future.done():  # a cancelled waiter must not stop the others
                future.set_result(reply)

    def fail_all(self, why: Callable[[int], Exception]) -> None:
        for ticket in list(self._first):
            for future in self._all(ticket):
                if not future.done():
                    future.set_exception(why(ticket))
            self._forget(ticket)

    def _all(self, ticket: int) -> list[asyncio.Future[Reply]]:
        first = self._first.get(ticket)
        return [] if first is None else [first, *self._more.get(ticket, ())]

    def _forget(self, ticket: int) -> None:
        self._first.pop(ticket, None)
        self._more.pop(ticket, None)
        if self._credentials and (credential := self._credentials.pop(ticket, None)) is not None:
            self._counts[credential] -= 1
            if not self._counts[credential]:
                del self._counts[credential]


# ------------------------------------------------------------ garbage collection
# Each waiting call is a dozen objects. A full collection traverses all of them, finds no garbage, and does so again
# whenever there are a quarter more objects. So the waiting calls are exempted in steps, with `gc.freeze`. Objects
# created later are not exempt, and when nearly all calls are done, everything is collected again.

STEP = 4096  # calls per step; a full collection of fewer takes only a few milliseconds
LEFT = 16  # unfreezes when only one in 16 still waits


class GcFreezer:
    def __init__(self) -> None:
        self._known = 0  # waiting calls at the last check
        self._frozen = False

    def grew(self, waiting: int) -> None:
        if waiting - self._known < STEP:
            return
        # Does not interfere with a process that freezes objects itself or disabled the collector.
        if self._frozen or (gc.isenabled() and not gc.get_freeze_count()):
            gc.collect(1)  # so that young garbage is not frozen; old garbage may be, until `shrank`
            gc.freeze()
            self._frozen = True
        self._known = waiting

    def shrank(self, waiting: int) -> None:
        if waiting * LEFT >= self._known:
            return
        if self._frozen:
            gc.unfreeze()
            self._frozen = False
        self._known = 0
