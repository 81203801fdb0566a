"""A process that died is told from one that is silent by its connection: what it awaited is free at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import psycopg
import pytest
from servers import schema_url
from stores import CRED, ME, OTHER, admission

from carpool.clock import SystemClock
from carpool.ports import Store
from carpool.stores.postgres import PostgresStore, _statements

LEASE, PULSE = 180.0, 3600.0


@pytest.fixture(autouse=True)
def _no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server of these tests may have been started a moment ago."""
    known = _statements.statements(True)
    monkeypatch.setitem(known, "gone", known["gone"].replace("'10 seconds'", "'0 seconds'"))


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


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def admitted(store: Store, ticket: int, awaiter: str) -> tuple[int, bool]:
    found = await store.admit(admission(ticket, fingerprint=7, awaiter=awaiter))
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


async def test_a_server_that_was_just_started_is_given_time(
    two: tuple[PostgresStore, PostgresStore], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its restart every connection is gone, and every process is alive."""
    known = _statements.statements(True)
    monkeypatch.setitem(known, "gone", known["gone"].replace("'0 seconds'", "'1 day'"))
    mine, others = two
    assert await admitted(others, 1, OTHER) == (1, True)
    await others.aclose()
    await until(lambda: not asked(url, "SELECT 1 FROM engines, pg_stat_get_activity(backend) WHERE name = %s", OTHER))
    assert await admitted(mine, 2, ME) == (2, True)
