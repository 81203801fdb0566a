"""Settling: outcomes and returns to the queue, each with its ledger line, many in one transaction."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from carpool.lifecycle import TicketState
from carpool.model import Lane, Outcome, Settlement
from carpool.stores._codec import Row, outcome_row, to_json
from carpool.stores._ledger import Books
from carpool.stores._session import Session

Asked = tuple[Sequence[Settlement], float]


def settle(session: Session, asked: list[Asked]) -> list[list[bool]]:
    times = [now for _, now in asked]
    settling = _Settling(session, {one.ticket for settlements, _ in asked for one in settlements}, min(times))
    results = [[settling.take(one) for one in settlements] for settlements, _ in asked]
    settling.write(max(times))
    return results


class _Standing(Struct, array_like=True, gc=False):
    """A ticket as it stands in the middle of the transaction; at first as the tables have it, read from JSON."""

    ticket: int
    state: str
    batch: int | None
    winner: int | None  # the purchase that gave its outcome
    submitting: int | bool | None  # its batch is being sent, so its body is still wanted
    tags: str | None


_found = msgspec.json.Decoder(list[_Standing])


class _Settling:
    """Decides in memory, in order, against what stood in the tables; then writes each kind of change at once."""

    def __init__(self, session: Session, tickets: set[int], now: float) -> None:
        self._session = session
        self._now = now  # of those that ask together the earliest: due at once means due for the first
        asked = to_json(sorted(tickets))
        session.hold(asked)
        [(calls, entries, first)] = session.rows("standing", {"tickets": asked})
        self._calls = {call.ticket: call for call in _found.decode(calls)}
        self._books = Books(session, entries)
        self._settled: list[int] = []
        self._first: int = first
        self._outcomes: list[Row] = []
        self._requeued: dict[int, tuple[int, str, int]] = {}
        self._unboarded: list[int] = []
        self._useless_bodies: list[int] = []

    def take(self, settlement: Settlement) -> bool:
        ticket, outcome, entry = settlement.ticket, settlement.outcome, settlement.entry
        call = self._calls.get(ticket)
        won = outcome is not None and call is not None and call.state != TicketState.SETTLED
        if won and call is not None and outcome is not None:
            self._settle(ticket, call, None if entry is None else entry.purchase, outcome)
        elif settlement.requeue is not None and call is not None:
            self._requeue(settlement, call, settlement.requeue)
        if entry is not None:
            late = outcome is not None and (call is None or call.winner != entry.purchase)
            self._books.write(entry, late, None if call is None else call.tags)
        return won

    def _settle(self, ticket: int, call: _Standing, purchase: int | None, outcome: Outcome) -> None:
        call.state = TicketState.SETTLED
        call.winner = purchase
        self._settled.append(ticket)
        number = self._first + len(self._outcomes)
        self._outcomes.append(outcome_row(self._session.sealing, number, ticket, purchase, outcome))
        if not call.submitting and (purchase is None or purchase != call.batch):
            self._useless_bodies.append(ticket)  # the others are removed in order, when their batch is tidied

    def _requeue(self, settlement: Settlement, call: _Standing, lane: Lane) -> None:
        entry = settlement.entry
        if call.state == TicketState.SETTLED:
            return
        if entry is not None and entry.purchase > 0 and entry.purchase != call.batch:
            return  # the ticket left that batch long ago, and may be aboard another
        call.batch = None
        call.submitting = None
        if call.state == TicketState.SENDING:
            self._unboarded.append(settlement.ticket)
            return
        call.state = TicketState.QUEUED
        if settlement.ticket in self._requeued:
            self._write_requeues()
        self._requeued[settlement.ticket] = (settlement.ticket, lane.value, self._session.word(settlement.reason))

    def _write_requeues(self) -> None:
        if self._requeued:
            requeues = to_json(list(self._requeued.values()))
            self._session.run("requeue_calls", {"requeues": requeues, "now": self._now})
            self._requeued.clear()

    def write(self, now: float) -> None:
        session = self._session
        self._write_requeues()
        if self._unboarded:
            session.run("unboard_calls", (to_json(self._unboarded),))
        if self._settled:
            tickets = to_json(self._settled)
            session.change("settle_calls", {"now": now, "first": self._first, "tickets": tickets})
            session.insert("insert_outcomes", self._outcomes)
            if self._useless_bodies:
                session.change("remove_bodies", (to_json(self._useless_bodies),))
            session.change("add_tally", ("tickets.settled", len(self._settled)))
        self._books.close()
