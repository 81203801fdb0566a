"""The batches of one account, in the order of their creation: runs them and charges for them."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from carpool.mock.core.batch import Batch, Outcome
from carpool.mock.core.bill import Bill, Charge, Usage

B = TypeVar("B", bound=Batch)


class Shelf(ABC, Generic[B]):
    """Defined by each API: what a request uses (`_use`), and how that is charged (`_charge`)."""

    def __init__(self, id: str, bill: Bill, strangers_bill: Bill, now: float) -> None:  # noqa: A002
        self.id = id
        self.batches: list[B] = []
        self._bill = bill
        self._strangers_bill = strangers_bill
        self._position: dict[str, int] = {}
        self._open: list[B] = []
        self._executing: list[tuple[float, int, Charge]] = []
        self._charged = 0
        self._until = now

    @abstractmethod
    def _use(self, batch: B, index: int) -> Usage: ...

    @abstractmethod
    def _charge(self, batch: B, index: int, usage: Usage) -> Charge: ...

    def _ended(self, batch: B) -> None:
        """A batch has just ended."""

    # -- batches

    def add(self, batch: B) -> None:
        self._position[batch.id] = len(self.batches)
        self.batches.append(batch)
        self._open.append(batch)

    def find(self, batch_id: str) -> B | None:
        position = self._position.get(batch_id)
        if position is None or self.batches[position].denied(self._until):
            return None
        return self.batches[position]

    def older(self, than: str | None) -> Iterator[B]:
        """Newest first, from the one before `than`, or from the newest."""
        position = len(self.batches) if than is None else self._position.get(than, 0)
        return self._shown(self.batches[i] for i in range(position - 1, -1, -1))

    def newer(self, than: str) -> Iterator[B]:
        """Oldest first, from the one after `than`."""
        position = self._position.get(than, len(self.batches))
        return self._shown(self.batches[i] for i in range(position + 1, len(self.batches)))

    def _shown(self, batches: Iterator[B]) -> Iterator[B]:
        return (batch for batch in batches if not batch.denied(self._until))

    def waiting(self) -> int:
        """Requests of all batches that have not started."""
        return sum(batch.waiting for batch in self._open if not batch.stranger)

    # -- time

    def advance(self, now: float) -> None:
        """Runs everything that is due by `now`.

        Requests of different batches run in the order of their starts, because an earlier one may write the cache
        entry that a later one reads.
        """
        self._until = now
        due = [(batch.next_start, order, batch) for order, batch in enumerate(self._open) if batch.next_start <= now]
        heapq.heapify(due)
        while due:
            _, order, batch = heapq.heappop(due)
            batch.run(min(now, due[0][0]) if due else now, self._execute)
            if batch.next_start <= now:
                heapq.heappush(due, (batch.next_start, order, batch))
        for batch in self._open:
            batch.close(now)
            if batch.closed:
                self._ended(batch)
        self._open = [batch for batch in self._open if not batch.closed]
        while self._executing and self._executing[0][0] <= now:
            self._bill.add(heapq.heappop(self._executing)[2])

    def hurry(self, batch: B, now: float) -> None:
        """Ends a batch now, and charges the requests that are still executing."""
        self.advance(now)
        batch.hurry(now)
        for position, (_, order, charge) in enumerate(self._executing):
            if charge.batch_id == batch.id:
                self._executing[position] = (now, order, msgspec.structs.replace(charge, at=now))
        heapq.heapify(self._executing)
        self.advance(now)

    def _execute(self, batch: B, index: int) -> Outcome:
        if batch.errs(index):
            return Outcome.ERRORED
        end = batch.ends[index]
        if index in batch.line_faults["line_expired"] or end > batch.expires:
            return Outcome.EXPIRED
        usage = batch.usages[index] = self._use(batch, index)
        charge = self._charge(batch, index, usage)
        if batch.stranger:
            self._strangers_bill.add(charge)
        elif end <= self._until:
            self._bill.add(charge)
        else:
            self._charged += 1
            heapq.heappush(self._executing, (end, self._charged, charge))
        return Outcome.SUCCEEDED
