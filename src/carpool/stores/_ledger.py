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

    def __init__(self, session: Session, stood: str) -> None:
        """`stood`: the entries of these tickets, in JSON, as the tables have them."""
        self._session = session
        self._stood = {(ticket, purchase): _Line(*rest) for ticket, purchase, *rest in msgspec.json.decode(stood)}
        self._rows: dict[tuple[int, int], Row] = {}

    def write(self, entry: Entry, late: bool = False, tags: str | None = None) -> None:
        """Inserts, or completes what stands as unknown; what is complete stays.

        `late`: its outcome came second, and what it would have cost stands with the first. `tags`: the call's.
        """
        identity = (entry.ticket, entry.purchase)
        kind = entry.kind
        if (standing := self._standing(identity)) is not None:
            if standing.paid is not None:
                return
            kind = _kind(kind, standing, late)
        elif late:
            kind = _kind(kind, None, late)
        credential = self._session.credential(entry.credential)
        would_have_paid = None if late else entry.would_have_paid
        self._rows[identity] = entry_row(self._session.sealing, entry, credential, kind, would_have_paid, tags)

    def _standing(self, identity: tuple[int, int]) -> _Line | None:
        """What this transaction wrote already, or else what stood before it."""
        row = self._rows.get(identity)
        return self._stood.get(identity) if row is None else _line(row)

    def close(self) -> None:
        stood = self._stood.keys() & self._rows.keys()
        fresh = [row for identity, row in self._rows.items() if identity not in stood] if stood else self._rows.values()
        self._session.insert("insert_entries", list(fresh))
        if stood:
            self._session.insert("complete_entries", [self._rows[identity] for identity in stood])
        sums = [(*whose, *sums) for whose, sums in self._sums(stood).items() if any(sums)]
        self._session.insert("add_totals", sums)

    def _sums(self, stood: set[tuple[int, int]]) -> dict[tuple[int, str, str], list[int]]:
        """By what the sums change: what was written comes in, what stood in its place goes out."""
        sums: dict[tuple[int, str, str], list[int]] = {}
        for row in self._rows.values():
            _add(sums, row[6], row[3], row[4], row[9], row[10], 1)
        for identity in stood:
            _add(sums, self._rows[identity][6], *self._stood[identity], -1)
        return sums


def _line(row: Row) -> _Line:
    """Of an entry's row, as `entry_row` makes it."""
    return _Line(row[3], row[4], row[9], row[10])


def _add(
    sums: dict[tuple[int, str, str], list[int]],
    credential: int,
    lane: str,
    kind: str,
    paid: int | None,
    would_have_paid: int | None,
    sign: int,
) -> None:
    found = sums.get((credential, lane, kind))
    if found is None:
        found = sums[credential, lane, kind] = [0, 0, 0, 0]
    found[0] += sign
    if paid is None:
        found[1] += sign
    else:
        found[2] += sign * paid
    if would_have_paid:
        found[3] += sign * would_have_paid


def _kind(given: EntryKind, standing: _Line | None, late: bool) -> EntryKind:
    stood = None if standing is None else standing.kind
    if EntryKind.RESCUE in (given, stood):
        return EntryKind.RESCUE
    if late or (stood == EntryKind.DUPLICATE):
        return EntryKind.DUPLICATE
    return given


def _books(session: Session, tickets: set[int]) -> Books:
    asked = to_json(sorted(tickets))
    session.hold(asked)
    [(stood,)] = session.rows("standing_entries", (asked,))
    return Books(session, stood)


def record(session: Session, entries: list[Entry]) -> list[None]:
    books = _books(session, {entry.ticket for entry in entries})
    for entry in entries:
        books.write(entry)
    books.close()
    return [None] * len(entries)


def start_sending(session: Session, entry: Entry, engine: str, now: float) -> bool:
    rows = session.rows("start_sending", {"ticket": entry.ticket, "engine": engine, "now": now})
    if not rows:
        return False
    books = _books(session, {entry.ticket})
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
