"""How calls come in: by key, by adoption, or as fresh tickets; many at once."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import msgspec
from msgspec.structs import replace

from carpool.errors import CarpoolError, KeyConflict, Undecided
from carpool.lifecycle import TicketState
from carpool.model import Admission, Admitted, Call, Lane
from carpool.stores import _calls
from carpool.stores._codec import Row, signed, tags_text, to_json
from carpool.stores._session import Session

RETRY_WINDOW = 60.0  # seconds for which a delivered answer is given again to a client that says it retries
_AT_ONCE = 16_000_000  # bytes of bodies in one statement, which copies what is bound to it
_ROWS = 1024  # in one statement, which keeps its memory for the next time
_SMALL_BODY = 65_536  # larger bodies are inserted one by one


def admit(session: Session, groups: list[Sequence[Admission]]) -> list[list[Admitted | CarpoolError]]:
    """Admits in order. Calls that can't meet anything known are gathered and inserted together."""
    session.bury()  # whoever lost its connection with a process that is gone must find its ticket free to adopt
    gathered = _Gathered(session, [one for group in groups for one in group])
    results = [
        [_fresh(one) if gathered.take(one) else _with_care(session, gathered, one) for one in group] for group in groups
    ]
    gathered.insert()
    return results


class _Gathered:
    """Fresh calls on their way into the store, and the fingerprints that a later call could adopt."""

    def __init__(self, session: Session, admissions: list[Admission]) -> None:
        self._session = session
        self._calls: list[Row] = []
        self._bodies: list[Row] = []
        asked = to_json([signed(one.call.fingerprint) for one in admissions if one.call.key is None])
        # Those in doubt first: whoever is freed between the two questions is in the second answer.
        self._adoptable = set(session.doubtful(asked))
        row = session.row("known_fingerprints", (asked,))
        self._adoptable.update(msgspec.json.decode(row[0], type=list[int]) if row else ())

    def take(self, admission: Admission) -> bool:
        """Takes a call that provably has no earlier ticket: no key, no retry, nothing to adopt."""
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
        self._bodies.append((call.ticket, self._session.sealing.bytes_in(call.ticket, call.body)))
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


def _with_care(session: Session, gathered: _Gathered, admission: Admission) -> Admitted | CarpoolError:
    """The prose of the contract, for one call, with all earlier ones in the tables."""
    gathered.insert()
    call = admission.call
    credential = session.credential(call.credential)
    if call.key is not None:
        row = _by_key(session, credential, call.key)
        if row is not None and row[1] != signed(call.fingerprint):
            return KeyConflict(f"The key {call.key[:80]!r} was used for another call. Use a new key for a new call.")
        ticket = None if row is None else row[0]
    else:
        fingerprint, pressed = signed(call.fingerprint), admission.pressed
        doubtful = not pressed and session.in_doubt(fingerprint, credential, admission.awaiter)
        ticket = _adoptable(session, call, credential)
        if ticket is None and doubtful:
            return Undecided(
                "Whether an equal call is still waited for is not known yet. Send it again in some seconds."
            )
    if ticket is not None:
        return _hand_over(session, ticket, admission)
    gathered.add(admission)
    return _fresh(admission)


def _by_key(session: Session, credential: int, key: str) -> Row | None:
    for form in session.sealing.key_forms(key):
        if (row := session.row("call_by_key", (credential, form))) is not None:
            return row
    return None


def _adoptable(session: Session, call: Call, credential: int) -> int | None:
    fingerprint = signed(call.fingerprint)
    row = session.row("adoptable", (fingerprint, credential))
    if row is None and call.retry:
        row = session.row("lately_delivered", (fingerprint, call.arrived - RETRY_WINDOW, credential))
    return None if row is None else row[0]


def _hand_over(session: Session, ticket: int, admission: Admission) -> Admitted:
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
    found = _calls.outcomes(session, [ticket]) if admitted.state is TicketState.SETTLED else []
    return replace(admitted, outcome=found[0].outcome, entry=found[0].entry) if found else admitted


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
        None if call.key is None else session.sealing.key_in(call.key),
        admission.awaiter,
        call.stream,
        call.max_output_tokens,
        session.word(call.model),
        session.word(admission.reason),
        tags_text(call.tags),
    )
