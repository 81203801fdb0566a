"""A PostgreSQL that restarts, cuts connections, is full, is away: no accepted call fails, and each is written once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psycopg
import pytest

from carpool.core.errors import StoreError, StoreUnwritable
from carpool.core.lifecycle import BatchState
from carpool.core.model import Settlement
from carpool.stores.postgres import PostgresStore
from tests.support import ROOT
from tests.support.postgres import FAST, Server, schema_url, shared_url, swept_url
from tests.support.stores import CRED, LEASE, ME, OTHER, T0, admission, admit_one, attempt, board, outcome, settlement

SECRET = b"a secret of the test"


@pytest.fixture
async def store() -> AsyncIterator[PostgresStore]:
    named = f"{swept_url()}&application_name=carpool-{os.getpid()}"
    opened = await PostgresStore.open(named, own_clock=False, secret=SECRET)
    await opened.join(ME, T0, LEASE)
    yield opened
    await opened.aclose()


@pytest.fixture
def boss() -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(shared_url(), autocommit=True) as connection:
        yield connection


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One that may be stopped: nobody else is on it."""
    started = Server(tmp_path_factory.mktemp("postgres") / "data", **(FAST | {"max_connections": "14"}))
    yield started
    started.remove()


async def flood(store: PostgresStore, first: int, count: int) -> None:
    """Calls as doors bring them: many callers, each awaiting its own."""
    admitted = await asyncio.gather(*(admit_one(store, admission(first + one)) for one in range(count)))
    assert [one.ticket for one in admitted] == [first + one for one in range(count)]
    settled = await asyncio.gather(
        *(store.settle([settlement(first + one, 7)], T0 + 60) for one in range(count)),
    )
    assert settled == [[True]] * count


async def check_books(store: PostgresStore, count: int) -> None:
    """Each once, in the calls, the ledger and the sums."""
    assert (await store.counts())["tickets.settled"] == count
    [total] = await store.totals()
    assert (total.purchases, total.paid) == (count, 50 * count)
    assert len(await store.outcomes(range(1, count + 1))) == count


# ---------------------------------------------------------------- connections


async def test_cut_connections_fail_nobody(store: PostgresStore, boss: psycopg.Connection[Any]) -> None:
    working = asyncio.gather(*(flood(store, 1 + 100 * turn, 100) for turn in range(20)))
    while not working.done():
        before = store.writer._groups.commits
        boss.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s",
            (store._session.connection.info.parameter_status("application_name"),),
        )
        while store.writer._groups.commits == before and not working.done():  # noqa: ASYNC110  in another thread
            await asyncio.sleep(0.001)
    await working
    assert store.writer._groups.reconnects
    await check_books(store, 2000)


class Cutting:
    """Stands before a connection, and breaks it once around a COMMIT."""

    def __init__(self, connection: psycopg.Connection[Any], after: bool) -> None:
        self._connection, self._after = connection, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def execute(self, query: str, *more: Any) -> Any:
        if query != "COMMIT":
            return self._connection.execute(query, *more)
        if self._after:
            self._connection.execute(query)
        self._connection.close()
        raise psycopg.OperationalError("the connection broke")


@pytest.mark.parametrize("after", [True, False], ids=["committed", "not committed"])
async def test_a_commit_without_an_answer_is_looked_up(store: PostgresStore, after: bool) -> None:
    """Repeated blindly, the second ticket would adopt the first, or be a number that is taken."""
    for ticket in range(1, 6):
        store._session.connection = Cutting(store._session.connection, after)  # type: ignore[assignment]
        admitted = await admit_one(store, admission(ticket, fingerprint=5, awaiter=None if ticket % 2 else ME))
        assert (admitted.fresh, admitted.ticket) == ((True, ticket) if ticket % 2 else (False, ticket - 1))
    store._session.connection = Cutting(store._session.connection, after)  # type: ignore[assignment]
    assert await store.settle([Settlement(1, outcome())], T0) == [True]
    assert store.writer._groups.reconnects == 6
    assert (await store.counts())["tickets.settled"] == 1


