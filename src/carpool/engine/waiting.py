"""Who waits for which ticket, inside this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from carpool.model import Entry, Outcome


@dataclass(frozen=True, slots=True)
class Reply:
    """What a door gets back: the outcome of a call, its ticket, and the ledger line where one is known."""

    ticket: int
    outcome: Outcome
    entry: Entry | None = None
    reason: str = ""  # why it took the way it took


class Waiters:
    def __init__(self) -> None:
        self._futures: dict[int, list[asyncio.Future[Reply]]] = {}

    def __len__(self) -> int:
        return len(self._futures)

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._futures

    def add(self, ticket: int) -> asyncio.Future[Reply]:
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._futures.setdefault(ticket, []).append(future)
        return future

    def drop(self, ticket: int, future: asyncio.Future[Reply]) -> bool:
        """Forgets one who waits no more; says whether the ticket has nobody left."""
        futures = self._futures.get(ticket, [])
        if future in futures:
            futures.remove(future)
        if not futures:
            self._futures.pop(ticket, None)
        return not futures

    def resolve(self, reply: Reply) -> None:
        for future in self._futures.pop(reply.ticket, ()):
            if not future.done():  # a cancelled waiter must not stop the others
                future.set_result(reply)

    def fail_all(self, why: Callable[[int], Exception]) -> None:
        for ticket, futures in self._futures.items():
            for future in futures:
                if not future.done():
                    future.set_exception(why(ticket))
        self._futures.clear()
