"""OpenAI's calls on the lane `batch`, through the proxy: files, batches, both result files, and the bill."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx2
import openai
import pytest

from carpool.core.model import Entry
from carpool.core.ports import Ask
from carpool.frontends.proxy.waiting import KeepAliveIntervals
from carpool.mock import Constant, Faults, MockConfig, OpenAIConfig, expected_openai_text
from carpool.stores import SqliteStore

from .test_openai_calls import CHAT_TOOL, MODEL, TOOL, Both, both, chat

QUICK = MockConfig(batch_latency=Constant(0.2))
BATCH = {"extra_headers": {"x-carpool-lane": "batch"}}


async def until(true: Callable[[], Any], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not true():  # noqa: ASYNC110  what is waited for happens on the other side of a connection
            await asyncio.sleep(0.01)


async def balanced(stage: Both, calls: int) -> list[Entry]:
    """Every purchase of so many calls, after it was held against the provider's own bill."""
    entries = await stage.booked(calls)
    bought = sorted(entry.paid for entry in entries if entry.paid)
    assert bought == sorted(charge.nano_usd for charge in stage.mock.bill.charges)
    assert all(entry.paid is not None for entry in entries)
    return entries


async def test_every_kind_of_call_rides_a_batch_and_is_booked() -> None:
    async with both(QUICK) as stage, stage.client() as client:
        told, response, vectors, tool = await asyncio.gather(
            client.chat.completions.create(**chat(), **BATCH),
            client.responses.create(model=MODEL, input="[tool]", tools=[TOOL], **BATCH),
            client.embeddings.create(
                model="text-embedding-3-small", input=["a", "b"], encoding_format="float", **BATCH
            ),
            client.chat.completions.create(**chat("[tool]", tools=[CHAT_TOOL]), **BATCH),
        )
        assert told.choices[0].message.content == expected_openai_text(chat())
        assert response.output[0].type == "function_call"
        assert len(vectors.data) == 2
        assert tool.choices[0].message.tool_calls
        entries = await balanced(stage, 4)
        assert {entry.lane for entry in entries} == {"batch"}
        assert stage.engine.stats.saved == stage.mock.bill.total() > 0  # half of what it would have been
        assert stage.engine.stats.batches_submitted == 3  # one endpoint in each, and one model


async def test_a_base_url_without_a_version_is_understood() -> None:
    settings = {"api_key": "k", "max_retries": 0}
    async with both(QUICK) as stage, openai.AsyncOpenAI(base_url=f"{stage.url}/@lane=batch", **settings) as client:
        told = await client.chat.completions.create(**chat())
        assert told.choices[0].message.content == expected_openai_text(chat())
        assert {entry.lane for entry in await balanced(stage, 1)} == {"batch"}
        assert [model.id async for model in await client.models.list()]


async def test_a_stream_rides_too_and_is_told_again() -> None:
    async with both(QUICK) as stage, stage.client() as client:
        wish = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = [
            one
            async for one in await client.chat.completions.create(**chat("[tool]", tools=[CHAT_TOOL], **wish), **BATCH)
        ]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert any(one.choices and one.choices[0].delta.tool_calls for one in chunks)
        assert chunks[-1].usage is not None
        said = await client.responses.create(model=MODEL, input="hello", stream=True, **BATCH)
        events = [one async for one in said]
        assert [one.sequence_number for one in events] == sorted({one.sequence_number for one in events})
        assert events[-1].type == "response.completed"
        await balanced(stage, 2)


async def test_stream_options_that_are_null_change_nothing() -> None:
    config = replace(QUICK, openai=OpenAIConfig(flex_latency=Constant(0.02)))
    async with both(config) as stage, httpx2.AsyncClient(timeout=60) as http:
        for lane in ("now", "flex", "batch"):
            asked = chat(lane, stream=True, stream_options=None)
            headers = {"authorization": "Bearer k", "x-carpool-lane": lane}
            answer = await http.post(f"{stage.url}/v1/chat/completions", json=asked, headers=headers)
            assert (answer.status_code, answer.headers["x-carpool-lane"]) == (200, lane)
            assert answer.text.endswith("data: [DONE]\n\n")
        entries = await stage.booked(3)
        # A stream on `now` or `flex` has no usage unless the client asks for it.
        assert sorted(entry.lane for entry in entries if entry.paid is None) == ["flex", "now"]


