"""Virtual keys in memory: read from the store when it has changed, checked without it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from carpool.core.errors import KeyRefused, StoreAway
from carpool.core.keys import VirtualKey, new_key, revoked
from carpool.engine.virtual_keys import USE_S, VirtualKeyCache
from tests.support.engine_context import SECRET, START, HandClock, engine_context

PEPPER = b"p" * 32  # that of the keyring of `engine_context`


class KeyTable:
    """The part of a store that has virtual keys. Implements `ports.KeyStore` as far as the cache uses it."""

    def __init__(self) -> None:
        self.change, self.rows, self.uses = 1, list[VirtualKey](), list[dict[str, float]]()
        self.away = False

    async def keys(self, known: int | None = None) -> tuple[int, list[VirtualKey]] | None:
        if self.away:
            raise StoreAway("The store is away. Try again.")
        return None if known == self.change else (self.change, self.rows)

    async def used_keys(self, uses: dict[str, float]) -> None:
        self.uses.append(uses)

    def give(self, name: str, expires_at: float | None = None) -> str:
        key, secret = new_key(PEPPER, name, "openai", "OUR_KEY", START, expires_at=expires_at)
        self.rows, self.change = [*self.rows, key], self.change + 1
        return secret


@pytest.fixture
def table() -> KeyTable:
    return KeyTable()


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def virtual_key_cache(table: KeyTable, clock: HandClock) -> VirtualKeyCache:
    context, _ = engine_context(store=table, clock=clock)
    virtual_key_cache = VirtualKeyCache(context)
    virtual_key_cache._find_secrets = lambda provider, env: [SECRET] if env == "OUR_KEY" else []
    return virtual_key_cache


async def test_a_key_is_found_by_its_secret_and_buys_with_the_configured_one(
    table: KeyTable, virtual_key_cache: VirtualKeyCache
) -> None:
    secret = table.give("ci")
    assert await virtual_key_cache.refresh()
    holder = virtual_key_cache.find(secret)
    assert (holder.key.name, holder.secrets) == ("ci", [SECRET])
    assert virtual_key_cache.expected


async def test_a_refresh_says_whether_anything_changed(table: KeyTable, virtual_key_cache: VirtualKeyCache) -> None:
    with pytest.raises(KeyRefused, match="does not know this virtual key"):
        virtual_key_cache.find("cpk-unknown")
    table.give("ci")
    assert [await virtual_key_cache.refresh() for _ in range(2)] == [True, False]


def _revoke(table: KeyTable, clock: HandClock) -> None:
    table.rows, table.change = revoked(table.rows, "ci", START), table.change + 1


def _wait(table: KeyTable, clock: HandClock) -> None:
    clock.time = START + 10


@pytest.mark.parametrize(("end", "why"), [(_revoke, "was revoked"), (_wait, "has expired")])
async def test_whoever_knows_a_key_is_told_when_it_ends(
    table: KeyTable, clock: HandClock, virtual_key_cache: VirtualKeyCache, end: Callable[..., None], why: str
) -> None:
    """An expired key is no change of the store: the poll notices that its time has passed."""
    secret = table.give("ci", expires_at=START + 10)
    await virtual_key_cache.refresh()
    before = virtual_key_cache.epoch
    end(table, clock)
    assert await virtual_key_cache.refresh()
    assert virtual_key_cache.epoch > before
    with pytest.raises(KeyRefused, match=f"The virtual key ci {why}"):
        virtual_key_cache.find(secret)
    assert not virtual_key_cache.expected


async def test_the_last_use_is_written_once_a_minute(
    table: KeyTable, clock: HandClock, virtual_key_cache: VirtualKeyCache
) -> None:
    secret = table.give("ci")
    await virtual_key_cache.refresh()
    for seconds in (0.0, USE_S - 1, 1.0, USE_S):  # since the step before; the last one is without a use
        clock.time += seconds
        virtual_key_cache.find(secret).used = clock.time < START + 2 * USE_S
        await virtual_key_cache._write_uses()
    assert [list(uses.values()) for uses in table.uses] == [[START], [START + USE_S]]


async def test_a_use_is_not_forgotten_when_the_keys_are_read_again(
    table: KeyTable, virtual_key_cache: VirtualKeyCache
) -> None:
    secret = table.give("ci")
    await virtual_key_cache.refresh()
    virtual_key_cache.find(secret).used = True
    table.give("another")
    await virtual_key_cache.refresh()
    assert virtual_key_cache.find(secret).used


async def test_keys_stay_valid_while_the_store_is_away(table: KeyTable, clock: HandClock) -> None:
    context, _ = engine_context(store=table, clock=clock)
    virtual_key_cache = VirtualKeyCache(context)
    secret = table.give("ci")
    await virtual_key_cache.open(lambda provider, env: [SECRET])
    for table.away in (True, False):
        for _ in range(10):  # rounds of the poll: this clock does not wait
            await asyncio.sleep(0)
        assert bool(context.troubles) is table.away
        assert virtual_key_cache.find(secret).key.name == "ci"
    virtual_key_cache.stop()
