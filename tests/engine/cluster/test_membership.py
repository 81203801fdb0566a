"""Several engines on one store, in virtual time: one leads, every door admits and delivers, and another takes over."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

import carpool.engine.cluster.membership
from carpool.mock import Constant, Faults, MockConfig
from carpool.planners.policy import RoutingPolicy
from carpool.sim.hang_ups import Cut
from carpool.sim.process import ConnectionCut, Process
from carpool.stores import SqliteStore
from tests.support.engines import LEASE, House, in_house

PATIENT = 24 * 3600.0

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
        await asyncio.sleep(LEASE.pulse + LEASE.renew_every + 1.0)
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
        leader.suspend()
        await asyncio.sleep(400.0)
        leader.resume()
        await asyncio.gather(*asking)
        await asyncio.sleep(3600.0)
        assert set(house.bought.values()) == {1}
        assert len(house.bought) == 24
        assert set((await house.store.leaders(house.timeline.now())).values()) == {other.engine.name}
        for process in house.engines:
            assert not process.without_lead
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
        other.suspend()
        await asyncio.sleep(120.0)
        other.resume()
        await asyncio.gather(*asking)
        assert house.timeline.now() - started <= 900.0
        await asyncio.sleep(5.0)
        assert other.engine.stats.rescued_calls == 4

    in_house(test, MockConfig(batch_latency=Constant(7200.0), faults=Faults()))


def test_who_awaits_many_calls_again_is_not_taken_for_dead_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that takes its time: to await all of them again takes longer than a pulse lasts."""
    awaited = SqliteStore.await_ticket

    async def slowly(self: SqliteStore, ticket: int, awaiter: str | None) -> None:
        await awaited(self, ticket, awaiter)
        if awaiter is not None:
            await asyncio.sleep(0.9 * LEASE.renew_every)

    monkeypatch.setattr(SqliteStore, "await_ticket", slowly)
    monkeypatch.setattr(carpool.engine.cluster.membership, "REAWAIT", 1)

    async def test(house: House) -> None:
        await house.boot(2)
        await house.ask(house.engines[0], 0)
        leader = house.leader()
        other = next(process for process in house.engines if process is not leader)
        asking = [asyncio.ensure_future(house.ask(other, n)) for n in range(10, 20)]
        await asyncio.sleep(5.0)
        other.suspend()
        await asyncio.sleep(2 * LEASE.pulse)
        other.resume()
        await asyncio.sleep(1.0)
        for _ in range(40):
            assert await alive(house, other)
            await asyncio.sleep(LEASE.renew_every / 2)
        await asyncio.gather(*asking)
        assert set(house.bought.values()) == {1}

    in_house(test, MockConfig(batch_latency=Constant(1200.0)))


async def alive(house: House, process: Process) -> bool:
    question = "SELECT pulse_until FROM engines WHERE name = ?"
    [(until,)] = house.store._session.connection.execute(question, (process.engine.name,)).fetchall()
    return bool(until >= house.timeline.now())


@pytest.mark.parametrize("seed", range(100, 104))
def test_a_batch_is_looked_at_when_another_door_hears_that_it_ended(seed: int) -> None:
    """At once, though its purchase was written down in this very moment, and its leader has not looked since."""

    async def test(house: House) -> None:
        house.policy = RoutingPolicy(linger_ms=500, poll_interval_s=3000)
        await house.boot(2, seed=seed)
        leader, away = house.engines
        asking = asyncio.ensure_future(house.ask(leader, 1, budget=PATIENT))
        while not leader.engine._context.led:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        away.add_secrets([("anthropic", (("x-api-key", "sk-one"),))])
        while not (await house.store.counts())["batches.bought"]:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        [batch] = house.provider.batches
        house.provider.end_batch(batch.id)
        away.engine.poll_soon("anthropic", "msgbatch_of_a_stranger")
        away.engine.poll_soon("anthropic", batch.id)
        async with asyncio.timeout(30.0):
            await asking
        assert house.owners() == {leader.engine.name}

    in_house(test, STUCK)


@pytest.mark.parametrize("after", [0.2, 120.0])
def test_a_retry_at_another_door_may_come_before_the_news_that_its_client_left(after: float) -> None:
    """Whether its batch still runs, or its answer is cut: the other engine knows a moment later that nobody waits."""

    async def test(house: House) -> None:
        await house.boot(2)
        first, second = house.engines
        first._store._slowness = 0.05
        cut = Cut.UNREAD if after > 60 else None
        with pytest.raises(ConnectionCut if cut else TimeoutError):
            async with asyncio.timeout(after):
                await first.submit(house.call(first, 1), cut)
        again = msgspec.structs.replace(house.call(second, 1), retry=True)
        assert await second.submit(again)
        assert set(house.bought.values()) == {1}

    in_house(test, QUICK)
