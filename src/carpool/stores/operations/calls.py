"""Operations on stored calls: who awaits them, which may be removed; lists of calls and batches for
display; virtual keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import msgspec

from carpool.core.keys import Profile, VirtualKey
from carpool.core.lifecycle import BatchState, TicketState
from carpool.core.model import Batch, CallRow, Outcome, SendableCall, Settled, TicketView
from carpool.stores.operations.session import (
    BIGGEST,
    Parameters,
    Row,
    Session,
    batch_value,
    call_value,
    finite,
    outcome_row,
    settled_value,
    to_json,
)

REACH = 50_000  # how many of the newest calls are searched for those of given credentials
_PROFILE = msgspec.json.Decoder(Profile)


def await_ticket(session: Session, ticket: int, awaiter: str | None) -> None:
    if awaiter is not None:
        session.awaiters.add(awaiter)
    session.run("await_ticket", (awaiter, ticket))


def stop_awaiting(session: Session, ticket: int, engine: str) -> None:
    session.run("stop_awaiting", (ticket, engine))


def delivered(session: Session, tickets: Sequence[int], now: float) -> None:
    session.change("delivered", {"tickets": to_json(sorted(tickets)), "now": now})


def outcome(session: Session, ticket: int, credential: str) -> Settled | None:
    row = session.row("outcome", (ticket, credential))
    return None if row is None else settled_value(session, row)


def outcomes(session: Session, tickets: Sequence[int]) -> list[Settled]:
    return [settled_value(session, row) for row in session.rows("outcomes", (to_json(tickets),))]


def sendable_call(session: Session, ticket: int) -> SendableCall | None:
    row = session.row("sendable_call", (ticket,))
    if row is None:
        return None
    number, pool, body, model, requeues, reason = row
    plain_body, text = session.contents.bytes_out(ticket, body), session.contents.text_out
    return SendableCall(number, session.pool_key(pool), plain_body, text(model), requeues, text(reason))


def views(session: Session, tickets: Sequence[int]) -> list[TicketView]:
    return [
        TicketView(ticket, TicketState(state), requeues, finite(rescue_at), deadline, bool(awaited))
        for ticket, state, requeues, rescue_at, deadline, awaited in session.rows("views", (to_json(tickets),))
    ]


def cancel(session: Session, ticket: int, outcome: Outcome) -> bool:
    [(number,)] = session.rows("next_outcome")
    if session.run("cancel", {"at": outcome.at, "outcome": number, "ticket": ticket}).rowcount == 0:
        return False
    session.insert("insert_outcomes", [outcome_row(session, number, ticket, None, outcome)])
    session.run("remove_bodies", (to_json([ticket]),))
    session.run("add_tally", ("tickets.settled", 1))
    return True


def counts(session: Session) -> dict[str, int]:
    tally = session.row("tally", ("tickets.settled",))
    bought, undelivered = session.row("batches_bought"), session.row("undelivered_count")
    counted = {f"tickets.{state}": 0 for state in TicketState}
    counted |= {f"tickets.{state}": count for state, count in session.rows("call_counts")}
    counted["tickets.settled"] = tally[0] if tally else 0
    counted |= {f"batches.{state}": count for state, count in session.rows("batch_counts")}
    counted["batches.bought"] = bought[0] if bought else 0
    counted["answers.undelivered"] = undelivered[0] if undelivered else 0
    return counted


def retain(session: Session, before: float, undelivered_before: float, limit: int) -> int:
    tickets = [row[0] for row in session.rows("removable_done", {"before": before, "limit": limit})]
    rest = {"before": undelivered_before, "limit": limit - len(tickets)}
    tickets += [row[0] for row in session.rows("removable_unclaimed", rest)]
    if not tickets:
        return 0
    parameters = (to_json(tickets),)
    session.run("remove_outcomes", parameters)
    session.run("remove_bodies", parameters)
    session.run("remove_calls", parameters)
    session.run("add_tally", ("tickets.settled", -len(tickets)))
    return len(tickets)


# ------------------------------------------------------------ lists for display


def listed_calls(
    session: Session,
    before: int | None,
    state: TicketState | None,
    limit: int,
    credentials: Sequence[str] | None = None,
) -> list[CallRow]:
    query: dict[str, object] = {"before": BIGGEST if before is None else before, "limit": limit}
    if credentials is not None:
        query |= {"credentials": session.credential_filter(credentials), "state": state.value if state else ""}
        return _listed(session, "newest_own", query | {"reach": REACH})
    if state is None:
        return _listed(session, "newest_calls", query)
    if state is TicketState.SETTLED:
        return _listed(session, "newest_settled", query)
    return _listed(session, "newest_open", query | {"state": state.value})


def listed_call(session: Session, ticket: int, credentials: Sequence[str] | None = None) -> CallRow | None:
    query = {"ticket": ticket, "credentials": session.credential_filter(credentials)}
    return next(iter(_listed(session, "one_call", query)), None)


def listed_batches(
    session: Session, before: int | None, state: BatchState | None, limit: int, credentials: Sequence[str] | None = None
) -> list[Batch]:
    query = {"before": BIGGEST if before is None else before, "state": state.value if state else "", "limit": limit}
    own = {"credentials": session.credential_filter(credentials)}
    rows = session.rows("listed_batches", query | own)
    return [batch_value(session, row) for row in rows]


def _listed(session: Session, which: str, query: Parameters) -> list[CallRow]:
    statement = session.sql["listed_calls"].replace("{found}", session.sql[which])
    return [call_value(session, row) for row in session.execute(statement, query).fetchall()]


# ------------------------------------------------------------ virtual keys
# Changes are numbered, so that a cache is reloaded only after a change.


def keys(session: Session, known: int | None = None) -> tuple[int, list[VirtualKey]] | None:
    row = session.row("keys_version")
    version = 0 if row is None else row[0]
    return None if version == known else (version, all_keys(session))


def all_keys(session: Session) -> list[VirtualKey]:
    """Returns the keys. The columns are the fields of a key, in order; the eighth is its profile."""
    rows: list[Row] = [(*row[:7], _PROFILE.decode(row[7]), *row[8:]) for row in session.rows("virtual_keys")]
    return [VirtualKey(*row) for row in rows]


def write_keys(session: Session, changed: Sequence[VirtualKey]) -> None:
    for key in changed:
        described = (key.digest, key.uid, key.name, key.hint, key.provider, key.env, key.owner, to_json(key.profile))
        session.run("write_key", (*described, key.created_at, key.expires_at, key.ends_at, key.ended))
    session.run("next_keys_version")


class KeyAdmin(NamedTuple):
    """Reads and changes virtual keys. `transaction` locks the keys against other writers."""

    session: Session
    pepper: bytes
    transaction: Callable[[], AbstractContextManager[object]]

    def stored(self) -> list[VirtualKey]:
        return all_keys(self.session)

    def change(self, decide: Callable[[list[VirtualKey]], Sequence[VirtualKey]]) -> None:
        """Passes the current keys to `decide` and writes what it returns, in one transaction. If it raises, nothing
        changes."""
        with self.transaction():
            write_keys(self.session, decide(self.stored()))


def used_keys(session: Session, uses: Mapping[str, float]) -> None:
    """Records uses without a new change number: caches need not be reloaded, since access does not depend on it."""
    for digest, at in uses.items():
        session.run("used_key", {"digest": digest, "at": at})
