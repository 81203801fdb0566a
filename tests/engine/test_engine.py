"""The engine's life: it takes calls between its start and its close, and at no other time."""

from __future__ import annotations

import random

import pytest

from carpool.core.clock import SystemClock
from carpool.core.errors import Closed, NotStarted
from carpool.core.upstream import Upstream
from carpool.dialects import OPENAI
from carpool.engine.engine import Engine
from carpool.engine.keyring import Keyring
from carpool.planners.policy import RoutingPolicy
from carpool.stores import open_store
from tests.support.engine_context import PLACE, SECRET, AlikeClient
from tests.support.stores import admission


async def started() -> Engine:
    return Engine(
        store=await open_store(None),
        clock=SystemClock(),
        upstreams={"openai": Upstream("openai", PLACE, OPENAI, AlikeClient())},
        keyring=Keyring(b"p" * 32),
        policy=RoutingPolicy(),
        rng=random.Random(0),
    )


async def test_it_takes_calls_between_start_and_close() -> None:
    engine, call = await started(), admission(1).call
    with pytest.raises(NotStarted):
        engine.decide(call)
    await engine.start()
    assert engine.alive
    await engine.close()
    assert not engine.alive
    with pytest.raises(Closed):
        engine.decide(call)
    await engine.close()  # a second time does no harm
    assert engine.failures == 0


async def test_a_secret_is_enrolled_once_and_told_to_others_once() -> None:
    engine = await started()
    await engine.start()
    told: list[str] = []
    engine.on_secret = lambda provider, secret: told.append(provider)
    name = engine.add_secret("openai", SECRET)
    assert engine.add_secret("openai", SECRET) == name
    assert told == ["openai"]
    assert name in engine.names("openai", SECRET)
    await engine.close()


async def test_the_summary_counts_what_waits() -> None:
    engine = await started()
    await engine.start()
    summary = await engine.overview.summary()
    assert (summary.waiting, summary.totals, summary.pressure) == (0, [], [])
    assert await engine.overview.trouble() is None
    assert engine.stats.sync_calls == 0
    await engine.close()
