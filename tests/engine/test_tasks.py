"""Tasks of several engines on one store: one deadline, one sum, also after a crash."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from carpool.core.errors import StoreUnwritable
from carpool.core.model import Call, Lane
from carpool.core.ports import RawRequest
from carpool.engine.tasks import WRITE_S
from carpool.mock import Constant, MockConfig
from carpool.planners.access.options import Options
from carpool.sim.process import Process
from tests.support.engines import House, in_house, said

HOUR = 3600.0
CONFIG = MockConfig(batch_latency=Constant(30.0), sync_latency=Constant(1.0))


def call(process: Process, number: int, **options: Any) -> Call:
    headers = (("x-api-key", "sk-one"), ("anthropic-version", "2023-06-01"))
    raw = RawRequest("POST", "/v1/messages", "", headers, msgspec.json.encode(said(number)))
    return process.call("anthropic", raw, Options(task="essay", **options))


async def submitted(process: Process, number: int, **options: Any) -> tuple[Lane, str]:
    reply = await process.submit(call(process, number, **options))
    assert reply is not None
    return reply.outcome.lane, reply.reason or reply.outcome.reason


def test_another_engine_knows_the_deadline() -> None:
    async def test(house: House) -> None:
        await house.boot(2)
        first, second = house.engines
        begun = house.timeline.now()
        assert (await submitted(first, 1, task_budget=HOUR))[0] is Lane.BATCH
        await asyncio.sleep(HOUR - 100)
        lane, reason = await submitted(second, 2, task_budget=HOUR)
        assert lane is Lane.NOW
        assert "The task essay needs the" in reason
        [task] = await house.store.tasks(0.0, 10)
        assert (task.deadline, task.left) == (begun + HOUR, False)
        await asyncio.sleep(2 * WRITE_S)
        [task] = await house.store.tasks(0.0, 10)
        assert (task.left, task.asked, task.answered) == (True, 2, 2)
        assert sum(task.spent.values()) == house.provider.bill.total()

    in_house(test, CONFIG)


def test_a_new_deadline_reaches_the_others() -> None:
    async def test(house: House) -> None:
        await house.boot(2)
        first, second = house.engines
        await submitted(first, 1, task_budget=HOUR)
        await submitted(second, 2, task_budget=HOUR)
        later = house.timeline.now() + 9 * HOUR
        await submitted(first, 3, task_deadline=later)
        await asyncio.sleep(2 * WRITE_S)
        await submitted(second, 4)  # it writes, and so learns
        await asyncio.sleep(2 * WRITE_S)
        for process in house.engines:
            [task] = process.engine.tasks._book._tasks.values()
            assert task.deadline == later
            assert process.engine.tasks.bound(call(process, 5)).task_deadline == later

    in_house(test, CONFIG)


def test_a_crash_forgets_no_deadline() -> None:
    async def test(house: House) -> None:
        await house.boot(1)
        begun = house.timeline.now()
        asking = asyncio.ensure_future(submitted(house.engines[0], 1, task_budget=HOUR))
        await asyncio.sleep(1.0)
        house.engines.pop().kill()
        asking.cancel()
        await asyncio.sleep(1000.0)
        await house.boot(1)
        bound = house.engines[0].engine.tasks
        await submitted(house.engines[0], 2, task_budget=HOUR)
        assert bound.bound(call(house.engines[0], 3)).task_deadline == begun + HOUR

    in_house(test, CONFIG)


def test_a_store_that_fails_keeps_no_call_on_now_from_its_way() -> None:
    async def test(house: House) -> None:
        await house.boot(1)
        [process] = house.engines

        async def fails(*arguments: object) -> None:
            raise StoreUnwritable("The disk is full.")

        tasks = process.engine.tasks
        tasks._store.merge_tasks = fails  # type: ignore[method-assign, assignment]
        assert (await submitted(process, 1, task_budget=60.0))[0] is Lane.NOW
        await asyncio.sleep(3 * WRITE_S)
        assert len(tasks._book.changed) == 1
        del tasks._store.merge_tasks
        await asyncio.sleep(3 * WRITE_S)
        [stored] = await house.store.tasks(0.0, 10)
        assert (stored.asked, stored.answered) == (1, 1)

    in_house(test, CONFIG)


def test_what_happens_is_written_when_an_engine_closes() -> None:
    async def test(house: House) -> None:
        await house.boot(1)
        await submitted(house.engines[0], 1, lane=Lane.NOW)
        await house.engines[0].engine.tasks.close()
        [stored] = await house.store.tasks(0.0, 10)
        assert (stored.name, stored.asked, stored.answered, stored.deadline) == ("essay", 1, 1, None)

    in_house(test, CONFIG)
