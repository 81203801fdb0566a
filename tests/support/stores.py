"""Every store that the contract suite runs over, and short words for what it is given.

A new store registers itself in `STORES`; the suite does the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from unittest.mock import patch

from carpool.core.errors import CarpoolError
from carpool.core.lifecycle import BatchState
from carpool.core.model import (
    Admission,
    Admitted,
    Batch,
    Call,
    Entry,
    EntryKind,
    Intent,
    Lane,
    Outcome,
    OutcomeKind,
    PoolKey,
    Settlement,
)
from carpool.core.ports import Store
from carpool.stores import SqliteStore
from carpool.stores.postgres import PostgresStore
from carpool.stores.sqlite import opening
from tests.support.postgres import swept_url


async def sqlite_file(directory: Path, *, encrypt: bool = False) -> SqliteStore:
    """A file as in earnest, but the disk is not waited for: only a power cut could tell the difference."""
    hasty = ("PRAGMA synchronous = OFF", *(one for one in opening._PRAGMAS if "synchronous" not in one))
    with patch.object(opening, "_PRAGMAS", hasty):
        return await SqliteStore.open(str(directory / "carpool.db"), secret=b"a secret of the test", encrypt=encrypt)


async def postgres() -> PostgresStore:
    """Leases by the time that the tests say."""
    return await PostgresStore.open(swept_url(), own_clock=False, secret=b"a secret of the test")


STORES: dict[str, Callable[[Path], Awaitable[Store]]] = {
    "sqlite-memory": lambda _: SqliteStore.open(None, threaded=False),
    "sqlite-file": sqlite_file,
    "sqlite-sealed": lambda directory: sqlite_file(directory, encrypt=True),
    "postgres": lambda _: postgres(),
}

T0 = 1_800_000_000.0
ME, OTHER = "engine-1", "engine-2"
CRED, STRANGER = "credential-a", "credential-b"
LEASE = 300.0


def pool(credential: str = CRED, model: str = "m") -> PoolKey:
    headers = (("anthropic-version", "2023-06-01"), ("anthropic-beta", "x"))
    return PoolKey("anthropic", "anthropic", credential, "/v1/messages", headers, model, "small", "1h")


def admission(
    ticket: int,
    *,
    fingerprint: int | None = None,
    credential: str = CRED,
    lane: Lane = Lane.BATCH,
    awaiter: str | None = ME,
    rescue_at: float | None = T0 + 600,
    deadline: float | None = T0 + 900,
    arrived: float = T0,
    key: str | None = None,
    retry: bool = False,
    body: bytes | None = None,
    model: str = "m",
    reason: str = "cheapest",
    tags: dict[str, str] | None = None,
) -> Admission:
    call = Call(
        ticket=ticket,
        provider="anthropic",
        dialect="anthropic",
        endpoint="/v1/messages",
        body=f"body {ticket}".encode() if body is None else body,
        headers=pool().headers,
        credential=credential,
        model=model,
        arrived=arrived,
        deadline=deadline,
        tags=tags or {},
        key=key,
        fingerprint=ticket * 7919 if fingerprint is None else fingerprint,
        retry=retry,
    )
    return Admission(call, pool(credential, model), lane, rescue_at, awaiter, reason)


def outcome(text: str = "answer", lane: Lane = Lane.BATCH, at: float = T0 + 60) -> Outcome:
    return Outcome(OutcomeKind.SUCCEEDED, 200, text.encode(), at, lane, "done", (("request-id", "r"),), "msgbatch_1")


def entry(
    ticket: int,
    purchase: int,
    *,
    kind: EntryKind = EntryKind.PURCHASE,
    paid: int | None = 50,
    would: int | None = 100,
    tags: dict[str, str] | None = None,
    credential: str = CRED,
    at: float = T0 + 60,
) -> Entry:
    lane = Lane.BATCH if purchase > 0 else Lane.NOW
    return Entry(
        ticket, purchase, at, lane, kind, "anthropic", credential, "m", None, paid, would, "because", tags or {}
    )


def attempt(ticket: int, number: int = 1, kind: EntryKind = EntryKind.PURCHASE, at: float = T0 + 10) -> Entry:
    return entry(ticket, -number, kind=kind, paid=None, would=None, at=at)


def settlement(ticket: int, purchase: int, text: str = "answer", **more: object) -> Settlement:
    line = entry(ticket, purchase, **more)  # type: ignore[arg-type]
    return Settlement(ticket, outcome(text, line.lane), line)


async def admit_one(store: Store, admission: Admission) -> Admitted:
    [admitted] = await store.admit_all([admission])
    if isinstance(admitted, CarpoolError):
        raise admitted
    return admitted


async def admit(store: Store, *tickets: int, **more: object) -> None:
    await asyncio.gather(*(admit_one(store, admission(ticket, **more)) for ticket in tickets))  # type: ignore[arg-type]


async def board(
    store: Store, tickets: Sequence[int], *, owner: str = ME, nonce: str = "nonce", state: BatchState | None = None
) -> Batch:
    """Admits the tickets, claims all that wait in their pool, and takes the batch to `state`."""
    await admit(store, *tickets, awaiter=owner)
    [view] = await store.pools([CRED])
    batch = await store.intend(Intent(view.pool, nonce, 100_000, 10**12, owner, T0 + 5))
    assert batch is not None
    for target in ROADS[state or BatchState.SUBMITTING]:
        batch = await store.move(batch.id, target)
    return batch


# One way from `submitting` to every state.
ROADS: dict[BatchState, tuple[BatchState, ...]] = {
    BatchState.SUBMITTING: (),
    BatchState.UNKNOWN: (BatchState.UNKNOWN,),
    BatchState.OPEN: (BatchState.OPEN,),
    BatchState.CANCELLING: (BatchState.OPEN, BatchState.CANCELLING),
    BatchState.ENDED: (BatchState.OPEN, BatchState.ENDED),
    BatchState.COLLECTED: (BatchState.OPEN, BatchState.ENDED, BatchState.COLLECTED),
    BatchState.REFUSED: (BatchState.REFUSED,),
    BatchState.ABANDONED: (BatchState.UNKNOWN, BatchState.ABANDONED),
    BatchState.VOID: (BatchState.UNKNOWN, BatchState.ABANDONED, BatchState.VOID),
    BatchState.LOST: (BatchState.OPEN, BatchState.LOST),
}


async def counted(store: Store, state: str) -> int:
    return (await store.counts()).get(state, 0)
