"""`carpool report` as somebody sees it who has recorded some traffic, or none yet."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest
from typer.testing import CliRunner

from carpool import cli
from carpool.mock import MockConfig
from carpool.mock.core.latency import Constant
from carpool.stores import open_store
from tests.sim.money.mock_fleet import FleetAgent, MockFleet

AGES = "36500d"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def running(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["carpool", "report", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return running


def fleet(path: Path, budget: float | None) -> MockFleet:
    agents = [
        FleetAgent(f"agent {number}", 100.0 * number, [0.0] * 3, "s", tags={"team": f"team {number % 2}"}, ttl=None)
        for number in range(12)
    ]
    return MockFleet(path, agents, MockConfig(batch_latency=Constant(40.0), sync_latency=Constant(3.0)), budget).go()


@pytest.fixture(scope="module")
def on_now(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MockFleet]:
    path = tmp_path_factory.mktemp("now") / "carpool.db"
    return path, fleet(path, None)


def test_what_a_budget_would_have_saved(on_now: tuple[Path, MockFleet], run: Run) -> None:
    path, _ = on_now
    code, out, err = run("--what-if", "budget=20h", "--by", "team", "--store", path, "--since", AGES)
    assert (code, err) == (0, "")
    rows = {words[0]: words for line in out.splitlines() if (words := line.split())}
    assert rows["all"][1] == "36"
    assert rows["all"][4:6] == ["50%", "100%"]
    assert out.count("team 0") == out.count("team 1") == 1
    assert "anthropic: economics (assumed, because the store has 0 batches, and it takes 30)" in out
    assert "replayed as it was, the same traffic costs what was paid" in out
    assert max(map(len, out.split("Calls of the last")[0].splitlines())) <= 80


def test_for_scripts(on_now: tuple[Path, MockFleet], run: Run) -> None:
    path, real = on_now
    asked = ("--what-if", "budget=20m", "--what-if", "caching=plan", "--world", "quick", "--format", "json")
    found = json.loads(run(*asked, "--by", "model", "--store", path, "--since", AGES)[1])
    assert found["batch_latencies"] == {"anthropic": "quick (as you said)"}
    assert (found["replay_to_paid"], found["left_out"]) == (1.0, {})
    budget, caching = found["what_if"]
    assert budget["total"]["paid"] == caching["total"]["paid"] == caching["total"]["would_pay"] == real.bill
    assert (budget["budget_s"], budget["total"]["saved"]) == (1200.0, real.bill // 2)
    assert [group["name"] for group in budget["groups"]] == ["claude-sonnet-4-6"]
    assert caching["plans_cache"]


def test_latencies_that_were_measured(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "carpool.db"
    real = fleet(path, 3600.0)
    found = json.loads(run("--what-if", "budget=1h", "--store", path, "--since", AGES, "--format", "json")[1])
    assert "your own batches (measured on 36 batches)" in found["batch_latencies"]["anthropic"]
    [answer] = found["what_if"]
    assert answer["total"]["paid"] == answer["total"]["would_pay"]  # that is what it did
    waited = median(real.waits) - 3.0
    # Nobody knows how long an answer of these would have taken on `now`, and the time until the next poll counts twice.
    assert answer["total"]["wait_p50_s"] == pytest.approx(waited, rel=0.4)


def test_cache_plans_are_said_to_be_no_part_of_carpool(on_now: tuple[Path, MockFleet], run: Run) -> None:
    assert "no part of carpool yet" in run("--what-if", "caching=plan", "--store", on_now[0], "--since", AGES)[1]


# ---------------------------------------------------------------- errors


def test_nothing_recorded_yet(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "carpool.db"

    async def make() -> None:
        await (await open_store(path)).aclose()

    asyncio.run(make())
    code, _, err = run("--what-if", "budget=20m", "--store", path)
    assert code == 2
    assert "has no recorded call in that time" in err
    assert "recording: {enabled: false}" in err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "Say what to report: --what-if budget=20m"),
        (("--what-if", "lanes=all"), "'lanes=all' is not known"),
        (("--what-if", "budget=soon"), "'soon' is not a budget"),
        (("--what-if", "budget=1m", "--by", "colour"), "--by 'colour' is not known: write team, model"),
        (("--what-if", "budget=1m", "--world", "mars"), "'mars' is not a world"),
        (("--what-if", "budget=1m", "--world", "quick", "--latency", "x.txt"), "Name --world or --latency, not both"),
        (("--what-if", "budget=1m", "--since", "ever"), "--since is 'ever'"),
        (("--what-if", "budget=1m", "--store", "missing.db"), "There is no store at missing.db"),
        (("--what-if", "budget=1m", "--store", ":memory:"), "A store in memory can't be read"),
    ],
)
def test_errors_are_sentences(arguments: tuple[str, ...], expected: str, run: Run) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert expected in " ".join(err.split())
    assert "Traceback" not in err


def test_help_shows_examples() -> None:
    out = CliRunner().invoke(cli.app, ["report", "-h"], env={"COLUMNS": "80"}).output
    assert "carpool report --what-if budget=20m --by team" in out
    assert "carpool report --what-if caching=plan --since 30d" in out
