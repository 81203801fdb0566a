"""`carpool tasks`: what is said of each task of a store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from carpool.cli.tasks import Format, tasks
from carpool.core.clock import SystemClock
from carpool.core.errors import StoreError
from carpool.core.model import Lane
from carpool.core.tasks import TaskRecord
from carpool.planners.tasks import TaskState, summarised
from carpool.stores import open_store

NOW = SystemClock().now()
HOUR = 3600.0


def task(name: str, *, ago: float = 10.0, **more: object) -> TaskRecord:
    began = NOW - HOUR / 2
    return TaskRecord("cred", name, "claude-code", began, NOW - ago, **more)  # type: ignore[arg-type]


TASKS = [
    task("nightly", deadline=NOW + 3 * HOUR, asked=12, answered=11, spent={Lane.BATCH: 2_500_000_000}),
    task("tight", ago=20, deadline=NOW + 600, left=True, asked=3, answered=3, unknown=1, spent={Lane.NOW: 40_000_000}),
    task("missed", ago=30, deadline=NOW - 60),
    task("session", ago=40, asked=1, answered=1),
    task("done", ago=3 * HOUR, deadline=NOW - 2 * HOUR),
]


@pytest.fixture
async def url(tmp_path: Path) -> str:
    store = await open_store(tmp_path / "carpool.db")
    await store.merge_tasks(TASKS)
    await store.aclose()
    return str(tmp_path / "carpool.db")


def test_the_state_of_a_task() -> None:
    states = [summarised(row, NOW).state for row in TASKS]
    assert states == [TaskState.SLACK, TaskState.NOW, TaskState.LATE, TaskState.OPEN, TaskState.OVER]


def test_slack_and_end() -> None:
    first = summarised(TASKS[0], NOW)
    assert first.slack == pytest.approx(3 * HOUR - 12 * 20 - 60)
    assert first.ends == pytest.approx(NOW + 12 * (HOUR / 2 - 10) / 11)
    done = summarised(TASKS[-1], NOW)
    assert (done.slack, done.ends) == (None, None)


def test_the_table(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    tasks(store=url)
    shown = capsys.readouterr().out
    lines = [line.split()[0] for line in shown.splitlines() if line.strip()]
    assert [name for name in lines if name in {row.name for row in TASKS}] == [row.name for row in TASKS]
    assert "11 +1" in shown
    assert "$2.50" in shown
    assert "$0.04 +1?" in shown


def test_json(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    tasks(store=url, as_format=Format.JSON, limit=2)
    first, second = json.loads(capsys.readouterr().out)["tasks"]
    assert (first["task"], first["state"], first["turns"]["asked"]) == ("nightly", "has slack", 12)
    assert (second["on_now_for_good"], second["unknown_purchases"]) == (True, 1)


def test_nothing_and_no_store(url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tasks(store=url, since="1s")
    assert capsys.readouterr().out == "No task was active in the last 1s.\n"
    with pytest.raises(StoreError, match="There is no store at"):
        tasks(store=str(tmp_path / "nothing.db"))
