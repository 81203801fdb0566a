"""Operations of an engine's step: leases, pools and due calls, and batches from the intent to their end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from carpool.core.errors import IllegalMove, Misuse
from carpool.core.lifecycle import BATCH_MOVES, BatchState, TicketState, check_batch_move
from carpool.core.model import Batch, Due, Intent, Lane, OpenCalls, PoolView
from carpool.stores.operations.session import Session, batch_value, finite, states_list, to_json

FIELDS = frozenset(
    {"sent_at", "resolved_at", "provider_id", "expires_at", "ended_at", "clock_offset", "abandoned", "note", "unsent"}
)
FORGOTTEN_S = 86_400.0  # after this time the row of a dead engine is deleted
LINES_PER_CHUNK = 2048
BYTES_PER_CHUNK = 4_000_000


def join(session: Session, engine: str, now: float, ttl: float, pulse: float | None = None) -> bool:
    alive = _alive(session, engine, now)
    session.run("join", {"engine": engine, "now": now, "ttl": ttl, "pulse": ttl if pulse is None else pulse})
    return alive


def _alive(session: Session, engine: str, now: float) -> bool:
    return session.row("alive", {"engine": engine, "now": now}) is not None


def leave(session: Session, engine: str) -> None:
    session.run("leave", (engine,))
    session.run("resign", (engine,))


def lead(session: Session, engine: str, accounts: Sequence[str], now: float) -> set[str]:
    session.mark_dead_engines()
    session.alone()
    if not _alive(session, engine, now):
        return set()
    asked = to_json(accounts)
    session.run("lead", {"engine": engine, "accounts": asked, "now": now})
    return {row[0] for row in session.rows("led", {"engine": engine, "accounts": asked})}


def leaders(session: Session, now: float) -> dict[str, str]:
    return dict(session.rows("leaders", {"now": now}))


def take_over(session: Session, engine: str, credentials: Sequence[str], now: float) -> int:
    session.alone()
    known = to_json(session.known_credentials(credentials))
    taken = session.run("take_batches", {"engine": engine, "credentials": known, "now": now}).rowcount
    session.run("return_orphans", {"now": now})
    session.run("forget_engines", {"before": now - FORGOTTEN_S})
    if dead := session.departed(now):
        session.run("forget_awaiters", {"dead": to_json(dead)})
    return taken


def pools(session: Session, credentials: Sequence[str]) -> list[PoolView]:
    rows = session.rows("pools", (session.pools_of(credentials),))
    return [
        PoolView(number, session.pool_key(number), count, size, oldest, newest, finite(rescue))
        for number, count, size, oldest, newest, rescue in rows
    ]


def due(
    session: Session, credentials: Sequence[str], until: float, limit: int, awaiter: str | None = None
) -> list[Due]:
    known = to_json(session.known_credentials(credentials))
    rows = session.rows("due", {"credentials": known, "until": until, "limit": limit, "awaiter": awaiter})
    return [Due(ticket, TicketState(state), Lane(lane), *rest) for ticket, state, lane, *rest in rows]


def next_due(session: Session, credentials: Sequence[str], awaiter: str | None = None) -> float | None:
    queries = [{"credential": number, "awaiter": awaiter} for number in session.known_credentials(credentials)]
    return min((row[0] for query in queries if (row := session.row("next_due", query)) is not None), default=None)


def intend(session: Session, intent: Intent) -> Batch | None:
    if intent.max_count < 1 or session.row("anything_waiting", {"pool": intent.pool, "at": intent.at}) is None:
        return None
    leading = {"account": intent.account, "engine": intent.owner, "now": intent.at}
    if intent.account is not None and session.row("leads", leading) is None:
        return None
    row = {"pool": intent.pool, "nonce": intent.nonce, "owner": intent.owner, "at": intent.at, "unsent": intent.unsent}
    number = session.new_id("insert_batch", row)
    limits = {"max_count": intent.max_count, "max_bytes": intent.max_bytes}
    claimed = session.run("claim", {"batch": number, "pool": intent.pool, "at": intent.at} | limits).rowcount
    if not claimed:  # another process claimed the calls first
        session.run("remove_batch", {"batch": number})
        return None
    session.run("sum_claim", {"batch": number})
    return batch(session, number)


def still_mine(session: Session, batch: int, owner: str, until: float) -> bool:
    return session.row("still_mine", {"batch": batch, "owner": owner, "until": until}) is not None


def depart(session: Session, batch: int, owner: str, until: float, now: float) -> bool:
    parameters = {"batch": batch, "owner": owner, "until": until, "now": now}
    return session.run("depart", parameters).rowcount == 1


def lines(session: Session, batch: int, after: int) -> list[tuple[int, bytes]]:
    """Returns the next chunk of at least one line, limited in lines and bytes so that other jobs need not wait long."""
    sizes = session.rows("line_sizes", (batch, after, LINES_PER_CHUNK))
    if not sizes:
        return []
    last, total = sizes[0]
    for ticket, size in sizes[1:]:
        total += size
        if total > BYTES_PER_CHUNK:
            break
        last = ticket
    rows, decrypt = session.rows("line_bodies", (batch, after, last)), session.contents.bytes_out
    return [(ticket, decrypt(ticket, body)) for ticket, body in rows]


def move(session: Session, batch: int, target: BatchState, changes: Mapping[str, object], owner: str | None) -> Batch:
    assignments = ", ".join(filter(None, ("state = ?", _assignments(changes))))
    sources = states_list(source for source, targets in BATCH_MOVES.items() if target in targets)
    statement = session.sql["move_batch"].replace("{changes}", assignments).replace("{sources}", sources)
    if session.execute(statement, [target.value, *_values(session, changes), batch]).rowcount == 0:
        check_batch_move(_existing(session, batch).state, target)
    moved = _existing(session, batch)  # the UPDATE locks the row, so no one else changes it in this transaction
    if owner not in (None, moved.owner):
        raise IllegalMove(f"The batch {batch} is not {owner}'s any more.")
    return moved


def annotate(session: Session, batch: int, changes: Mapping[str, object]) -> None:
    assignments = _assignments(changes)
    if assignments:
        statement = session.sql["set_batch"].replace("{changes}", assignments)
        if session.execute(statement, [*_values(session, changes), batch]).rowcount == 0:
            _existing(session, batch)


def release(
    session: Session, batch: int, target: BatchState, lane: Lane, now: float, reason: str, owner: str | None = None
) -> int:
    move(session, batch, target, {"abandoned": True} if target is BatchState.ABANDONED else {}, owner)
    bought = target is not BatchState.REFUSED  # a batch that was provably not bought does not count as a requeue
    change = {"batch": batch, "lane": lane.value, "now": now, "reason": session.word(reason), "bought": bought}
    returned = session.run("release_boarded", change).rowcount
    session.run("release_sending", {"batch": batch})
    return returned


def _assignments(changes: Mapping[str, object]) -> str:
    for name in changes.keys() - FIELDS:
        raise Misuse(f"A batch has no field {name!r} that may be set.")
    return ", ".join(f"{name} = ?" for name in changes)


def _values(session: Session, changes: Mapping[str, object]) -> list[object]:
    return [session.contents.text_in(str(value)) if name == "note" else value for name, value in changes.items()]


def batch(session: Session, number: int) -> Batch | None:
    row = session.row("batch", (number,))
    return None if row is None else batch_value(session, row)


def _existing(session: Session, number: int) -> Batch:
    existing = batch(session, number)
    if existing is None:
        raise IllegalMove(f"There is no batch {number}.")
    return existing


def batches(session: Session, owner: str) -> list[Batch]:
    rows = session.rows("batches", (owner,))
    return [batch_value(session, row) for row in rows]


def unfinished(session: Session, provider: str, provider_id: str) -> list[int]:
    return [row[0] for row in session.rows("unfinished_named", {"provider": provider, "provider_id": provider_id})]


def open_calls(session: Session, batch: int) -> OpenCalls:
    row = session.row("open_calls", {"batch": batch})
    assert row is not None
    return OpenCalls(*row)


def tidy(session: Session, batch: int, after: int, limit: int) -> int | None:
    tickets = [row[0] for row in session.rows("settled_in_batch", {"batch": batch, "after": after, "limit": limit})]
    session.change("remove_bodies", (to_json(tickets),))
    return tickets[-1] if tickets else None


def unmentioned(session: Session, batch: int, after: int, limit: int) -> list[int]:
    row = session.row("unmentioned", {"batch": batch, "after": after, "limit": limit})
    assert row is not None
    return msgspec.json.decode(row[0], type=list[int])


def known_provider_ids(session: Session, credential: str) -> set[str]:
    provider_ids: set[str] = set()
    for number in session.known_credentials([credential]):
        provider_ids.update(row[0] for row in session.rows("known_provider_ids", {"credential": number}))
    return provider_ids


def suspect(session: Session, batch: int, provider_id: str, verdict: str) -> None:
    session.run("suspect", {"batch": batch, "provider_id": provider_id, "verdict": verdict})


def suspects(session: Session, batch: int) -> dict[str, str]:
    return dict(session.rows("suspects", (batch,)))