@pytest.mark.parametrize(
    "agent", [{"x-stainless-lang": "js"}, {"user-agent": "codex_exec/0.169"}], ids=["SDK", "Codex"]
)
async def test_a_response_that_is_waited_for_keeps_its_name(agent: dict[str, str]) -> None:
    """The Node SDK gives up a stream whose response changes its id, which is not known before it is there. Codex does
    not look at it, and takes comments for silence."""
    headers = {"authorization": "Bearer k", "x-carpool-lane": "batch", **agent}
    asked = {"model": MODEL, "input": "hello", "stream": True}
    soon = KeepAliveIntervals(stream_head_s=0.05, ping_s=0.02, early_s=0.02)
    async with both(MockConfig(batch_latency=Constant(0.5)), intervals=soon) as stage, httpx2.AsyncClient() as http:
        said = (await http.post(f"{stage.url}/v1/responses", json=asked, headers=headers)).text
        (charge,) = stage.mock.bill.charges
    events = [json.loads(line[6:]) for line in said.splitlines() if line.startswith("data: {")]
    names = [event["response"]["id"] for event in events if "response" in event]
    comments = [line for line in said.splitlines() if line.startswith(":")]
    assert names[-1] == charge.message_id  # the provider's, by which the next call may name it
    if "user-agent" in agent:
        assert len(names) > 3
        assert not comments
    else:
        assert set(names) == {charge.message_id}
        assert comments
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


async def test_models_never_meet_in_a_file() -> None:
    async with both(QUICK) as stage, stage.client() as client:
        models = ["gpt-6-luna", "gpt-5-mini", "gpt-4o"]
        await asyncio.gather(*(client.chat.completions.create(**chat() | {"model": m}, **BATCH) for m in models * 3))
        assert stage.engine.stats.batches_submitted == 3
        assert stage.engine.stats.batches_refused == 0
        await balanced(stage, 9)


async def test_the_error_file_is_read_and_only_its_call_fails() -> None:
    async with both(QUICK) as stage, stage.client() as client:
        bad = chat("[error:invalid_request_error]")
        answers = await asyncio.gather(
            client.chat.completions.create(**chat(), **BATCH),
            client.chat.completions.create(**bad, **BATCH),
            return_exceptions=True,
        )
        assert not isinstance(answers[0], BaseException)
        assert isinstance(answers[1], openai.BadRequestError)
        assert answers[1].body is not None
        assert stage.engine.stats.batches_submitted == 1
        await balanced(stage, 2)


async def test_what_expired_is_resubmitted_and_the_rest_is_kept() -> None:
    async with both(QUICK) as stage, stage.client() as client:
        stage.mock.script("line_expired", 2)
        answers = await asyncio.gather(*(client.chat.completions.create(**chat(str(n)), **BATCH) for n in range(6)))
        assert [one.choices[0].message.content for one in answers] == [
            expected_openai_text(chat(str(n))) for n in range(6)
        ]
        assert stage.engine.stats.batches_submitted == 2
        assert len(stage.mock.bill.charges) == 6
        await balanced(stage, 6)


