"""Several processes on one PostgreSQL: each with connections of its own, all at the same time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable

import psycopg
import pytest

from carpool.core.errors import CarpoolError
from carpool.core.lifecycle import BatchState
from carpool.core.model import Intent, Lane, Settlement
from carpool.stores.postgres import PostgresStore
from tests.support.postgres import shared_url, swept_url
from tests.support.stores import CRED, LEASE, ME, OTHER, T0, admission, admit_one, board, entry, outcome, settlement

SECRET = b"a secret of the test"
NAMES = [ME, OTHER, "engine-3", "engine-4"]


@pytest.fixture
async def stores() -> AsyncIterator[list[PostgresStore]]:
    url = swept_url()
    opened = [await PostgresStore.open(url, own_clock=False, secret=SECRET) for _ in NAMES]
    for name, store in zip(NAMES, opened, strict=True):
        await store.join(name, T0, LEASE)
    yield opened
    for store in opened:
        await store.aclose()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110  what is waited for happens in another thread
            await asyncio.sleep(0.01)


async def _pool(store: PostgresStore) -> int:
    [view] = await store.pools([CRED])
    return view.pool


# ---------------------------------------------------------------- calls


async def test_no_call_is_claimed_twice(stores: list[PostgresStore]) -> None:
    await stores[0].admit_all([admission(ticket) for ticket in range(1, 2001)])
    pool = await _pool(stores[0])

    async def claim(number: int) -> list[int]:
        store, found = stores[number], []
        while batch := await store.intend(Intent(pool, f"n{number}", 37, 10**9, NAMES[number], T0 + 5)):
            found += [ticket async for chunk in store.lines(batch.id) for ticket, _ in chunk]
        return found

    claimed = [ticket for one in await asyncio.gather(*map(claim, range(4))) for ticket in one]
    # A claim leaves out what another holds in that moment; when all are done nothing is left.
    claimed += await claim(0)
    assert sorted(claimed) == list(range(1, 2001))


async def test_what_one_admits_all_can_claim_send_and_settle(stores: list[PostgresStore]) -> None:
    await admit_one(stores[0], admission(1, credential="new to the others", model="new too"))
    [view] = await stores[1].pools(["new to the others"])
    batch = await stores[2].intend(Intent(view.pool, "n", 10, 10**9, NAMES[2], T0 + 5))
    assert batch is not None
    assert batch.key.model == "new too"
    sendable_call = await stores[3].sendable_call(1)
    assert sendable_call is not None
    assert sendable_call.key == batch.key
    assert await stores[1].settle([settlement(1, batch.id, credential="new to the others")], T0 + 60) == [True]
    assert (await stores[0].outcome(1, "new to the others")) is not None


async def test_one_key_is_one_call_whoever_brings_it(stores: list[PostgresStore]) -> None:
    for turn in range(20):
        asked = [
            admit_one(store, admission(100 * turn + number + 1, fingerprint=7, key=f"key-{turn}"))
            for number, store in enumerate(stores)
        ]
        admitted = await asyncio.gather(*asked)
        assert len({one.ticket for one in admitted}) == 1
        assert [one.fresh for one in admitted].count(True) == 1


async def test_each_orphan_is_adopted_by_one(stores: list[PostgresStore]) -> None:
    orphans = [admission(ticket, fingerprint=ticket % 5, awaiter=None, key=f"{ticket}") for ticket in range(1, 41)]
    await stores[0].admit_all(orphans)
    comers = [
        admit_one(store, admission(1000 + 100 * number + turn, fingerprint=turn % 5, awaiter=NAMES[number]))
        for number, store in enumerate(stores)
        for turn in range(15)
    ]
    admitted = await asyncio.gather(*comers)
    adopted = [one.ticket for one in admitted if not one.fresh]
    assert sorted(adopted) == list(range(1, 41))
    assert len(admitted) - len(adopted) == 20


async def test_of_many_senders_one_sends(stores: list[PostgresStore]) -> None:
    await stores[0].admit_all([admission(ticket) for ticket in range(1, 101)])

    async def send(number: int, ticket: int) -> bool:
        return await stores[number].start_sending(entry(ticket, -1 - number, paid=None), NAMES[number], T0 + 10)

    for ticket in range(1, 101):
        assert sum(await asyncio.gather(*(send(number, ticket) for number in range(4)))) == 1


# ---------------------------------------------------------------- settling


async def test_each_call_is_settled_once_and_the_sums_say_so(stores: list[PostgresStore]) -> None:
    """In whatever order: who meets another's rows waits for them, and none is given up."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    batch = await board(stores[0], range(1, 301), state=BatchState.OPEN)

    async def settle(number: int) -> list[int]:
        dice, won = random.Random(seed + number), []
        tickets = dice.sample(range(1, 301), 300)
        for start in range(0, 300, 25):
            chunk = tickets[start : start + 25]
            answers = [settlement(ticket, batch.id, f"from {number}") for ticket in chunk]
            settled = await stores[number].settle(answers, T0 + 60)
            won += [ticket for ticket, mine in zip(chunk, settled, strict=True) if mine]
        return won

    winners = await asyncio.gather(*map(settle, range(4)))
    assert sorted(ticket for won in winners for ticket in won) == list(range(1, 301))
    kept = {one.ticket: one.outcome for one in await stores[0].outcomes(range(1, 301))}
    for number, won in enumerate(winners):
        assert {kept[ticket].body for ticket in won} <= {f"from {number}".encode()}
    [total] = await stores[3].totals()
    assert (total.purchases, total.paid) == (300, 300 * 50)
    assert (await stores[2].counts())["tickets.settled"] == 300


