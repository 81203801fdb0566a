"""PostgreSQL is restarted, or another server takes its place, and a process dies in the same moment.

Every connection is gone then, of the living and of the dead. Whoever comes back without a key must find its ticket, and
equal calls of the living must stay two.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import psycopg
import pytest

from carpool.mock import fingerprint
from tests.support.crash import POLICY, Call, Child, World, check_answers, check_bought_once, children, make_call, world
from tests.support.deep import quick_and_deep
from tests.support.postgres import FAST, Server, schema_url

LASTING = FAST | {"synchronous_commit": "on"}  # what was committed outlives a server that is stopped at once
EACH = 6  # calls of each process
# The pulse lasts longer than the clients take to come back.
SHARED: dict[str, Any] = {"lease": [20.0, 6.0, 1.0], "create_silence_s": 1.0, "doubt_s": 5.0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(tmp_path_factory.mktemp("postgres") / "data", **LASTING)
    yield started
    started.remove()


class Pair:
    """A server and its standby, which follows it."""

    def __init__(self, folder: Path) -> None:
        self.first = Server(folder / "first", **LASTING)
        copy = self.first.new_folder(folder / "second")
        self.first.run("pg_basebackup", "-d", self.first.url, "-D", str(copy), "-R", "-c", "fast")
        for left in copy.glob(".s.PGSQL.*"):  # the first server's own
            left.unlink()
        self.second = Server(copy)
        hosts = [urlsplit(one.url) for one in (self.first, self.second)]
        sockets = ",".join(dict(parse_qsl(one.query))["host"] for one in hosts)
        asked = urlencode({"host": sockets, "target_session_attrs": "read-write"})
        self.url = hosts[0]._replace(query=asked).geturl()

    async def caught_up(self) -> None:
        """The standby has all that the first server has said was written."""
        async with asyncio.timeout(40):
            with psycopg.connect(self.first.url, autocommit=True) as first:
                [said] = first.execute("SELECT pg_current_wal_insert_lsn()").fetchone() or ("",)
            with psycopg.connect(self.second.url, autocommit=True) as second:
                question = "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn"
                while not (second.execute(question, (said,)).fetchone() or (False,))[0]:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)

    def fail_over(self) -> None:
        self.first.stop()
        self.second.run("pg_ctl", "-w", "-D", str(self.second.folder), "promote")

    def remove(self) -> None:
        self.first.remove()
        self.second.remove()


@pytest.fixture
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("pair"))
    yield made
    made.remove()


@pytest.fixture(autouse=True)
def _config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))  # where these stores' secrets are kept


@asynccontextmanager
async def fleet_on(url: str, folder: Path) -> AsyncIterator[World]:
    async with children(folder / "children.log") as family, world(folder / "world", family, schema_url(url)) as made:
        made.more = SHARED
        made.policy = {**POLICY, "linger_ms": 100}
        yield made


async def bought(made: World, count: int) -> None:
    """So many calls ride batches whose numbers are on disk."""
    async with asyncio.timeout(40):
        while sum(batch.size for batch in made.own_batches) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        while (await made.counts()).get("batches.submitting"):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


Moment = Callable[[Server, Child], Awaitable[None]]


async def before_the_restart(server: Server, child: Child) -> None:
    await child.kill()
    await asyncio.to_thread(server.restart)


async def while_it_is_away(server: Server, child: Child) -> None:
    await asyncio.to_thread(server.stop)
    await child.kill()
    await asyncio.to_thread(server.start)


async def after_the_restart(server: Server, child: Child) -> None:
    await asyncio.to_thread(server.restart)
    await child.kill()


MOMENTS = (before_the_restart, while_it_is_away, after_the_restart)


@pytest.mark.parametrize("moment", quick_and_deep(MOMENTS, [while_it_is_away]))
async def test_who_dies_around_a_restart_is_found_by_its_clients(
    server: Server, tmp_path: Path, moment: Moment
) -> None:
    calls = [make_call(number) for number in range(2 * EACH)]
    async with fleet_on(server.url, tmp_path) as made:
        first, second = made.start(calls[:EACH]), made.start(calls[EACH:])
        await bought(made, len(calls))
        await moment(server, first)
        third = made.start(calls[:EACH])
        await third.reaches("admitted", EACH)
        made.flow()
        await second.finish()
        await third.finish()
        check_answers(calls, second, third)
        check_bought_once(made, calls)


async def test_equal_calls_of_the_living_stay_two_after_a_restart(server: Server, tmp_path: Path) -> None:
    """Sampling twice is two purchases, also when nobody has found the server again yet."""
    calls = [make_call(number) for number in range(EACH)]
    async with fleet_on(server.url, tmp_path) as made:
        first = made.start(calls)
        await bought(made, len(calls))
        await asyncio.to_thread(server.restart)
        second = made.start(calls)
        await second.reaches("admitted", EACH)
        made.flow()
        await first.finish()
        await second.finish()
        check_two_samples(made, calls, first, second)


def check_two_samples(made: World, calls: list[Call], first: Child, second: Child) -> None:
    check_answers(calls, first)
    check_answers(calls, second)
    assert not {told for told, _ in first.answers.values()} & {told for told, _ in second.answers.values()}
    assert made.batch_charges() == Counter({fingerprint(call.body): 2 for call in calls})


# ---------------------------------------------------------------- another server takes over


@pytest.mark.deep
async def test_after_a_fail_over_the_dead_are_found_and_the_living_stay_two(tmp_path: Path, pair: Pair) -> None:
    """The first server is lost with one process. The standby has run for long; nobody was ever connected to it."""
    calls = [make_call(number) for number in range(2 * EACH)]
    async with fleet_on(pair.url, tmp_path) as made:
        first, second = made.start(calls[:EACH]), made.start(calls[EACH:])
        await bought(made, len(calls))
        await pair.caught_up()
        await first.kill()
        await asyncio.to_thread(pair.fail_over)
        third, fourth = made.start(calls[:EACH]), made.start(calls[EACH:])
        await third.reaches("admitted", EACH)
        await fourth.reaches("admitted", EACH)
        made.flow()
        for life in (second, third, fourth):
            await life.finish()
        check_answers(calls[:EACH], third)
        told = Counter({fingerprint(call.body): 1 if call.number < EACH else 2 for call in calls})
        assert made.batch_charges() == told
        assert not {one for one, _ in second.answers.values()} & {one for one, _ in fourth.answers.values()}
