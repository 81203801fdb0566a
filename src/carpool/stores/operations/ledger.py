"""Settling and the ledger: outcomes and requeues, each with its entry, many in one transaction. There is one entry per
purchase, and the totals change in the same transaction as the entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from carpool.core.lifecycle import TicketState
from carpool.core.model import Entry, EntryKind, Lane, Outcome, Settlement, Totals
from carpool.stores.operations.session import Row, Session, entry_row, entry_value, outcome_row, to_json


class _LedgerLine(NamedTuple):
    """The columns of an entry that the totals depend on."""

    lane: str
    kind: str
    paid: int | None
    would_have_paid: int | None


class LedgerWriter:
    """Collects the entries written in one transaction and compares them with the stored ones."""

    def __init__(self, session: Session, stored: str) -> None:
        """`stored`: the stored entries of these tickets, as JSON."""
        self._session = session
        self._stored = {
            (ticket, purchase): _LedgerLine(*rest) for ticket, purchase, *rest in msgspec.json.decode(stored)
        }
        self._rows: dict[tuple[int, int], Row] = {}

    def write(self, entry: Entry, late: bool = False, tags: str | None = None) -> None:
        """Inserts an entry, or completes one with an unknown price; a complete one stays.

        `late`: its outcome came second, so `would_have_paid` belongs to the first entry. `tags`: the call's.
        """
        identity = (entry.ticket, entry.purchase)
        existing = self._stored.get(identity)
        if (row := self._rows.get(identity)) is not None:  # written before in this transaction
            existing = _LedgerLine(row[3], row[4], row[9], row[10])
        kind = entry.kind
        if existing is not None:
            if existing.paid is not None:
                return
            if existing.kind != EntryKind.PURCHASE and kind is not EntryKind.RESCUE:
                kind = EntryKind(existing.kind)
        if late and kind is not EntryKind.RESCUE:
            kind = EntryKind.DUPLICATE
        credential = self._session.credential(entry.credential)
        would_have_paid = None if late else entry.would_have_paid
        self._rows[identity] = entry_row(self._session, entry, credential, kind, would_have_paid, tags)

    def close(self) -> None:
        replaced = self._stored.keys() & self._rows.keys()
        new = [row for identity, row in self._rows.items() if identity not in replaced]
        self._session.insert("insert_entries", new)
        if replaced:
            self._session.insert("complete_entries", [self._rows[identity] for identity in replaced])
        # The changes of the totals: written entries are added, the ones they replace are subtracted.
        lines = [(row[6], _LedgerLine(row[3], row[4], row[9], row[10]), 1) for row in self._rows.values()]
        lines += [(self._rows[identity][6], self._stored[identity], -1) for identity in replaced]
        sums: dict[tuple[int, str, str], list[int]] = {}
        for credential, line, sign in lines:
            group_sums = sums.setdefault((credential, line.lane, line.kind), [0, 0, 0, 0])
            group_sums[0] += sign
            if line.paid is None:
                group_sums[1] += sign
            else:
                group_sums[2] += sign * line.paid
            group_sums[3] += sign * (line.would_have_paid or 0)
        self._session.insert("add_totals", [(*group, *changes) for group, changes in sums.items() if any(changes)])


def _writer(session: Session, tickets: set[int]) -> LedgerWriter:
    ticket_list = to_json(sorted(tickets))
    session.hold(ticket_list)
    [(stored,)] = session.rows("stored_entries", (ticket_list,))
    return LedgerWriter(session, stored)


def record(session: Session, entries: list[Entry]) -> list[None]:
    writer = _writer(session, {entry.ticket for entry in entries})
    for entry in entries:
        writer.write(entry)
    writer.close()
    return [None] * len(entries)


def start_sending(session: Session, entry: Entry, engine: str, now: float) -> bool:
    reason = session.word(entry.reason)
    rows = session.rows("start_sending", {"ticket": entry.ticket, "engine": engine, "now": now, "reason": reason})
    if not rows:
        return False
    writer = _writer(session, {entry.ticket})
    writer.write(replace(entry, paid=None), tags=rows[0][0])
    writer.close()
    return True


def stop_sending(session: Session, ticket: int) -> bool:
    return session.run("stop_sending", (ticket,)).rowcount > 0


def totals(session: Session, credentials: Sequence[str] | None = None) -> list[Totals]:
    rows = session.rows("totals", {"credentials": session.credential_filter(credentials)})
    return [Totals(Lane(lane), EntryKind(kind), *sums) for lane, kind, *sums in rows]


def entries(session: Session, ticket: int, credentials: Sequence[str] | None = None) -> list[Entry]:
    query = {"ticket": ticket, "credentials": session.credential_filter(credentials)}
    return [entry_value(session, row) for row in session.rows("entries", query)]


def attempts(session: Session, ticket: int) -> int:
    row = session.row("attempts", (ticket,))
    return row[0] if row else 0


def remember(session: Session, kind: str, key: str, value: str, now: float) -> None:
    session.run("remember", (kind, key, session.contents.text_in(value), now))


def recall(session: Session, kind: str) -> dict[str, str]:
    return {key: session.contents.text_out(value) for key, value in session.rows("recall", (kind,))}


# ------------------------------------------------------------ settling


def settle(session: Session, asked: list[tuple[Sequence[Settlement], float]]) -> list[list[bool]]:
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
        [(calls, entries, first)] = session.rows("stored_tickets", {"tickets": ticket_list})
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
        self._outcomes.append(outcome_row(self._session, number, ticket, purchase, outcome))
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
