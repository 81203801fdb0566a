"""The demo as somebody without a terminal sees it. It takes its time: it runs once, among the deep tests."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from rich.console import Console

from carpool.cli import demo as command
from carpool.cli.demo import FLEET, DemoVerdict, conclude
from carpool.core.model import EntryKind, Lane, Totals


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    store = tmp_path_factory.mktemp("demo") / "demo.db"
    line = [sys.executable, "-m", "carpool", "demo", "--store", str(store)]
    return subprocess.run(line, capture_output=True, text=True, check=False), store


@pytest.mark.deep
def test_it_ends_well(ran: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    assert ran[0].returncode == 0, ran[0].stdout + ran[0].stderr
    assert ran[0].stderr == ""


@pytest.mark.deep
def test_it_writes_plain_lines(ran: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", ran[0].stdout)


@pytest.mark.deep
def test_every_call_takes_the_lane_that_fits_its_budget(ran: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    out = ran[0].stdout
    assert "All 14 chats are answered: 14 now." in out
    assert "All 28 graders are answered: 28 by batch." in out
    assert "All 12 nightly are answered: 12 by batch." in out
    assert "All 6 reviewers are answered: 6 rescued." in out


@pytest.mark.deep
def test_the_stuck_batch_is_cancelled_before_its_calls_are_sent_again(
    ran: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    out = ran[0].stdout
    assert out.index("gets stuck") < out.index("carpool cancels it") < out.index("calls are sent again on now")
    assert re.search(r"msgbatch_\w{24} +6 +cancelled +\d+\.\d s", out)
    assert len(re.findall(r"msgbatch_\w{24} +\d+ +collected +\d+\.\d s", out)) == 3


@pytest.mark.deep
def test_the_tables_add_up(ran: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    out = ran[0].stdout
    assert re.search(r"now +14 +\d\.\d s +\d\.\d s +\$", out)
    assert re.search(r"batch +40 +4 +\d+\.\d s +\d+\.\d s +\$", out)
    assert re.search(r"rescue +6 +\d+\.\d s +\d+\.\d s +\$", out)
    assert re.search(r"sum +60 +4 +\$", out)
    ledger, bill = re.search(r"The ledger says \$(\S+), the provider's own bill \$(\S+)\.", out).groups()  # type: ignore[union-attr]
    assert ledger == bill
    assert "They are equal." in out
    assert "Try next" in out


@pytest.mark.deep
def test_the_store_can_be_looked_at_afterwards(ran: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    line = [sys.executable, "-m", "carpool", "stats", "--store", str(ran[1])]
    shown = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    assert re.search(r"rescue\b.*\b6\b", shown)
    assert "Calls: settled 46" in shown


def test_without_the_sdk_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "anthropic", None)
    with pytest.raises(Exception, match=r"pip install anthropic"):
        command(None)


def test_what_goes_wrong_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def failing(*_: object) -> None:
        async with asyncio.TaskGroup():
            raise ValueError("no luck")

    monkeypatch.setattr(sys.modules["carpool.cli.demo"], "_demo", failing)
    with pytest.raises(typer.Exit) as ended:
        command(None)
    assert ended.value.exit_code == 1
    assert "The demo did not finish: ValueError('no luck')." in capsys.readouterr().out


def test_books_that_differ_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    verdict = DemoVerdict([Totals(Lane.NOW, EntryKind.PURCHASE, 1, 0, 5, 5)], bill=6, calls=1)
    assert not verdict.equal
    conclude(Console(width=80), verdict, None)
    assert "They differ, and must not." in capsys.readouterr().out


def test_the_fleet_has_sixty_calls() -> None:
    assert sum(role.count for role in FLEET) == 60
