"""The way in: calls are put on disk together, and each still stands for itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, patch

import pytest

from carpool.core.errors import CarpoolError, StoreError, TooManyWaiting, Undecided
from carpool.core.model import Admission
from carpool.engine.batch.admit import WRITE_S, Deliveries, PendingCall
from carpool.sim.timeline import Timeline, VirtualClock, run
from carpool.stores import SqliteStore
from tests.support.engine_context import engine_context
from tests.support.fleets import QUICK, SOON, riding

admit_all = SqliteStore.admit_all


def ask(number: int) -> dict[str, Any]:
    return {"model": "claude-sonnet-5", "max_tokens": 5, "messages": [{"role": "user", "content": f"call {number}"}]}


async def nobody_waits(scene: Any) -> None:
    store = scene.fleet._engine._context.store
    async with asyncio.timeout(10):
        while [row.awaited for row in await store.listed_calls(None, None, 10)] != [False]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_one_that_the_store_refuses_keeps_no_other_out() -> None:
    def choosy(self: SqliteStore, admissions: Sequence[Admission]) -> Any:
        if any(b"call 3" in one.call.body for one in admissions):
            refused: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            refused.set_exception(StoreError("The store can't hold such a value."))
            return refused
        return admit_all(self, admissions)

    with patch.object(SqliteStore, "admit_all", choosy):
        async with riding(SOON, QUICK) as scene:
            results = await asyncio.gather(
                *(scene.fleet.submit_batch(**ask(number)) for number in range(6)), return_exceptions=True
            )
    assert [isinstance(one, CarpoolError) for one in results] == [False, False, False, True, False, False]


class Doubting:
    """Stands for a store that does not know for a while whether an equal call has lost its client."""

    def __init__(self, times: float) -> None:
        self.times = times
        self.asked = 0

    def admit_all(self, store: SqliteStore, admissions: Sequence[Admission]) -> Any:
        doubtful = [b"call 3" in one.call.body and not one.pressed for one in admissions]
        self.asked += any(doubtful)
        if not any(doubtful) or self.asked > self.times:
            return admit_all(store, admissions)

        async def partly() -> list[Any]:
            known = [one for one, doubt in zip(admissions, doubtful, strict=True) if not doubt]
            found = iter(await admit_all(store, known) if known else [])
            return [Undecided("Not known yet.") if doubt else next(found) for doubt in doubtful]

        return partly()


async def test_one_whose_fate_is_not_known_yet_is_asked_for_again_and_keeps_no_other_out() -> None:
    doubting = Doubting(3)
    with patch.object(SqliteStore, "admit_all", lambda *given: doubting.admit_all(*given)):
        async with riding(SOON, QUICK) as scene:
            third = asyncio.ensure_future(scene.fleet.submit_batch(**ask(3)))
            await asyncio.gather(*(scene.fleet.submit_batch(**ask(number)) for number in range(3)))
            assert not third.done()
            await third
    assert doubting.asked == 4


async def test_nobody_waits_for_anothers_fate_beyond_its_own_time() -> None:
    doubting = Doubting(float("inf"))
    with patch.object(SqliteStore, "admit_all", lambda *given: doubting.admit_all(*given)):
        async with riding(SOON, QUICK) as scene:
            await scene.fleet.submit(lane="batch", latency_budget_ms=10_000, **ask(3))
    assert doubting.asked


async def test_who_is_not_decided_on_hears_that_carpool_stopped() -> None:
    doubting = Doubting(float("inf"))
    with patch.object(SqliteStore, "admit_all", lambda *given: doubting.admit_all(*given)):
        async with riding(SOON, QUICK) as scene:
            third = asyncio.ensure_future(scene.fleet.submit_batch(**ask(3)))
            while not doubting.asked:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    with pytest.raises(CarpoolError, match="Send it again"):
        await third


async def test_who_leaves_at_the_door_is_not_waited_for() -> None:
    inside = asyncio.Event()
    go_on = asyncio.Event()

    def slow(self: SqliteStore, admissions: Sequence[Admission]) -> Any:
        async def later() -> Any:
            inside.set()
            await go_on.wait()
            return await admit_all(self, admissions)

        return later()

    async with riding(SOON, QUICK) as scene:
        with patch.object(SqliteStore, "admit_all", slow):
            leaver = asyncio.create_task(scene.fleet.submit_batch(**ask(1)))
            await inside.wait()
            leaver.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaver
            go_on.set()
            await nobody_waits(scene)
        await scene.fleet.submit_batch(**ask(1))
        assert len(scene.provider.bill.charges) == 1  # the first was taken back before anything was bought for it


async def test_who_leaves_undecided_leaves_nothing_behind() -> None:
    """Let in later, with nobody behind it, it would take the ticket that its client comes back for."""
    doubting = Doubting(float("inf"))
    with patch.object(SqliteStore, "admit_all", lambda *given: doubting.admit_all(*given)):
        async with riding(SOON, QUICK) as scene:
            leaver = asyncio.create_task(scene.fleet.submit_batch(**ask(3)))
            while not doubting.asked:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            leaver.cancel()
            entrance = scene.fleet._engine.tickets
            async with asyncio.timeout(10):
                while entrance._arriving:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert doubting.asked == 1
            assert not entrance._leaving
            doubting.times = 0
            await scene.fleet.submit_batch(**ask(3))
            assert len(await scene.fleet._engine._context.store.listed_calls(None, None, 10)) == 1


async def test_who_is_cancelled_in_the_moment_of_its_answer_comes_back_to_it() -> None:
    async with riding(SOON, QUICK) as scene:
        waiters = scene.fleet._engine._context.waiters
        resolve, leaver = waiters.resolve, asyncio.create_task(scene.fleet.submit_batch(**ask(1)))

        def answer_and_cancel(reply: Any) -> None:
            resolve(reply)
            leaver.cancel()

        waiters.resolve = answer_and_cancel
        with pytest.raises(asyncio.CancelledError):
            await leaver
        waiters.resolve = resolve
        await scene.fleet.submit_batch(**ask(1))
        assert len(scene.provider.bill.charges) == 1


class SlowStore:
    """Lets a test say when what is being written is on disk. A group of several with a bad call in it is refused."""

    def __init__(self) -> None:
        self.writing: list[list[bytes]] = []  # the bodies of each group
        self._go_on = asyncio.Semaphore(0)

    def admit_all(self, store: SqliteStore, admissions: Sequence[Admission]) -> Any:
        bodies = [one.call.body for one in admissions]
        self.writing.append(bodies)

        async def later() -> Any:
            await self._go_on.acquire()
            if any(b"call 666" in body for body in bodies):
                raise StoreError("The store can't hold such a value.")
            return await admit_all(store, admissions)

        return later()

    def go_on(self, groups: int) -> None:
        for _ in range(groups):
            self._go_on.release()

    async def until(self, groups: int) -> None:
        async with asyncio.timeout(10):
            while len(self.writing) < groups:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


async def queue_full(scene: Any, number: int) -> None:
    async with asyncio.timeout(10):
        with pytest.raises(TooManyWaiting):
            await scene.fleet.submit_batch(**ask(number))


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowStore:
    slow = SlowStore()
    monkeypatch.setattr(SqliteStore, "admit_all", lambda store, admissions: slow.admit_all(store, admissions))
    return slow


async def test_who_is_being_written_to_disk_counts_among_those_who_wait(slow: SlowStore) -> None:
    async with riding(SOON, replace(QUICK, max_waiting_calls=3, linger_ms=60_000)) as scene:
        calls = [asyncio.create_task(scene.fleet.submit_batch(**ask(number))) for number in range(2)]
        await slow.until(1)
        calls += [asyncio.create_task(scene.fleet.submit_batch(**ask(2)))]
        await slow.until(2)
        await queue_full(scene, 3)
        slow.go_on(2)
        await scene.admitted(3)
        await queue_full(scene, 3)
        assert [len(group) for group in slow.writing] == [2, 1]
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def test_who_was_not_let_in_takes_no_room(slow: SlowStore) -> None:
    """A group that is refused as a whole is written one by one; meanwhile nobody is counted twice."""
    async with riding(SOON, replace(QUICK, max_waiting_calls=3, linger_ms=60_000)) as scene:
        calls = [asyncio.create_task(scene.fleet.submit_batch(**ask(number))) for number in (0, 666)]
        await slow.until(1)
        slow.go_on(1)
        await slow.until(2)  # the first again, alone
        calls += [asyncio.create_task(scene.fleet.submit_batch(**ask(1)))]
        await slow.until(3)
        await queue_full(scene, 2)
        slow.go_on(3)
        await scene.admitted(2)
        with pytest.raises(StoreError):
            await calls[1]
        calls += [asyncio.create_task(scene.fleet.submit_batch(**ask(2)))]  # the room of the one that was refused
        await slow.until(5)
        slow.go_on(1)
        await scene.admitted(3)
        await queue_full(scene, 3)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


# ------------------------------------------------------------ deliveries


def written_and_left(at: dict[int, list[float]], taken_back: dict[int, float]) -> tuple[set[int], set[int]]:
    """Which tickets were written as delivered, and which clients count as gone: `at` says when each ticket was
    delivered, `taken_back` when its connection turned out to be broken."""
    timeline = Timeline()
    context, _ = engine_context(clock=VirtualClock(timeline))
    left: set[int] = set()

    async def body() -> None:
        deliveries = Deliveries(context, lambda pending_call: left.add(pending_call.ticket))
        loop = asyncio.get_running_loop()
        for ticket, times in at.items():
            pending_call = Mock(spec=PendingCall, ticket=ticket)
            for seconds in times:
                loop.call_later(seconds, deliveries.add, ticket, pending_call)
        for ticket, seconds in taken_back.items():
            loop.call_later(seconds, deliveries.take_back, ticket)
        await asyncio.sleep(1)

    run(body(), timeline)
    delivered: Any = context.store.delivered
    return {ticket for group in delivered.await_args_list for ticket in group.args[0]}, left


def test_a_delivery_is_written_unless_it_is_taken_back() -> None:
    assert written_and_left({1: [0.0], 2: [0.0]}, {2: WRITE_S / 2}) == ({1}, {2})


def test_a_delivery_can_be_taken_back_for_a_while_even_if_others_are_about_to_be_written() -> None:
    just_before, in_time = WRITE_S * 0.9, WRITE_S * 1.8
    assert written_and_left({1: [0.0], 2: [just_before]}, {2: in_time}) == ({1}, {2})


def test_a_repeated_delivery_can_be_taken_back_for_as_long_as_a_first() -> None:
    again, in_time = WRITE_S * 0.9, WRITE_S * 1.8
    assert written_and_left({1: [0.0, again]}, {1: in_time}) == (set(), {1})


def test_a_delivery_that_is_on_disk_is_not_taken_back() -> None:
    assert written_and_left({1: [0.0]}, {1: WRITE_S * 3}) == ({1}, set())