async def test_a_transaction_that_the_server_still_holds_is_waited_for(
    store: PostgresStore, boss: psycopg.Connection[Any]
) -> None:
    """The connection broke on our side only: what the server has not ended, it is told to."""
    groups = store.writer._groups
    left = store._session.connection
    left.execute("BEGIN")
    [number] = left.execute("SELECT pg_current_xact_id()::text").fetchone() or ("",)
    groups._number, groups._backend = number, left.info.backend_pid
    store._session.connection = Cutting(left, after=False)  # type: ignore[assignment]
    store._session.connection.closed = True  # type: ignore[misc]
    await admit_one(store, admission(1))
    assert groups.reconnects == 1
    left.close()


# ---------------------------------------------------------------- the server


async def test_a_restart_fails_nobody(server: Server) -> None:
    store = await PostgresStore.open(schema_url(server.url), own_clock=False, secret=SECRET)
    await store.join(ME, T0, LEASE)
    working = asyncio.gather(*(flood(store, 1 + 100 * turn, 100) for turn in range(20)))
    await asyncio.to_thread(server.restart)
    await asyncio.to_thread(server.restart)
    await working
    await check_books(store, 2000)
    await store.aclose()


async def test_a_server_that_stays_away_is_said_in_a_sentence_and_waited_for(server: Server) -> None:
    store = await PostgresStore.open(schema_url(server.url), own_clock=False, secret=SECRET, patience=0.3)
    await asyncio.to_thread(server.stop)
    try:
        with pytest.raises(StoreError, match=r"can't be reached .*\.$"):
            await admit_one(store, admission(1))
        with pytest.raises(StoreError, match="can't be reached"):
            await PostgresStore.open(schema_url(server.url), secret=SECRET)
    finally:
        await asyncio.to_thread(server.start)
    assert (await admit_one(store, admission(1))).fresh
    await store.aclose()


async def test_a_server_without_a_free_connection_is_waited_for(server: Server) -> None:
    url = schema_url(server.url)
    patient = await PostgresStore.open(url, own_clock=False, secret=SECRET)
    hasty = await PostgresStore.open(url, own_clock=False, secret=SECRET, patience=0.2)
    crowd: list[psycopg.Connection[Any]] = []
    for opened in (patient, hasty):
        opened._session.connection.close()
    with contextlib.suppress(psycopg.OperationalError):
        while True:
            crowd.append(psycopg.connect(server.url))
    with pytest.raises(StoreError, match="no connection left"):
        await admit_one(hasty, admission(2))
    admitting = asyncio.ensure_future(admit_one(patient, admission(1)))
    await asyncio.sleep(0.1)
    assert not admitting.done()
    for one in crowd:
        one.close()
    assert (await admitting).fresh
    assert (await admit_one(hasty, admission(2))).fresh
    await patient.aclose()
    await hasty.aclose()


# ---------------------------------------------------------------- no room, no rights


async def test_a_full_disk_is_said_and_outlived(store: PostgresStore, boss: psycopg.Connection[Any]) -> None:
    """The server's own error, raised where it would be: at the row that does not fit."""
    schema = swept_url().rpartition("=")[2]
    boss.execute(
        f"""CREATE FUNCTION {schema}.no_room() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = '53100'; END $$"""
    )
    boss.execute(
        f"CREATE TRIGGER no_room BEFORE INSERT ON {schema}.bodies FOR EACH ROW EXECUTE FUNCTION {schema}.no_room()"
    )
    try:
        for ticket in range(1, 4):
            with pytest.raises(StoreUnwritable, match="the disk is full"):
                await admit_one(store, admission(ticket))
        await store.remember("kind", "key", "small enough", T0)
    finally:
        boss.execute(f"DROP FUNCTION {schema}.no_room() CASCADE")
    assert (await admit_one(store, admission(1))).fresh
    assert (await store.counts())["tickets.queued"] == 1


