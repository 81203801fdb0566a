"""What stands in the store, for people who look."""

from __future__ import annotations

import msgspec

from carpool.lifecycle import BatchState, TicketState
from carpool.model import Batch, CallRow, Lane, OutcomeKind
from carpool.stores._codec import BIGGEST, Row, batch_value
from carpool.stores._session import Parameters, Session
from carpool.stores._statements import SQL

_TAGS = msgspec.json.Decoder(dict[str, str])


def listed_calls(session: Session, before: int | None, state: TicketState | None, limit: int) -> list[CallRow]:
    asked = {"before": BIGGEST if before is None else before, "limit": limit}
    if state is None:
        return _calls(session, "newest_calls", asked)
    if state is TicketState.SETTLED:
        return _calls(session, "newest_settled", asked)
    return _calls(session, "newest_open", asked | {"state": state.value})


def listed_call(session: Session, ticket: int) -> CallRow | None:
    found = _calls(session, "one_call", {"ticket": ticket}) if ticket <= BIGGEST else []
    return found[0] if found else None


def listed_batches(session: Session, before: int | None, state: BatchState | None, limit: int) -> list[Batch]:
    asked = {"before": BIGGEST if before is None else before, "state": state.value if state else "", "limit": limit}
    return [batch_value(row, session.pool_key(row[1])) for row in session.rows("listed_batches", asked)]


def _calls(session: Session, which: str, asked: Parameters) -> list[CallRow]:
    statement = SQL["listed_calls"].replace("{found}", SQL[which])
    return [_value(row) for row in session.connection.execute(statement, asked)]


def _value(row: Row) -> CallRow:
    ticket, provider, credential, endpoint, model, state, lane, arrived, deadline, settled_at, *rest = row
    delivered_at, awaited, size, batch, reason, tags, kind, status, paid, would_have_paid = rest
    return CallRow(
        ticket=ticket,
        provider=provider,
        credential=credential,
        endpoint=endpoint,
        model=model,
        state=TicketState(state),
        lane=Lane(lane),
        arrived=arrived,
        deadline=deadline,
        settled_at=settled_at,
        delivered_at=delivered_at,
        awaited=bool(awaited),
        bytes=size,
        batch=batch,
        reason=reason,
        tags={} if tags is None else _TAGS.decode(tags),
        kind=None if kind is None else OutcomeKind(kind),
        status=status,
        paid=paid,
        would_have_paid=would_have_paid,
    )
