"""Batches that the provider denies: after a short doubt their calls are bought again, and the ledger says so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from carpool.core.lifecycle import BatchState, TicketState
from carpool.core.model import Batch, EntryKind, Lane, OutcomeKind
from carpool.engine import Reply
from carpool.mock import Constant, MockConfig
from carpool.planners.policy import RoutingPolicy
from tests.support.engines import House, in_house
from tests.support.fleets import until

DENIED = "the provider does not know it any more"
SLOW = MockConfig(batch_latency=Constant(300.0))


async def _asked(house: House, budget: float | None) -> asyncio.Task[Reply | None]:
    """A call aboard a batch that is bought."""
    if not house.engines:
        await house.boot(1)
    process = house.engines[0]
    waiting = asyncio.create_task(process.submit(house.call(process, 1, budget=budget)))
    await until(lambda: bool(house.provider.batches), 60)
    return waiting


async def _answer(waiting: asyncio.Task[Reply | None]) -> Reply:
    reply = await waiting
    assert reply is not None
    return reply


async def _rows(house: House) -> list[Batch]:
    return list(reversed(await house.store.listed_batches(None, None, 100)))


async def _eventually(condition: Callable[[], Awaitable[bool]], seconds: float) -> None:
    for _ in range(int(seconds)):
        if await condition():
            return
        await asyncio.sleep(1.0)
    raise AssertionError("It never came true.")


def test_the_calls_of_a_denied_batch_are_bought_again_while_their_time_allows() -> None:
    async def test(house: House) -> None:
        started = house.timeline.now()
        waiting = await _asked(house, 1800.0)
        house.provider.forget_batch(house.provider.batches[0].id)
        reply = await _answer(waiting)
        assert (reply.outcome.kind, reply.outcome.lane) == (OutcomeKind.SUCCEEDED, Lane.BATCH)
        assert house.timeline.now() - started < 300 + 120  # the doubt, and another batch
        lost, second = await _rows(house)
        assert (lost.state, lost.abandoned, second.abandoned) == (BatchState.ABANDONED, True, False)
        entries = {entry.purchase: entry for entry in await house.store.entries(reply.ticket)}
        assert entries[lost.id].paid is None  # it may be billed
        assert DENIED in entries[lost.id].reason
        assert (entries[second.id].kind, entries[second.id].paid is None) == (EntryKind.PURCHASE, False)
        assert "batch lost" in house.log.text()
        stats = house.engines[0].engine.stats
        assert (stats.batches_lost, stats.requeued_calls, stats.unknown_purchases) == (1, 1, 1)

    in_house(test, SLOW)


def test_one_denial_is_not_believed() -> None:
    """It may be a moment's trouble, or a batch that is too new to be known everywhere."""

    async def test(house: House) -> None:
        waiting = await _asked(house, 1800.0)
        house.provider.forget_batch(house.provider.batches[0].id, seconds=25.0)
        reply = await _answer(waiting)
        assert reply.outcome.kind is OutcomeKind.SUCCEEDED
        assert [row.abandoned for row in await _rows(house)] == [False]
        assert list(house.bought.values()) == [1]

    in_house(test, SLOW)


def test_a_provider_that_denies_everything_is_not_believed() -> None:
    """Where no list is to be had either, the address is wrong or the provider is not well: no batch is gone."""

    async def test(house: House) -> None:
        waiting = await _asked(house, 1800.0)
        box = house.provider._state.box
        well, box.faults = box.faults, replace(box.faults, poll_404=1.0)
        await asyncio.sleep(200.0)
        box.faults = well
        reply = await _answer(waiting)
        assert reply.outcome.kind is OutcomeKind.SUCCEEDED
        assert [row.abandoned for row in await _rows(house)] == [False]

    in_house(test, SLOW)


def test_a_pressing_call_of_a_denied_batch_is_rescued_in_time() -> None:
    async def test(house: House) -> None:
        started = house.timeline.now()
        waiting = await _asked(house, 120.0)
        house.provider.forget_batch(house.provider.batches[0].id)
        reply = await _answer(waiting)
        assert (reply.outcome.kind, reply.outcome.lane) == (OutcomeKind.SUCCEEDED, Lane.NOW)
        assert house.timeline.now() - started < 120.0

    in_house(test, SLOW)


