"""What every store promises to those who want to hear of settled tickets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from carpool.core.lifecycle import BatchState
from carpool.core.model import Lane, Settled, Settlement
from carpool.core.ports import Store
from tests.support.stores import CRED, T0, admit, board, outcome, settlement


class Ear:
    """Remembers what it heard, and whether that was on the event loop."""

    def __init__(self) -> None:
        self.heard: list[int] = []
        self.loops: set[asyncio.AbstractEventLoop] = set()

    def __call__(self, tickets: Sequence[int]) -> None:
        self.heard += tickets
        self.loops.add(asyncio.get_running_loop())


async def turn() -> None:
    """Lets everything happen that was put off until the next turn of the loop."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


@pytest.mark.parametrize("ears", [1, 2, 3])
async def test_listeners_hear_on_the_loop_what_was_settled_and_nothing_else(store: Store, ears: int) -> None:
    listeners = [Ear() for _ in range(ears)]
    for ear in listeners:
        store.subscribe(ear)
    await admit(store, 1, 2, 3, 4)
    await store.settle([Settlement(1, outcome()), Settlement(2, requeue=Lane.NOW), Settlement(99, outcome())], T0)
    await store.settle([Settlement(3, outcome()), Settlement(1, outcome())], T0)
    await turn()
    for ear in listeners:
        assert set(ear.heard) == {1, 3}
        assert ear.loops == {asyncio.get_running_loop()}


async def test_whoever_hears_of_it_finds_the_outcome(store: Store) -> None:
    batch = await board(store, [1, 2], state=BatchState.OPEN)
    heard: list[asyncio.Task[list[Settled]]] = []
    store.subscribe(lambda tickets: heard.append(asyncio.ensure_future(store.outcomes(tickets))))
    await store.settle([settlement(1, batch.id), settlement(2, batch.id)], T0)
    await turn()
    assert {settled.ticket for one in heard for settled in await one} == {1, 2}
    assert (await store.outcome(1, CRED)).outcome == outcome()


async def test_a_cancelled_call_is_settled_too(store: Store) -> None:
    ear = Ear()
    store.subscribe(ear)
    await admit(store, 1)
    assert await store.cancel(1, outcome("cancelled"))
    assert not await store.cancel(1, outcome("cancelled"))
    assert not await store.cancel(99, outcome("cancelled"))
    await turn()
    assert set(ear.heard) == {1}


async def test_a_listener_is_never_called_in_the_middle_of_settling(store: Store) -> None:
    """Called inside `settle` it would run before the one who settled has its answer."""
    order: list[str] = []
    store.subscribe(lambda _: order.append("heard"))
    await admit(store, 1)
    await store.settle([Settlement(1, outcome())], T0)
    order.append("settled")
    await turn()
    assert order == ["settled", "heard"]


async def test_what_subscribe_gives_back_ends_it(store: Store) -> None:
    leaving, staying = Ear(), Ear()
    end = store.subscribe(leaving)
    store.subscribe(staying)
    await admit(store, 1, 2)
    await store.settle([Settlement(1, outcome())], T0)
    end()  # before it could hear anything
    end()
    await store.settle([Settlement(2, outcome())], T0)
    await turn()
    assert leaving.heard == []
    assert set(staying.heard) == {1, 2}


async def test_ending_one_subscription_twice_leaves_its_twin(store: Store) -> None:
    ear = Ear()
    first, _ = store.subscribe(ear), store.subscribe(ear)
    first()
    first()
    await admit(store, 1)
    await store.settle([Settlement(1, outcome())], T0)
    await turn()
    assert ear.heard == [1]


async def test_nobody_has_to_listen(store: Store) -> None:
    await admit(store, 1)
    assert await store.settle([Settlement(1, outcome())], T0) == [True]
    store.subscribe(Ear())()
    assert await store.settle([Settlement(1, outcome())], T0) == [False]


async def test_whoever_follows_a_batch_is_told_that_it_may_have_ended(store: Store) -> None:
    batch = await board(store, [1], nonce="one")
    other = await board(store, [2], nonce="two")
    await store.move(batch.id, BatchState.OPEN, provider_id="batch_1")
    await store.move(other.id, BatchState.OPEN, provider_id="batch_2")
    ear, leaving = Ear(), Ear()
    store.on_batch_hint(ear)
    store.on_batch_hint(leaving)()
    assert await store.hint_batch("anthropic", "batch_1")
    assert not await store.hint_batch("openai", "batch_1")  # another provider may give the same name
    assert not await store.hint_batch("anthropic", "batch_of_a_stranger")
    await turn()
    assert ear.heard == [batch.id]
    assert ear.loops == {asyncio.get_running_loop()}
    assert leaving.heard == []
    await store.move(batch.id, BatchState.ENDED)
    assert await store.hint_batch("anthropic", "batch_1")  # not collected yet
    await store.move(batch.id, BatchState.COLLECTED)
    assert not await store.hint_batch("anthropic", "batch_1")
