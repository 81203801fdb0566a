"""What a call on `now` is entered as, when it had to wait for its turn."""

from __future__ import annotations

import math
import random
from unittest.mock import Mock

import pytest

from carpool.core.errors import StoreError
from carpool.core.lifecycle import BatchState
from carpool.core.model import EntryKind, Intent, Lane
from carpool.core.ports import Store
from carpool.core.prices import PriceBook
from carpool.engine.context import EngineContext
from carpool.engine.events import EventHooks
from carpool.engine.keyring import Keyring
from carpool.engine.now.send import BACKOFF_MAX_S, Sender, SendRequest
from carpool.engine.recording import CallRecorder
from carpool.planners.forecast import Forecast
from carpool.planners.policy import RoutingPolicy
from carpool.stores import SqliteStore
from tests.support.stores import CRED, LEASE, ME, T0, admission, admit_one

TICKET = 77


@pytest.fixture
async def store() -> Store:
    store = await SqliteStore.open(None, threaded=False)
    await store.join(ME, T0, LEASE)
    await admit_one(store, admission(TICKET))
    return store


def sender(store: Store) -> Sender:
    context = EngineContext(
        store=store,
        clock=Mock(now=lambda: T0),
        policy=RoutingPolicy(),
        forecast=Forecast(),
        prices=PriceBook(),
        keyring=Keyring(b"p" * 32),
        upstreams={},
        event_hooks=EventHooks(()),
        rng=random.Random(0),
        name=ME,
    )
    return Sender(context, CallRecorder(context))


async def seen_again(store: Store, *, kept: bool = True) -> EntryKind:
    errand = SendRequest(admission(TICKET).call, "due", kept=kept)
    return (await sender(store)._recheck_kind(errand, Mock())).kind


async def board(store: Store) -> int:
    [pool] = await store.pools([CRED])
    batch = await store.intend(Intent(pool.pool, "nonce", 10, 1 << 20, ME, T0))
    assert batch is not None
    return batch.id


async def test_a_call_that_no_batch_took_is_a_first_purchase(store: Store) -> None:
    assert await seen_again(store) is EntryKind.PURCHASE


async def test_a_call_that_boarded_a_batch_while_it_waited_is_a_rescue(store: Store) -> None:
    await board(store)
    assert await seen_again(store) is EntryKind.RESCUE


async def test_a_call_that_a_batch_gave_back_while_it_waited_is_a_rescue(store: Store) -> None:
    """The batch may have bought it all the same."""
    batch = await board(store)
    await store.move(batch, BatchState.UNKNOWN)
    await store.release(batch, BatchState.ABANDONED, Lane.BATCH, T0 + 90, "unknown")
    assert await seen_again(store) is EntryKind.RESCUE


async def test_a_call_that_is_on_no_disk_is_not_looked_for(store: Store) -> None:
    await board(store)
    assert await seen_again(store, kept=False) is EntryKind.PURCHASE


async def test_a_store_in_trouble_gives_the_turn_back(store: Store) -> None:
    broken, slot = Mock(views=Mock(side_effect=StoreError("The disk is full."))), Mock()
    with pytest.raises(StoreError):
        await sender(broken)._recheck_kind(SendRequest(admission(TICKET).call, "due", kept=True), slot)
    slot.failed.assert_called_once()


async def test_the_pause_before_a_try_is_bounded_however_many_there_were(store: Store) -> None:
    slot = Mock(retry_wait=lambda: 0.0)
    pauses = [sender(store)._delay(math.inf, number, None, slot) for number in (1024, 1025, 5000, 10_000)]
    assert all(pause is not None and 0.75 * BACKOFF_MAX_S <= pause <= 1.25 * BACKOFF_MAX_S for pause in pauses)