def test_a_call_without_time_left_gets_the_typed_error() -> None:
    """One attempt only, and a client that set no deadline: nothing is left to try."""

    async def test(house: House) -> None:
        house.policy = RoutingPolicy(linger_ms=500, max_attempts=1)
        waiting = await _asked(house, None)
        house.provider.forget_batch(house.provider.batches[0].id)
        reply = await _answer(waiting)
        assert (reply.outcome.kind, reply.outcome.status) == (OutcomeKind.LOST, 502)
        assert DENIED in reply.outcome.reason
        assert len(await _rows(house)) == 1

    in_house(test, SLOW)


def test_results_that_are_denied_are_bought_again() -> None:
    async def test(house: House) -> None:
        waiting = await _asked(house, 7200.0)
        await until(lambda: house.provider.batches[0].closed, 400)
        house.provider.forget_batch(house.provider.batches[0].id)
        reply = await _answer(waiting)
        assert reply.outcome.kind is OutcomeKind.SUCCEEDED
        assert reply.outcome.batch != house.provider.batches[0].id
        assert [row.abandoned for row in await _rows(house)] == [True, False]

    in_house(test, SLOW)


def test_a_batch_that_comes_back_is_collected_and_what_it_bought_is_a_duplicate() -> None:
    async def test(house: House) -> None:
        waiting = await _asked(house, 1800.0)
        house.provider.forget_batch(house.provider.batches[0].id, seconds=3600.0)
        reply = await _answer(waiting)
        first = (await _rows(house))[0].id

        async def collected() -> bool:
            row = await house.store.batch(first)
            return row is not None and row.state is BatchState.COLLECTED

        await _eventually(collected, 7200)
        entries = {entry.purchase: entry for entry in await house.store.entries(reply.ticket)}
        assert (entries[first].kind, entries[first].paid is None) == (EntryKind.DUPLICATE, False)
        assert sum(entry.paid or 0 for entry in entries.values()) == sum(
            charge.nano_usd for charge in house.provider.bill.charges
        )

    in_house(test, SLOW)


def test_what_comes_back_first_is_the_answer() -> None:
    """The call waits in another batch; the first one is there again, and ends sooner."""

    async def test(house: House) -> None:
        waiting = await _asked(house, 7200.0)
        house.provider.forget_batch(house.provider.batches[0].id, seconds=200.0)
        await until(lambda: len(house.provider.batches) == 2, 200)
        house.provider.hold_batch(house.provider.batches[1].id)
        reply = await _answer(waiting)
        assert (reply.outcome.lane, reply.outcome.batch) == (Lane.BATCH, house.provider.batches[0].id)

    in_house(test, SLOW)


def test_a_denied_batch_is_watched_for_a_day_and_then_lost() -> None:
    async def test(house: House) -> None:
        waiting = await _asked(house, 1800.0)
        house.provider.forget_batch(house.provider.batches[0].id)
        await _answer(waiting)
        before = house.log.text().count(f"{house.provider.batches[0].id} -> 404")
        await asyncio.sleep(86_400.0)

        async def lost() -> bool:
            return (await _rows(house))[0].state is BatchState.LOST

        await _eventually(lost, 14_400)
        looks = house.log.text().count(f"{house.provider.batches[0].id} -> 404") - before
        assert 5 < looks < 100
        counts = await house.store.counts()
        assert counts.get(f"tickets.{TicketState.SETTLED}") == 1
        assert house.engines[0].engine.stats.batches_lost == 1

    in_house(test, SLOW)


def test_results_that_stay_denied_although_the_batch_is_there_are_given_up() -> None:
    async def test(house: House) -> None:
        house.policy = RoutingPolicy(linger_ms=500, max_attempts=1)
        house.provider.script("results_404", 10_000)
        waiting = await _asked(house, None)
        reply = await _answer(waiting)
        assert (reply.outcome.kind, reply.outcome.status) == (OutcomeKind.LOST, 502)

        async def lost() -> bool:
            return (await _rows(house))[0].state is BatchState.LOST

        await asyncio.sleep(86_400.0)
        await _eventually(lost, 14_400)
        assert house.log.text().count("batch ended") == 1

    in_house(test, SLOW)