async def test_an_entry_that_two_complete_counts_once(stores: list[PostgresStore]) -> None:
    for turn in range(1, 31):
        await stores[0].record(entry(turn, -1, paid=None))
        await asyncio.gather(*(store.record(entry(turn, -1, paid=5)) for store in stores))
    [total] = await stores[0].totals()
    assert (total.purchases, total.unknown, total.paid) == (30, 0, 150)


async def test_groups_that_lock_in_opposite_orders_both_succeed(stores: list[PostgresStore]) -> None:
    await stores[0].admit_all([admission(ticket) for ticket in range(1, 41)])

    async def one(store: PostgresStore, tickets: list[int]) -> None:
        await asyncio.gather(*(store.await_ticket(ticket, ME) for ticket in tickets))

    for _ in range(5):
        await asyncio.gather(
            *(one(store, list(range(1, 41))[:: 1 if turn % 2 else -1]) for turn, store in enumerate(stores))
        )


# ---------------------------------------------------------------- engines


async def test_one_follows_a_dead_engine(stores: list[PostgresStore]) -> None:
    for turn in range(10):
        dead = f"dead-{turn}"
        await stores[0].join(dead, T0, LEASE)
        batch = await board(stores[0], [turn + 1], owner=dead, nonce=f"n{turn}", state=BatchState.OPEN)
        later = T0 + LEASE * (turn + 2)
        for name, store in zip(NAMES, stores, strict=True):
            await store.join(name, later - 1, LEASE)
        taken = await asyncio.gather(
            *(store.take_over(name, [CRED], later) for name, store in zip(NAMES, stores, strict=True))
        )
        assert sum(taken) == 1
        standing = await stores[0].batch(batch.id)
        assert standing is not None
        assert standing.owner == NAMES[taken.index(1)]
        for store in stores:
            await store.join(standing.owner, later, LEASE)


async def test_those_who_start_together_get_one_leader_and_one_heir(stores: list[PostgresStore]) -> None:
    """Each joins and asks in one breath: a look at who is alive must not miss whoever joined in that moment."""
    for turn in range(25):
        await stores[0].join("dead", T0, LEASE)
        batch = await board(stores[0], [turn + 1], owner="dead", nonce=f"n{turn}", state=BatchState.OPEN)
        later = T0 + LEASE * 2

        async def start(number: int, turn: int = turn, later: float = later) -> tuple[str, set[str], int]:
            store, name = stores[number], f"{turn}-{number}"
            joined, led, taken = await asyncio.gather(
                store.join(name, later, LEASE),
                store.lead(name, [f"account-{turn}"], later),
                store.take_over(name, [CRED], later),
            )
            assert not joined
            return name, led, taken

        begun = await asyncio.gather(*map(start, range(4)))
        leaders = [name for name, led, _ in begun if led]
        heirs = [name for name, _, taken in begun if taken]
        assert len(leaders) == 1
        assert (await stores[0].leaders(later))[f"account-{turn}"] == leaders[0]
        standing = await stores[0].batch(batch.id)
        assert standing is not None
        assert heirs == [standing.owner]
        await stores[0].move(batch.id, BatchState.LOST)


