"""Replayed answers, judged by the provider's own SDK."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.core.errors import MalformedResponse
from carpool.dialects import OPENAI
from carpool.dialects.keep_alive import EarlyResponse
from carpool.dialects.openai.replay import replay

LONG = 'a "quoted" line\nü🚗\r\n' * 900
MESSAGES = [{"role": "user", "content": "x"}]
CITED = {"type": "url_citation", "start_index": 0, "end_index": 4, "url": "https://example.com", "title": "T"}


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


ANSWERED: dict[str, dict[str, Any]] = {
    "text": {"content": "Grüße, 🚗!\nSecond line.\r\n"},
    "nothing": {"content": ""},
    "long text": {"content": LONG},
    "refusal": {"content": None, "refusal": "I can't help with that."},
    "tool call": {"content": None, "tool_calls": [call("look", '{"a": [1, 2.50, null], "ü": {"🚗": ""}}')]},
    "two long calls": {"content": "Let me see.", "tool_calls": [call("a", LONG), call("b", "")]},
    "annotations": {"content": "See.", "annotations": [{"type": "url_citation", "url_citation": CITED}]},
}
USAGE = {
    "prompt_tokens": 12,
    "completion_tokens": 6,
    "total_tokens": 18,
    "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 2},
}


def completion(*messages: dict[str, Any], finish: str = "stop") -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "refusal": None, **message},
            "logprobs": None,
            "finish_reason": "tool_calls" if "tool_calls" in message else finish,
        }
        for index, message in enumerate(messages)
    ]
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_795_000_000,
        "model": "gpt-6-luna",
        "choices": choices,
        "usage": USAGE,
        "service_tier": "default",
        "system_fingerprint": "fp_1",
    }


@contextmanager
def told(events: Iterable[bytes], strict: bool = True) -> Any:
    """The SDK, that hears these events whatever it asks."""
    stream = b"".join(events)

    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=stream)

    http = httpx2.Client(transport=httpx2.MockTransport(answer))
    with openai.OpenAI(api_key="k", http_client=http, max_retries=0, _strict_response_validation=strict) as client:
        yield client


def encoded(answer: Any) -> bytes:
    return json.dumps(answer, indent=2, ensure_ascii=False).encode()


# ---------------------------------------------------------------- chat completions


@pytest.mark.parametrize("message", ANSWERED.values(), ids=ANSWERED)
def test_the_sdk_puts_a_completion_together_again(message: dict[str, Any]) -> None:
    answer = completion(message)
    with (
        told(replay(encoded(answer), include_usage=True)) as client,
        client.chat.completions.stream(model="m", messages=MESSAGES) as stream,
    ):
        final = stream.get_final_completion()
    choice = final.choices[0]
    assert choice.message.content == message["content"]
    assert choice.message.refusal == message.get("refusal")
    made = [(one.id, one.function.name, one.function.arguments) for one in choice.message.tool_calls or ()]
    assert made == [(one["id"], *one["function"].values()) for one in message.get("tool_calls", [])]
    assert choice.finish_reason == answer["choices"][0]["finish_reason"]
    assert final.usage.model_dump(exclude_unset=True) == USAGE
    assert (final.id, final.created, final.service_tier) == ("chatcmpl-1", 1_795_000_000, "default")


def test_the_chunks_are_those_of_the_provider() -> None:
    events = [json.loads(event[6:]) for event in list(replay(encoded(completion(ANSWERED["tool call"]))))[:-1]]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": None, "refusal": None}
    function = {"name": "look", "arguments": ""}
    assert deltas[1] == {"tool_calls": [{"index": 0, "id": "call_look", "type": "function", "function": function}]}
    assert [set(delta["tool_calls"][0]) for delta in deltas[2:-1]] == [{"index", "function"}]
    assert deltas[-1] == {}
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["tool_calls"]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}


def test_usage_comes_only_to_those_who_asked() -> None:
    """Who did not ask may well take the first choice of every chunk."""
    body = encoded(completion(ANSWERED["text"]))
    plain = [json.loads(event[6:]) for event in list(replay(body))[:-1]]
    assert all(chunk["choices"] and "usage" not in chunk for chunk in plain)
    full = [json.loads(event[6:]) for event in list(replay(body, include_usage=True))[:-1]]
    assert [chunk["usage"] for chunk in full] == [None] * (len(full) - 1) + [USAGE]
    assert [bool(chunk["choices"]) for chunk in full] == [True] * (len(full) - 1) + [False]
    assert list(replay(body))[-1] == b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("request_", "stream_options"),
    [
        ({"stream": True, "stream_options": {"include_usage": True}}, "usage"),
        ({"stream": True, "stream_options": {"include_usage": False}}, ""),
        ({"stream": True, "stream_options": None, "user": "include_usage"}, ""),
        ({"stream": True, "stream_options": "include_usage"}, ""),
        ({"stream": True}, ""),
    ],
)
def test_the_wish_is_read_from_the_request(request_: dict[str, Any], stream_options: str) -> None:
    assert OPENAI.stream_options(encoded(request_)) == stream_options
    assert OPENAI.stream_options(b"include_usage {") == ""
    chunks = list(OPENAI.replay(encoded(completion(ANSWERED["text"])), stream_options))
    assert (b'"choices":[]' in chunks[-2]) is (stream_options == "usage")


def test_several_choices_keep_apart() -> None:
    answer = completion({"content": "one"}, {"content": "two"}, {"content": None, "refusal": "three"})
    with told(replay(encoded(answer))) as client:
        texts = ["", "", ""]
        for chunk in client.chat.completions.create(model="m", messages=MESSAGES, n=3, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or choice.delta.refusal or ""
    assert texts == ["one", "two", "three"]


def test_log_probabilities_come_once() -> None:
    token = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105], "top_logprobs": []}
    answer = completion({"content": LONG})
    answer["choices"][0]["logprobs"] = {"content": [token], "refusal": None}
    with told(replay(encoded(answer))) as client:
        chunks = list(client.chat.completions.create(model="m", messages=MESSAGES, logprobs=True, stream=True))
    given_ = [chunk for chunk in chunks if chunk.choices[0].logprobs]
    assert len(given_) == 1
    assert given_[0].choices[0].delta.content


def test_other_kinds_of_tools_come_whole() -> None:
    custom = {"id": "call_1", "type": "custom", "custom": {"name": "exec", "input": "1 + 1"}}
    events = list(replay(encoded(completion({"content": None, "tool_calls": [custom]}))))
    assert json.loads(events[1][6:])["choices"][0]["delta"] == {"tool_calls": [{"index": 0, **custom}]}


def test_the_old_way_to_call_a_function() -> None:
    answer = completion({"content": None, "function_call": {"name": "look", "arguments": LONG}})
    with told(replay(encoded(answer))) as client:
        chunks = list(client.chat.completions.create(model="m", messages=MESSAGES, stream=True))
    parts = [chunk.choices[0].delta.function_call for chunk in chunks if chunk.choices[0].delta.function_call]
    assert parts[0].name == "look"
    assert "".join(part.arguments for part in parts) == LONG


def test_an_old_completion() -> None:
    answer = {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "gpt-3.5-turbo-instruct",
        "choices": [{"index": 0, "text": LONG, "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
    }
    # Strictly, the SDK's type has no room for the null that the provider sends until the end.
    with told(replay(encoded(answer)), strict=False) as client:
        chunks = list(client.completions.create(model="m", prompt="x", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == LONG
    assert chunks[-1].choices[0].finish_reason == "length"


# ---------------------------------------------------------------- responses


def spoken(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": list(parts)}


def text(words: str, annotations: tuple[Any, ...] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": words, "annotations": list(annotations), "logprobs": []}


CALL = {"id": "fc_1", "type": "function_call", "call_id": "call_1", "name": "look", "status": "completed"}
THOUGHT = {"id": "rs_1", "type": "reasoning", "summary": [], "encrypted_content": "gAAA/+=="}
ITEMS: dict[str, list[dict[str, Any]]] = {
    "text": [spoken(text("Grüße, 🚗!\n"))],
    "nothing": [],
    "long text": [spoken(text(LONG), text("and more"))],
    "cited": [spoken(text("See.", (CITED, {**CITED, "title": "U"})))],
    "refusal": [spoken({"type": "refusal", "refusal": "I can't."})],
    "call": [{**CALL, "arguments": '{"a": [1, 2.50, null]}'}],
    "long call": [{**CALL, "arguments": LONG}],
    "custom call": [{"id": "ctc_1", "type": "custom_tool_call", "call_id": "c", "name": "exec", "input": LONG}],
    "reasoning": [
        {**THOUGHT, "summary": [{"type": "summary_text", "text": "First."}, {"type": "summary_text", "text": LONG}]},
        spoken(text("So.")),
    ],
    "open reasoning": [{**THOUGHT, "content": [{"type": "reasoning_text", "text": "Hm."}]}],
    "search": [
        {
            "id": "ws_1",
            "type": "web_search_call",
            "status": "completed",
            "action": {"type": "search", "query": "cars", "queries": ["cars"]},
        },
        spoken(text("Found.", (CITED,))),
    ],
}


def response(items: list[dict[str, Any]], status: str = "completed", **more: Any) -> dict[str, Any]:
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1_795_000_000,
        "status": status,
        "background": False,
        "completed_at": 1_795_000_002,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": "gpt-6-luna",
        "output": items,
        "parallel_tool_calls": True,
        "service_tier": "default",
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "usage": {
            "input_tokens": 12,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 6,
            "output_tokens_details": {"reasoning_tokens": 2},
            "total_tokens": 18,
        },
        **more,
    }


@pytest.mark.parametrize("items", ITEMS.values(), ids=ITEMS)
def test_the_sdk_puts_a_response_together_again(items: list[dict[str, Any]]) -> None:
    answer = response(items)
    with told(OPENAI.replay(encoded(answer))) as client, client.responses.stream(model="m", input="x") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.model_dump(exclude_unset=True, mode="json", exclude={"output": {"__all__": {"parsed_arguments"}}}) | {
        "output": None
    } == answer | {"output": None}
    with told(OPENAI.replay(encoded(answer))) as client:
        plain = list(client.responses.create(model="m", input="x", stream=True))
    assert plain[-1].response.model_dump(exclude_unset=True, mode="json") == answer
    assert [event.sequence_number for event in plain] == list(range(len(plain)))
    assert [event.type for event in plain[:2]] == ["response.created", "response.in_progress"]
    assert plain[0].response.output == []
    assert plain[0].response.usage is None
    assert events[-1].type == "response.completed"


@pytest.mark.parametrize("items", ITEMS.values(), ids=ITEMS)
def test_the_deltas_of_an_item_add_up_to_it(items: list[dict[str, Any]]) -> None:
    events = [json.loads(event.partition(b"data: ")[2]) for event in OPENAI.replay(encoded(response(items)))]
    written = "".join(event["delta"] for event in events if event["type"].endswith(".delta"))
    assert written == "".join(_writing(item) for item in items)
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == items
    assert [item["id"] for item in added] == [item["id"] for item in items]
    assert all(item.get("status", "in_progress") == "in_progress" for item in added)
    assert not any(_writing(item) for item in added)


def _writing(item: dict[str, Any]) -> str:
    parts = [*item.get("summary", ()), *item.get("content", ())]
    return "".join(
        str(one.get(name, "")) for one in [item, *parts] for name in ("arguments", "input", "text", "refusal")
    )


@pytest.mark.parametrize(
    ("status", "final"), [("incomplete", "response.incomplete"), ("failed", "response.failed"), ("odd", None)]
)
def test_how_it_ended_is_told(status: str, final: str | None) -> None:
    last = list(OPENAI.replay(encoded(response([], status))))[-1]
    assert last.startswith(f"event: {final or 'response.completed'}\n".encode())


def test_what_is_said_of_a_search_between() -> None:
    names = [event[7 : event.index(b"\n")].decode() for event in OPENAI.replay(encoded(response(ITEMS["search"])))]
    assert names[3:6] == [f"response.web_search_call.{stage}" for stage in ("in_progress", "searching", "completed")]


@pytest.mark.parametrize("items", ITEMS.values(), ids=ITEMS)
def test_a_response_that_was_waited_for_is_told_on(items: list[dict[str, Any]]) -> None:
    """`response.in_progress` again and again keeps Codex; the numbers rise through to the end."""
    early = EarlyResponse("gpt-6-luna", "ticket", 1_795_000_000.0)
    waited = [early.first(), early.again(), early.again()]
    with told([*waited, *early.remaining(OPENAI.replay(encoded(response(items))))]) as client:
        events = list(client.responses.create(model="m", input="x", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events].count("response.created") == 1
    assert events[-1].response.model_dump(exclude_unset=True, mode="json") == response(items)


# ---------------------------------------------------------------- both


WORDS = st.text(max_size=40).map(lambda word: word.encode("utf-8", "replace").decode())


@settings(max_examples=60)
@given(content=WORDS | st.none(), arguments=st.lists(WORDS, max_size=3), escaped=st.booleans())
def test_any_words_arrive_as_they_were(content: str | None, arguments: list[str], escaped: bool) -> None:
    calls = [call(f"f{index}", words) for index, words in enumerate(arguments)]
    message = {"content": content, **({"tool_calls": calls} if calls else {})}
    chat = json.dumps(completion(message), ensure_ascii=escaped).encode()
    texts, written = "", dict.fromkeys(range(len(calls)), "")
    for event in list(replay(chat))[:-1]:
        delta = json.loads(event[6:])["choices"][0]["delta"]
        texts += delta.get("content") or ""
        for one in delta.get("tool_calls", ()):
            written[one["index"]] += one["function"]["arguments"]
    assert (texts, list(written.values())) == (content or "", arguments)
    items = [spoken(text(content or "")), *({**CALL, "id": f"fc_{n}", "arguments": a} for n, a in enumerate(arguments))]
    told_ = [
        event.partition(b"data: ")[2] for event in replay(json.dumps(response(items), ensure_ascii=escaped).encode())
    ]
    deltas = [json.loads(data) for data in told_ if b".delta" in data]
    assert "".join(event["delta"] for event in deltas) == (content or "") + "".join(arguments)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda answer: answer.pop("choices"),
        lambda answer: answer["choices"][0].pop("message"),
        lambda answer: answer["choices"][0].pop("index"),
        lambda answer: answer.update(choices={}),
        lambda answer: answer.update(object="list"),
        lambda answer: answer.update(object="response"),
    ],
)
def test_what_can_not_be_told_is_known_before_the_first_event(spoil: Callable[[dict[str, Any]], Any]) -> None:
    answer = completion(ANSWERED["text"])
    spoil(answer)
    with pytest.raises(MalformedResponse):
        OPENAI.replay(encoded(answer))


@pytest.mark.parametrize("endpoint", ["chat", "responses"])
def test_a_late_failure_is_raised_by_the_sdk(endpoint: str) -> None:
    error = OPENAI.error(429, "rate_limit_error", "Too much.")
    with told([OPENAI.keep_alive, OPENAI.stream_error(error)]) as client:
        ask = (
            (lambda: client.chat.completions.create(model="m", messages=MESSAGES, stream=True))
            if endpoint == "chat"
            else (lambda: client.responses.create(model="m", input="x", stream=True))
        )
        with pytest.raises(openai.APIError, match="Too much") as caught:
            list(ask())
    assert caught.value.code == "rate_limit_exceeded"


def test_a_page_from_a_gateway_is_not_shown() -> None:
    assert b"html" not in OPENAI.stream_error(b"<html>\n\ndata: x</html>")


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (400, "invalid_request_error", ("invalid_request_error", None)),
        (401, "authentication_error", ("invalid_request_error", "invalid_api_key")),
        (404, "not_found_error", ("invalid_request_error", "not_found")),
        (413, "request_too_large", ("invalid_request_error", "request_too_large")),
        (429, "rate_limit_error", ("requests", "rate_limit_exceeded")),
        (502, "api_error", ("server_error", None)),
        (504, "timeout_error", ("server_error", "timeout")),
    ],
)
def test_errors_have_the_providers_shape(status: int, code: str, error: tuple[str, str | None]) -> None:
    said = json.loads(OPENAI.error(status, code, "No."))
    kind, name = error
    assert said == {"error": {"message": "No.", "type": kind, "param": None, "code": name}}


def test_a_spent_quota_is_not_worth_a_retry() -> None:
    spent = json.dumps({"error": {"message": "Spent.", "type": "insufficient_quota", "code": "insufficient_quota"}})
    assert not OPENAI.refusal(429, (("x-should-retry", "true"),), spent.encode()).retryable
    assert OPENAI.refusal(429, (), b"{}").retryable
    assert not OPENAI.refusal(503, (("x-should-retry", "false"),), b"{}").retryable
    assert OPENAI.refusal(400, (("x-should-retry", "true"),), b"{}").retryable
    assert OPENAI.refusal(429, (("retry-after-ms", "250"), ("retry-after", "9")), b"{}").retry_after == 0.25
    assert OPENAI.refusal(500, (), b'{"error":{"message":"x","code":7}}').message == "x"
