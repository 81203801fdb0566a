"""The ledger: one line per purchase, and its sums, which change together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from carpool.model import Entry, EntryKind, Lane, Totals
from carpool.stores._codec import Row, entry_row, entry_value, to_json
from carpool.stores._session import Session


class _Line(NamedTuple):
    """What the sums need of an entry."""

    lane: str
    kind: str
    paid: int | None
    would_have_paid: int | None


class Books:
    """Entries written during one transaction, against those that stood before it."""

    def __init__(self, session: Session, tickets: str) -> None:
        self._session = session
        row = session.row("standing_entries", (tickets,))
        found = msgspec.json.decode(row[0]) if row else []
        self._lines = {(ticket, purchase): _Line(*rest) for ticket, purchase, *rest in found}
        self._stood = set(self._lines)
        self._rows: dict[tuple[int, int], Row] = {}
        self._sums: dict[tuple[int, str, str], list[int]] = {}

    def write(self, entry: Entry, late: bool = False, tags: str | None = None) -> None:
        """Inserts, or completes what stands as unknown; what is complete stays.

        `late`: its outcome came second, and what it would have cost stands with the first. `tags`: the call's.
        """
        identity = (entry.ticket, entry.purchase)
        standing = self._lines.get(identity)
        if standing is not None and standing.paid is not None:
            return
        kind = _kind(entry.kind, standing, late)
        would_have_paid = None if late else entry.would_have_paid
        line = _Line(entry.lane._value_, kind._value_, entry.paid, would_have_paid)
        credential = self._session.credential(entry.credential)
        if standing is not None:
            self._add(credential, standing, -1)
        self._add(credential, line, 1)
        self._lines[identity] = line
        self._rows[identity] = entry_row(self._session.sealing, entry, credential, kind, would_have_paid, tags)

    def _add(self, credential: int, line: _Line, sign: int) -> None:
        sums = self._sums.setdefault((credential, line.lane, line.kind), [0, 0, 0, 0])
        sums[0] += sign
        sums[1] += sign * (line.paid is None)
        sums[2] += sign * (line.paid or 0)
        sums[3] += sign * (line.would_have_paid or 0)

    def close(self) -> None:
        fresh = [row for identity, row in self._rows.items() if identity not in self._stood]
        self._session.insert("insert_entries", fresh)
        if len(fresh) < len(self._rows):
            standing = [row for identity, row in self._rows.items() if identity in self._stood]
            self._session.insert("complete_entries", standing)
        self._session.insert("add_totals", [(*whose, *sums) for whose, sums in self._sums.items() if any(sums)])


def _kind(given: EntryKind, standing: _Line | None, late: bool) -> EntryKind:
    stood = None if standing is None else standing.kind
    if EntryKind.RESCUE in (given, stood):
        return EntryKind.RESCUE
    if late or (stood == EntryKind.DUPLICATE):
        return EntryKind.DUPLICATE
    return given


def record(session: Session, entries: list[Entry]) -> list[None]:
    asked = to_json(sorted({entry.ticket for entry in entries}))
    session.hold(asked)
    books = Books(session, asked)
    for entry in entries:
        books.write(entry)
    books.close()
    return [None] * len(entries)


def start_sending(session: Session, entry: Entry, engine: str, now: float) -> bool:
    rows = session.rows("start_sending", {"ticket": entry.ticket, "engine": engine, "now": now})
    if not rows:
        return False
    books = Books(session, to_json([entry.ticket]))
    books.write(replace(entry, paid=None), tags=rows[0][0])
    books.close()
    return True


def stop_sending(session: Session, ticket: int) -> bool:
    return session.run("stop_sending", (ticket,)).rowcount > 0


def totals(session: Session, credentials: Sequence[str] | None = None) -> list[Totals]:
    if credentials is None:
        rows = session.rows("totals")
    else:
        rows = session.rows("totals_of", (to_json(session.known_credentials(credentials)),))
    return [Totals(Lane(lane), EntryKind(kind), *sums) for lane, kind, *sums in rows]


def entries(session: Session, ticket: int) -> list[Entry]:
    return [entry_value(session.sealing, row) for row in session.rows("entries", (ticket,))]


def attempts(session: Session, ticket: int) -> int:
    row = session.row("attempts", (ticket,))
    return row[0] if row else 0


def remember(session: Session, kind: str, key: str, value: str, now: float) -> None:
    session.run("remember", (kind, key, session.sealing.text_in(value), now))


def recall(session: Session, kind: str) -> dict[str, str]:
    return {key: session.sealing.text_out(value) for key, value in session.rows("recall", (kind,))}
