"""Settling: outcomes and requeues, each with its ledger entry, many in one transaction."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from carpool.core.lifecycle import TicketState
from carpool.core.model import Lane, Outcome, Settlement
from carpool.stores.operations.codec import Row, outcome_row, to_json
from carpool.stores.operations.ledger import LedgerWriter
from carpool.stores.operations.session import Session

Asked = tuple[Sequence[Settlement], float]


def settle(session: Session, asked: list[Asked]) -> list[list[bool]]:
    times = [now for _, now in asked]
    tickets = {settlement.ticket for settlements, _ in asked for settlement in settlements}
    settling = _Settling(session, tickets, min(times))
    results = [[settling.take(settlement) for settlement in settlements] for settlements, _ in asked]
    settling.write(max(times))
    return results


class _TicketRow(Struct, array_like=True, gc=False):
    """The current state of a ticket during the transaction; initially as stored, decoded from JSON."""

    ticket: int
    state: str
    batch: int | None
    winner: int | None  # the purchase that provided its outcome
    submitting: int | bool | None  # its batch is being submitted, so its body is still needed
    tags: str | None


_ticket_rows = msgspec.json.Decoder(list[_TicketRow])


class _Settling:
    """Applies settlements in order in memory, starting from the stored state; then writes all changes of a kind at
    once."""

    def __init__(self, session: Session, tickets: set[int], now: float) -> None:
        self._session = session
        self._now = now  # the earliest time in the group, so that requeued calls are due for its first caller too
        ticket_list = to_json(sorted(tickets))
        session.hold(ticket_list)
        [(calls, entries, first)] = session.rows("standing", {"tickets": ticket_list})
        self._calls = {call.ticket: call for call in _ticket_rows.decode(calls)}
        self._ledger = LedgerWriter(session, entries)
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
            self._ledger.write(entry, late, None if call is None else call.tags)
        return won

    def _settle(self, ticket: int, call: _TicketRow, purchase: int | None, outcome: Outcome) -> None:
        call.state = TicketState.SETTLED
        call.winner = purchase
        self._settled.append(ticket)
        number = self._first + len(self._outcomes)
        self._outcomes.append(outcome_row(self._session.sealing, number, ticket, purchase, outcome))
        if not call.submitting and (purchase is None or purchase != call.batch):
            self._useless_bodies.append(ticket)  # other bodies are removed in order, when their batch is tidied

    def _requeue(self, settlement: Settlement, call: _TicketRow, lane: Lane) -> None:
        entry = settlement.entry
        if call.state == TicketState.SETTLED:
            return
        if entry is not None and entry.purchase > 0 and entry.purchase != call.batch:
            return  # the ticket has left that batch and may be in another one by now
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
        self._ledger.close()
