"""The crash matrix on PostgreSQL; and processes that share a store, of which one is killed or stands still."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from .harness import World, check_answers, check_bought_once, children, make_call, world
from .test_crash_matrix import SCENARIOS, run_all

sys.path.append(str(Path(__file__).parents[1] / "contract"))

from servers import schema_url, shared_url

AT_ONCE = 5  # the server works for all of them
PATIENCE_S = 40.0


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that has run for a while: one that was just started takes nobody for dead whose connection is gone."""
    folder = str(tmp_path_factory.mktemp("config"))
    before = os.environ.get("XDG_CONFIG_HOME")
    os.environ["XDG_CONFIG_HOME"] = folder  # where the secrets of these stores are kept
    url = shared_url()
    with psycopg.connect(url, autocommit=True) as connection:
        up = "extract(epoch FROM clock_timestamp() - pg_postmaster_start_time())"
        connection.execute(f"SELECT pg_sleep(greatest(0, 11 - {up}))")
    yield url
    if before is None:
        del os.environ["XDG_CONFIG_HOME"]
    else:
        os.environ["XDG_CONFIG_HOME"] = before


@pytest.fixture(scope="session")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, postgres: str
) -> dict[str, str | None]:
    asked = [
        item.callspec.params["name"]
        for item in request.session.items
        if getattr(item, "originalname", "") == test_killed_on_postgres.__name__ and hasattr(item, "callspec")
    ]
    return asyncio.run(run_all(asked, tmp_path_factory.mktemp("crash"), schema_url, AT_ONCE))


@pytest.mark.parametrize("name", SCENARIOS)
def test_killed_on_postgres(name: str, outcomes: dict[str, str | None]) -> None:
    trouble = outcomes[name]
    if trouble is not None:
        pytest.fail(trouble, pytrace=False)


# ---------------------------------------------------------------- processes side by side


async def test_fleets_of_several_processes_share_batches(postgres: str, tmp_path: Path) -> None:
    """Four processes with a fleet each, on one database."""
    async with children(tmp_path / "children.log") as family, world(tmp_path / "w", family, schema_url()) as made:
        made.policy = {**made.policy, "linger_ms": 1500}
        calls = [make_call(number) for number in range(200)]
        lives = [made.start(calls[number::4]) for number in range(4)]
        await accepted(made, len(calls))
        made.flow()
        for life in lives:
            await life.finish()
        check_answers(calls, *lives)
        check_bought_once(made, calls)
        assert len(made.own_batches) <= 6
        assert [set(life.answers) for life in lives] == [{call.number for call in calls[n::4]} for n in range(4)]


async def accepted(made: World, count: int) -> None:
    """So many calls ride batches that the provider knows of."""
    async with asyncio.timeout(PATIENCE_S):
        while sum(batch.size for batch in made.own_batches) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("point", ["intended", "checked", "created", "bought", "polled", "ended", "settled"])
async def test_a_leader_is_killed_and_another_goes_on(point: str, postgres: str, tmp_path: Path) -> None:
    """Both have clients; the one that leads dies where it stands. The other answers all its own and buys nothing that
    was bought; the clients of the dead one come back to it."""
    async with children(tmp_path / "children.log") as family, world(tmp_path / "w", family, schema_url()) as made:
        stop = {"point": point, "at": 1, "from": 1, "drain": False}
        calls = [make_call(number) for number in range(20)]
        first = made.start(calls[:10], stop=stop)
        await first.until("its calls", lambda: first.points["admitted"] >= 10)
        second = made.start(calls[10:])
        if point in ("ended", "settled"):
            made.flow()
        await first.reaches(point, 1)
        await first.kill()
        made.flow()
        third = made.start([call for call in calls[:10] if call.number not in first.answers])
        await second.finish()
        await third.finish()
        check_answers(calls, first, second, third)
        check_bought_once(made, calls)


@pytest.mark.parametrize("point", ["intended", "checked", "bought", "polled", "ended", "settled"])
async def test_a_leader_stands_still_and_wakes_with_a_stale_lease(point: str, postgres: str, tmp_path: Path) -> None:
    """It is stopped where it stands until long after its lease, and goes on: nothing is bought twice."""
    async with children(tmp_path / "children.log") as family, world(tmp_path / "w", family, schema_url()) as made:
        calls = [make_call(number) for number in range(20)]
        first = made.start(calls[:10])
        if point in ("ended", "settled"):
            made.flow()
        await first.reaches(point, 1)
        os.kill(first.pid, signal.SIGSTOP)
        second = made.start(calls[10:])
        made.flow()
        await second.finish()
        os.kill(first.pid, signal.SIGCONT)
        await first.finish()
        check_answers(calls, first, second)
        check_bought_once(made, calls)
