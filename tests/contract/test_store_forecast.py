"""The state of the forecast that the engines on a store share."""

from __future__ import annotations

import asyncio

from carpool.core.ports import Store


async def test_it_comes_back_as_it_was_saved(store: Store) -> None:
    assert await store.forecast() == (0, b"")
    assert await store.save_forecast(0, b"\x00learned\xff")
    assert await store.forecast() == (1, b"\x00learned\xff")
    assert await store.save_forecast(1, b"more")
    assert await store.forecast() == (2, b"more")


async def test_who_has_read_an_older_state_does_not_replace_a_newer_one(store: Store) -> None:
    assert await store.save_forecast(0, b"one")
    assert not await store.save_forecast(0, b"other")
    assert await store.forecast() == (1, b"one")
    assert await store.save_forecast(1, b"both")
    assert not await store.save_forecast(1, b"other")
    assert await store.forecast() == (2, b"both")


async def test_one_of_many_at_once_saves(store: Store) -> None:
    for known in range(3):
        saved = await asyncio.gather(*(store.save_forecast(known, bytes([number])) for number in range(8)))
        assert sum(saved) == 1
        assert await store.forecast() == (known + 1, bytes([saved.index(True)]))
