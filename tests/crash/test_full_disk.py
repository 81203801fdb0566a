"""The disk of the store is full while a fleet works, and is freed later. It is a real one: see `disks`.

What was admitted is answered; what could not be is refused with an error that says why, or waits; nothing is bought
twice. PostgreSQL goes down when it has no room for its log, and comes back.
"""

from __future__ import annotations

import asyncio
import base64
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import pytest
from anthropic import AsyncAnthropic

import carpool.engine.batch.follow
from carpool import CarpoolError, FleetDispatcher, RoutingPolicy, StoreAway, StoreUnwritable
from carpool.mock import Faults, MockAnthropic, MockConfig, fingerprint, serve
from tests.support.crash import NEVER, POLICY, Call, World, check_books, make_call
from tests.support.deep import quick_and_deep
from tests.support.disks import Disk, Limited, Mounted, mounted, ways
from tests.support.postgres import FAST, Server, schema_url

PATIENCE_S = 90.0
EARLY = 30  # calls that ride batches when the disk becomes full
WAVE = 20  # calls that come together then
LARGE = 75_000  # random bytes in a body of theirs
SEED = int(os.environ.get("CARPOOL_SEED", random.randrange(10**9)))
# What was committed must outlive a server that breaks down.
SMALL_LOG = FAST | {"synchronous_commit": "on", "min_wal_size": "32MB", "max_wal_size": "48MB"}


@pytest.fixture(autouse=True)
def _config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))  # where the stores' secrets are kept
    monkeypatch.setattr(carpool.engine.batch.follow, "GRACE_S", 2.0)


class Crowd:
    """Clients of one fleet: what each was told."""

    def __init__(self, fleet: FleetDispatcher) -> None:
        self._fleet = fleet
        self._rng = random.Random(SEED)
        self.calls: list[Call] = []
        self._asked: list[asyncio.Task[Any]] = []

    def comes(self, count: int, size: int = 0) -> None:
        for _ in range(count):
            call = make_call(len(self.calls))
            if size:
                text = base64.b64encode(self._rng.randbytes(size)).decode()
                call.params["messages"] = [{"role": "user", "content": f"{call.number}: {text}"}]
            self.calls.append(call)
            self._asked.append(asyncio.create_task(self._fleet.submit(**call.params)))

    @property
    def refused(self) -> list[Call]:
        return [call for call, task in zip(self.calls, self._asked, strict=True) if task.done() and task.exception()]

    async def refused_come_again(self) -> list[BaseException]:
        """Everybody has an answer in the end; says what the refused were told at first."""
        told = []
        for at, call in enumerate(self.calls):
            try:
                await self._asked[at]
            except CarpoolError as error:
                told.append(error)
                self._asked[at] = asyncio.create_task(self._fleet.submit(**call.params))
        for call, task in zip(self.calls, self._asked, strict=True):
            assert (await task).content[0].text == call.text
        return told


@asynccontextmanager
async def at_work(folder: Path, store: str | Path) -> AsyncIterator[tuple[World, Crowd]]:
    """A fleet whose first calls ride batches that have not ended."""
    provider = MockAnthropic(MockConfig(batch_latency=NEVER, batch_rpm=None, faults=Faults()))
    async with (
        asyncio.timeout(PATIENCE_S),
        serve(provider=provider) as server,
        AsyncAnthropic(base_url=server.url, api_key="k") as client,
    ):
        made = World(provider, server.url, folder)
        made.store = store
        async with FleetDispatcher(client, store=store, policy=RoutingPolicy(**POLICY)) as fleet:
            crowd = Crowd(fleet)
            crowd.comes(EARLY)
            while sum(batch.size for batch in made.own_batches) < EARLY:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            yield made, crowd
            await made.stop()


async def until_refused(made: World, crowd: Crowd) -> None:
    """More and more come, and batches end, until the first is not let in."""
    made.flow()
    while not crowd.refused:
        crowd.comes(WAVE, LARGE)
        await asyncio.sleep(0.2)