async def test_a_server_that_only_reads(store: PostgresStore) -> None:
    store._session.connection.execute("SET default_transaction_read_only = on")
    with pytest.raises(StoreUnwritable, match="read-only"):
        await admit_one(store, admission(1))
    assert await store.counts()
    store._session.connection.execute("SET default_transaction_read_only = off")
    assert (await admit_one(store, admission(1))).fresh


async def test_trouble_never_quotes_what_was_to_be_written(store: PostgresStore) -> None:
    await admit_one(store, admission(1, body=b"private"))
    with pytest.raises(StoreError) as caught:
        await admit_one(store, admission(1, body=b"private", key="private"))
    assert "private" not in f"{caught.value!r} {caught.value.__cause__!r}"


# ---------------------------------------------------------------- clocks


async def test_clocks_that_differ_by_seconds_do_no_harm() -> None:
    """Leases last on the database's clock; each engine says times by its own."""
    url = swept_url()
    early, late = [await PostgresStore.open(url, secret=SECRET) for _ in range(2)]
    true = time.time()
    await early.join(ME, true - 5, 3.0)
    await late.join(OTHER, true + 5, 3.0)
    await early.lead(ME, ["account"], true - 5)
    batch = await board(early, [1])
    assert await late.take_over(OTHER, [CRED], true + 5) == 0
    assert await late.lead(OTHER, ["account"], true + 5) == set()
    assert await early.still_mine(batch.id, ME, true - 5 + 2)
    assert not await early.still_mine(batch.id, ME, true - 5 + 4)
    assert await early.join(ME, true - 5, 0.0) is True
    await asyncio.sleep(0.05)
    assert await late.take_over(OTHER, [CRED], true + 5) == 1
    assert await late.lead(OTHER, ["account"], true + 5) == {"account"}
    for store in (early, late):
        await store.aclose()


# ---------------------------------------------------------------- a process that sleeps


CHILD = """
    import asyncio, sys
    from tests.support.stores import *
    from carpool.stores.postgres import PostgresStore
    import time

    async def main():
        store = await PostgresStore.open({url!r}, secret=b"a secret of the test")
        await store.join("sleeper", time.time(), 2.0)
        batch = await board(store, [1, 2, 3], owner="sleeper")
        connection = store._session.connection
        if {holding}:
            connection.execute("BEGIN")
            connection.execute("SELECT * FROM calls FOR UPDATE")
        print("ready", batch.id, flush=True)
        sys.stdin.readline()
        if {holding}:
            connection.close()
        print(await store.still_mine(batch.id, "sleeper", time.time()), flush=True)
        print(await store.intend(Intent(batch.pool, "n", 9, 10**9, "sleeper", time.time(), "account")), flush=True)
        print(await store.start_sending(attempt(1), "sleeper", time.time()), flush=True)
        await store.aclose()

    asyncio.run(main())
"""


@pytest.mark.parametrize("holding", [False, True], ids=["between transactions", "within one"])
async def test_a_stopped_process_wakes_to_find_that_nothing_is_its_own(holding: bool) -> None:
    url = swept_url()
    code = textwrap.dedent(CHILD.format(url=url, holding=holding))
    child = await asyncio.to_thread(_started, code)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        assert child.stdout.readline().startswith("ready")
        child.send_signal(signal.SIGSTOP)
        store = await PostgresStore.open(url, secret=SECRET)
        taken = 0
        async with asyncio.timeout(30):
            while not taken:
                await store.join(ME, time.time(), 30.0)
                taken = await store.take_over(ME, [CRED], time.time())
                await asyncio.sleep(0.1)
        [batch] = await store.batches(ME)
        assert batch.state is BatchState.UNKNOWN
        assert await store.start_sending(_rescue(1), ME, time.time())
        assert await store.lead(ME, ["account"], time.time()) == {"account"}
        os.kill(child.pid, signal.SIGCONT)
        said, _ = child.communicate("\n", timeout=60)
        assert said.split() == ["False", "None", "False"]
        await store.aclose()
    finally:
        child.kill()
        child.wait()


def _started(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _rescue(ticket: int) -> Any:
    return attempt(ticket, 2)
