"""What happens to batches has a line each; what goes wrong upstream is told when it begins, changes and ends."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from carpool.engine import events
from carpool.engine.events import BatchSubmitted, Event, Trouble, TroubleBegan
from carpool.frontends.proxy.log import (
    DESCRIBED,
    NOT_LOGGED,
    WARNED,
    EventLogger,
    JsonFormatter,
    LogEvent,
    as_json,
    as_text,
    span,
)
from carpool.mock import Constant, Faults, MockConfig, serve
from carpool.planners.forecast import Forecast, Part, Prior
from tests.support.stage import QUICK, Stage, ask, staged

BATCH = {"x-carpool-budget": "30m"}
KEY = "sk-ant-very-secret-key"


@asynccontextmanager
async def reported(config: MockConfig, **more: Any) -> AsyncIterator[tuple[Stage, list[LogEvent]]]:
    told: list[LogEvent] = []
    async with staged(config, write_event=told.append, **more) as stage:
        stage.engine.event_hooks.add(EventLogger(told.append))
        yield stage, told


def names(told: list[LogEvent]) -> list[str]:
    return [one.event for one in told]


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "carpool.upstream"]


# ------------------------------------------------------------ what happens


async def test_the_way_of_a_batch_has_a_line_for_each_step() -> None:
    async with reported(MockConfig(batch_latency=Constant(0.2))) as (stage, told):
        answer = await stage.post(ask("whisper"), **BATCH, x_api_key=KEY, **{"x-carpool-tags": "team=ci"})
        assert answer.status_code == 200
        await stage.until(lambda: "collected" in names(told))
    assert names(told) == ["waiting", "bought", "ended", "collected"]
    waits, bought, ended, collected = told
    assert waits.facts["ticket"] == answer.headers["x-carpool-ticket"]
    assert waits.facts["tags"] == {"team": "ci"}
    assert bought.facts["provider_id"] == ended.facts["provider_id"] == answer.headers["x-carpool-batch"]
    assert bought.words.startswith("batch 1 bought: 1 call, ")
    assert collected.words == "batch 1 collected: 1 succeeded"
    for one in told:
        assert len(as_text(one, 80)) <= 81
        assert json.loads(as_json(one))["event"] == one.event
        assert KEY not in as_json(one) + as_text(one)
        assert "whisper" not in as_json(one) + as_text(one)


async def test_a_late_batch_and_its_rescues_have_a_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    soon = Prior(parts=(Part(1.0, 0.2, 0.5),), cancel_seconds=0.4, sync_floor=0.6, tokens_per_s=1e9)
    monkeypatch.setattr("carpool.engine.engine.Forecast", lambda: Forecast(soon, learns=False))
    hasty = replace(QUICK, sync_max_latency_ms=100)
    async with reported(MockConfig(faults=Faults(batch_stuck=1.0)), policy=hasty) as (stage, told):
        asked = [stage.post(ask(f"pressing {number}"), **{"x-carpool-budget": "4s"}) for number in range(2)]
        assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200, 200]
        await stage.until(lambda: names(told).count("rescued") == 2)
    assert names(told)[:3] == ["waiting", "waiting", "bought"]
    assert names(told).count("late") == 1
    assert names(told).index("late") < names(told).index("rescued")


async def test_a_call_on_now_has_none_of_them() -> None:
    async with reported(MockConfig()) as (stage, told):
        assert (await stage.post(ask())).status_code == 200
    assert told == []


async def test_batches_that_another_process_left_are_found(tmp_path: Path) -> None:
    async with serve(MockConfig(batch_latency=Constant(60))) as mock:
        async with staged(beside=mock, store=tmp_path / "s.db") as first:
            left = asyncio.ensure_future(first.post(ask("left behind"), **BATCH))
            await first.until(lambda: first.engine.stats.batches_submitted)
            await first.engine.close(0.0)
            assert (await left).status_code == 503
        told: list[LogEvent] = []
        async with staged(beside=mock, store=tmp_path / "s.db") as second:
            second.engine.event_hooks.add(EventLogger(told.append))
            back = asyncio.ensure_future(second.post(ask("left behind"), **BATCH))
            await second.until(lambda: told)
            assert names(told) == ["found"]
            assert told[0].facts["count"] == 1
            back.cancel()


# ------------------------------------------------------------ what goes wrong


async def test_a_provider_that_cannot_be_reached_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async with reported(MockConfig(batch_latency=Constant(0.1))) as (stage, _):
        upstream, away = stage.engine._context.upstreams["anthropic"], "http://127.0.0.1:9"
        here = upstream.base_url
        object.__setattr__(upstream, "base_url", away)
        for _ in range(4):
            assert (await stage.post(ask())).status_code == 502
        waits = asyncio.ensure_future(stage.post(ask("patient"), **BATCH))
        await stage.until(lambda: stage.engine.stats.batches_refused)
        [began] = warned(caplog)
        assert began.startswith("anthropic can't be reached since ")
        assert "127.0.0.1" in began
        object.__setattr__(upstream, "base_url", here)
        assert (await stage.post(ask())).status_code == 200
        _, over = warned(caplog)
        assert over.startswith("anthropic can be reached again after ")
        waits.cancel()


async def test_a_provider_that_goes_away_while_a_batch_runs_is_not_told_to_be_back(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at a single batch asks by its id: a list that was not asked for proves nothing."""
    monkeypatch.setattr("carpool.engine.batch.follow.FAILED_POLL_S", 0.05)
    async with reported(MockConfig(batch_latency=Constant(0.1))) as (stage, told):
        upstream = stage.engine._context.upstreams["anthropic"]
        here, tries = upstream.base_url, []
        stage.engine.event_hooks.add(lambda event: tries.append(event) if isinstance(event, Trouble) else None)
        waits = asyncio.ensure_future(stage.post(ask("patient"), **BATCH))
        await stage.until(lambda: "bought" in names(told))
        object.__setattr__(upstream, "base_url", "http://127.0.0.1:9")
        await stage.until(lambda: len(tries) >= 3)
        [began] = warned(caplog)
        assert began.startswith("anthropic can't be reached since ")
        object.__setattr__(upstream, "base_url", here)
        assert (await waits).status_code == 200
        _, over = warned(caplog)
        assert over.startswith("anthropic can be reached again after ")