@pytest.mark.parametrize(
    "fault", ["upload_500", "upload_cut", "upload_429", "upload_accepted_cut", "upload_accepted_500"]
)
async def test_an_upload_that_fails_buys_nothing_and_is_never_unknown(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carpool.engine.batch.api.PAUSE_S", 0.05)
    async with both(QUICK) as stage, stage.client() as client:
        stage.mock.script(fault)
        await client.chat.completions.create(**chat(), **BATCH)
        assert stage.engine.stats.batches_unknown == 0
        assert stage.engine.stats.batches_submitted == stage.engine.stats.batches_refused == 1
        await balanced(stage, 1)


async def test_a_file_that_can_not_be_seen_yet_is_waited_for() -> None:
    config = MockConfig(batch_latency=Constant(0.1), faults=Faults(file_lag_s=1.0))
    async with both(config) as stage, stage.client() as client:
        stage.mock.script("file_lag")
        await client.chat.completions.create(**chat(), **BATCH)
        assert stage.engine.stats.batches_refused == 0
        assert stage.mock.requests_seen.count("batches") > 1 or stage.mock.requests_seen.count("create") > 1
        await balanced(stage, 1)


@pytest.mark.parametrize("fault", ["create_accepted_500", "create_accepted_cut"])
async def test_a_create_with_unknown_outcome_is_found_by_its_nonce(fault: str) -> None:
    async with both(QUICK) as stage, stage.client() as client:
        stage.mock.add_openai_stranger("k", 1)  # fits by count and time, and is never looked at
        stage.mock.script(fault)
        await client.chat.completions.create(**chat(), **BATCH)
        stats = stage.engine.stats
        assert (stats.batches_unknown, stats.batches_submitted, stats.batches_abandoned) == (1, 1, 0)
        assert stats.stray_lines == 0
        await balanced(stage, 1)


async def test_a_full_queue_is_waited_for_and_counts_as_no_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carpool.planners.pressure.quota.WAIT_S", 0.2)
    async with both(QUICK) as stage, stage.client() as client:
        stage.mock.script("token_limit", 4)  # more often than a call may be tried
        answer = await client.chat.completions.create(**chat(), **BATCH)
        assert answer.choices[0].message.content == expected_openai_text(chat())
        assert stage.engine.stats.batches_refused == 4
        (entry,) = await balanced(stage, 1)
        assert entry.lane == "batch"


async def test_a_known_limit_splits_what_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carpool.planners.pressure.quota.WAIT_S", 0.1)
    config = MockConfig(batch_latency=Constant(0.2), openai=OpenAIConfig(enqueued_tokens={MODEL: 4000}))
    async with both(config) as stage, stage.client() as client:
        texts = [f"{n} " + "word " * 1000 for n in range(12)]  # far more than fit at once
        answers = await asyncio.gather(*(client.chat.completions.create(**chat(text), **BATCH) for text in texts))
        assert len(answers) == 12
        await balanced(stage, 12)
        assert {entry.lane for entry in await stage.booked(12)} == {"batch"}


async def test_nothing_is_left_at_the_provider() -> None:
    async with both(QUICK) as stage, stage.client(base=stage.direct) as direct, stage.client() as client:
        answers = await asyncio.gather(
            client.chat.completions.create(**chat(), **BATCH),
            client.chat.completions.create(**chat("[error:invalid_request_error]"), **BATCH),
            return_exceptions=True,
        )
        assert len(answers) == 2
        async with asyncio.timeout(20):
            while [one async for one in direct.files.list()]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_results_that_the_provider_lost_are_bought_again_and_in_the_end_said_to_be_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("carpool.planners.tracking.DOUBT_S", 0.2)
    monkeypatch.setattr("carpool.engine.batch.collect.RETRY_S", 0.1)
    gone = Ask("GET", "/v1/files/file-gone/content", ())
    monkeypatch.setattr("carpool.dialects.OpenAI.results", lambda dialect, headers, place: gone)
    async with both(QUICK) as stage, stage.client() as client:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(**chat(), **BATCH)
        assert caught.value.status_code == 502
        entries = await stage.booked(1)
        assert [entry.paid for entry in entries] == [None] * 3  # bought and lost each time: what it cost is unknown


async def test_the_calls_of_a_batch_that_the_provider_forgot_are_bought_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carpool.planners.tracking.DOUBT_S", 0.2)
    monkeypatch.setattr("carpool.planners.tracking.DENIALS_TO_BELIEVE", 2)
    async with both(MockConfig(batch_latency=Constant(1.0))) as stage, stage.client() as client:
        stage.mock.script("batch_forgotten")
        told = await client.chat.completions.create(
            **chat(), extra_headers={"x-carpool-lane": "batch", "x-carpool-budget": "30m"}
        )
        assert told.choices[0].message.content == expected_openai_text(chat())
        entries = await stage.booked(1)
        assert [entry.paid is None for entry in entries] == [True, False]
        assert stage.engine.stats.batches_lost == 1


async def test_the_lease_is_checked_again_between_upload_and_create(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    async def lost(self: SqliteStore, batch: int, owner: str, until: float, now: float) -> bool:
        asked.append(batch)
        return False  # mine before the upload, another's after it

    monkeypatch.setattr(SqliteStore, "depart", lost)
    unsaid = BATCH["extra_headers"] | {"x-stainless-read-timeout": "NOT_GIVEN"}  # or it would be kept alive
    async with both(QUICK) as stage, stage.client(timeout=1.0) as client:
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(**chat(), extra_headers=unsaid)
        assert asked
        assert not stage.mock.batches
        assert not stage.mock.bill.charges


@pytest.mark.parametrize("fault", ["results_500", "results_cut_midway", "results_429"])
async def test_collecting_goes_on_where_it_failed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second try no longer has the report that named the files, and asks for it."""
    monkeypatch.setattr("carpool.engine.batch.collect.RETRY_S", 0.05)
    async with both(QUICK) as stage, stage.client() as client:
        stage.mock.script(fault)
        calls = [client.chat.completions.create(**chat(str(n)), **BATCH) for n in range(3)]
        calls.append(client.chat.completions.create(**chat("[error:invalid_request_error]"), **BATCH))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(answers[-1], openai.BadRequestError)
        assert not any(isinstance(one, BaseException) for one in answers[:-1])
        assert stage.mock.faults_struck[fault] == 1
        await balanced(stage, 4)


async def test_a_batch_with_too_many_inputs_is_made_smaller() -> None:
    limits = OpenAIConfig(max_embedding_inputs=50)
    async with both(MockConfig(batch_latency=Constant(0.2), openai=limits)) as stage, stage.client() as client:
        texts = [[f"{n} {m}" for m in range(20)] for n in range(8)]
        more: dict[str, Any] = {"model": "text-embedding-3-small", "encoding_format": "float", **BATCH}
        answers = await asyncio.gather(*(client.embeddings.create(input=one, **more) for one in texts))
        assert [len(one.data) for one in answers] == [20] * 8
        assert stage.engine.stats.batches_refused > 0
        assert {entry.lane for entry in await balanced(stage, 8)} == {"batch"}
