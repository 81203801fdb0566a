"""Several engines on one store, in virtual time: one leads, every door admits and delivers, and another takes over."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from carpool.doors.options import Options
from carpool.engine.sharing import Lease
from carpool.mock import Constant, Faults, MockAnthropic, MockConfig, expected_text
from carpool.model import Call
from carpool.policy import RoutingPolicy
from carpool.ports import RawRequest
from carpool.prices import PriceBook
from carpool.sim.network import Network
from carpool.sim.process import Process
from carpool.sim.story import Story
from carpool.sim.timeline import Timeline, VirtualClock, run
from carpool.stores import SqliteStore

PRICES = PriceBook()
LEASE = Lease()
PATIENT = 24 * 3600.0


def said(number: int) -> dict[str, object]:
    return {"model": "claude-sonnet-5", "max_tokens": 50, "messages": [{"role": "user", "content": f"say {number}"}]}


class House:
    """Engines on one store, before one provider."""

    def __init__(self, timeline: Timeline, store: SqliteStore, config: MockConfig) -> None:
        self.timeline = timeline
        self.store = store
        self.provider = MockAnthropic(config, now=timeline.now)
        self.network = Network({"anthropic": self.provider}, random.Random(1))
        self.story = Story(timeline.now)
        self.policy = RoutingPolicy(linger_ms=500)
        self.engines: list[Process] = []

    async def boot(self, count: int, *, offset: float = 0.0, seed: int = 100) -> None:
        for number in range(count):
            clock = VirtualClock(self.timeline, offset)
            rng = random.Random(seed + number)
            shared = self.network, clock, self.policy, PRICES, self.story, rng, ("anthropic",), {}
            process = Process(f"engine {number}", self.store, *shared, LEASE)
            await process.start()
            self.engines.append(process)

    def call(self, process: Process, number: int, *, key: str = "sk-one", budget: float | None = None) -> Call:
        headers = (("x-api-key", key), ("anthropic-version", "2023-06-01"))
        raw = RawRequest("POST", "/v1/messages", "", headers, msgspec.json.encode(said(number)))
        return process.call("anthropic", raw, Options(budget=budget))

    async def ask(self, process: Process, number: int, **more: object) -> None:
        reply = await process.submit(self.call(process, number, **more))  # type: ignore[arg-type]
        assert reply is not None
        message = msgspec.json.decode(reply.outcome.body)
        text = "".join(block.get("text", "") for block in message["content"])
        assert text == expected_text(said(number))

    def leader(self) -> Process:
        [led] = {name for name in (process.engine.name for process in self.engines) if name in self.owners()}
        return next(process for process in self.engines if process.engine.name == led)

    def owners(self) -> set[str]:
        rows = self.store._session.connection.execute("SELECT DISTINCT owner FROM batches").fetchall()
        return {row[0] for row in rows}

    @property
    def bought(self) -> Counter[str]:
        return Counter(charge.fingerprint for charge in self.provider.bill.charges)


def in_house(test: Callable[[House], Awaitable[None]], config: MockConfig) -> None:
    timeline = Timeline()

    @asynccontextmanager
    async def house() -> AsyncIterator[House]:
        store = await SqliteStore.open(None, threaded=False, secret=b"sharing")
        made = House(timeline, store, config)
        try:
            yield made
        finally:
            for process in made.engines:
                await process.engine.close(0.0)
            await made.network.close()
            await store.aclose()

    async def go() -> None:
        async with house() as made:
            await test(made)

    run(go(), timeline)


QUICK = MockConfig(batch_latency=Constant(60.0), sync_latency=Constant(1.0))
STUCK = MockConfig(batch_latency=Constant(7200.0), sync_latency=Constant(1.0), cancel_latency=Constant(5.0))


@pytest.mark.parametrize("engines", [1, 2, 4, 8])
def test_calls_at_many_doors_travel_in_few_batches(engines: int) -> None:
    async def test(house: House) -> None:
        await house.boot(engines)
        await asyncio.gather(*(house.ask(house.engines[number % engines], number) for number in range(400)))
        assert len(house.provider.batches) <= 3
        assert len(house.owners()) == 1
        assert len(house.bought) == 400
        assert set(house.bought.values()) == {1}

    in_house(test, QUICK)


def test_each_account_has_its_own_leader() -> None:
    """Whoever meets a key first leads its account; so many keys are spread over the engines."""

    async def test(house: House) -> None:
        await house.boot(3)
        first = [house.ask(house.engines[number], number, key=f"sk-{number}") for number in range(3)]
        await asyncio.gather(*first)
        await asyncio.gather(*(house.ask(house.engines[n % 3], n, key=f"sk-{n % 2}") for n in range(10, 40)))
        leaders = await house.store.leaders(house.timeline.now())
        assert len(leaders) == 3
        assert len(house.owners()) == 3

    in_house(test, QUICK)


def test_when_the_leader_dies_another_takes_over_within_moments() -> None:
    async def test(house: House) -> None:
        await house.boot(3)
        asking = [asyncio.ensure_future(house.ask(house.engines[n % 3], n, budget=PATIENT)) for n in range(90)]
        await asyncio.sleep(20.0)
        leader = house.leader()
        leader.kill()
        house.engines.remove(leader)
        await asyncio.sleep(LEASE.pulse + LEASE.beat + 1.0)
        [heir] = set((await house.store.leaders(house.timeline.now())).values())
        assert heir != leader.engine.name
        answers = await asyncio.gather(*asking, return_exceptions=True)
        assert sum(answer is None for answer in answers) == 60  # those at the dead one's door lost their connection
        again = [house.ask(house.engines[0], n, budget=PATIENT) for n in range(90) if answers[n] is not None]
        await asyncio.gather(*again)
        assert set(house.bought.values()) == {1}
        assert len(house.provider.batches) <= 3

    in_house(test, QUICK)


def test_when_the_leader_leaves_another_leads_at_once() -> None:
    async def test(house: House) -> None:
        await house.boot(2)
        await asyncio.gather(*(house.ask(house.engines[n % 2], n) for n in range(10)))
        leader = house.leader()
        await leader.engine.close(0.0)
        house.engines.remove(leader)
        [heir] = house.engines
        await asyncio.sleep(2.0)
        assert set((await house.store.leaders(house.timeline.now())).values()) == {heir.engine.name}

    in_house(test, QUICK)


def test_a_late_batch_is_rescued_by_the_engine_whose_door_awaits_the_call() -> None:
    async def test(house: House) -> None:
        await house.boot(4)
        started = house.timeline.now()
        await asyncio.gather(*(house.ask(house.engines[n % 4], n, budget=300.0) for n in range(80)))
        assert house.timeline.now() - started <= 300.0
        await asyncio.sleep(5.0)  # an answer is told before it is counted
        assert [process.engine.stats.rescued_calls for process in house.engines] == [20, 20, 20, 20]
        assert len(house.provider.batches) <= 2
        assert house.provider.canceled  # everybody was pressed, so the leader stopped the batch first
        for charge in house.provider.bill.charges:
            assert charge.kind != "batch"

    in_house(test, STUCK)


def test_a_stopped_leader_buys_nothing_twice() -> None:
    """It stands still with a plan in its hands, is taken for dead, and goes on when another has done its work."""

    async def test(house: House) -> None:
        await house.boot(2)
        await asyncio.gather(*(house.ask(house.engines[n % 2], n) for n in range(4)))
        leader = house.leader()
        other = next(process for process in house.engines if process is not leader)
        asking = [asyncio.ensure_future(house.ask(house.engines[n % 2], n)) for n in range(10, 30)]
        await asyncio.sleep(0.45)  # admitted, and about to be flushed
        leader.stop()
        await asyncio.sleep(400.0)
        leader.go_on()
        await asyncio.gather(*asking)
        await asyncio.sleep(3600.0)
        assert set(house.bought.values()) == {1}
        assert len(house.bought) == 24
        assert set((await house.store.leaders(house.timeline.now())).values()) == {other.engine.name}
        for process in house.engines:
            assert not process.usurped
            assert not process.engine.failures

    in_house(test, QUICK)


def test_who_was_taken_for_dead_awaits_its_calls_again() -> None:
    """Its clients are still there, so their calls must be rescued in time."""

    async def test(house: House) -> None:
        await house.boot(2)
        await house.ask(house.engines[0], 0, budget=None)
        leader = house.leader()
        other = next(process for process in house.engines if process is not leader)
        started = house.timeline.now()
        asking = [asyncio.ensure_future(house.ask(other, n, budget=900.0)) for n in range(10, 14)]
        await asyncio.sleep(30.0)
        other.stop()
        await asyncio.sleep(120.0)
        other.go_on()
        await asyncio.gather(*asking)
        assert house.timeline.now() - started <= 900.0
        await asyncio.sleep(5.0)
        assert other.engine.stats.rescued_calls == 4

    in_house(test, MockConfig(batch_latency=Constant(7200.0), faults=Faults()))


@pytest.mark.parametrize("seed", range(100, 104))
def test_a_batch_is_looked_at_when_another_door_hears_that_it_ended(seed: int) -> None:
    """At once, though its purchase was written down in this very moment, and its leader has not looked since."""

    async def test(house: House) -> None:
        house.policy = RoutingPolicy(linger_ms=500, poll_interval_s=3000)
        await house.boot(2, seed=seed)
        leader, away = house.engines
        asking = asyncio.ensure_future(house.ask(leader, 1, budget=PATIENT))
        await asyncio.sleep(0.2)
        away.show([("anthropic", (("x-api-key", "sk-one"),))])
        while not (await house.store.counts())["batches.bought"]:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        [batch] = house.provider.batches
        house.provider.end_batch(batch.id)
        away.engine.look_soon("anthropic", "msgbatch_of_a_stranger")
        away.engine.look_soon("anthropic", batch.id)
        async with asyncio.timeout(30.0):
            await asking
        assert house.owners() == {leader.engine.name}

    in_house(test, STUCK)
