"""The garbage collector while a crowd waits: set aside by steps, and taken back when it has gone."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from carpool.engine.context import FREEZE_LEFT as LEFT
from carpool.engine.context import FREEZE_STEP as STEP
from carpool.engine.context import GcFreezer
from tests.support.fleets import QUICK, SOON, riding


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.enable() if enabled else gc.disable()


def test_few_who_wait_change_nothing() -> None:
    GcFreezer().grew(STEP - 1)
    assert gc.get_freeze_count() == 0


def test_a_crowd_is_set_aside_step_by_step_and_taken_back_when_it_has_gone() -> None:
    crowd = GcFreezer()
    crowd.grew(STEP)
    first = gc.get_freeze_count()
    later = [[number] for number in range(1000)]
    crowd.grew(STEP + 1)
    assert 0 < gc.get_freeze_count() <= first  # not again for each that comes; what is gone meanwhile is gone
    crowd.grew(2 * STEP)
    assert gc.get_freeze_count() >= first + len(later)
    crowd.shrank(2 * STEP // LEFT)
    assert gc.get_freeze_count() > 0
    crowd.shrank(2 * STEP // LEFT - 1)
    assert gc.get_freeze_count() == 0
    crowd.grew(STEP)
    assert gc.get_freeze_count() > 0
    crowd.shrank(0)
    assert gc.get_freeze_count() == 0


def test_garbage_that_is_made_while_a_crowd_waits_is_collected() -> None:
    class Knot:
        pass

    crowd = GcFreezer()
    crowd.grew(STEP)
    knot = Knot()
    knot.itself = knot  # type: ignore[attr-defined]
    weak = weakref.ref(knot)
    del knot
    gc.collect()
    assert weak() is None


def test_what_the_host_froze_stays_frozen() -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    crowd = GcFreezer()
    crowd.grew(STEP)
    crowd.shrank(0)
    assert 0.99 * before < gc.get_freeze_count() <= before  # what is frozen may still die


def test_a_host_that_collects_when_it_wants_to_is_left_alone() -> None:
    gc.disable()
    GcFreezer().grew(STEP)
    assert gc.get_freeze_count() == 0


async def test_an_engine_sets_its_crowd_aside_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carpool.engine.context.FREEZE_STEP", 3)
    frozen = []

    def freeze() -> None:
        frozen.append(gc.get_count())
        freeze_all()

    freeze_all = gc.freeze
    monkeypatch.setattr(gc, "freeze", freeze)
    async with riding(SOON, QUICK) as scene:
        ask = {"model": "claude-sonnet-5", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}
        await asyncio.gather(*(scene.fleet.submit_batch(**ask) for _ in range(6)))
    assert frozen
    assert gc.get_freeze_count() == 0
