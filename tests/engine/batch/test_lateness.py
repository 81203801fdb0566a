"""How late answers are after their batches have ended: the engine before a provider with 50 requests a minute, in
virtual time. `make bench-polls` measures the same over HTTP."""

from __future__ import annotations

import asyncio
import random
import statistics

import pytest

from carpool.core.model import Lane
from carpool.mock import MockConfig, Uniform
from carpool.planners.policy import RoutingPolicy
from carpool.sim.process import Process
from tests.support.engines import House, in_house


class Lateness:
    def __init__(self, house: House, process: Process) -> None:
        self._house = house
        self._process = process
        self.late: list[float] = []

    async def ask(self, number: int, key: str) -> None:
        reply = await self._process.submit(self._house.call(self._process, number, key=key, lane=Lane.BATCH))
        assert reply is not None
        [batch] = [one for one in self._house.provider.batches if one.id == reply.outcome.batch]
        self.late.append(self._house.timeline.now() - batch.ends_at)

    async def agent(self, name: int, until: float) -> None:
        number = 1000 * name
        while self._house.timeline.now() < until:
            number += 1
            await self.ask(number, f"sk-{name}")

    async def arrivals(self, per_minute: float, until: float, rng: random.Random) -> None:
        tasks = []
        while self._house.timeline.now() < until:
            tasks.append(asyncio.create_task(self.ask(len(tasks), "sk-busy")))
            await asyncio.sleep(rng.expovariate(per_minute / 60))
        await asyncio.gather(*tasks)


def run(seed: int, *, agents: int = 0, per_minute: float = 0.0, minutes: float = 6.0, **policy: float) -> list[float]:
    """How late every answer is: of agents with an account each, and one batch at a time; or of calls to one account."""
    late: list[float] = []

    async def test(house: House) -> None:
        house.policy = RoutingPolicy(**policy)
        await house.boot(1, seed=seed)
        lateness, until = Lateness(house, house.engines[0]), house.timeline.now() + 60 * minutes
        if agents:
            await asyncio.gather(*(lateness.agent(name, until) for name in range(agents)))
        else:
            await lateness.arrivals(per_minute, until, random.Random(seed))
        late.extend(lateness.late)

    in_house(test, MockConfig(seed=seed, batch_latency=Uniform(9.0, 70.0), batch_rpm=50.0))
    return late


@pytest.mark.parametrize("seed", range(5))
def test_with_one_batch_at_a_time_answers_are_a_second_late(seed: int) -> None:
    late = run(seed, agents=4)
    assert len(late) > 30
    assert statistics.median(late) <= 2.0, f"seed {seed}"
    assert max(late) <= 5.0, f"seed {seed}"


@pytest.mark.parametrize("seed", range(5))
def test_under_many_creates_polls_take_what_is_left(seed: int) -> None:
    assert statistics.median(run(seed, per_minute=20)) <= 4.0, f"seed {seed}"
    assert statistics.median(run(seed, per_minute=60)) <= 4.0, f"seed {seed}"


def test_even_where_creates_take_most_of_the_quota() -> None:
    """A pace of 6 s leaves 20 creates a minute to a quota of 50."""
    assert statistics.median(run(1, per_minute=60, poll_interval_s=6.0)) <= 6.0


def test_an_explicit_interval_is_kept() -> None:
    late = run(1, agents=4, poll_interval_s=12.0)
    assert 4.0 < statistics.median(late) < 8.0
