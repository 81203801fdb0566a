"""One of the processes that share a store. Before each stage it says `ready` and waits for a line on its standard
input; at the end it tells when each stage began and ended, by a clock that all processes of a machine share.

`store`: the store alone, as an engine uses it: calls admitted by groups, claimed, settled by chunks.
`fleet`: the whole way: calls at a door of this process, pooled with those of the others, bought from the mock,
answered here.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "pool")]

import job as bench  # noqa: E402
import ours  # noqa: E402

from carpool.core.model import (  # noqa: E402
    Admission,
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
    Usage,
)
from carpool.core.ports import Store  # noqa: E402
from carpool.stores import open_store  # noqa: E402

GROUP, CHUNK, AHEAD = 500, 2000, 4  # calls let in together, results settled together, groups under way at a time
DAY = 86_400.0
POOL = PoolKey(
    "anthropic", "anthropic", "c" * 32, "/v1/messages", (("anthropic-version", "2023-06-01"),), "", "s", "24h"
)


@dataclass(frozen=True, slots=True)
class Part:
    """What one process is to do."""

    kind: str
    store: str
    first: int
    calls: int
    url: str

    def text(self) -> str:
        return json.dumps(asdict(self))


Span = tuple[float, float]


def span(started: float) -> Span:
    return started, time.monotonic()


async def start() -> None:
    """All begin together: when whoever started them says so."""
    bench.tell({"ready": True})
    await asyncio.to_thread(sys.stdin.readline)


# ---------------------------------------------------------------- the store alone


def admission(number: int, engine: str, now: float) -> Admission:
    body = json.dumps(bench.params(number), separators=(",", ":")).encode()
    call = Call(
        ticket=secrets.randbits(62) | 1,
        provider="anthropic",
        dialect="anthropic",
        endpoint=POOL.endpoint,
        body=body,
        headers=POOL.headers,
        credential=POOL.credential,
        model=bench.MODEL,
        arrived=now,
        deadline=now + DAY,
        max_output_tokens=256,
        fingerprint=random.getrandbits(62),
    )
    return Admission(call, POOL, Lane.BATCH, now + DAY / 2, engine, "A batch is back in time; it pays.")


def settlement(ticket: int, body: bytes, batch: Batch, now: float) -> Settlement:
    outcome = Outcome(OutcomeKind.SUCCEEDED, 200, body[:700], now, Lane.BATCH, batch="msgbatch_shared")
    entry = Entry(
        ticket,
        batch.id,
        now,
        Lane.BATCH,
        EntryKind.PURCHASE,
        "anthropic",
        POOL.credential,
        bench.MODEL,
        Usage(300, 40),
        1000,
        2000,
    )
    return Settlement(ticket, outcome, entry)


async def abreast(work: Sequence[Awaitable[Any]]) -> None:
    """A few at a time, as doors and collectors hand them over."""
    turn = asyncio.Semaphore(AHEAD)

    async def one(waiting: Awaitable[Any]) -> None:
        async with turn:
            await waiting

    await asyncio.gather(*map(one, work))


async def admit(store: Store, admissions: Sequence[Admission]) -> None:
    for done in await store.admit_all(admissions):
        if isinstance(done, Exception):
            raise done


async def claimed(store: Store, calls: int, engine: str, now: float) -> AsyncIterator[Settlement]:
    """The answers to a part of the pool. What another process is just claiming is passed over, so it may take a few."""
    [pool] = [view.pool for view in await store.pools([POOL.credential])]
    while calls:
        batch = await store.intend(Intent(pool, secrets.token_hex(8), calls, 1 << 40, engine, now))
        if batch is None:
            await asyncio.sleep(0.01)
            continue
        calls -= batch.count
        async for chunk in store.lines(batch.id):
            for ticket, body in chunk:
                yield settlement(ticket, body, batch, now)


async def alone(part: Part) -> dict[str, Span]:
    store, engine = await open_store(part.store), f"bench-{secrets.token_hex(4)}"
    now = time.time()
    await store.join(engine, now, 3600.0)
    calls = [admission(number, engine, now) for number in range(part.first, part.first + part.calls)]
    await start()
    started = time.monotonic()
    await abreast([admit(store, calls[place : place + GROUP]) for place in range(0, len(calls), GROUP)])
    admitted = span(started)
    await start()  # all calls are in: as many are left for each as it brought
    made = [one async for one in claimed(store, part.calls, engine, now)]
    random.shuffle(made)  # results come in any order
    await start()
    started = time.monotonic()
    await abreast([store.settle(made[place : place + CHUNK], now) for place in range(0, len(made), CHUNK)])
    settled = span(started)
    await store.aclose()
    return {"admitted": admitted, "settled": settled}


# ---------------------------------------------------------------- the whole way


async def fleet(part: Part) -> dict[str, Span]:
    order = bench.Job("carpool", part.calls, part.url, linger_s=0.5, poll_s=0.1, one_batch=False)
    async with ours.through_the_exchange(order, part.store) as (ask, _):
        await start()
        started = time.monotonic()
        numbers = range(part.first, part.first + part.calls)
        answers = await asyncio.gather(*(ask(bench.params(number)) for number in numbers))
        answered = span(started)
        bench.check(answers, part.calls)
    return {"answered": answered}


KINDS = {"store": alone, "fleet": fleet}

if __name__ == "__main__":
    mine = Part(**json.loads(sys.argv[1]))
    bench.tell(asyncio.run(KINDS[mine.kind](mine)))
