"""OpenAI's endpoints of the mock, judged by OpenAI's own SDK."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from carpool.mock import (
    Constant,
    Faults,
    MockConfig,
    MockServer,
    expected_openai_text,
    openai_fingerprint,
    serve,
)

MODEL = "gpt-6-luna"
PARAMETERS = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
CHAT_TOOL = {"type": "function", "function": {"name": "lookup", "parameters": PARAMETERS}}
TOOL = {"type": "function", "name": "lookup", "parameters": PARAMETERS, "strict": False}


def chat(text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **more}


def asked(text: str = "hello", /, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": text, **more}


@asynccontextmanager
async def connected(config: MockConfig | None = None, **options: Any) -> AsyncIterator[tuple[MockServer, AsyncOpenAI]]:
    http = DefaultAsyncHttpxClient(verify=False)
    options = {"api_key": "k", "max_retries": 0, "_strict_response_validation": True, "http_client": http, **options}
    async with serve(config) as server, AsyncOpenAI(base_url=f"{server.url}/v1", **options) as client:
        yield server, client


# ---------------------------------------------------------------- chat completions


async def test_an_answer_of_its_own_for_everyone() -> None:
    async with connected() as (server, client):
        answers = await asyncio.gather(*(client.chat.completions.create(**chat(f"n{n}")) for n in range(5)))
        assert [one.choices[0].message.content for one in answers] == [
            expected_openai_text(chat(f"n{n}")) for n in range(5)
        ]
        assert len({one.id for one in answers}) == 5
        assert server.provider.requests_seen.count("chat") == 5
        assert len(server.provider.bill.charges) == 5


async def test_a_stream_says_the_same_and_usage_on_request() -> None:
    async with connected() as (_, client):
        whole = await client.chat.completions.create(**chat())
        for wanted in (True, False):
            more = {"stream_options": {"include_usage": True}} if wanted else {}
            chunks = [chunk async for chunk in await client.chat.completions.create(**chat(), stream=True, **more)]
            spoken = [chunk for chunk in chunks if chunk.choices]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in spoken)
            assert text == whole.choices[0].message.content
            assert spoken[0].choices[0].delta.role == "assistant"
            assert spoken[-1].choices[0].finish_reason == "stop"
            assert [chunk.usage for chunk in chunks if chunk.usage] == ([whole.usage] if wanted else [])
            assert len(chunks) - len(spoken) == wanted


async def test_a_tool_is_called_when_the_user_asks_and_not_after() -> None:
    async with connected() as (_, client):
        request = chat("please [tool]", tools=[CHAT_TOOL])
        first = await client.chat.completions.create(**request)
        (call,) = first.choices[0].message.tool_calls or ()
        assert first.choices[0].finish_reason == "tool_calls"
        assert json.loads(call.function.arguments) == {"q": "please [tool]"}
        written, ids = "", []
        async for chunk in await client.chat.completions.create(**request, stream=True):
            for part in chunk.choices[0].delta.tool_calls or ():
                ids += [part.id] if part.id else []
                written += part.function.arguments or ""
        assert (ids, written) == ([call.id], call.function.arguments)
        said = first.choices[0].message.model_dump(exclude_none=True)
        done = {"role": "tool", "tool_call_id": call.id, "content": "42"}
        last = await client.chat.completions.create(
            model=MODEL, messages=[*request["messages"], said, done], tools=[CHAT_TOOL]
        )
        assert last.choices[0].message.tool_calls is None
        assert (await client.chat.completions.create(**chat(tools=[CHAT_TOOL]))).choices[0].message.content


async def test_a_tool_may_be_forced_or_forbidden() -> None:
    async with connected() as (_, client):
        named = {"type": "function", "function": {"name": "lookup"}}
        other = {"type": "function", "function": {"name": "other"}}
        for choice in ("required", named):
            answer = await client.chat.completions.create(**chat(tools=[other, CHAT_TOOL], tool_choice=choice))
            assert answer.choices[0].message.tool_calls[0].function.name == (
                "other" if choice == "required" else "lookup"
            )
        kept = await client.chat.completions.create(**chat("[tool]", tools=[CHAT_TOOL], tool_choice="none"))
        assert kept.choices[0].message.tool_calls is None


async def test_structured_answers_fit_their_schema() -> None:
    inner = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "kind": {"enum": ["a", "b"]},
            "parts": {"type": "array", "items": {"$ref": "#/$defs/part"}},
            "maybe": {"anyOf": [{"type": "null"}, {"type": "string"}]},
            "unasked": {"type": "string"},
        },
        "required": ["name", "kind", "parts", "maybe"],
        "$defs": {"part": inner},
    }
    async with connected() as (_, client):
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        answer = await client.chat.completions.create(**chat(response_format=wanted))
        made = json.loads(answer.choices[0].message.content or "")
        assert made == {"name": made["name"], "kind": "a", "parts": [{"n": 1}], "maybe": None}
        form = {"type": "json_schema", "name": "x", "schema": schema}
        told = await client.responses.create(**asked(text={"format": form}))
        assert json.loads(told.output_text)["parts"] == [{"n": 1}]


@pytest.mark.parametrize(("directive", "finish"), [("[max]", "length"), ("[refuse]", "stop")])
async def test_other_ends(directive: str, finish: str) -> None:
    async with connected() as (_, client):
        answer = await client.chat.completions.create(**chat(directive, max_completion_tokens=50))
        assert answer.choices[0].finish_reason == finish
        assert (answer.usage.completion_tokens == 50) is (finish == "length")
        assert bool(answer.choices[0].message.refusal) is (finish == "stop")


# ---------------------------------------------------------------- responses


async def test_a_response_and_its_stream_agree() -> None:
    async with connected() as (_, client):
        for text, more in (
            ("hello", {}),
            ("[think] well", {"include": ["reasoning.encrypted_content"]}),
            ("[tool] now", {"tools": [TOOL]}),
            ("[tool] now", {"tools": [{"type": "custom", "name": "exec"}]}),
            ("[refuse]", {}),
        ):
            whole = await client.responses.create(**asked(text, **more))
            events = [event async for event in await client.responses.create(**asked(text, **more), stream=True)]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            assert events[0].type == "response.created"
            assert events[-1].type == "response.completed"
            assert events[-1].response.output == whole.output
            assert events[-1].response.usage == whole.usage
            done = [event.item for event in events if event.type == "response.output_item.done"]
            assert done == whole.output


async def test_a_cut_response_is_incomplete() -> None:
    async with connected() as (_, client):
        answer = await client.responses.create(**asked("[max]", max_output_tokens=16))
        assert answer.status == "incomplete"
        assert answer.incomplete_details.reason == "max_output_tokens"


async def test_the_results_of_tools_are_taken() -> None:
    async with connected() as (_, client):
        first = await client.responses.create(**asked("[tool]", tools=[TOOL]))
        call = first.output[0]
        turns = [
            {"role": "user", "content": "[tool]"},
            call.model_dump(exclude_none=True),
            {"type": "function_call_output", "call_id": call.call_id, "output": "42"},
        ]
        last = await client.responses.create(model=MODEL, input=turns, tools=[TOOL])
        assert last.output_text.startswith("echo:")


async def test_a_websocket_is_refused_so_that_codex_posts() -> None:
    async with connected() as (server, _), DefaultAsyncHttpxClient(verify=False) as http:
        answer = await http.get(f"{server.url}/v1/responses", headers={"upgrade": "websocket", "connection": "upgrade"})
        assert answer.status_code == 426


# ---------------------------------------------------------------- embeddings and models


async def test_embeddings_in_both_forms() -> None:
    # The SDK asks for base64 by itself, and its own types have no room for that.
    async with connected(_strict_response_validation=False) as (server, client):
        packed = await client.embeddings.create(model="text-embedding-3-small", input=["a", "b"])
        plain = await client.embeddings.create(
            model="text-embedding-3-small", input=["a", "b"], encoding_format="float"
        )
        for one, other in zip(packed.data, plain.data, strict=True):
            assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
            assert sum(value * value for value in one.embedding) == pytest.approx(1.0, abs=1e-4)
        assert packed.data[0].embedding != packed.data[1].embedding
        short = await client.embeddings.create(model="text-embedding-3-large", input=[[1, 2, 3], [4]], dimensions=8)
        assert [len(one.embedding) for one in short.data] == [8, 8]
        assert short.usage.prompt_tokens == 4
        assert [charge.usage.output for charge in server.provider.bill.charges] == [0, 0, 0]


async def test_models_by_header() -> None:
    async with connected() as (server, client), DefaultAsyncHttpxClient(verify=False) as http:
        assert MODEL in [model.id async for model in client.models.list()]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt-nobody")
        theirs = await http.get(
            f"{server.url}/v1/models", headers={"x-api-key": "k", "anthropic-version": "2023-06-01"}
        )
        assert theirs.json()["data"][0]["type"] == "model"


# ---------------------------------------------------------------- no


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}, 400, None, None),
        ("chat/completions", chat() | {"model": "gpt-nobody"}, 404, None, "model_not_found"),
        ("chat/completions", {"model": MODEL}, 400, "messages", "missing_required_parameter"),
        ("chat/completions", {"model": MODEL, "messages": "x"}, 400, "messages", "invalid_type"),
        ("chat/completions", {"model": MODEL, "messages": []}, 400, "messages", "empty_array"),
        ("chat/completions", {"model": MODEL, "messages": [{"role": "me"}]}, 400, "messages[0].role", "invalid_value"),
        ("chat/completions", chat(max_token=1), 400, "max_token", "unknown_parameter"),
        ("chat/completions", chat(max_tokens=1), 400, "max_tokens", "unsupported_parameter"),
        ("chat/completions", chat(stream_options={}), 400, "stream_options", None),
        ("chat/completions", chat(stream="yes"), 400, "stream", "invalid_type"),
        ("chat/completions", chat(service_tier="warp"), 400, "service_tier", "invalid_value"),
        ("chat/completions", chat(tools=[{"type": "function"}]), 400, "tools[0].function.name", None),
        ("responses", {"model": MODEL}, 400, "input", "missing_required_parameter"),
        ("responses", asked(max_output_tokens=3), 400, "max_output_tokens", "integer_below_min_value"),
        ("responses", asked(messages=[]), 400, "messages", "unknown_parameter"),
        ("responses", asked(previous_response_id="resp_1"), 400, "previous_response_id", None),
        (
            "responses",
            {"model": MODEL, "input": [{"type": "function_call_output", "call_id": "c"}]},
            400,
            "input",
            None,
        ),
        ("embeddings", {"model": MODEL, "input": "x"}, 404, "model", None),
        ("embeddings", {"model": "text-embedding-3-small"}, 400, "input", "missing_required_parameter"),
        ("embeddings", {"model": "text-embedding-3-small", "input": []}, 400, "input", None),
        ("embeddings", {"model": "text-embedding-3-small", "input": "x", "dimensions": 9999}, 400, "dimensions", None),
        ("images", {}, 404, None, None),
    ],
)
async def test_what_is_wrong_is_refused_and_not_billed(
    path: str, body: dict[str, Any], status: int, param: str | None, code: str | None
) -> None:
    async with serve() as server, DefaultAsyncHttpxClient(verify=False) as http:
        answer = await http.post(f"{server.url}/v1/{path}", json=body, headers={"authorization": "Bearer k"})
        assert answer.status_code == status, answer.text
        if path != "images":  # an endpoint that neither of the two has
            error = answer.json()["error"]
            assert error["param"] == param
            assert error["message"]
            assert code is None or error["code"] == code
        assert server.provider.bill.charges == []


async def test_tool_messages_must_fit_together() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    done = {"role": "tool", "tool_call_id": "c1", "content": "1"}
    user = {"role": "user", "content": "x"}
    async with connected() as (_, client):
        for wrong in ([user, done], [user, said], [user, said, user, done], [user, said, done, done]):
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(model=MODEL, messages=wrong)
        assert await client.chat.completions.create(model=MODEL, messages=[user, said, done, user])


async def test_keys_are_checked() -> None:
    async with connected(MockConfig(keys=frozenset({"good"})), api_key="bad") as (server, client):
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.chat.completions.create(**chat())
        assert caught.value.code == "invalid_api_key"
        assert await client.with_options(api_key="good").chat.completions.create(**chat())
        async with DefaultAsyncHttpxClient(verify=False) as http:
            assert (await http.post(f"{server.url}/v1/responses", json=asked())).status_code == 401


@pytest.mark.parametrize(
    ("fault", "status"),
    [("sync_500", 500), ("sync_529", 503), ("sync_429", 429), ("sync_429_bare", 429)],
)
async def test_faults_have_openais_shape(fault: str, status: int) -> None:
    async with connected() as (server, client):
        server.provider.script(fault, 3)
        for ask in (
            lambda: client.chat.completions.create(**chat()),
            lambda: client.responses.create(**asked()),
            lambda: client.embeddings.create(model="text-embedding-3-small", input="x", encoding_format="float"),
        ):
            with pytest.raises(openai.APIStatusError) as caught:
                await ask()
            assert caught.value.status_code == status
            assert set(caught.value.body) == {"message", "type", "param", "code"}
            assert ("retry-after" in caught.value.response.headers) is (fault == "sync_429")
        assert server.provider.bill.charges == []


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_breaks_off_is_billed(stream: bool) -> None:
    async def whole(asking: Any) -> None:
        answer = await asking
        if stream:
            async for _ in answer:
                pass

    async with connected() as (server, client):
        server.provider.script("sync_cut_midway", 2)
        with pytest.raises(openai.APIConnectionError):
            await whole(client.chat.completions.create(**chat(), stream=stream))
        with pytest.raises(openai.APIConnectionError):
            await whole(client.responses.create(**asked(), stream=stream))
        assert len(server.provider.bill.charges) == 2


async def test_a_stream_may_fail_in_the_middle() -> None:
    async with connected(MockConfig(faults=Faults(sync_stream_error=1.0))) as (_, client):
        with pytest.raises(openai.APIError, match="Overloaded"):
            [one async for one in await client.chat.completions.create(**chat(), stream=True)]
        events = [one async for one in await client.responses.create(**asked(), stream=True)]
        assert events[-1].type == "response.failed"
        assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_a_limit_on_requests() -> None:
    async with connected(MockConfig(sync_rpm=2)) as (_, client):
        for left in ("1", "0"):
            raw = await client.chat.completions.with_raw_response.create(**chat())
            assert raw.headers["x-ratelimit-limit-requests"] == "2"
            assert raw.headers["x-ratelimit-remaining-requests"] == left
        with pytest.raises(openai.RateLimitError) as caught:
            await client.responses.create(**asked())
        assert caught.value.code == "rate_limit_exceeded"
        assert int(caught.value.response.headers["retry-after"]) > 0


async def test_the_latency_is_that_of_synchronous_calls() -> None:
    loop = asyncio.get_running_loop()
    async with connected(MockConfig(sync_latency=Constant(0.2))) as (_, client):
        for ask in (
            lambda: client.chat.completions.create(**chat()),
            lambda: client.embeddings.create(model="text-embedding-3-small", input="x", encoding_format="float"),
        ):
            began = loop.time()
            await ask()
            assert loop.time() - began >= 0.2


def test_a_body_means_the_same_streamed_or_not() -> None:
    streamed = chat(stream=True, stream_options={"include_usage": True})
    assert openai_fingerprint(dict(reversed(streamed.items()))) == openai_fingerprint(chat())
    assert openai_fingerprint(chat("other")) != openai_fingerprint(chat())