async def check(made: World, crowd: Crowd) -> None:
    assert made.batch_charges() == Counter(fingerprint(call.body) for call in crowd.calls)
    assert not made.sync_charges()
    check_books(made, await made.ledger())


# ---------------------------------------------------------------- SQLite


@pytest.fixture(params=quick_and_deep(ways(), ways()[:1]))
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, Disk]]:
    if request.param == "mounted":
        with mounted(tmp_path / "small", 16) as folder:
            yield folder / "fleet.db", Mounted(folder)
        return
    limited = Limited(2_000_000, lambda: [os.getpid()])
    yield tmp_path / "fleet.db", limited
    limited.free()


async def test_sqlite_on_a_full_disk(file: tuple[Path, Disk], tmp_path: Path) -> None:
    print("seed", SEED)
    path, disk = file
    async with at_work(tmp_path, path) as (made, crowd):
        disk.fill()
        await until_refused(made, crowd)
        disk.free()
        told = await crowd.refused_come_again()
        assert {type(error) for error in told} == {StoreUnwritable}
        assert all("disk" in str(error) for error in told)
    await check(made, crowd)


# ---------------------------------------------------------------- PostgreSQL


@pytest.fixture(params=quick_and_deep(ways(), ways()[:1]))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Disk]]:
    folder = tmp_path_factory.mktemp("small")
    if request.param == "mounted":
        with mounted(folder / "disk", 256) as disk:
            folder.chmod(0o755)
            server = Server(disk / "data", **SMALL_LOG)
            yield server, Mounted(disk)
            server.remove()
        return
    server = Server(folder / "data", **SMALL_LOG)
    most = 17_000_000  # a little more than a file of its log
    yield server, Limited(most, lambda: server.processes, server.user)
    server.remove()


async def test_postgres_on_a_full_disk(server: tuple[Server, Disk], tmp_path: Path) -> None:
    print("seed", SEED)
    runs, disk = server
    async with at_work(tmp_path, schema_url(runs.url)) as (made, crowd):
        disk.fill()
        await until_refused(made, crowd)
        disk.free()
        await comes_back(runs)
        told = await crowd.refused_come_again()
        assert StoreUnwritable in {type(error) for error in told} <= {StoreUnwritable, StoreAway}
        assert all("disk" in str(error) for error in told if isinstance(error, StoreUnwritable))
    await check(made, crowd)


async def test_postgres_without_room_for_its_log(server: tuple[Server, Disk], tmp_path: Path) -> None:
    """It goes down in the middle of everything, and can't come up before there is room."""
    print("seed", SEED)
    runs, disk = server
    if isinstance(disk, Limited):
        disk = Limited(1_000_000, lambda: runs.processes, runs.user)
    async with at_work(tmp_path, schema_url(runs.url)) as (made, crowd):
        disk.fill()
        crowd.comes(WAVE, LARGE)
        made.flow()
        await asyncio.to_thread(log_until_it_breaks, runs)
        crowd.comes(WAVE, LARGE)
        disk.free()
        await comes_back(runs)
        told = await crowd.refused_come_again()
        assert {type(error) for error in told} <= {StoreUnwritable, StoreAway}
    await check(made, crowd)


def log_until_it_breaks(server: Server) -> None:
    """Writes into the server's log, and nothing else, until the server breaks down and cuts every connection. The fleet
    may have been quicker."""
    with suppress(psycopg.OperationalError), psycopg.connect(server.url, autocommit=True) as connection:
        while not connection.broken:
            with suppress(psycopg.Error):
                connection.execute("SELECT pg_logical_emit_message(false, 'test', repeat('x', 1000000))")


async def comes_back(server: Server) -> None:
    """Where it went down, somebody starts it again; also where it hangs, its recovery having died of the full disk."""
    for tries in count(1):
        try:
            await asyncio.to_thread(lambda: psycopg.connect(server.url).close())
        except psycopg.OperationalError:
            if tries % 50 == 0 and server.processes:
                await asyncio.to_thread(server.run, "pg_ctl", "-D", str(server.folder), "-m", "immediate", "stop")
            if not server.processes:
                await asyncio.to_thread(server.start)
            await asyncio.sleep(0.1)
        else:
            return
