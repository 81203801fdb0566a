"""Rescues fit through the synchronous rate limit: they start early enough, and what would not fit is not batched."""

from __future__ import annotations

import asyncio

from carpool.core.model import Lane, OutcomeKind
from carpool.engine import Reply
from carpool.mock import Constant, MockConfig
from carpool.planners.policy import RoutingPolicy
from tests.support.engines import House, in_house

BUDGET = 600.0
STUCK = MockConfig(batch_latency=Constant(7200.0), sync_latency=Constant(2.0), batch_rpm=50.0, sync_rpm=60.0)


async def _answers(house: House, count: int, *, every: float = 0.0) -> list[tuple[Reply, float]]:
    """What calls with the same budget got, and after how long; the first of all calls shows the rate limit."""
    if not house.engines:
        house.policy = RoutingPolicy()
        await house.boot(1)
        await house.ask(house.engines[0], 0, lane=Lane.NOW)

    async def one(number: int) -> tuple[Reply, float]:
        await asyncio.sleep(number * every)
        began = house.timeline.now()
        reply = await house.engines[0].submit(house.call(house.engines[0], number, budget=BUDGET))
        assert reply is not None
        return reply, house.timeline.now() - began

    return await asyncio.gather(*(one(number) for number in range(1, count + 1)))


def _on_time(answers: list[tuple[Reply, float]]) -> int:
    return sum(reply.outcome.kind is OutcomeKind.SUCCEEDED and took <= BUDGET for reply, took in answers)


def test_the_calls_of_a_stuck_batch_are_rescued_in_time_through_a_narrow_limit() -> None:
    async def test(house: House) -> None:
        answers = await _answers(house, 300)
        stats = house.engines[0].engine.stats
        assert stats.batched_calls == 300
        assert (stats.rescued_calls, _on_time(answers)) == (300, 300)
        assert min(took for _, took in answers) > BUDGET / 4  # no earlier than needed
        assert len(house.engines[0].engine._context.open_rescues) == 0

    in_house(test, STUCK)


def test_what_would_not_fit_is_not_batched() -> None:
    """With a minute's worth at once and 48 a minute until the deadline, about 490 rescues fit."""

    async def test(house: House) -> None:
        answers = await _answers(house, 560)
        stats = house.engines[0].engine.stats
        assert 400 <= stats.batched_calls <= 500
        assert stats.no_room_calls == 560 - stats.batched_calls
        assert _on_time(answers) >= 555
        told = {reply.outcome.lane for reply, _ in answers}
        assert told == {Lane.NOW}

    in_house(test, STUCK)


def test_the_rescues_of_several_batches_share_the_limit() -> None:
    """One call a second for 200 s: each batch alone would fit at any time."""

    async def test(house: House) -> None:
        answers = await _answers(house, 250, every=0.4)
        assert _on_time(answers) == 250

    in_house(test, STUCK)


def test_where_everything_is_rescued_nothing_is_bought_twice() -> None:
    """The batch is cancelled first, and its calls are sent when it gave them back, or when it took too long."""

    async def test(house: House) -> None:
        await _answers(house, 100)
        assert len(house.provider.canceled) == 1  # a batch of all 100
        assert set(house.bought.values()) == {1}

    in_house(test, STUCK)


def test_an_answered_call_makes_room() -> None:
    async def test(house: House) -> None:
        await _answers(house, 20)
        assert len(house.engines[0].engine._context.open_rescues) == 0
        assert house.engines[0].engine.stats.rescued_calls == 0

    in_house(test, MockConfig(batch_latency=Constant(30.0), sync_rpm=60.0))
