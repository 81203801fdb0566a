"""Operations on the ledger: one entry per purchase, and totals that change in the same transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from carpool.core.model import Entry, EntryKind, Lane, Totals
from carpool.stores.operations.codec import BIGGEST, Row, entry_row, entry_value, to_json
from carpool.stores.operations.session import Session


class _LedgerLine(NamedTuple):
    """The columns of an entry that the totals depend on."""

    lane: str
    kind: str
    paid: int | None
    would_have_paid: int | None


class LedgerWriter:
    """Collects the entries written in one transaction and compares them with the stored ones."""

    def __init__(self, session: Session, stood: str) -> None:
        """`stood`: the stored entries of these tickets, as JSON."""
        self._session = session
        self._stored = {
            (ticket, purchase): _LedgerLine(*rest) for ticket, purchase, *rest in msgspec.json.decode(stood)
        }
        self._rows: dict[tuple[int, int], Row] = {}

    def write(self, entry: Entry, late: bool = False, tags: str | None = None) -> None:
        """Inserts an entry, or completes one with an unknown price; a complete one stays.

        `late`: its outcome came second, so `would_have_paid` belongs to the first entry. `tags`: the call's.
        """
        identity = (entry.ticket, entry.purchase)
        kind = entry.kind
        if (existing := self._existing(identity)) is not None:
            if existing.paid is not None:
                return
            kind = _kind(kind, existing, late)
        elif late:
            kind = _kind(kind, None, late)
        credential = self._session.credential(entry.credential)
        would_have_paid = None if late else entry.would_have_paid
        self._rows[identity] = entry_row(self._session.sealing, entry, credential, kind, would_have_paid, tags)

    def _existing(self, identity: tuple[int, int]) -> _LedgerLine | None:
        """Returns the entry as written in this transaction, else as stored before it."""
        row = self._rows.get(identity)
        return self._stored.get(identity) if row is None else _line(row)

    def close(self) -> None:
        replaced = self._stored.keys() & self._rows.keys()
        new = (
            [row for identity, row in self._rows.items() if identity not in replaced]
            if replaced
            else self._rows.values()
        )
        self._session.insert("insert_entries", list(new))
        if replaced:
            self._session.insert("complete_entries", [self._rows[identity] for identity in replaced])
        sums = [(*group, *sums) for group, sums in self._changes(replaced).items() if any(sums)]
        self._session.insert("add_totals", sums)

    def _changes(self, replaced: set[tuple[int, int]]) -> dict[tuple[int, str, str], list[int]]:
        """Computes the changes of the totals: written entries are added, the ones they replace are subtracted."""
        sums: dict[tuple[int, str, str], list[int]] = {}
        for row in self._rows.values():
            _add(sums, row[6], row[3], row[4], row[9], row[10], 1)
        for identity in replaced:
            _add(sums, self._rows[identity][6], *self._stored[identity], -1)
        return sums


def _line(row: Row) -> _LedgerLine:
    """Picks the columns from a row made by `entry_row`."""
    return _LedgerLine(row[3], row[4], row[9], row[10])


def _add(
    sums: dict[tuple[int, str, str], list[int]],
    credential: int,
    lane: str,
    kind: str,
    paid: int | None,
    would_have_paid: int | None,
    sign: int,
) -> None:
    group_sums = sums.get((credential, lane, kind))
    if group_sums is None:
        group_sums = sums[credential, lane, kind] = [0, 0, 0, 0]
    group_sums[0] += sign
    if paid is None:
        group_sums[1] += sign
    else:
        group_sums[2] += sign * paid
    if would_have_paid:
        group_sums[3] += sign * would_have_paid


def _kind(given: EntryKind, existing: _LedgerLine | None, late: bool) -> EntryKind:
    existing_kind = None if existing is None else existing.kind
    if EntryKind.RESCUE in (given, existing_kind):
        return EntryKind.RESCUE
    if late or (existing_kind == EntryKind.DUPLICATE):
        return EntryKind.DUPLICATE
    return given


def _writer(session: Session, tickets: set[int]) -> LedgerWriter:
    ticket_list = to_json(sorted(tickets))
    session.hold(ticket_list)
    [(stored,)] = session.rows("standing_entries", (ticket_list,))
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
    if credentials is None:
        rows = session.rows("totals")
    else:
        rows = session.rows("totals_of", (to_json(session.known_credentials(credentials)),))
    return [Totals(Lane(lane), EntryKind(kind), *sums) for lane, kind, *sums in rows]


def entries(session: Session, ticket: int, credentials: Sequence[str] | None = None) -> list[Entry]:
    if ticket > BIGGEST:
        return []
    if credentials is None:
        rows = session.rows("entries", (ticket,))
    else:
        own = to_json(session.known_credentials(credentials))
        rows = session.rows("entries_of", {"ticket": ticket, "credentials": own})
    return [entry_value(session.sealing, row) for row in rows]


def attempts(session: Session, ticket: int) -> int:
    row = session.row("attempts", (ticket,))
    return row[0] if row else 0


def remember(session: Session, kind: str, key: str, value: str, now: float) -> None:
    session.run("remember", (kind, key, session.sealing.text_in(value), now))


def recall(session: Session, kind: str) -> dict[str, str]:
    return {key: session.sealing.text_out(value) for key, value in session.rows("recall", (kind,))}
