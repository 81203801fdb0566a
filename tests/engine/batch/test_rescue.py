"""A rescue that is refused: the batch is then all that can still answer, and it is given the time that is left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from carpool.core.errors import StoreLocked
from carpool.core.model import EntryKind, Lane, OutcomeKind
from carpool.engine import Reply
from carpool.mock import Constant, Faults, MockConfig
from carpool.planners.policy import RoutingPolicy
from carpool.stores import SqliteStore
from tests.support.engines import House, in_house
from tests.support.fleets import until

BUDGET = 300.0
REFUSED = Faults(sync_429=1.0, retry_after_s=60, cancel_500=1.0)  # nothing is sold on `now`, no batch can be stopped
NOT_DONE = MockConfig(batch_latency=Constant(7200.0), faults=REFUSED)
NOT_FETCHED = MockConfig(batch_latency=Constant(60.0), faults=replace(REFUSED, results_500=1.0))
RARELY = 40.0  # of polls at this pace, none falls into the last 19 s of the budget
REFUSAL = "POST /v1/messages -> 429"


async def _answered(house: House, poll_interval_s: float = 1.0) -> tuple[Reply, float]:
    """What a call got, and how long that took."""
    house.policy = RoutingPolicy(linger_ms=500, poll_interval_s=poll_interval_s)
    await house.boot(1)
    started = house.timeline.now()
    reply = await house.engines[0].submit(house.call(house.engines[0], 1, budget=BUDGET))
    assert reply is not None
    return reply, house.timeline.now() - started


async def _answered_by_its_batch(house: House) -> None:
    reply, took = await _answered(house, RARELY)
    assert (reply.outcome.kind, reply.outcome.lane) == (OutcomeKind.SUCCEEDED, Lane.BATCH)
    assert took < BUDGET
    assert house.log.text().count(REFUSAL) == 1
    entries = await house.store.entries(reply.ticket)
    assert [(entry.kind, entry.paid) for entry in entries if entry.lane is Lane.NOW] == [(EntryKind.RESCUE, 0)]
    assert list(house.bought.values()) == [1]


def test_a_batch_that_has_ended_meanwhile_is_looked_at_when_a_rescue_is_refused() -> None:
    """By itself, the next poll would come after the deadline."""
    in_house(_answered_by_its_batch, MockConfig(batch_latency=Constant(BUDGET - 10), faults=REFUSED))


def test_results_that_could_not_be_fetched_are_tried_again_when_a_rescue_is_refused() -> None:
    """What failed often is tried rarely: by itself, the next try would come after the deadline."""

    async def test(house: House) -> None:
        async def mend() -> None:
            await until(lambda: "sync_429" in house.provider.faults_struck, BUDGET)
            house.provider._state.box.faults = REFUSED

        mending = asyncio.create_task(mend())
        await _answered_by_its_batch(house)
        await mending
        assert house.log.text().count("/results -> 500") > 3

    in_house(test, NOT_FETCHED)


def test_a_batch_that_ends_after_a_refused_rescue_is_noticed_in_time() -> None:
    in_house(_answered_by_its_batch, MockConfig(batch_latency=Constant(BUDGET - 6), faults=REFUSED))


@pytest.mark.parametrize("takes", [1.0, 22.0, 26.0])
def test_what_a_stopped_batch_gives_back_does_not_wait_beyond_the_deadline(takes: float) -> None:
    """All of it was pressed, so that it was stopped before the rescue: its calls come back while `now` has no room."""

    async def test(house: House) -> None:
        reply, took = await _answered(house)
        assert reply.outcome.status in (429, 504)
        assert took < BUDGET + 1
        assert house.provider.canceled
        assert not house.bought

    config = MockConfig(batch_latency=Constant(7200.0), cancel_latency=Constant(takes))
    in_house(test, replace(config, faults=replace(REFUSED, cancel_500=0.0)))


def test_a_late_answer_of_a_rescue_is_not_lost_to_the_end_of_its_batch() -> None:
    """The batch gives the call back after the deadline, while the rescue that is paid for is still being answered."""

    async def test(house: House) -> None:
        reply, took = await _answered(house)
        assert (reply.outcome.kind, reply.outcome.lane) == (OutcomeKind.SUCCEEDED, Lane.NOW), reply.outcome.body
        assert took > BUDGET
        assert house.provider.batches[0].ends_at < house.timeline.now() - 10
        entries = await house.store.entries(reply.ticket)
        assert [entry.kind for entry in entries if entry.paid] == [EntryKind.RESCUE]

    times = {"cancel_latency": Constant(40.0), "sync_latency": Constant(60.0)}
    in_house(test, MockConfig(batch_latency=Constant(7200.0), **times))


def test_a_store_in_trouble_does_not_forget_a_call_whose_rescue_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands as on its way, so nobody else would ever look for it."""
    failing = {"record": 2, "stop_sending": 2}
    for name in failing:
        monkeypatch.setattr(SqliteStore, name, _sometimes(name, failing))
    in_house(_answered_by_its_batch, MockConfig(batch_latency=Constant(BUDGET - 10), faults=REFUSED))
    assert not any(failing.values())


def _sometimes(name: str, failing: dict[str, int]) -> Callable[..., Awaitable[object]]:
    true = getattr(SqliteStore, name)

    async def fail(*given: object) -> object:
        if failing[name]:
            failing[name] -= 1
            raise StoreLocked("Somebody else writes.")
        return await true(*given)

    return fail


@pytest.mark.parametrize("config", [NOT_DONE, NOT_FETCHED], ids=["not done", "not fetched"])
def test_where_its_batch_brings_nothing_the_deadline_ends_the_wait(config: MockConfig) -> None:
    async def test(house: House) -> None:
        reply, took = await _answered(house)
        assert (reply.outcome.kind, reply.outcome.status) == (OutcomeKind.DEADLINE, 504)
        assert BUDGET <= took < BUDGET + 1
        assert house.log.text().count(REFUSAL) == 1  # nobody asks again for the time that is left

    in_house(test, config)
