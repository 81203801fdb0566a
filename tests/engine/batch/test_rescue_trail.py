"""A rescue says that it is one, whichever way the call came back from its batch; its purchases stay with the call."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from carpool.core.model import CallRow, EntryKind, Lane
from carpool.engine import Reply
from carpool.mock import Constant, Faults, MockConfig
from tests.support.engines import House, in_house
from tests.support.fleets import until

LATE = "its batch would have been late"
NEVER = MockConfig(batch_latency=Constant(7200.0), cancel_latency=Constant(1.0))
BUDGET = 300.0


async def _rescued(house: House) -> tuple[Reply, CallRow]:
    house.policy = replace(
        house.policy, poll_interval_s=1.0
    )  # so that what a batch gives back is seen before the rescue
    await house.boot(1)
    process = house.engines[0]
    reply = await process.submit(house.call(process, 1, budget=BUDGET))
    assert reply is not None
    row = await house.store.listed_call(reply.ticket)
    assert row is not None
    return reply, row


@pytest.mark.parametrize(
    "faults",
    [
        Faults(),  # it is stopped first, and gives its call back
        Faults(cancel_accepted_cut=1.0),  # the same, and nobody hears that it was taken
        Faults(cancel_500=1.0),  # it can't be stopped: the rescue runs beside it
    ],
    ids=["stopped", "stopped in silence", "beside it"],
)
def test_a_rescue_says_that_its_batch_would_have_been_late(faults: Faults) -> None:
    async def test(house: House) -> None:
        reply, row = await _rescued(house)
        assert (reply.outcome.lane, reply.outcome.reason) == (Lane.NOW, LATE)
        assert (row.lane, row.reason) == (Lane.NOW, LATE)
        assert f"reason {LATE}" in house.log.text()  # the event
        assert reply.entry is not None
        assert (reply.entry.kind, reply.entry.reason) == (EntryKind.RESCUE, LATE)

    in_house(test, replace(NEVER, faults=faults))


def test_a_batch_that_somebody_else_stopped_was_not_late() -> None:
    async def test(house: House) -> None:
        async def stop() -> None:
            await until(lambda: bool(house.provider.batches), 60)
            house.provider.batches[0].cancel(house.timeline.now(), 1.0)

        stopping = asyncio.create_task(stop())
        house.policy = replace(house.policy, max_attempts=1)
        reply, _ = await _rescued(house)
        await stopping
        assert (reply.outcome.lane, reply.outcome.reason) == (Lane.NOW, "the batch returned it as canceled")

    in_house(test, NEVER)


def test_a_call_on_now_whose_batch_was_lost_says_so() -> None:
    async def test(house: House) -> None:
        async def forget() -> None:
            await until(lambda: bool(house.provider.batches), 60)
            house.provider.forget_batch(house.provider.batches[0].id)

        forgetting = asyncio.create_task(forget())
        house.policy = replace(house.policy, max_attempts=1)
        reply, row = await _rescued(house)
        await forgetting
        assert reply.outcome.lane is Lane.NOW
        assert reply.outcome.reason == row.reason == "its batch was lost: the provider does not know it any more"

    in_house(test, NEVER)


def test_the_trail_of_purchases_stays_with_the_call() -> None:
    async def test(house: House) -> None:
        reply, row = await _rescued(house)
        assert row.purchases == 2
        line, rescue = await house.engines[0].engine.overview.purchases(reply.ticket)
        assert (rescue["lane"], rescue["kind"], rescue["batch"]) == (Lane.NOW, EntryKind.RESCUE, None)
        assert rescue["paid"] == reply.entry.paid if reply.entry else False
        assert (line["lane"], line["kind"], line["paid"]) == (Lane.BATCH, EntryKind.PURCHASE, 0)
        assert (line["batch"], line["reason"]) == (house.provider.batches[0].id, "the batch returned it as canceled")

    in_house(test, NEVER)


def test_calls_are_counted_apart_from_purchases() -> None:
    """One call: a line of a batch that was given back, and a rescue."""

    async def test(house: House) -> None:
        await _rescued(house)
        stats = house.engines[0].engine.stats
        assert (stats.batched_calls, stats.sync_calls, stats.rescued_calls, stats.settled_calls) == (1, 0, 1, 1)
        assert (stats.batch_purchases, stats.sync_purchases, stats.rescue_purchases) == (1, 1, 1)

    in_house(test, NEVER)


def test_a_call_whose_first_create_was_refused_and_that_then_rode_a_batch_keeps_its_reason() -> None:
    async def test(house: House) -> None:
        house.policy = replace(house.policy, poll_interval_s=1.0)
        await house.boot(1)
        process = house.engines[0]
        reply = await process.submit(house.call(process, 1, budget=3600.0))
        assert reply is not None
        row = await house.store.listed_call(reply.ticket)
        assert row is not None
        assert process.engine.stats.batches_refused > 0
        assert (row.lane, reply.outcome.lane) == (Lane.BATCH, Lane.BATCH)
        assert "refused" not in row.reason + reply.reason

    in_house(test, MockConfig(batch_latency=Constant(60.0), faults=Faults(create_429=0.7), seed=3))


def test_a_call_on_now_after_a_refused_create_is_not_a_rescue() -> None:
    async def test(house: House) -> None:
        reply, row = await _rescued(house)
        assert (reply.outcome.lane, row.lane) == (Lane.NOW, Lane.NOW)
        assert "the batch was refused" in row.reason
        assert reply.entry is not None
        assert reply.entry.kind is EntryKind.PURCHASE
        assert house.engines[0].engine.stats.rescued_calls == 0
        assert "CallRescued" not in house.log.text()

    in_house(test, MockConfig(keys_without_batch=frozenset({"sk-one"})))
