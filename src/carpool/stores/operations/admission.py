"""Admission: persists calls, or matches them with a ticket that is already stored.

A client may send the same call again: it timed out, its connection broke, or carpool restarted. Buying the call a
second time would be billed twice, so admission first looks for the earlier ticket. There are three cases.

**Key.** The client names the call itself (`key=`, `x-carpool-key`). A known key of the same credential returns its
ticket in any state. The fingerprint must match: the same key with another request is a mistake of the client, and
raises `KeyConflict` rather than returning an answer to another question.

**Adoption.** Without a key, an equal call (same credential and fingerprint) takes over a ticket only if that ticket is
undelivered and not awaited: its client is gone, so the new call is most likely its retry. A ticket with a waiting
client is never shared, because two clients may well ask the same question on purpose and expect two answers. A
delivered ticket counts as answered; it is returned again only within `RETRY_WINDOW`, and only to a client that marks
its request as a retry.

**Undecided.** Adoption depends on whether a ticket is awaited, and that on whether the awaiting engine is alive. With
several processes there is a short time in which an engine may be dead or alive: its connection is gone, but it may
reconnect. Adopting then could take the ticket from a living client; buying a new one could pay twice. So neither is
done: the result is `Undecided`, nothing is written, and the caller retries until the doubt is resolved. An admission
that is `pressed` has no time left for that and gets a new ticket.

Most calls match nothing, and must be fast. So one query per group loads all fingerprints that could be adopted. Calls
without key and retry mark whose fingerprint is not among them are collected and inserted in bulk (`_NewCalls`); all
others are decided one by one, after the calls collected so far were inserted, so that each sees the ones before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import msgspec
from msgspec.structs import replace

from carpool.core.errors import CarpoolError, KeyConflict, Undecided
from carpool.core.lifecycle import TicketState
from carpool.core.model import Admission, Admitted, Call, Lane
from carpool.stores.operations import calls
from carpool.stores.operations.session import Row, Session, signed, tags_text, to_json

RETRY_WINDOW = 60.0  # seconds for which a delivered answer is returned again to a client that marks a retry
_AT_ONCE = 16_000_000  # bytes of bodies per statement, which copies its parameters
_ROWS = 1024  # rows per statement, which keeps its memory while it is cached
_SMALL_BODY = 65_536  # larger bodies are inserted one by one


def admit(session: Session, groups: list[Sequence[Admission]]) -> list[list[Admitted | CarpoolError]]:
    """Admits in order. Calls that can't match a stored ticket are collected and inserted together."""
    session.mark_dead_engines()  # frees their tickets, so that their clients' retries can adopt them
    new_calls = _NewCalls(session, [admission for group in groups for admission in group])
    results = [
        [
            _fresh(admission) if new_calls.take(admission) else _match_or_add(session, new_calls, admission)
            for admission in group
        ]
        for group in groups
    ]
    new_calls.insert()
    return results