async def test_refused_creates_are_told_once_per_reason(caplog: pytest.LogCaptureFixture) -> None:
    config = MockConfig(batch_latency=Constant(0.1), faults=Faults(retry_after_s=0))
    async with reported(config) as (stage, _):
        stage.mock.script("create_429", 3)
        assert (await stage.post(ask("in the end"), **BATCH)).status_code == 200
        assert stage.engine.stats.batches_refused == 3
        began, over = warned(caplog)
        assert began.startswith("anthropic: creating a batch fails since ")
        assert "429" in began
        assert began.endswith("Its calls wait, and it is tried again.")
        assert over.startswith("anthropic: creating a batch works again after ")
        assert over.endswith(", 3 tries.")


async def test_failed_looks_are_told_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carpool.engine.batch.follow.FAILED_POLL_S", 0.05)
    async with reported(MockConfig(batch_latency=Constant(0.1))) as (stage, _):
        stage.mock.script("poll_500", 4)
        assert (await stage.post(ask("in the end"), **BATCH)).status_code == 200
        began, over = warned(caplog)
        assert "looking at batch 1 fails since" in began
        assert "works again" in over
        assert over.endswith(", 4 tries.")


async def test_a_batch_that_the_provider_forgets_is_bought_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the provider is killed and starts anew: its calls are answered while they wait, and who asks sees why."""
    monkeypatch.setattr("carpool.planners.tracking.DOUBT_S", 0.3)
    monkeypatch.setattr("carpool.engine.batch.follow.FAILED_POLL_S", 0.05)
    async with reported(MockConfig(batch_latency=Constant(0.2))) as (stage, told):
        stage.mock.script("batch_forgotten")
        answer = await stage.post(ask("anew"), **BATCH)
        assert (answer.status_code, answer.headers["x-carpool-lane"]) == (200, "batch")
        assert names(told).count("bought") == 2
        [lost] = [message for message in warned(caplog) if "is lost" in message]
        assert lost.endswith("the provider does not know it any more. 1 call of it is bought again.")
        url = f"{stage.url}/carpool/calls/{answer.headers['x-carpool-ticket']}/purchases"
        first, second = (await stage.http.get(url, headers={"x-api-key": "k"})).json()["purchases"]
        assert (first["batch_state"], first["paid"]) == ("abandoned", None)
        assert second["batch"] == answer.headers["x-carpool-batch"] != first["batch"]
        assert second["paid"]


async def test_a_create_of_unknown_fate_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async with reported(MockConfig(batch_latency=Constant(0.2))) as (stage, told):
        stage.mock.script("create_accepted_cut")
        assert (await stage.post(ask("bought, or not"), **BATCH)).status_code == 200
        await stage.until(lambda: "bought" in names(told))
        assert any("may have been bought, or not" in one for one in warned(caplog))


def test_a_warning_in_json_has_its_facts(caplog: pytest.LogCaptureFixture) -> None:
    EventLogger(lambda happening: None)(
        TroubleBegan(100.0, "polling", f"401: not {KEY}", 100.0, 1, "anthropic", credential="c" * 32)
    )
    [record] = caplog.records
    said = json.loads(JsonFormatter().format(record))
    assert (said["event"], said["provider"], said["doing"], said["credential"]) == (
        *("trouble", "anthropic", "polling", "cccccccc"),
    )
    assert KEY not in json.dumps(said)
    assert record.levelno == logging.WARNING


# ------------------------------------------------------------ the words


def all_events() -> list[type[Event]]:
    found = [one for one in vars(events).values() if isinstance(one, type) and issubclass(one, Event)]
    return [one for one in found if one is not Event]


def test_every_event_is_told_in_one_way() -> None:
    known = [*DESCRIBED, *WARNED, *NOT_LOGGED]
    assert sorted(one.__name__ for one in known) == sorted(one.__name__ for one in all_events())


def test_nobodys_words_break_a_line() -> None:
    told: list[LogEvent] = []
    EventLogger(told.append)(BatchSubmitted(1_800_000_000.0, 7, "evil\n\x1b[31m", 1))
    assert as_text(told[0]).count("\n") == 1
    assert "\x1b" not in as_text(told[0])


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0s"), (59.4, "59s"), (59.6, "1m00s"), (192, "3m12s"), (3600, "1h00m"), (9000, "2h30m")],
)
def test_spans(seconds: float, words: str) -> None:
    assert span(seconds) == words
