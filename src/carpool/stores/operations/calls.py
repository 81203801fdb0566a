"""Operations on stored calls: who awaits them, which are due, which may be removed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from carpool.core.lifecycle import TicketState
from carpool.core.model import Due, Lane, Outcome, Parcel, PoolView, Settled, TicketView
from carpool.stores.operations.codec import BIGGEST, finite, outcome_row, settled_value, to_json
from carpool.stores.operations.session import Session


def await_ticket(session: Session, ticket: int, awaiter: str | None) -> None:
    if awaiter is not None:
        session.awaiters.add(awaiter)
    session.run("await_ticket", (awaiter, ticket))


def stop_awaiting(session: Session, ticket: int, engine: str) -> None:
    session.run("stop_awaiting", (ticket, engine))


def delivered(session: Session, tickets: Sequence[int], now: float) -> None:
    session.change("delivered", {"tickets": to_json(sorted(tickets)), "now": now})


def outcome(session: Session, ticket: int, credential: str) -> Settled | None:
    if ticket > BIGGEST:  # the text form can encode larger numbers than a ticket can have
        return None
    row = session.row("outcome", (ticket, credential))
    return None if row is None else settled_value(session.sealing, row)


def outcomes(session: Session, tickets: Sequence[int]) -> list[Settled]:
    rows = session.rows("outcomes", (to_json(list(tickets)),))
    return [settled_value(session.sealing, row) for row in rows]


def parcel(session: Session, ticket: int) -> Parcel | None:
    row = session.row("parcel", (ticket,))
    if row is None:
        return None
    number, pool, body, model, requeues, reason = row
    plain_body, text = session.sealing.bytes_out(ticket, body), session.sealing.text_out
    return Parcel(number, session.pool_key(pool), plain_body, text(model), requeues, text(reason))


def views(session: Session, tickets: Sequence[int]) -> list[TicketView]:
    return [
        TicketView(ticket, TicketState(state), requeues, finite(rescue_at), deadline, bool(awaited))
        for ticket, state, requeues, rescue_at, deadline, awaited in session.rows("views", (to_json(tickets),))
    ]


def cancel(session: Session, ticket: int, outcome: Outcome) -> bool:
    number = session.next_outcome()
    if session.run("cancel", {"at": outcome.at, "outcome": number, "ticket": ticket}).rowcount == 0:
        return False
    session.insert("insert_outcomes", [outcome_row(session.sealing, number, ticket, None, outcome)])
    session.run("remove_bodies", (to_json([ticket]),))
    session.run("add_tally", ("tickets.settled", 1))
    return True


def pools(session: Session, credentials: Iterable[str]) -> list[PoolView]:
    rows = session.rows("pools", (session.pools_of(credentials),))
    return [
        PoolView(number, session.pool_key(number), count, size, oldest, newest, finite(rescue))
        for number, count, size, oldest, newest, rescue in rows
    ]


def due(session: Session, credentials: Iterable[str], until: float, limit: int, awaiter: str | None) -> list[Due]:
    known = to_json(session.known_credentials(credentials))
    rows = session.rows("due", {"credentials": known, "until": until, "limit": limit, "awaiter": awaiter})
    return [Due(ticket, TicketState(state), Lane(lane), *rest) for ticket, state, lane, *rest in rows]


def next_due(session: Session, credentials: Iterable[str], awaiter: str | None) -> float | None:
    queries = [{"credential": number, "awaiter": awaiter} for number in session.known_credentials(credentials)]
    return min((row[0] for query in queries if (row := session.row("next_due", query)) is not None), default=None)


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
