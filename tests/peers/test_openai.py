"""Bugs that others had with OpenAI's batches, 10 to 13, 18, 19, 22 and 23: none of them may ever be ours."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from carpool import FleetDispatcher
from carpool.core.ports import RawRequest
from carpool.dialects import OPENAI
from carpool.mock import MockAnthropic, expected_openai_text, serve
from tests.support.fleets import QUICK, SOON, soon

MODEL = "gpt-6-luna"
TOOL = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}


def chat(text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **more}


@dataclass
class Scene:
    fleet: FleetDispatcher
    mock: MockAnthropic

    async def batch(self, **params: Any) -> Any:
        return await soon(self.fleet.submit(lane="batch", **params), 20)


@asynccontextmanager
async def scene(**client: Any) -> AsyncIterator[Scene]:
    settings = {"api_key": "k", "max_retries": 0, **client}
    async with (
        serve(SOON) as mock,
        AsyncOpenAI(base_url=f"{mock.url}/v1", **settings) as sdk,
        FleetDispatcher(sdk, policy=QUICK, close_timeout=0.0) as fleet,
    ):
        yield Scene(fleet, mock.provider)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_10_nothing_forbidden_is_passed_into_a_batch(path: str) -> None:
    body = json.dumps(chat(stream=True, stream_options={"include_usage": True})).encode()
    parsed = OPENAI.parse(RawRequest("POST", path, "", (("authorization", "Bearer k"),), body))
    line = json.loads(OPENAI.line(path, "n-1", parsed.body))
    assert not {"stream", "stream_options"} & set(line["body"])


async def test_11_models_and_endpoints_never_share_a_file() -> None:
    async with scene() as on:
        calls = [chat(), chat() | {"model": "gpt-5-mini"}, {"model": MODEL, "input": "hello"}]
        await asyncio.gather(*(on.batch(**call) for call in calls * 2))
        assert on.fleet.stats.batches_submitted == 3
        assert on.fleet.stats.batches_refused == 0


async def test_11_the_error_file_is_read_and_partial_results_are_kept() -> None:
    async with scene() as on:
        on.mock.script("line_expired", 1)
        bad = on.batch(**chat("[error:invalid_request_error]"))
        good = [on.batch(**chat(str(number))) for number in range(4)]
        answers = await asyncio.gather(bad, *good, return_exceptions=True)
        assert isinstance(answers[0], openai.BadRequestError)
        said = [one.choices[0].message.content for one in answers[1:] if not isinstance(one, BaseException)]
        assert said == [expected_openai_text(chat(str(number))) for number in range(4)]
        assert len(on.mock.bill.charges) == 4  # what was answered before is not bought again


@pytest.mark.parametrize("status", ["failed", "completed", "expired", "cancelled"])
def test_12_every_terminal_state_ends_the_polling(status: str) -> None:
    body = {"id": "batch_1", "status": status, "created_at": 1, "metadata": {}}
    assert OPENAI.report(json.dumps(body).encode()).ended


async def test_13_a_full_queue_means_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carpool.planners.pressure.quota.WAIT_S", 0.1)
    async with scene() as on:
        on.mock.script("token_limit", 5)  # more often than a call may be tried
        answer = await on.batch(**chat())
        assert answer.choices[0].message.content == expected_openai_text(chat())
        assert (on.fleet.stats.batches_refused, on.fleet.stats.failed_calls) == (5, 0)


async def test_18_projects_and_headers_never_share_a_batch() -> None:
    async with scene() as on:
        headers = [{"openai-project": "one"}, {"openai-project": "two"}, {"x-tenant": "blue"}, {}]
        await asyncio.gather(*(on.batch(extra_headers=one, **chat()) for one in headers))
        assert on.fleet.stats.batches_submitted == 4


async def test_19_bodies_travel_faithful_into_the_file() -> None:
    full = chat(
        temperature=0.1, tools=[TOOL], reasoning_effort="low", metadata={"a": "b"}, seed=7, max_completion_tokens=99
    )
    async with scene() as on:
        answer = await on.batch(**full)  # the mock echoes a fingerprint of what it got
        assert answer.choices[0].message.content == expected_openai_text(full)
    odd = b'{"model":"m", "big": 12345678901234567890123, "f":1.10,\n "u":"\\u00e9","messages":[ ]}'
    line = OPENAI.line("/v1/chat/completions", "n-1", odd)
    assert odd.replace(b"\n", b" ") in line


def test_22_tool_calls_survive_the_synthesised_stream() -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "lookup", "arguments": '{"a": "' + "x" * 9000 + '"}'},
    }
    answer = {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": None, "tool_calls": [call, call | {"id": "call_2"}]},
                "finish_reason": "tool_calls",
            }
        ],
    }
    arguments: dict[int, str] = {0: "", 1: ""}
    for event in OPENAI.replay(json.dumps(answer).encode()):
        if event.startswith(b"data: {"):
            for part in json.loads(event[6:])["choices"][0]["delta"].get("tool_calls", ()):
                arguments[part["index"]] += part["function"].get("arguments", "")
    assert arguments == dict.fromkeys((0, 1), call["function"]["arguments"])


async def test_23_an_upstream_400_stays_a_400_in_its_own_words() -> None:
    async with scene() as on:
        seen = []
        for lane in ("now", "flex", "batch"):
            with pytest.raises(openai.BadRequestError) as caught:
                await soon(on.fleet.submit(lane=lane, **chat("[error:invalid_request_error]")), 20)
            seen.append((caught.value.status_code, caught.value.type, caught.value.message))
        assert len(set(seen)) == 1, seen