async def test_calls_awaited_elsewhere_are_forgotten_with_their_engine(stores: list[PostgresStore]) -> None:
    await stores[0].admit_all([admission(1, awaiter="gone"), admission(2, awaiter=OTHER), admission(3, awaiter="left")])
    assert await stores[3].take_over(NAMES[3], [CRED], T0 + 1) == 0
    views = {view.ticket: view.awaited for view in await stores[1].views([1, 2, 3])}
    assert views == {1: False, 2: True, 3: False}


# ---------------------------------------------------------------- telling


async def test_the_others_hear_that_a_batch_may_have_ended_and_nothing_that_somebody_else_wrote(
    stores: list[PostgresStore],
) -> None:
    batch = await board(stores[0], [1])
    await stores[0].move(batch.id, BatchState.OPEN, provider_id="batch_1 with a ; strange name")
    heard: list[int] = []
    for store in stores:
        assert store._notify_channel is not None
        await until(store._notify_channel.listening.is_set)
        store.on_batch_hint(heard.extend)
    assert stores[0]._notify_channel is not None
    with psycopg.connect(shared_url(), autocommit=True) as connection:
        connection.execute(f'LISTEN "{stores[0]._notify_channel._channel}"')
        assert await stores[3].hint_batch("anthropic", "batch_1 with a ; strange name")
        assert not await stores[3].hint_batch("anthropic", "batch_2")
        await until(lambda: len(heard) == len(stores))
        told = [one.payload for one in connection.notifies(timeout=5, stop_after=1)]
    assert heard == len(stores) * [batch.id]
    assert told == [f"b {batch.id}"]


async def test_the_others_hear_what_was_settled_and_what_came_in(stores: list[PostgresStore]) -> None:
    settled: Counter[int] = Counter()
    came: list[str] = []
    for store in stores[1:]:
        assert store._notify_channel is not None
        await until(store._notify_channel.listening.is_set)
        store.subscribe(settled.update)
        store.on_pool_change(came.extend)
    await stores[0].admit_all([admission(ticket) for ticket in range(1, 3001)])
    await until(lambda: came.count(CRED) >= 3)
    await stores[0].settle([Settlement(ticket, outcome()) for ticket in range(1, 3001)], T0 + 60)
    await until(lambda: len(settled) == 3000 and set(settled.values()) == {3})


async def test_an_engine_that_leaves_is_heard_of(stores: list[PostgresStore]) -> None:
    heard: list[tuple[str, ...]] = []
    assert stores[1]._notify_channel is not None
    await until(stores[1]._notify_channel.listening.is_set)
    stores[1].on_pool_change(lambda names: heard.append(tuple(names)))
    await stores[0].leave(ME)
    await until(lambda: () in heard)


