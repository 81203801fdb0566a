"""One line a call: complete, cheap, and without a word of what was said."""

import asyncio
import io
import json
import logging
from typing import Any

import httpx2
import pytest

from carpool.core.model import ticket_number
from carpool.frontends.proxy import log
from carpool.frontends.proxy.log import JsonFormatter, LogLine, LogWriter, as_json, as_text, redacted, to_stream
from carpool.frontends.proxy.waiting import KeepAliveIntervals
from carpool.mock import Constant, MockConfig
from tests.support.stage import ask

BATCH = {"x-carpool-budget": "30m"}
SECRET = "sk-secret-key"


def line(**more: Any) -> LogLine:
    known: dict[str, Any] = {
        "ticket": "0123456789abc",
        "provider": "anthropic",
        "model": "m",
        "lane": "batch",
        "reason": "time enough",
    }
    known |= {"status": 200, "duration_s": 1.5}
    return LogLine(at=1_800_000_000.25, client="sdk", **{**known, **more})


async def noted(stage_with: Any, lines: list[LogLine], count: int, *posts: Any) -> None:
    async with stage_with(MockConfig(), note=lines.append) as stage:
        for body, headers in posts:
            await stage.post(body, **headers, x_api_key=SECRET)
        await stage.until(lambda: len(lines) == count)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("headers", [{}, BATCH])
async def test_every_call_is_noted_once(stage_with: Any, headers: dict[str, str], stream: bool) -> None:
    lines: list[LogLine] = []
    asked = ask("whisper", stream=stream)
    told = {"x-carpool-tags": "team=ci", "user-agent": "mytool/1.0 (token=abc)", "x-other": "hush"}
    await noted(stage_with, lines, 1, (asked, headers | told))
    [one] = lines
    assert one.lane == ("batch" if headers else "now")
    assert (one.provider, one.model, one.status) == ("anthropic", asked["model"], 200)
    assert one.duration_s > 0
    assert one.bytes_in == len(json.dumps(asked, separators=(",", ":")))
    assert one.bytes_out > 100
    assert one.input_tokens
    assert one.output_tokens
    assert one.cost_usd
    assert one.tags == {"team": "ci"}
    assert one.client == "other mytool"
    assert one.reason
    assert ticket_number(one.ticket)
    assert (one.batch is not None) == bool(headers)
    for words in (as_json(one), as_text(one)):
        assert not [word for word in ("whisper", SECRET, "token=abc", "hush") if word in words]


async def test_failures_are_noted_with_their_status(stage_with: Any) -> None:
    lines: list[LogLine] = []
    asked = ask("[error:invalid_request_error]")
    await noted(stage_with, lines, 2, (asked, {}), (asked, BATCH))
    assert [(one.lane, one.status) for one in lines] == [("now", 400), ("batch", 400)]


async def test_a_client_that_leaves_is_noted(stage_with: Any) -> None:
    lines: list[LogLine] = []
    async with stage_with(note=lines.append) as stage:
        async with stage.client("/@budget=30m", timeout=0.05) as client:
            with pytest.raises(Exception, match="timed out"):
                await client.messages.create(**ask("leaving"))
        await stage.until(lambda: lines)
        assert (lines[0].status, lines[0].lane) == (499, "batch")


async def test_a_provider_that_is_not_there_is_noted(stage_with: Any) -> None:
    lines: list[LogLine] = []
    async with stage_with(note=lines.append) as stage:
        stage.mock.script("sync_cut")
        answer = await stage.post(ask("cut"))
        assert answer.status_code == 502
        assert [(one.status, one.lane) for one in lines] == [(502, "now")]


async def test_a_late_failure_is_noted_with_its_true_status(stage_with: Any) -> None:
    lines: list[LogLine] = []
    intervals = KeepAliveIntervals(head_s=0.05)
    async with stage_with(MockConfig(batch_latency=Constant(0.4)), intervals=intervals, note=lines.append) as stage:
        with pytest.raises(httpx2.RemoteProtocolError):
            await stage.post(ask("[error:invalid_request_error]"), **BATCH)
        await stage.until(lambda: lines)
        assert [(one.status, one.lane) for one in lines] == [(400, "batch")]


async def test_a_call_that_is_collected_later_is_noted_when_it_is_accepted(stage_with: Any) -> None:
    lines: list[LogLine] = []
    await noted(stage_with, lines, 1, (ask("later"), BATCH | {"prefer": "respond-async"}))
    assert (lines[0].status, lines[0].lane) == (202, "batch")


