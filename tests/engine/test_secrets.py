"""Neither keys nor bodies nor answers ever reach a log, an event, a statistic, or the store's plain columns."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

import anthropic
import pytest

import carpool.engine.batch.api
import carpool.engine.batch.collect
import carpool.engine.batch.follow
from carpool import BadCall, CallExpired, KeyConflict
from tests.support.fleets import HASTY, KEY, SOON, ask, faulty, riding, small_times, soon

PROMPT = "the-prompt-that-nobody-may-see"
ANSWER = "echo:"


def _clean(text: str) -> bool:
    return not any(word in text for word in (KEY, PROMPT, ANSWER, "sk-other-key"))


async def test_nothing_private_is_logged_or_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A scenario with most kinds of trouble, with everything that carpool logs captured."""
    caplog.set_level(logging.DEBUG, "carpool")
    small_times(monkeypatch)
    monkeypatch.setattr(carpool.engine.batch.follow, "FAILED_POLL_S", 0.05)
    monkeypatch.setattr(carpool.engine.batch.collect, "RETRY_S", 0.02)
    monkeypatch.setattr(carpool.engine.batch.api, "PAUSE_S", 0.02)
    config = faulty(retry_after_s=0)
    async with riding(config, replace(HASTY, max_attempts=3), store=tmp_path / "s.db", hooks=(_raising,)) as scene:
        provider, fleet = scene.provider, scene.fleet
        for fault in ("create_429", "poll_500", "poll_garbage", "results_cut", "line_overloaded", "line_unknown"):
            provider.script(fault)
        await soon(asyncio.gather(*[fleet.submit(**ask(f"{PROMPT} {i}")) for i in range(3)]))
        await soon(fleet.submit(**ask(PROMPT), extra_headers={"x-api-key": "sk-other-key"}))
        await soon(fleet.submit_sync(**ask(PROMPT), key="k"))
        with pytest.raises(KeyConflict) as conflict:
            await soon(fleet.submit_sync(**ask(f"{PROMPT} other"), key="k"))
        provider.script("line_expired", 3)
        with pytest.raises(CallExpired) as expired:
            await soon(fleet.submit(**ask(PROMPT)))
        with pytest.raises(anthropic.BadRequestError):
            await soon(fleet.submit(**ask(f"{PROMPT} [error:invalid_request_error]")))
        with pytest.raises(BadCall) as half:
            await soon(fleet.submit(**ask(PROMPT), extra_body={"x": "\ud800"}))
        provider.script("batch_stuck")
        await soon(fleet.submit(**ask(f"{PROMPT} rescued"), budget="2s"))
        events = list(scene.events.all)
        shown = [repr(fleet), repr(fleet.stats), str(fleet.metrics()), repr(fleet._engine)]
    records = [record for record in caplog.records if record.name.startswith("carpool")]
    assert len(records) > 20
    assert [record.getMessage() for record in records if not _clean(record.getMessage())] == []
    assert [event for event in events if not _clean(repr(event))] == []
    assert [text for text in shown if not _clean(text)] == []
    for error in (conflict.value, expired.value, half.value):
        assert _clean(str(error))


def _raising(event: object) -> None:
    raise RuntimeError("a hook in trouble")


def _files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


async def test_no_key_is_on_disk(tmp_path: Path) -> None:
    async with riding(SOON, store=tmp_path / "s.db") as scene:
        await soon(scene.fleet.submit(**ask(PROMPT)))
        await soon(scene.fleet.submit_sync(**ask(PROMPT), key="k"))
        during = _files(tmp_path)
    for files in (during, _files(tmp_path)):
        assert "s.db" in files
        assert [name for name, content in files.items() if KEY.encode() in content] == []
