"""Several engines on one store: who is alive, who leads, who rescues, and who is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from carpool.core.lifecycle import BatchState, TicketState
from carpool.core.model import Intent, Lane, Settlement
from carpool.core.ports import Store
from tests.support.stores import CRED, LEASE, ME, OTHER, STRANGER, T0, admission, admit, board

PULSE = 30.0
LATER = T0 + PULSE + 1  # no pulse of T0 lasts until here, every lease does


async def the_pool(store: Store) -> int:
    [view] = await store.pools([CRED])
    return view.pool


class Watcher:
    """Remembers what it was told, and can be waited for."""

    def __init__(self) -> None:
        self.told: list[Sequence[str]] = []
        self._news = asyncio.Event()

    def __call__(self, names: Sequence[str]) -> None:
        self.told.append(names)
        self._news.set()

    @property
    def names(self) -> set[str]:
        return {name for names in self.told for name in names}

    async def hears(self, what: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not what():
                self._news.clear()
                await self._news.wait()


# ---------------------------------------------------------------- alive


async def test_who_joins_is_told_whether_it_was_alive(store: Store) -> None:
    assert not await store.join(OTHER, T0, LEASE, PULSE)
    assert await store.join(OTHER, T0 + PULSE, LEASE, PULSE)
    assert not await store.join(OTHER, T0 + 3 * PULSE, LEASE, PULSE)  # its lease lasts, its pulse had stopped
    await store.leave(OTHER)
    assert not await store.join(OTHER, T0 + 3 * PULSE, LEASE)
    assert await store.join(OTHER, T0 + 3 * PULSE + LEASE, LEASE)  # without a pulse of its own: as long as the lease


async def test_without_a_pulse_everything_is_lost_but_the_time_for_a_create(store: Store) -> None:
    await store.join(OTHER, T0, LEASE, PULSE)
    batch = await board(store, [1], owner=OTHER)
    assert await store.still_mine(batch.id, OTHER, T0 + LEASE)
    await store.join(ME, LATER, LEASE, PULSE)
    assert await store.take_over(ME, [CRED], LATER) == 1
    taken = await store.batch(batch.id)
    assert taken is not None
    assert (taken.owner, taken.state) == (ME, BatchState.UNKNOWN)
    assert taken.resolved_at == T0 + LEASE  # until then its create may be on its way
    assert not await store.still_mine(batch.id, OTHER, LATER)
    [view] = await store.views([1])
    assert not view.awaited


async def test_of_an_engine_that_left_nothing_is_on_its_way(store: Store) -> None:
    await store.join(OTHER, T0, LEASE, PULSE)
    batch = await board(store, [1], owner=OTHER)
    await store.leave(OTHER)
    await store.take_over(ME, [CRED], T0 + 1)
    taken = await store.batch(batch.id)
    assert taken is not None
    assert (taken.state, taken.resolved_at) == (BatchState.UNKNOWN, T0 + 1)


async def test_a_bought_batch_goes_to_another_as_soon_as_the_pulse_stops(store: Store) -> None:
    await store.join(OTHER, T0, LEASE, PULSE)
    batch = await board(store, [1], owner=OTHER, state=BatchState.OPEN)
    assert await store.take_over(ME, [CRED], T0 + PULSE) == 0
    assert await store.take_over(ME, [CRED], LATER) == 1
    assert [one.id for one in await store.batches(ME)] == [batch.id]


# ---------------------------------------------------------------- leaders


async def test_an_account_has_one_leader(store: Store) -> None:
    await store.join(OTHER, T0, LEASE)
    assert await store.lead(ME, ["a", "b"], T0) == {"a", "b"}
    assert await store.lead(OTHER, ["a", "c"], T0) == {"c"}
    assert await store.lead(ME, ["a", "b", "c"], T0) == {"a", "b"}
    assert await store.lead(ME, ["b"], T0) == {"b"}  # not asked for, not told; and not lost
    assert await store.lead(ME, [], T0) == set()
    assert await store.leaders(T0) == {"a": ME, "b": ME, "c": OTHER}


async def test_nobody_leads_without_a_pulse(store: Store) -> None:
    assert await store.lead(OTHER, ["a"], T0) == set()
    await store.join(OTHER, T0, LEASE, PULSE)
    assert await store.lead(OTHER, ["a"], LATER) == set()
    assert await store.lead(OTHER, ["a"], T0 + PULSE) == {"a"}
    assert await store.leaders(LATER) == {}


async def test_leadership_ends_with_the_pulse(store: Store) -> None:
    await store.join(OTHER, T0, LEASE, PULSE)
    assert await store.lead(OTHER, ["a"], T0) == {"a"}
    assert await store.lead(ME, ["a"], T0 + PULSE) == set()
    assert await store.lead(ME, ["a"], LATER) == {"a"}
    await store.join(OTHER, LATER, LEASE, PULSE)
    assert await store.lead(OTHER, ["a"], LATER) == set()  # back from the dead: another leads


async def test_leadership_ends_when_an_engine_leaves(store: Store) -> None:
    await store.join(OTHER, T0, LEASE)
    await store.lead(ME, ["a"], T0)
    await store.leave(ME)
    assert await store.leaders(T0) == {}
    assert await store.lead(OTHER, ["a"], T0) == {"a"}
    await store.join(ME, T0, LEASE)
    assert await store.lead(ME, ["a"], T0) == set()


async def test_many_who_want_to_lead_get_one_leader(store: Store) -> None:
    engines = [f"engine-{number}" for number in range(8)]
    for engine in engines:
        await store.join(engine, T0, LEASE)
    accounts = [f"account-{number}" for number in range(5)]
    answers = await asyncio.gather(*(store.lead(engine, accounts, T0) for engine in engines))
    assert sorted(account for led in answers for account in led) == accounts


async def test_only_the_leader_makes_batches(store: Store) -> None:
    await store.join(OTHER, T0, LEASE)
    await admit(store, 1, 2)
    pool = await the_pool(store)
    mine = Intent(pool, "n", 10, 10**9, ME, T0, CRED)
    assert await store.intend(mine) is None  # nobody leads yet
    await store.lead(OTHER, [CRED], T0)
    assert await store.intend(mine) is None
    assert (await store.counts())["tickets.queued"] == 2
    batch = await store.intend(Intent(pool, "n", 10, 10**9, OTHER, T0, CRED))
    assert batch is not None
    assert (batch.owner, batch.count) == (OTHER, 2)


async def test_a_leader_whose_pulse_stopped_makes_no_batch(store: Store) -> None:
    await admit(store, 1)
    pool = await the_pool(store)
    await store.join(OTHER, T0, LEASE, PULSE)
    await store.lead(OTHER, [CRED], T0)
    assert await store.intend(Intent(pool, "n", 10, 10**9, OTHER, LATER, CRED)) is None
    assert await store.intend(Intent(pool, "n", 10, 10**9, OTHER, T0 + PULSE, CRED)) is not None


# ---------------------------------------------------------------- who rescues


async def test_each_engine_sees_the_due_calls_that_it_awaits(store: Store) -> None:
    await store.join(OTHER, T0, LEASE)
    await admit(store, 1, rescue_at=T0 + 30)
    await admit(store, 2, rescue_at=T0 + 10, awaiter=OTHER)
    await admit(store, 3, rescue_at=T0 + 20, awaiter=None)
    await admit(store, 4, rescue_at=T0 + 5, credential=STRANGER)
    assert [one.ticket for one in await store.due([CRED], T0 + 60, 10)] == [2, 1]
    assert [one.ticket for one in await store.due([CRED], T0 + 60, 10, ME)] == [1]
    assert [(one.ticket, one.awaiter) for one in await store.due([CRED], T0 + 60, 10, OTHER)] == [(2, OTHER)]
    assert await store.next_due([CRED]) == T0 + 10
    assert await store.next_due([CRED], ME) == T0 + 30
    assert await store.next_due([CRED, STRANGER], ME) == T0 + 5
    assert await store.next_due([CRED], "engine-3") is None


async def test_what_nobody_awaits_on_lane_now_is_told_as_nobodys(store: Store) -> None:
    batch = await board(store, [1])
    await store.release(batch.id, BatchState.REFUSED, Lane.NOW, T0 + 6, "refused")
    await store.await_ticket(1, None)
    [one] = await store.due([CRED], T0 + 60, 10)
    assert (one.ticket, one.state, one.awaiter) == (1, TicketState.QUEUED, None)
    assert await store.due([CRED], T0 + 60, 10, ME) == []


# ---------------------------------------------------------------- who is told


async def test_watchers_hear_whose_calls_came_in(store: Store) -> None:
    watcher = Watcher()
    end = store.on_pool_change(watcher)
    await admit(store, 1)
    await watcher.hears(lambda: watcher.names == {CRED})
    await store.admit_all([admission(2), admission(3, credential=STRANGER), admission(4)])
    await watcher.hears(lambda: watcher.names == {CRED, STRANGER})
    end()
    before = len(watcher.told)
    await admit(store, 5)
    await asyncio.sleep(0.05)
    assert len(watcher.told) == before


async def test_watchers_hear_that_something_changed(store: Store) -> None:
    batch = await board(store, [1, 2], state=BatchState.OPEN)
    watcher = Watcher()
    store.on_pool_change(watcher)
    await store.settle([Settlement(1, requeue=Lane.BATCH, reason="again")], T0 + 9)
    await watcher.hears(lambda: len(watcher.told) > 0)
    before = len(watcher.told)
    await store.join(OTHER, T0, LEASE)
    await store.leave(OTHER)
    await watcher.hears(lambda: len(watcher.told) > before)
    before = len(watcher.told)
    await store.release(batch.id, BatchState.REFUSED, Lane.NOW, T0 + 9, "refused")
    await watcher.hears(lambda: len(watcher.told) > before)
    assert not watcher.names
