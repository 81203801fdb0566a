"""Lists of stored calls and batches, for display."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from carpool.core.lifecycle import BatchState, TicketState
from carpool.core.model import Batch, CallRow, Lane, OutcomeKind
from carpool.stores.encryption import Sealing
from carpool.stores.operations.codec import BIGGEST, Row, batch_value, to_json
from carpool.stores.operations.session import Parameters, Session

REACH = 50_000  # how many of the newest calls are searched for those of given credentials

_TAGS = msgspec.json.Decoder(dict[str, str])


def listed_calls(
    session: Session,
    before: int | None,
    state: TicketState | None,
    limit: int,
    credentials: Sequence[str] | None = None,
) -> list[CallRow]:
    query: dict[str, object] = {"before": BIGGEST if before is None else before, "limit": limit}
    if credentials is not None:
        own = {"credentials": _numbers(session, credentials), "state": state.value if state else "", "reach": REACH}
        return _calls(session, "newest_own", query | own)
    if state is None:
        return _calls(session, "newest_calls", query)
    if state is TicketState.SETTLED:
        return _calls(session, "newest_settled", query)
    return _calls(session, "newest_open", query | {"state": state.value})


def listed_call(session: Session, ticket: int, credentials: Sequence[str] | None = None) -> CallRow | None:
    if ticket > BIGGEST:  # the text form can encode larger numbers than a ticket can have
        return None
    if credentials is None:
        rows = _calls(session, "one_call", {"ticket": ticket})
    else:
        rows = _calls(session, "one_own_call", {"ticket": ticket, "credentials": _numbers(session, credentials)})
    return rows[0] if rows else None


def listed_batches(
    session: Session,
    before: int | None,
    state: BatchState | None,
    limit: int,
    credentials: Sequence[str] | None = None,
) -> list[Batch]:
    query = {"before": BIGGEST if before is None else before, "state": state.value if state else "", "limit": limit}
    own = {"credentials": None if credentials is None else _numbers(session, credentials)}
    rows = session.rows("listed_batches", query | own)
    return [batch_value(session.sealing, row, session.pool_key(row[1])) for row in rows]


def _numbers(session: Session, credentials: Sequence[str]) -> str:
    return to_json(session.known_credentials(credentials))


def _calls(session: Session, which: str, query: Parameters) -> list[CallRow]:
    statement = session.sql["listed_calls"].replace("{found}", session.sql[which])
    return [_value(session.sealing, row) for row in session.execute(statement, query).fetchall()]


def _value(sealing: Sealing, row: Row) -> CallRow:
    ticket, provider, credential, endpoint, model, state, lane, arrived, deadline, settled_at, *rest = row
    delivered_at, awaited, size, batch, reason, tags, kind, status, paid, would_have_paid, purchases = rest
    return CallRow(
        ticket=ticket,
        provider=provider,
        credential=credential,
        endpoint=endpoint,
        model=sealing.text_out(model),
        state=TicketState(state),
        lane=Lane(lane),
        arrived=arrived,
        deadline=deadline,
        settled_at=settled_at,
        delivered_at=delivered_at,
        awaited=bool(awaited),
        bytes=size,
        batch=batch,
        reason=sealing.text_out(reason),
        tags={} if tags is None else _TAGS.decode(tags),
        kind=None if kind is None else OutcomeKind(kind),
        status=status,
        paid=paid,
        would_have_paid=would_have_paid,
        purchases=purchases,
    )
