"""A process that died is told from one that is silent by its connection: what it awaited is free at once."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from msgspec.structs import replace

from carpool.core.clock import SystemClock
from carpool.core.errors import Undecided
from carpool.core.model import Admitted
from carpool.core.ports import Store
from carpool.stores.postgres import PostgresStore
from carpool.stores.postgres.session import statements
from tests.support.postgres import schema_url
from tests.support.stores import CRED, ME, OTHER, admission, admit_one

LEASE, PULSE = 180.0, 3600.0


def grace(monkeypatch: pytest.MonkeyPatch, lasts: str) -> None:
    known = statements(True)
    for name in ("missing", "mark_dead_engines"):
        monkeypatch.setitem(known, name, re.sub(r"interval '.*?'", f"interval '{lasts}'", known[name]))


@pytest.fixture(autouse=True)
def _no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose connection is gone is dead at once; else these tests would wait."""
    grace(monkeypatch, "0 seconds")


@pytest.fixture
async def url() -> str:
    return schema_url()


@pytest.fixture
async def two(url: str) -> AsyncIterator[tuple[PostgresStore, PostgresStore]]:
    stores = [await PostgresStore.open(url, secret=b"a secret of the test") for _ in range(2)]
    now = SystemClock().now()
    for store, name in zip(stores, (ME, OTHER), strict=True):
        await store.join(name, now, LEASE, PULSE)
        await until(lambda name=name: signed_in(url, name))
    yield stores[0], stores[1]
    for store in stores:
        await store.aclose()


def asked(url: str, question: str, *values: Any) -> Any:
    base, _, schema = url.partition("schema=")
    with psycopg.connect(base.rstrip("?&"), autocommit=True) as connection:
        connection.execute(f"SET search_path TO {schema}")
        return connection.execute(question, values).fetchone()


def signed_in(url: str, engine: str) -> bool:
    found = asked(url, "SELECT backend FROM engines WHERE name = %s", engine)
    return bool(found and found[0] is not None)


def connected(url: str, engine: str) -> bool:
    question = "SELECT 1 FROM engines, pg_stat_get_activity(backend) WHERE name = %s AND backend_start = backend_since"
    return asked(url, question, engine) is not None


async def vanish(store: PostgresStore, url: str) -> None:
    """As the system does it for a process that is killed: without a word."""
    await store.aclose()
    await until(lambda: not connected(url, OTHER))


@contextmanager
def silent(store: PostgresStore) -> Iterator[None]:
    """Its listening connection, once cut, is not made again meanwhile."""
    channel = store._notify_channel
    assert channel is not None
    made, channel._connect = channel._connect, _refused
    try:
        yield
    finally:
        channel._connect = made


def _refused() -> Any:
    raise psycopg.OperationalError("no connection left")


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def admitted(store: Store, ticket: int, awaiter: str) -> tuple[int, bool]:
    found = await admit_one(store, admission(ticket, fingerprint=7, awaiter=awaiter))
    return found.ticket, found.fresh


async def test_the_calls_of_a_process_that_died_are_adopted_at_once(
    two: tuple[PostgresStore, PostgresStore], url: str
) -> None:
    mine, others = two
    now = SystemClock().now()
    assert await others.lead(OTHER, [CRED], now) == {CRED}
    assert await admitted(others, 1, OTHER) == (1, True)
    assert await admitted(mine, 2, ME) == (2, True)  # equal calls of the living are never joined
    await others.aclose()  # as the system does it for a process that is killed: without a word
    await until(lambda: not asked(url, "SELECT 1 FROM engines, pg_stat_get_activity(backend) WHERE name = %s", OTHER))
    assert await admitted(mine, 3, ME) == (1, False)
    assert await mine.lead(ME, [CRED], now) == {CRED}


async def test_an_engine_whose_connection_was_cut_says_that_it_lives(
    two: tuple[PostgresStore, PostgresStore], url: str
) -> None:
    mine, others = two
    assert await admitted(others, 1, OTHER) == (1, True)
    [before] = asked(url, "SELECT backend FROM engines WHERE name = %s", OTHER)
    asked(url, "SELECT pg_terminate_backend(%s)", before)
    await until(lambda: asked(url, "SELECT backend <> %s FROM engines WHERE name = %s", before, OTHER)[0])
    assert await admitted(mine, 2, ME) == (2, True)
    assert await others.join(OTHER, SystemClock().now(), LEASE, PULSE)


async def test_who_left_is_not_looked_for(two: tuple[PostgresStore, PostgresStore], url: str) -> None:
    mine, others = two
    assert await admitted(others, 1, OTHER) == (1, True)
    await others.leave(OTHER)
    await mine.take_over(ME, [], SystemClock().now())
    assert await admitted(mine, 2, ME) == (1, False)
    assert asked(url, "SELECT 1 FROM engines WHERE name = %s", OTHER) is None


