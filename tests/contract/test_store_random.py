"""Random operations: every store must say what the plain one says, step by step."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from math import inf

import pytest
from msgspec.structs import replace

from carpool.core.errors import IllegalMove, KeyConflict
from carpool.core.lifecycle import BatchState, TicketState
from carpool.core.model import Entry, EntryKind, Intent, Lane, Settlement
from carpool.core.ports import Store
from tests.support.reference_store import OPEN, PlainStore
from tests.support.stores import CRED, LEASE, ME, OTHER, STRANGER, T0, admission, admit_one, attempt, entry, outcome

SEED = int(os.environ.get("CARPOOL_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
STEPS = 400
CREDENTIALS = [CRED, STRANGER]


class Run:
    """One run: does each operation to both, and compares what they answer and how they stand."""

    def __init__(self, store: Store, dice: random.Random) -> None:
        self.store, self.dice, self.plain = store, dice, PlainStore()
        self.now, self.last_ticket = T0, 0
        self.told: list[int] = []

    async def begin(self) -> None:
        self.plain.join(ME, T0)
        await self.join()
        self.store.subscribe(self.told.extend)

    async def step(self) -> None:
        self.now += self.dice.choice((0.0, 1.0, 7.0))
        names = [name for name, weight in WEIGHTS.items() for _ in range(weight)]
        await getattr(self, self.dice.choice(names))()

    # operations

    async def join(self) -> None:
        engine = self.dice.choice((ME, OTHER))
        self.plain.join(engine, self.now)
        await self.store.join(engine, self.now, LEASE)

    async def leave(self) -> None:
        engine = self.dice.choice((ME, OTHER))
        self.plain.leases.pop(engine, None)
        await self.store.leave(engine)

    async def take_over(self) -> None:
        asked = self.dice.sample(CREDENTIALS, self.dice.randrange(3))
        engine = self.dice.choice((ME, OTHER))
        expected = self.plain.take_over(engine, asked, self.now)
        assert await self.store.take_over(engine, asked, self.now) == expected

    async def admit(self) -> None:
        self.last_ticket += 1
        fingerprint = self.dice.randrange(12)
        one = admission(
            self.last_ticket,
            fingerprint=fingerprint,
            credential=self.dice.choice(CREDENTIALS),
            lane=self.dice.choice((Lane.BATCH, Lane.BATCH, Lane.NOW)),
            awaiter=self.dice.choice((ME, OTHER, ME, None)),
            rescue_at=self.dice.choice((None, self.now + self.dice.randrange(100))),
            deadline=self.dice.choice((None, self.now + 200)),
            arrived=self.now,
            key=self.dice.choice((None, None, f"key-{self.dice.randrange(8)}")),
            retry=self.dice.random() < 0.3,
            body=b"x" * self.dice.randrange(9),
        )
        try:
            expected = self.plain.admit(one)
        except KeyConflict:
            with pytest.raises(KeyConflict):
                await admit_one(self.store, one)
            return
        admitted = await admit_one(self.store, one)
        assert replace(admitted, entry=None) == expected
        if expected.outcome is not None:
            assert self.plain.bought(expected.ticket) == _bought(admitted.entry)

    async def await_ticket(self) -> None:
        ticket, awaiter = self._ticket(), self.dice.choice((None, ME, OTHER))
        if ticket in self.plain.calls:
            self.plain.calls[ticket].awaiter = awaiter
        await self.store.await_ticket(ticket, awaiter)

    async def stop_awaiting(self) -> None:
        ticket, engine = self._ticket(), self.dice.choice((ME, OTHER))
        if ticket in self.plain.calls and self.plain.calls[ticket].awaiter == engine:
            self.plain.calls[ticket].awaiter = None
        await self.store.stop_awaiting(ticket, engine)

    async def delivered(self) -> None:
        ticket = self._ticket()
        self.plain.delivered(ticket, self.now)
        await self.store.delivered([ticket], self.now)

    async def cancel(self) -> None:
        ticket, final = self._ticket(), outcome("cancelled", at=self.now)
        assert await self.store.cancel(ticket, final) == self.plain.cancel(ticket, final)

    async def start_sending(self) -> None:
        kind = self.dice.choice((EntryKind.PURCHASE, EntryKind.RESCUE))
        line = attempt(self._ticket(), self.dice.randrange(1, 4), kind)
        engine = self.dice.choice((ME, OTHER))
        assert await self.store.start_sending(line, engine, self.now) == self.plain.start_sending(
            line, engine, self.now
        )

    async def stop_sending(self) -> None:
        ticket = self._ticket()
        assert await self.store.stop_sending(ticket) == self.plain.stop_sending(ticket)

    async def intend(self) -> None:
        credential = self.dice.choice(CREDENTIALS)
        views = await self.store.pools([credential])
        if not views:
            assert self.plain.waiting(credential) == []
            return
        limits = (self.dice.randrange(1, 6), self.dice.randrange(30))
        intent = Intent(views[0].pool, "nonce", *limits, self.dice.choice((ME, OTHER)), self.now)
        batch = await self.store.intend(intent)
        if batch is None:
            assert self.plain.claimable(intent, credential) == []
            return
        claimed = self.plain.intend(intent, batch.id, credential)
        assert [t async for chunk in self.store.lines(batch.id) for t, _ in chunk] == sorted(claimed)
        assert batch.count == len(claimed)

    async def move(self) -> None:
        number, target = self._batch(), self.dice.choice(list(BatchState))
        changes = {"provider_id": f"p-{number}"} if target is BatchState.OPEN else {}
        try:
            self.plain.move(number, target, **changes)
        except IllegalMove:
            with pytest.raises(IllegalMove):
                await self.store.move(number, target, **changes)
        else:
            assert (await self.store.move(number, target, **changes)).state is target

    async def suspect(self) -> None:
        number, verdict = self._batch(), self.dice.choice(("watched", "stranger"))
        provider_id = f"p-{self._batch()}"
        if number in self.plain.batches:
            self.plain.batches[number].suspects[provider_id] = verdict
        await self.store.suspect(number, provider_id, verdict)

    async def release(self) -> None:
        number, target = self._batch(), self.dice.choice(list(BatchState))
        lane = self.dice.choice((Lane.NOW, Lane.BATCH))
        try:
            expected = self.plain.release(number, target, lane, self.now)
        except IllegalMove:
            with pytest.raises(IllegalMove):
                await self.store.release(number, target, lane, self.now, "released")
        else:
            assert await self.store.release(number, target, lane, self.now, "released") == expected

    async def settle(self) -> None:
        chunk = [self._settlement() for _ in range(self.dice.randrange(1, 6))]
        expected = [self.plain.settle(one, self.now) for one in chunk]
        assert await self.store.settle(chunk, self.now) == expected

    async def retain(self) -> None:
        before, undelivered = self.now - self.dice.randrange(100), self.now - self.dice.randrange(300)
        assert await self.store.retain(before, undelivered, 10_000) == self.plain.retain(before, undelivered)

    def _ticket(self) -> int:
        return self.dice.randrange(1, self.last_ticket + 2)

    def _batch(self) -> int:
        return self.dice.randrange(1, len(self.plain.batches) + 2)

    def _settlement(self) -> Settlement:
        ticket = self._ticket()
        call = self.plain.calls.get(ticket)
        purchase = self.dice.choice((call.batch if call and call.batch else self._batch(), -1, -2))
        kind = self.dice.choice((EntryKind.PURCHASE, EntryKind.RESCUE))
        paid = self.dice.choice((None, 3, 5))
        line = self.dice.choice((None, entry(ticket, purchase, kind=kind, paid=paid)))
        if self.dice.random() < 0.6:
            return Settlement(ticket, outcome(str(self.dice.random())), line)
        return Settlement(ticket, None, line, self.dice.choice((None, Lane.NOW, Lane.BATCH)), "again")

    # comparison

    async def compare(self) -> None:
        await self._compare_calls()
        for number, batch in self.plain.batches.items():
            stands = await self.store.batch(number)
            assert stands is not None
            assert (stands.state, stands.owner) == (batch.state, batch.owner)
            assert await self.store.open_calls(number) == self.plain.open_calls(number)
            assert await self.store.suspects(number) == batch.suspects
            cursor = (number, self.dice.choice((0, self._ticket())), self.dice.choice((1, 3, 10_000)))
            assert await self.store.unmentioned(*cursor) == self.plain.unmentioned(*cursor)
        for credential in CREDENTIALS:
            assert await self.store.known_provider_ids(credential) == self.plain.known_provider_ids(credential)
        totals = {
            (t.lane, t.kind): (t.purchases, t.unknown, t.paid, t.would_have_paid) for t in await self.store.totals()
        }
        assert totals == self.plain.totals()
        await asyncio.sleep(0)
        assert self.told == self.plain.told

    async def _compare_calls(self) -> None:
        calls = self.plain.calls
        views = {view.ticket: view for view in await self.store.views(range(1, self.last_ticket + 1))}
        assert set(views) == {number for number, call in calls.items() if call.state in OPEN}
        for number, view in views.items():
            call = calls[number]
            assert (view.state, view.requeues, view.deadline) == (call.state, call.requeues, call.deadline)
            assert view.rescue_at == (None if call.rescue_at == inf else call.rescue_at)
            assert view.awaited == (call.awaiter is not None)
        settled = {one.ticket: one for one in await self.store.outcomes(range(1, self.last_ticket + 1))}
        outcomes = {number: one.outcome for number, one in settled.items()}
        assert outcomes == {number: call.outcome for number, call in calls.items() if call.outcome is not None}
        assert all(_bought(one.entry) == self.plain.bought(number) for number, one in settled.items())
        due = [one.ticket for one in await self.store.due(CREDENTIALS, self.now + 50, 10_000)]
        assert due == self.plain.due(self.now + 50)
        for credential in CREDENTIALS:
            counts = [view.count for view in await self.store.pools([credential])]
            assert sum(counts) == len(self.plain.waiting(credential))
        by_state = Counter(call.state for call in calls.values())
        counts = await self.store.counts()
        assert {state: counts[f"tickets.{state}"] for state in TicketState} == {s: by_state[s] for s in TicketState}


def _bought(entry: Entry | None) -> object:
    return None if entry is None else (entry.purchase, entry.lane, entry.kind, entry.paid, entry.would_have_paid)


WEIGHTS = {"admit": 10, "settle": 6, "intend": 4, "move": 4, "start_sending": 4, "await_ticket": 4, "delivered": 3}
WEIGHTS |= {"cancel": 1, "stop_sending": 2, "release": 2, "take_over": 2, "join": 1, "leave": 1, "retain": 1}
WEIGHTS |= {"stop_awaiting": 2, "suspect": 1}


@pytest.mark.parametrize("number", range(3))
async def test_random_operations(store: Store, number: int) -> None:
    seed = SEED + number
    print(f"replay with CARPOOL_TEST_SEED={seed}")
    run = Run(store, random.Random(seed))
    await run.begin()
    for step in range(STEPS):
        await run.step()
        if step % 10 == 0:
            await run.compare()
    await run.compare()