async def test_too_many_to_name_are_told_as_such(stores: list[PostgresStore], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carpool.stores.postgres.notify._FORGET_ABOVE", 3)
    heard: list[tuple[int, ...]] = []
    assert stores[1]._notify_channel is not None
    await until(stores[1]._notify_channel.listening.is_set)
    stores[1].subscribe(lambda tickets: heard.append(tuple(tickets)))
    await stores[0].admit_all([admission(ticket) for ticket in range(1, 11)])
    await stores[0].settle([Settlement(ticket, outcome()) for ticket in range(1, 11)], T0)
    await until(lambda: () in heard)


async def test_what_a_cut_kept_from_the_others_is_made_up_for(stores: list[PostgresStore]) -> None:
    heard: list[tuple[int, ...]] = []
    teller, hearer = stores[0]._notify_channel, stores[1]._notify_channel
    assert teller is not None
    assert hearer is not None
    await until(lambda: teller.listening.is_set() and hearer.listening.is_set())
    stores[1].subscribe(lambda tickets: heard.append(tuple(tickets)))
    await admit_one(stores[0], admission(1))
    with psycopg.connect(shared_url(), autocommit=True) as boss:
        boss.execute("SELECT pg_terminate_backend(%s)", (teller.backend,))
    await stores[0].settle([Settlement(1, outcome())], T0)
    await until(lambda: (1,) in heard or () in heard)


async def test_whoever_was_cut_off_is_told_that_some_went_untold(stores: list[PostgresStore]) -> None:
    heard: list[tuple[int, ...]] = []
    channel = stores[1]._notify_channel
    assert channel is not None
    await until(channel.listening.is_set)
    stores[1].subscribe(lambda tickets: heard.append(tuple(tickets)))
    await admit_one(stores[0], admission(1))
    with psycopg.connect(shared_url(), autocommit=True) as boss:
        boss.execute("SELECT pg_terminate_backend(%s)", (channel.backend,))
    await until(lambda: () in heard)
    await until(channel.listening.is_set)
    await stores[0].settle([Settlement(1, outcome())], T0)
    await until(lambda: (1,) in heard)


# ---------------------------------------------------------------- leaving traces


async def test_retention_from_several_sides_counts_each_call_once(stores: list[PostgresStore]) -> None:
    await stores[0].admit_all([admission(ticket) for ticket in range(1, 301)])
    await stores[0].settle([Settlement(ticket, outcome()) for ticket in range(1, 301)], T0)
    await stores[0].delivered(range(1, 301), T0)

    async def retain(store: PostgresStore) -> int:
        removed = 0
        while step := await store.retain(T0 + 1, T0, 20):
            removed += step
        return removed

    assert sum(await asyncio.gather(*map(retain, stores))) == 300
    assert (await stores[0].counts())["tickets.settled"] == 0


async def test_everybody_at_once(stores: list[PostgresStore]) -> None:
    """Admitting, claiming, sending, settling and delivering, all by all: nothing fails, and the books are right."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")

    async def work(number: int) -> None:
        dice, store, name = random.Random(seed + number), stores[number], NAMES[number]
        for turn in range(40):
            first = 10_000 * (number + 1) + 10 * turn
            await store.admit_all([admission(first + more, awaiter=name, reason=f"r{turn}") for more in range(10)])
            for view in await store.pools([CRED]):
                batch = await store.intend(Intent(view.pool, "n", dice.randrange(1, 20), 10**9, name, T0 + 5))
                if batch is None:
                    continue
                await store.move(batch.id, BatchState.OPEN, provider_id=f"p{batch.id}")
                tickets = [ticket async for chunk in store.lines(batch.id) for ticket, _ in chunk]
                rescued = dice.choice(tickets)
                await stores[dice.randrange(4)].start_sending(entry(rescued, -1, paid=None), name, T0 + 10)
                dice.shuffle(tickets)
                answers = [settlement(ticket, batch.id) for ticket in tickets]
                both = await asyncio.gather(
                    store.settle(answers, T0 + 60),
                    stores[dice.randrange(4)].settle([settlement(rescued, -1)], T0 + 60),
                    stores[dice.randrange(4)].delivered(tickets, T0 + 61),
                )
                assert sum(both[0]) + sum(both[1]) == len(tickets)
                await store.move(batch.id, BatchState.ENDED)
                await store.move(batch.id, BatchState.COLLECTED)

    await asyncio.gather(*map(work, range(4)))
    counts = await stores[0].counts()
    assert counts["tickets.settled"] + counts["tickets.queued"] == 1600
    assert counts["tickets.boarded"] == counts["tickets.sending"] == 0
    totals = await stores[0].totals()
    lines = [line for ticket in await _settled(stores[0]) for line in await stores[0].entries(ticket)]
    assert sum(total.purchases for total in totals) == len(lines)
    assert sum(total.paid for total in totals) == sum(line.paid or 0 for line in lines)


async def _settled(store: PostgresStore) -> list[int]:
    return [row.ticket for row in await store.listed_calls(None, None, 10_000)]


async def test_a_failure_in_a_group_is_its_callers_alone(stores: list[PostgresStore]) -> None:
    store = stores[0]
    batch = await board(store, [1, 2])
    racing = []
    for number in range(10, 30):
        racing += [
            admit_one(store, admission(number)),
            admit_one(store, admission(1, credential=f"new-{number}")),  # a number that is taken
            store.move(batch.id, BatchState.COLLECTED),  # a move that is forbidden
            store.remember("kind", str(number), "x", T0),
            store.attempts(2**70),  # a number that fits nowhere
            store.remember("kind", "\ud800", "x", T0),  # no text at all
            store.remember("kind", "\0", "x", T0),  # none that this database holds
        ]
    answers = await asyncio.gather(*racing, return_exceptions=True)
    for number, answer in enumerate(answers):
        if number % 7 in (0, 3):
            assert not isinstance(answer, BaseException)
        else:
            assert isinstance(answer, CarpoolError)
            assert str(answer).endswith(".")
    assert len(await store.recall("kind")) == 20
    assert (await store.listed_calls(None, None, 1))[0].lane == Lane.BATCH
