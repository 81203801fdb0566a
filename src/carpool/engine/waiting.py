"""Who waits for which ticket, inside this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from carpool.model import Entry, Outcome, Settled, Value


class Reply(Value, frozen=True, gc=False):
    """What a door gets back: the outcome of a call, its ticket, and the ledger line where one is known."""

    ticket: int
    outcome: Outcome
    entry: Entry | None = None
    reason: str = ""  # why it took the way it took

    @classmethod
    def of(cls, settled: Settled) -> Reply:
        """As the store has it, whoever settled it."""
        return cls(settled.ticket, settled.outcome, settled.entry)


class Waiters:
    """Nearly every ticket has one who waits for it; the few with more keep them in a list."""

    def __init__(self) -> None:
        self._one: dict[int, asyncio.Future[Reply]] = {}
        self._more: dict[int, list[asyncio.Future[Reply]]] = {}
        self._whose: dict[int, str] = {}  # where calls of a credential are counted
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._one)

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._one

    def __iter__(self) -> Iterator[int]:
        return iter(self._one)

    def of(self, credential: str) -> int:
        """How many calls of a credential are waited for, as far as they are counted."""
        return self._counts.get(credential, 0)

    def count(self, ticket: int, credential: str) -> None:
        """Counts a ticket that is waited for as one of this credential's."""
        if ticket in self._one and ticket not in self._whose:
            self._whose[ticket] = credential
            self._counts[credential] = self._counts.get(credential, 0) + 1

    def add(self, ticket: int) -> asyncio.Future[Reply]:
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.put(ticket, future)
        return future

    def put(self, ticket: int, future: asyncio.Future[Reply]) -> None:
        if self._one.setdefault(ticket, future) is not future:
            self._more.setdefault(ticket, []).append(future)

    def drop(self, ticket: int, future: asyncio.Future[Reply]) -> bool:
        """Forgets one who waits no more; says whether the ticket has nobody left."""
        rest = [one for one in self._all(ticket) if one is not future]
        whose = self._whose.get(ticket)
        self._forget(ticket)
        if rest:
            self._one[ticket], *more = rest
            if more:
                self._more[ticket] = more
            if whose is not None:
                self.count(ticket, whose)
        return not rest

    def resolve(self, reply: Reply) -> None:
        ticket = reply.ticket
        if self._more or self._whose:
            futures = self._all(ticket)
            self._forget(ticket)
        else:  # as a rule
            first = self._one.pop(ticket, None)
            futures = [] if first is None else [first]
        for future in futures:
            if not future.done():  # a cancelled waiter must not stop the others
                future.set_result(reply)

    def fail_all(self, why: Callable[[int], Exception]) -> None:
        for ticket in list(self._one):
            for future in self._all(ticket):
                if not future.done():
                    future.set_exception(why(ticket))
            self._forget(ticket)

    def _all(self, ticket: int) -> list[asyncio.Future[Reply]]:
        first = self._one.get(ticket)
        return [] if first is None else [first, *self._more.get(ticket, ())]

    def _forget(self, ticket: int) -> None:
        self._one.pop(ticket, None)
        self._more.pop(ticket, None)
        if self._whose and (whose := self._whose.pop(ticket, None)) is not None:
            self._counts[whose] -= 1
            if not self._counts[whose]:
                del self._counts[whose]
