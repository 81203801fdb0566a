"""`carpool simulate` as somebody at a terminal, in a pipe and in a script sees it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from carpool.cli.simulate import ALL_POLICIES
from carpool.cli.simulated import brief, curves, tables
from carpool.mock import MockConfig
from carpool.sim.money.experiment import CODING, Experiment, TraceSource, WorldSource, run_experiment
from carpool.sim.money.results import summarised
from tests.sim.money.mock_fleet import FleetAgent, MockFleet

SMALL = ("coding", "--agents", "2", "--turns", "3", "--seeds", "2", "--jobs", "1")
SVG = "{http://www.w3.org/2000/svg}"


def carpool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "carpool", "simulate", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def said(*arguments: str | Path) -> str:
    ran = carpool(*arguments)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def piped() -> subprocess.CompletedProcess[str]:
    return carpool(*SMALL)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    asked = ("--budget", "10m", "--budget", "2h", "--read-multiplier", "0.1", "--read-multiplier", "0.05", "--json")
    return dict(json.loads(said(*SMALL, *asked)))


def test_a_pipe_gets_plain_lines_and_no_progress(piped: subprocess.CompletedProcess[str]) -> None:
    assert piped.returncode == 0
    assert piped.stderr == ""
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", piped.stdout)


def test_the_tables_name_all_policies(piped: subprocess.CompletedProcess[str]) -> None:
    lines = [line.split() for line in piped.stdout.splitlines() if line.strip()]
    first = [words[0] for words in lines]
    for policy in ("now", "now+5m", "now+1h", "now+5m+pings(3)", "llmfleet", "window", "batch", "batch+1h", "carpool"):
        assert first.count(policy) >= 2  # what it costs, how long it takes
    assert "30 min a call" in piped.stdout


def test_the_tables_fit_80_columns() -> None:
    """With the most that a fleet of a hundred thousand calls puts into them."""
    source = TraceSource(CODING, agents=2, turns=3)
    policies = ("now", "now+5m", "now+5m+pings(3)", "batch+1h", "carpool")
    plan = Experiment([source], [WorldSource("anthropic")], policies, [None], [60.0, 86400.0], range(3))
    console = Console(width=80, record=True, file=StringIO())
    for table in tables(summarised(run_experiment(plan, 1))):
        console.print(table)
    text = console.export_text()
    assert "…" not in text
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1e-12, "0s"), (0.2, "0.2s"), (6.04, "6s"), (42.4, "42s"), (119, "119s"), (300, "5m"), (10_000, "2.78h")],
)
def test_times_are_brief(seconds: float, text: str) -> None:
    assert brief(seconds) == text


# ---------------------------------------------------------------- JSON


def test_rows_of_all_seeds_sum_up_to_the_summaries(document: dict[str, Any]) -> None:
    key = ("trace", "mode", "regime", "read_multiplier", "deadline_s", "policy")
    for summary in document["summaries"]:
        rows = [row for row in document["rows"] if all(row[name] == summary[name] for name in key)]
        assert len(rows) == summary["seeds"] == 2
        assert summary["cost"] == pytest.approx(sum(row["cost"] for row in rows) / 2, abs=1)
        assert summary["calls"] == sum(row["calls"] for row in rows)
        assert summary["misses"] == sum(row["misses"] for row in rows)
    assert len(document["rows"]) == 2 * len(document["summaries"]) == 2 * 2 * 2 * len(ALL_POLICIES)


def test_rows_say_what_was_run(document: dict[str, Any]) -> None:
    row = document["rows"][0]
    asked = {"trace", "mode", "regime", "read_multiplier", "deadline_s", "policy", "seed", "cost", "bound", "misses"}
    assert asked | {"calls", "added_wait_s"} <= set(row)
    assert (row["trace"], row["mode"], row["regime"]) == ("coding", "attended", "economics")
    assert {one["read_multiplier"] for one in document["rows"]} == {0.1, 0.05}
    assert {one["deadline_s"] for one in document["rows"]} == {600.0, 7200.0}


def test_the_baseline_is_one(document: dict[str, Any]) -> None:
    ratios = [one["to_baseline"] for one in document["summaries"] if one["policy"] == "now+5m"]
    assert ratios == [[1.0, 1.0, 1.0]] * 4


def test_the_same_seeds_give_the_same_document(document: dict[str, Any]) -> None:
    again = json.loads(said(*SMALL, "--budget", "10m", "--read-multiplier", "0.1", "--policy", "carpool", "--json"))
    rows = [
        row
        for row in document["rows"]
        if (row["policy"], row["deadline_s"], row["read_multiplier"]) == ("carpool", 600.0, 0.1)
    ]
    assert again["rows"] == rows


# ---------------------------------------------------------------- files


def test_a_curve_tells_only_of_what_now_would_have_kept() -> None:
    """Eight seconds are too short for some answers, on whatever lane."""
    plan = Experiment(
        [TraceSource(CODING, agents=2, turns=3)], [WorldSource("quick")], ("now+5m", "batch"), [None], [8.0, 30.0], [0]
    )
    found = {curve.name: curve.points for curve in curves(summarised(run_experiment(plan, 1)))}
    assert [point.missed for point in found["now+5m"]] == [0.0, 0.0]
    assert found["batch"][0].missed > 0.2
    assert [point.deadline_s for point in found["bound"]] == [8.0, 30.0]


def test_measured_latencies_are_a_world(tmp_path: Path) -> None:
    (tmp_path / "seconds.txt").write_text("10\n20\n30\n")
    out = json.loads(said(*SMALL, "--latency", tmp_path / "seconds.txt", "--policy", "batch", "--json"))
    assert {row["regime"] for row in out["rows"]} == {"seconds"}
    assert all(10 <= row["turn_p50_s"] <= 35 for row in out["rows"])


def test_a_picture_has_a_curve_for_each_policy(tmp_path: Path) -> None:
    ran = carpool(*SMALL, "--policy", "now+1h", "--policy", "carpool", "--picture", tmp_path / "cost.svg")
    assert f"Drawn: {tmp_path / 'cost.svg'}" in ran.stderr
    drawn = ET.fromstring((tmp_path / "cost.svg").read_text())
    names = {str(text.text) for text in drawn.iter(f"{SVG}text") if text.get("class") == "name"}
    assert {"now+1h", "carpool"} <= names
    lines = list(drawn.iter(f"{SVG}polyline"))
    assert len(lines) == len(names)
    assert {len(str(line.get("points")).split()) for line in lines} == {8}  # 1 min to 24 h


def test_several_worlds_get_a_picture_each(tmp_path: Path) -> None:
    worlds = ("--world", "quick", "--world", "slow", "--budget", "10m", "--policy", "batch")
    said(*SMALL, *worlds, "--picture", tmp_path / "cost.svg")
    assert {file.name for file in tmp_path.glob("*.svg")} == {
        "cost-coding-attended-quick-true.svg",
        "cost-coding-attended-slow-true.svg",
    }


# ---------------------------------------------------------------- recorded traffic


def test_traffic_from_a_store(tmp_path: Path) -> None:
    path = tmp_path / "fleet.db"
    agents = [FleetAgent(f"agent {number}", number, [0.0, 9.0], "system " * 2000) for number in range(4)]
    MockFleet(path, agents, MockConfig(), None).go()
    asked = ("--from-store", "--store", path, "--since", "36500d", "--policy", "carpool", "--seeds", "1", "--json")
    found = json.loads(said(*asked))
    [summary] = found["summaries"]
    assert (summary["trace"], summary["policy"], summary["calls"]) == ("recorded", "carpool", 8)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "the word `coding`, or --from-store"),
        (("--from-store", "--store", "missing.db"), "There is no store at missing.db"),
        (("--from-store", "--store", ":memory:"), "A store in memory"),
        (("--from-store", "--since", "soon"), "--since is 'soon'"),
    ],
)
def test_what_can_not_be_replayed(arguments: tuple[str, ...], expected: str) -> None:
    ran = carpool(*arguments)
    assert ran.returncode == 2
    assert expected in ran.stderr
    assert "Traceback" not in ran.stderr