async def test_a_call_that_a_stop_interrupts_is_noted(stage_with: Any) -> None:
    lines: list[LogLine] = []
    async with stage_with(MockConfig(batch_latency=Constant(60)), note=lines.append) as stage:
        waiting = asyncio.ensure_future(stage.post(ask("interrupted"), **BATCH))
        await stage.until(lambda: len(stage.engine._context.waiters))
        await stage.engine.close(0.0)
        assert (await waiting).status_code == 503
        assert [(one.status, one.lane) for one in lines] == [(503, "batch")]


def test_words() -> None:
    one = line(input_tokens=10, output_tokens=5, cost_usd=0.00125, tags={"team": "ci"}, cache_read_tokens=90)
    assert as_text(one).endswith("200 batch m 1.50s 100+5 tok $0.00125 0123456789abc anthropic team=ci (time enough)\n")
    said = json.loads(as_json(one))
    assert (said["event"], said["at"], said["cost_usd"]) == ("call", "2027-01-15T08:00:00.250+00:00", 0.00125)
    assert "batch" not in said


def test_what_matters_fits_eighty_columns() -> None:
    model = "claude-haiku-4-5-20251001"
    one = line(model=model, input_tokens=181_875, output_tokens=4210, cost_usd=0.146, duration_s=1875.2)
    full = as_text(one)
    assert full.index("0123456789abc") + len("0123456789abc") <= 80
    cut = as_text(one, 80)
    assert len(cut.rstrip("\n")) == 80
    assert full.startswith(cut.rstrip("…\n"))
    failed = line(
        model=model, status=502, error="The provider at https://api.anthropic.com can't be reached.", lane="now"
    )
    assert as_text(failed, 80).endswith("can't be reached.)\n")
    left = line(model=model, status=499, reason="A batch is back in time with a chance of 88%; it pays above 20%.")
    assert len(as_text(left, 80).rstrip("\n")) == 80


def test_what_never_became_a_call_has_its_path() -> None:
    one = LogLine(at=1_800_000_000.25, status=401, duration_s=0.002, request="POST /v1/messages", error="Not known.")
    assert as_text(one).endswith(" 401 -     POST /v1/messages 0.00s (Not known.)\n")
    assert json.loads(as_json(one)) == {
        "event": "call",
        "at": "2027-01-15T08:00:00.250+00:00",
        "error": "Not known.",
        "status": 401,
        "duration_s": 0.002,
        "request": "POST /v1/messages",
    }


def test_what_looks_like_a_secret_is_left_out() -> None:
    said = f"The option 'sk-ant-api03-abcdef' and {'x' * 40!r} and cpk-{'a' * 43} and '30s' are not known."
    assert redacted(said) == "The option 'sk-…' and '…' and cpk-… and '30s' are not known."
    assert redacted("The provider's answer, as far as it came, can't be read.").count("…") == 0
    assert redacted(f"It said '{'x' * 20}'s {'x' * 20}', which can't be read.") == "It said '…', which can't be read."


def test_a_clients_words_stay_on_their_line() -> None:
    evil = line(tags={"a": "b\n200 now forged"}, model="\x1b[31mred", reason="x\r\ny")
    assert as_text(evil).count("\n") == 1
    assert "\x1b" not in as_text(evil)
    assert as_json(evil).count("\n") == 1


async def test_lines_are_written_by_a_thread_and_none_is_lost_at_the_end() -> None:
    stream = io.StringIO()
    journal = LogWriter(to_stream(stream), as_json)
    for number in range(1000):
        journal.note(line(ticket=str(number)))
    journal.close(10)
    assert [json.loads(one)["ticket"] for one in stream.getvalue().splitlines()] == [str(n) for n in range(1000)]


async def test_a_reader_that_is_too_slow_costs_lines_and_nothing_else(monkeypatch: Any) -> None:
    monkeypatch.setattr(log, "MAX_WAITING", 100)
    written: list[str] = []
    journal = LogWriter(written.append, as_text)
    for _ in range(500):
        journal.note(line())
    assert journal.dropped == 400
    journal.close(10)
    assert sum(text.count("\n") for text in written) == 100


async def test_a_reader_that_is_gone_harms_nobody() -> None:
    stream = io.StringIO()
    stream.close()
    journal = LogWriter(to_stream(stream), as_text)
    journal.note(line())
    await asyncio.sleep(0)
    journal.close(10)
    assert journal.dropped == 1


def test_warnings_take_the_form_of_the_other_lines() -> None:
    record = logging.LogRecord("carpool.proxy", logging.WARNING, "f", 1, "A %s.", ("sentence",), None)
    said = json.loads(JsonFormatter().format(record))
    assert (said["event"], said["level"], said["message"]) == ("log", "warning", "A sentence.")
