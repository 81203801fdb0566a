"""What every store promises when many ask at once."""

from __future__ import annotations

import asyncio

from carpool.core.errors import IllegalMove, KeyConflict
from carpool.core.lifecycle import BatchState
from carpool.core.model import EntryKind, Intent, Lane
from carpool.core.ports import Store
from tests.support.stores import (
    CRED,
    LEASE,
    ME,
    OTHER,
    T0,
    admission,
    admit,
    admit_one,
    attempt,
    board,
    counted,
    outcome,
    settlement,
)

MANY = 10_000


async def test_ten_thousand_at_once_are_ten_thousand_tickets(store: Store) -> None:
    admitted = await asyncio.gather(*(admit_one(store, admission(ticket)) for ticket in range(1, MANY + 1)))
    assert {one.ticket for one in admitted} == set(range(1, MANY + 1))
    [view] = await store.pools([CRED])
    assert view.count == MANY


async def test_a_key_used_by_a_hundred_at_once_is_one_ticket(store: Store) -> None:
    same = (admit_one(store, admission(ticket, key="k", fingerprint=5)) for ticket in range(1, 101))
    admitted = await asyncio.gather(*same)
    assert {one.ticket for one in admitted} == {1}
    assert [one.fresh for one in admitted].count(True) == 1


async def test_a_conflict_hurts_its_caller_only(store: Store) -> None:
    keys = ("k", None, "k", None)
    racing = (admit_one(store, admission(ticket, key=key)) for ticket, key in enumerate(keys, 1))
    results = await asyncio.gather(*racing, return_exceptions=True)
    assert [isinstance(one, KeyConflict) for one in results] == [False, False, True, False]
    assert await counted(store, "tickets.queued") == 3


async def test_an_abandoned_ticket_is_adopted_by_one_of_a_hundred(store: Store) -> None:
    await admit(store, 1, fingerprint=5, awaiter=None)
    admitted = await asyncio.gather(*(admit_one(store, admission(ticket, fingerprint=5)) for ticket in range(2, 102)))
    assert [one.ticket for one in admitted].count(1) == 1
    assert len({one.ticket for one in admitted}) == 100


async def test_unawaited_twins_in_one_go_meet_each_other(store: Store) -> None:
    twins = (admit_one(store, admission(ticket, fingerprint=5, awaiter=None)) for ticket in (1, 2))
    assert [one.ticket for one in await asyncio.gather(*twins)] == [1, 1]


async def test_two_intents_never_claim_the_same_call(store: Store) -> None:
    await asyncio.gather(*(admit_one(store, admission(ticket)) for ticket in range(1, 1001)))
    [view] = await store.pools([CRED])
    intents = (store.intend(Intent(view.pool, f"n{number}", 300, 10**9, ME, T0)) for number in range(5))
    batches = [batch for batch in await asyncio.gather(*intents) if batch is not None]
    assert [batch.count for batch in batches] == [300, 300, 300, 100]
    claimed = [ticket for batch in batches for ticket in await store.unmentioned(batch.id, 0, 1000)]
    assert sorted(claimed) == list(range(1, 1001))


async def test_of_a_rescue_and_a_batch_one_gives_the_outcome(store: Store) -> None:
    batch = await board(store, list(range(1, 101)), state=BatchState.OPEN)
    await asyncio.gather(
        *(store.start_sending(attempt(ticket, kind=EntryKind.RESCUE), ME, T0) for ticket in range(1, 101))
    )
    rescues = [store.settle([settlement(ticket, -1, kind=EntryKind.RESCUE)], T0) for ticket in range(1, 101)]
    results = [store.settle([settlement(ticket, batch.id)], T0) for ticket in range(1, 101)]
    interleaved = [one for pair in zip(rescues, results, strict=True) for one in pair]
    won = await asyncio.gather(*interleaved)
    assert [first[0] + second[0] for first, second in zip(won[::2], won[1::2], strict=True)] == [1] * 100
    totals = {one.kind: one for one in await store.totals()}
    assert totals[EntryKind.RESCUE].purchases == 100
    assert sum(one.would_have_paid for one in totals.values()) == 100 * 100


async def test_settling_the_same_call_from_many_sides(store: Store) -> None:
    batch = await board(store, [1], state=BatchState.OPEN)
    won = await asyncio.gather(*(store.settle([settlement(1, batch.id, str(n))], T0) for n in range(50)))
    assert won == [[True]] + [[False]] * 49
    assert len(await store.entries(1)) == 1


async def test_of_a_cancel_and_an_intent_one_wins(store: Store) -> None:
    await admit(store, 1)
    [view] = await store.pools([CRED])
    cancelled, batch = await asyncio.gather(
        store.cancel(1, outcome("cancelled")), store.intend(Intent(view.pool, "n", 10, 10**9, ME, T0))
    )
    assert cancelled is (batch is None)


async def test_of_many_engines_one_sends(store: Store) -> None:
    engines = [f"engine-{number}" for number in range(1, 21)]
    for engine in engines:
        await store.join(engine, T0, LEASE)
    await board(store, [1], state=BatchState.OPEN)
    started = await asyncio.gather(
        *(store.start_sending(attempt(1, number), engine, T0) for number, engine in enumerate(engines, 1))
    )
    assert started.count(True) == 1
    assert await store.attempts(1) == 1


async def test_a_batch_moves_once(store: Store) -> None:
    batch = await board(store, [1])
    racing = (store.move(batch.id, BatchState.OPEN, provider_id=str(number)) for number in range(20))
    results = await asyncio.gather(*racing, return_exceptions=True)
    assert [isinstance(one, IllegalMove) for one in results].count(False) == 1


async def test_two_engines_take_over_each_batch_once(store: Store) -> None:
    for ticket in range(1, 6):
        await board(store, [ticket], nonce=f"n{ticket}")
    await store.leave(ME)
    later = T0 + 1
    await store.join(OTHER, later, LEASE)
    await store.join("engine-3", later, LEASE)
    taken = await asyncio.gather(store.take_over(OTHER, [CRED], later), store.take_over("engine-3", [CRED], later))
    assert sum(taken) == 5
    assert len(await store.batches(OTHER)) + len(await store.batches("engine-3")) == 5


async def test_a_cancelled_caller_leaves_a_whole_store(store: Store) -> None:
    tasks = [asyncio.ensure_future(admit_one(store, admission(ticket))) for ticket in range(1, 200)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    again = await admit_one(store, admission(500, lane=Lane.NOW))
    assert again.fresh
    assert await counted(store, "tickets.queued") >= 99