class _NewCalls:
    """New calls to be inserted, and the fingerprints that a later call could adopt."""

    def __init__(self, session: Session, admissions: list[Admission]) -> None:
        self._session = session
        self._calls: list[Row] = []
        self._bodies: list[Row] = []
        fingerprints = to_json(
            [signed(admission.call.fingerprint) for admission in admissions if admission.call.key is None]
        )
        # Doubtful ones first: a ticket that is released between the two queries is found by the second.
        self._adoptable: set[int] = set()
        if session.doubted:
            query = {"fingerprints": fingerprints, "doubted": to_json(sorted(session.doubted))}
            self._adoptable.update(row[0] for row in session.rows("doubtful", query))
        [(known,)] = session.rows("known_fingerprints", (fingerprints,))
        self._adoptable.update(msgspec.json.decode(known, type=list[int]))

    def take(self, admission: Admission) -> bool:
        """Accepts a call that provably has no earlier ticket: no key, no retry, nothing to adopt."""
        call = admission.call
        if call.key is not None or call.retry or signed(call.fingerprint) in self._adoptable:
            return False
        self.add(admission)
        return True

    def add(self, admission: Admission) -> None:
        call = admission.call
        self._calls.append(_call_row(self._session, admission))
        if admission.awaiter is not None:
            self._session.awaiters.add(admission.awaiter)
        self._bodies.append((call.ticket, self._session.contents.bytes_in(call.ticket, call.body)))
        if admission.awaiter is None:
            self._adoptable.add(signed(call.fingerprint))

    def insert(self) -> None:
        self._session.insert("insert_calls", self._calls, most=_ROWS)
        small = [row for row in self._bodies if len(row[1]) <= _SMALL_BODY]
        largest = max((len(body) for _, body in small), default=0)
        self._session.insert("insert_bodies", small, most=min(_ROWS, _AT_ONCE // max(largest, 1)))
        if len(small) < len(self._bodies):
            for row in self._bodies:
                if len(row[1]) > _SMALL_BODY:
                    self._session.insert("insert_bodies", [row])
        self._calls.clear()
        self._bodies.clear()


def _match_or_add(session: Session, new_calls: _NewCalls, admission: Admission) -> Admitted | CarpoolError:
    """Applies the three cases to one call, after all earlier ones were inserted."""
    new_calls.insert()
    call = admission.call
    credential = session.credential(call.credential)
    if call.key is not None:
        rows = [session.row("call_by_key", (credential, form)) for form in session.contents.key_forms(call.key)]
        row = next(filter(None, rows), None)
        if row is not None and row[1] != signed(call.fingerprint):
            return KeyConflict(f"The key {call.key[:80]!r} was used for another call. Use a new key for a new call.")
        ticket = None if row is None else row[0]
    else:
        # Asked first: a ticket that is released between the two queries is found by the second.
        in_doubt = False
        if not admission.pressed and (doubted := session.doubted - {admission.awaiter}):  # the asking engine is alive
            query = {"fingerprint": signed(call.fingerprint), "credential": credential}
            in_doubt = session.row("in_doubt", {**query, "doubted": to_json(sorted(doubted))}) is not None
        ticket = _adoptable(session, call, credential)
        if ticket is None and in_doubt:
            return Undecided(
                "Whether an equal call is still waited for is not known yet. Send it again in some seconds."
            )
    if ticket is not None:
        return _reassign(session, ticket, admission)
    new_calls.add(admission)
    return _fresh(admission)


def _adoptable(session: Session, call: Call, credential: int) -> int | None:
    fingerprint = signed(call.fingerprint)
    row = session.row("adoptable", (fingerprint, credential))
    if row is None and call.retry:
        row = session.row("lately_delivered", (fingerprint, call.arrived - RETRY_WINDOW, credential))
    return None if row is None else row[0]


def _reassign(session: Session, ticket: int, admission: Admission) -> Admitted:
    """Gives an existing ticket to the new client."""
    rescue_at = inf if admission.rescue_at is None else admission.rescue_at
    if admission.awaiter is not None:
        session.awaiters.add(admission.awaiter)
    changes = {
        "ticket": ticket,
        "awaiter": admission.awaiter,
        "deadline": admission.call.deadline,
        "rescue_at": rescue_at,
        "reason": session.word(admission.reason),
    }
    [(state, lane, deadline)] = session.rows("hand_over", changes)
    admitted = Admitted(ticket, False, TicketState(state), Lane(lane), deadline)
    settled = calls.outcomes(session, [ticket]) if admitted.state is TicketState.SETTLED else []
    return replace(admitted, outcome=settled[0].outcome, entry=settled[0].entry) if settled else admitted


def _fresh(admission: Admission) -> Admitted:
    return Admitted(admission.call.ticket, True, _first_state(admission.lane), admission.lane, admission.call.deadline)


def _first_state(lane: Lane) -> TicketState:
    return TicketState.QUEUED if lane is Lane.BATCH else TicketState.SENDING


def _call_row(session: Session, admission: Admission) -> Row:
    call = admission.call
    return (
        call.ticket,
        session.pool(admission.pool),
        session.credential(call.credential),
        _first_state(admission.lane)._value_,
        admission.lane._value_,
        call.arrived,
        call.deadline,
        inf if admission.rescue_at is None else admission.rescue_at,
        len(call.body),
        signed(call.fingerprint),
        None if call.key is None else session.contents.key_forms(call.key)[0],
        admission.awaiter,
        call.stream,
        call.max_output_tokens,
        session.word(call.model),
        session.word(admission.reason),
        tags_text(call.tags),
    )
