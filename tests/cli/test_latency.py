from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from carpool import cli
from carpool.cli.latency import ROWS, latency_report
from carpool.core.errors import StoreError
from carpool.planners.forecast import BatchClass, Forecast
from carpool.stores import open_store, peek_forecast

OF = BatchClass("anthropic", "a [bold]model", "s")


def taught() -> Forecast:
    forecast = Forecast()
    for number in range(40):
        forecast.batch_ended(OF, 0.0, 80.0 + number, 0.0)
        forecast.batch_passed(OF._replace(model="", size_class="l"), 0.0, 600.0, 0.0)
        forecast.call_answered("anthropic", OF.model, 500, 4.0, 0.0)
    forecast.cancel_ended("anthropic", 30.0, 1, 1, 0.0)
    forecast.flex_answered("openai", "m", refused=True, now=0.0)
    return forecast


def printed(forecast: Forecast, width: int = 80) -> str:
    out = Console(file=io.StringIO(), width=width)
    for part in latency_report(forecast, width):
        out.print(part)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


@pytest.mark.parametrize("width", [80, 200])
def test_each_class_has_a_curve_with_its_counts_and_the_prior(width: int) -> None:
    text = printed(taught(), width)
    assert "anthropic a [bold]model, short answers\n40 batches watched, 40 ended by themselves\n" in text
    assert "anthropic several models, long answers\n40 batches watched, 0.0 ended by themselves\n" in text
    half = re.search(r"50 % end in (\d+) s \(assumed 165 s\)", text)
    assert half
    assert 90 < int(half[1]) < 115
    assert text.count("100% ") == text.count(" 10 s") == 2
    curve = text.split(" 10 s")[0].splitlines()[-1 - ROWS : -1]
    assert all("·" in row for row in curve[2:])
    assert curve[-1].count("█") > curve[1].count("█") > 10
    assert max(map(len, text.splitlines())) <= width


def test_other_times_stand_in_tables() -> None:
    text = printed(taught(), 100)
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert rows["openai"][-3:] == ["1.0", "32%", "10%"]
    assert "Synchronous calls of 500 output tokens" in text
    assert "Cancelled batches" in text


def test_nothing_is_drawn_where_nothing_was_learned() -> None:
    assert printed(Forecast()).startswith("Nothing is learned yet.")


async def test_the_state_is_read_beside_the_running_engine(tmp_path: Path) -> None:
    path = tmp_path / "carpool.db"
    with pytest.raises(StoreError, match="There is no store"):
        peek_forecast(path)
    store = await open_store(path)
    try:
        assert peek_forecast(path) == b""
        await store.save_forecast(0, b"state")
        assert peek_forecast(path) == b"state"
    finally:
        await store.aclose()


async def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    store = await open_store(tmp_path / "carpool.db")
    await store.save_forecast(0, taught().dump())
    await store.aclose()
    monkeypatch.setattr("sys.argv", ["carpool", "stats", "latency", "--store", str(tmp_path / "carpool.db")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert "short answers" in capsys.readouterr().out
