"""The crash matrix on PostgreSQL; and processes that share a store, of which one is killed or stands still."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from tests.support.crash import POLICY, World, check_answers, check_bought_once, make_call
from tests.support.deep import quick_and_deep
from tests.support.postgres import schema_url, shared_url

from .test_crash_matrix import Scenario, large, one_of_each, run_each

AT_ONCE = 8  # the server works for all of them
PATIENCE_S = 40.0


# ---------------------------------------------------------------- processes side by side


async def accepted(made: World, count: int) -> None:
    """So many calls ride batches that the provider knows of."""
    async with asyncio.timeout(PATIENCE_S):
        while sum(batch.size for batch in made.own_batches) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def side_by_side(made: World, processes: int) -> None:
    """Processes with a fleet each, on one database: their calls travel together, and each has its own answers."""
    made.policy = {**POLICY, "linger_ms": 1500}
    calls = [make_call(number) for number in range(50 * processes)]
    lives = [made.start(calls[number::processes]) for number in range(processes)]
    await accepted(made, len(calls))
    made.flow()
    for life in lives:
        await life.finish()
    check_answers(calls, *lives)
    check_bought_once(made, calls)
    assert len(made.own_batches) <= 6
    for number, life in enumerate(lives):
        assert set(life.answers) == {call.number for call in calls[number::processes]}


async def while_another_waits(made: World, point: str) -> None:
    """Both have clients; the one that leads is killed where it stands. The other answers all its own and buys nothing
    that was bought; the clients of the dead one come back to a third."""
    made.policy = {**POLICY, "linger_ms": 100}
    calls = [make_call(number) for number in range(20)]
    first = made.start(calls[:10], stop={"point": point, "at": 1, "from": 1, "drain": False})
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


async def with_a_stale_lease(made: World, point: str) -> None:
    """The one that leads stands still until another has answered its own, long after its lease, and goes on."""
    made.policy = {**POLICY, "linger_ms": 100}
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


# ---------------------------------------------------------------- the plan

POINTS = ("intended", "checked", "bought", "polled", "ended", "settled")


def plan() -> Iterator[Scenario]:
    yield Scenario("four processes side by side", "", side_by_side, 4)
    for point in (*POINTS, "created"):
        yield Scenario(f"killed at {point}, while another waits", point, while_another_waits, point)
    for point in POINTS:
        yield Scenario(f"stopped at {point}, and awake with a stale lease", point, with_a_stale_lease, point)
    # What SQLite shows of every scenario, one of each kind shows here.
    yield from one_of_each(lambda scenario: (scenario.run, scenario.point))
    yield from large()


SHARED = {scenario.name: scenario for scenario in plan()}
QUICK = (
    "four processes side by side",
    "killed at created, while another waits",
    "stopped at bought, and awake with a stale lease",
)


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    before = os.environ.get("XDG_CONFIG_HOME")
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("config"))  # where these stores' secrets are kept
    yield shared_url()
    if before is None:
        del os.environ["XDG_CONFIG_HOME"]
    else:
        os.environ["XDG_CONFIG_HOME"] = before


@pytest.fixture(scope="session")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, postgres: str
) -> dict[str, str | None]:
    """Runs every scenario that is asked for, some at a time, and keeps what went wrong with each."""
    asked = [
        item.callspec.params["name"]
        for item in request.session.items
        if getattr(item, "originalname", "") == test_on_postgres.__name__ and hasattr(item, "callspec")
    ]
    scenarios = [SHARED[name] for name in asked]
    results = asyncio.run(run_each(scenarios, tmp_path_factory.mktemp("shared"), schema_url, AT_ONCE))
    return dict(zip(asked, results, strict=True))


@pytest.mark.parametrize("name", quick_and_deep(SHARED, QUICK))
def test_on_postgres(name: str, outcomes: dict[str, str | None]) -> None:
    trouble = outcomes[name]
    if trouble is not None:
        pytest.fail(trouble, pytrace=False)
