from __future__ import annotations

import asyncio

import pytest

from carpool.engine.background import BackgroundTasks
from tests.support.fleets import soon


async def test_a_task_that_fails_is_heard_of(caplog: pytest.LogCaptureFixture) -> None:
    background = BackgroundTasks()

    async def fail() -> None:
        raise ValueError("out of ideas")

    task = background.spawn(fail(), "thinker")
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert background.failures == 1
    assert not background.busy
    assert "The task thinker failed: ValueError at " in caplog.text  # where, but not its words: they may quote anything
    assert "out of ideas" not in caplog.text


async def test_a_borrowed_task_gives_its_failure_to_who_awaits_it(caplog: pytest.LogCaptureFixture) -> None:
    background = BackgroundTasks()

    async def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError):
        await background.spawn_awaited(fail(), "lent")
    assert background.failures == 0
    assert caplog.text == ""


async def test_rest_waits_for_what_ends_and_cancels_the_rest() -> None:
    background = BackgroundTasks()
    done = asyncio.Event()

    async def finish() -> None:
        await asyncio.sleep(0)
        done.set()

    background.spawn(finish(), "short")
    endless = background.spawn(asyncio.Event().wait(), "endless")
    await soon(background.finish(timeout=0.05), 2)
    assert done.is_set()
    assert endless.cancelled()
    assert not background.busy
    assert background.failures == 0
    await soon(background.finish(timeout=60), 1)  # nothing to wait for
