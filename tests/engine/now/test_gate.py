"""A call on `now` gets a slot at once while the provider works and has room, and queues otherwise."""

from __future__ import annotations

import asyncio

import pytest

from carpool.core.errors import ConnectionBroken, ProviderFailing, TooBusy
from carpool.core.model import Headers
from carpool.core.upstream import WholeResponse
from carpool.engine.events import AccountSlowed, BreakerOpened, Event, EventHooks
from carpool.engine.now.gate import Gates, Slot
from carpool.planners.policy import RoutingPolicy
from carpool.planners.pressure.breaker import FAILURES
from tests.support.engine_context import HandClock, engine_context

SLOW_DOWN: Headers = (("retry-after", "5"),)


class Scene:
    def __init__(self, policy: RoutingPolicy | None = None) -> None:
        self.clock = HandClock()
        self.events: list[Event] = []
        hooks = EventHooks((self.events.append,))
        self.context, self.credential = engine_context(
            clock=self.clock, policy=policy or RoutingPolicy(), event_hooks=hooks
        )
        self.gates = Gates(self.context)

    def enter(self, model: str = "gpt-5") -> Slot | None:
        return self.gates.enter("openai", self.credential, model, 400)

    def answer(self, status: int, headers: Headers = ()) -> None:
        slot = self.enter()
        assert slot is not None
        slot.answered(WholeResponse(status, headers, b"{}"))

    async def wait(self) -> Slot:
        return await self.gates.wait(
            "openai", self.credential, "gpt-5", 400, tags={}, deadline=None, kept=False, tried=False
        )


def test_a_refusal_closes_the_gate_of_its_model_until_the_provider_has_room() -> None:
    scene = Scene()
    scene.answer(200)
    assert scene.gates.gate_delays() == []
    scene.answer(429, SLOW_DOWN)
    assert scene.enter() is None
    assert scene.enter("gpt-5-mini") is not None  # providers limit each model separately
    [hurdle] = scene.gates.gate_delays()
    assert (hurdle.model, hurdle.breaker_open) == ("gpt-5", False)
    assert 5.0 <= hurdle.closed_for_s < 6.0  # with jitter
    assert [type(event) for event in scene.events] == [AccountSlowed]
    scene.clock.time += 6.0
    assert scene.enter() is not None


async def test_a_breaker_opens_for_all_models_of_an_account() -> None:
    scene = Scene()
    for _ in range(FAILURES):
        slot = scene.enter()
        assert slot is not None
        slot.failed(ConnectionBroken("cut"))
    assert isinstance(scene.events[-1], BreakerOpened)
    assert scene.enter("gpt-5-mini") is None
    with pytest.raises(ProviderFailing):
        await scene.wait()
    assert scene.context.stats.breaker_openings == scene.context.stats.turned_away_calls == 1


def test_a_slot_is_released_once() -> None:
    scene = Scene()
    slot = scene.enter()
    assert slot is not None
    slot.failed(asyncio.CancelledError())
    slot.answered(WholeResponse(429, SLOW_DOWN, b"{}"))  # too late to mean anything
    assert scene.enter() is not None


async def test_a_call_is_turned_away_where_the_pause_is_longer_than_it_may_wait() -> None:
    scene = Scene(RoutingPolicy(max_wait_now_s=2.0))
    scene.answer(429, SLOW_DOWN)
    with pytest.raises(TooBusy) as refused:
        await scene.wait()
    assert 5.0 <= refused.value.retry_after < 6.0


async def test_a_queued_call_gets_the_slot_when_the_pause_is_over() -> None:
    scene = Scene()
    scene.answer(429, (("retry-after", "0.05"),))
    waiting = asyncio.create_task(scene.wait())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    scene.clock.time += 60.0
    slot = await asyncio.wait_for(waiting, 5.0)
    slot.failed(asyncio.CancelledError())
    assert scene.context.stats.held_calls == 1
    await scene.context.background.finish(1.0)