# ---------------------------------------------------------------- in doubt


async def test_who_lost_its_connection_may_be_alive_until_it_had_time_to_come_back(
    two: tuple[PostgresStore, PostgresStore], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An equal call is neither joined with one that may be awaited, nor bought beside one that may be free."""
    grace(monkeypatch, "1 day")
    mine, others = two
    assert await admitted(others, 1, OTHER) == (1, True)
    await vanish(others, url)
    for _ in range(2):
        with pytest.raises(Undecided, match="not known yet"):
            await admitted(mine, 2, ME)
    assert (await admit_one(mine, admission(3, fingerprint=8, awaiter=ME))).fresh  # others need not wait
    assert (await admit_one(mine, admission(4, fingerprint=7, credential="another", awaiter=ME))).fresh
    assert (await admit_one(mine, admission(5, fingerprint=7, key="a key", awaiter=ME))).fresh
    together = [admission(6, fingerprint=7, awaiter=ME), admission(7, fingerprint=9, awaiter=ME)]
    undecided, fresh = await mine.admit_all(together)
    assert isinstance(undecided, Undecided)
    assert isinstance(fresh, Admitted)
    grace(monkeypatch, "0 seconds")
    assert await admitted(mine, 2, ME) == (1, False)


async def test_a_ticket_that_is_free_is_adopted_whoever_is_in_doubt(
    two: tuple[PostgresStore, PostgresStore], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    grace(monkeypatch, "1 day")
    mine, others = two
    assert await admitted(others, 1, OTHER) == (1, True)
    assert await admitted(mine, 2, ME) == (2, True)
    await vanish(others, url)
    await mine.await_ticket(2, None)
    assert await admitted(mine, 3, ME) == (2, False)


async def test_a_call_that_presses_waits_for_nobodys_fate(
    two: tuple[PostgresStore, PostgresStore], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    grace(monkeypatch, "1 day")
    mine, others = two
    assert await admitted(others, 1, OTHER) == (1, True)
    await vanish(others, url)
    assert (await admit_one(mine, replace(admission(2, fingerprint=7, awaiter=ME), pressed=True))).fresh


async def test_equal_calls_of_the_living_stay_two_while_a_connection_is_cut(
    two: tuple[PostgresStore, PostgresStore], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    grace(monkeypatch, "1 day")
    mine, others = two
    assert await admitted(others, 1, OTHER) == (1, True)
    [before] = asked(url, "SELECT backend FROM engines WHERE name = %s", OTHER)
    with silent(others):
        asked(url, "SELECT pg_terminate_backend(%s)", before)
        await until(lambda: not connected(url, OTHER))
        with pytest.raises(Undecided):
            await admitted(mine, 2, ME)
        assert await admitted(others, 3, OTHER) == (3, True)  # it knows of itself that it lives
    await until(lambda: connected(url, OTHER))
    assert await admitted(mine, 2, ME) == (2, True)
    assert await others.join(OTHER, SystemClock().now(), LEASE, PULSE)


async def test_a_number_that_the_server_gave_to_another_is_not_taken_for_the_engine(
    two: tuple[PostgresStore, PostgresStore], url: str
) -> None:
    """After a restart numbers begin anew, and a stranger's process may have the one that an engine had."""
    mine, others = two
    assert await admitted(others, 1, OTHER) == (1, True)
    await vanish(others, url)
    with psycopg.connect(url.partition("schema=")[0].rstrip("?&"), autocommit=True) as stranger:
        asked(url, "UPDATE engines SET backend = %s WHERE name = %s RETURNING 1", stranger.info.backend_pid, OTHER)
        assert await admitted(mine, 2, ME) == (1, False)


async def test_after_a_restart_the_pulse_decides(two: tuple[PostgresStore, PostgresStore], url: str) -> None:
    """The connections of all are gone then, and pulses may have run out while nobody could say that it lives."""
    mine, others = two
    assert await admitted(others, 1, OTHER) == (1, True)
    await vanish(others, url)
    ran_out = "pulse_until = 1, pulse = 3600, server_since = server_since - interval '1 second'"
    asked(url, f"UPDATE engines SET {ran_out} WHERE name = %s RETURNING 1", OTHER)
    with pytest.raises(Undecided):
        await admitted(mine, 2, ME)
    await mine.lead(ME, [CRED], SystemClock().now())
    await mine.take_over(ME, [CRED], SystemClock().now())
    with pytest.raises(Undecided):
        await admitted(mine, 2, ME)
    asked(url, "UPDATE engines SET pulse_until = 1 WHERE name = %s RETURNING 1", OTHER)
    assert await admitted(mine, 2, ME) == (1, False)
