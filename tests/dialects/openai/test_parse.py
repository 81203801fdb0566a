"""What is understood of a request to OpenAI."""

from __future__ import annotations

import json
from typing import Any

import pytest

from carpool.core.errors import BadCall
from carpool.core.ports import Parsed, RawRequest
from carpool.core.upstream import join
from carpool.dialects import OPENAI
from tests.support.dialect_cases import canonical

CHAT = {"model": "gpt-6-luna", "messages": [{"role": "user", "content": "Hi"}]}
KEY = ("authorization", "Bearer sk-1")


def parse(body: Any, path: str = "/v1/chat/completions", query: str = "", headers: tuple = (KEY,)) -> Parsed:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return OPENAI.parse(RawRequest("POST", path, query, headers, raw))


@pytest.mark.parametrize(
    ("method", "path", "handled"),
    [
        ("POST", "/v1/chat/completions", True),
        ("POST", "/v1/responses", True),
        ("POST", "/v1/embeddings", True),
        ("POST", "/v1/completions", True),
        ("GET", "/v1/chat/completions", False),
        ("GET", "/v1/responses/resp_1", False),
        ("POST", "/v1/responses/resp_1/cancel", False),
        ("POST", "/v1/moderations", True),
        ("POST", "/v1/images/generations", False),
        ("POST", "/v1/batches", False),
        ("POST", "/v1/messages", False),
    ],
)
def test_which_endpoints_are_calls(method: str, path: str, handled: bool) -> None:
    assert OPENAI.handles(method, path) is handled


def test_stream_options_go_where_stream_goes() -> None:
    """A provider refuses them alone, and what they ask for is no part of what the call means."""
    asked = b'{"model":"m","stream":true, "stream_options" : {"include_usage":true},"messages":[],"seed":1.0}'
    parsed = parse(asked)
    assert parsed.body == b'{"model":"m","messages":[],"seed":1.0}'
    assert parsed.stream
    assert canonical(parsed) == canonical(parse(b'{"seed":1.0,"messages":[],"model":"m"}'))


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","stream":true,"stream_options":null,"messages":[]}',
        b'{"stream_options": null, "model": "m", "messages": [], "stream": true}',
        b'{"model":"m","messages":[],"stream":true , "stream_options" : null }',
    ],
)
def test_stream_options_may_be_null(body: bytes) -> None:
    parsed = parse(body)
    assert json.loads(parsed.body) == {"model": "m", "messages": []}
    assert parsed.stream
    assert canonical(parsed) == canonical(parse(b'{"model":"m","messages":[]}'))
    assert OPENAI.stream_options(body) == ""


@pytest.mark.parametrize(
    ("path", "more", "tokens"),
    [
        ("/v1/chat/completions", {}, 4096),
        ("/v1/chat/completions", {"max_tokens": 7}, 7),
        ("/v1/chat/completions", {"max_tokens": 7, "max_completion_tokens": 9}, 9),
        ("/v1/chat/completions", {"max_tokens": None}, 4096),
        ("/v1/chat/completions", {"max_tokens": True}, 4096),
        ("/v1/chat/completions", {"max_tokens": -3}, 0),
        ("/v1/chat/completions", {"max_tokens": 2**40}, 2**31 - 1),
        ("/v1/responses", {"max_output_tokens": 5}, 5),
        ("/v1/responses", {"max_tokens": 5}, 4096),
        ("/v1/completions", {"max_tokens": 5}, 5),
        ("/v1/embeddings", {"max_tokens": 5}, 0),
    ],
)
def test_how_long_an_answer_may_get(path: str, more: dict[str, Any], tokens: int) -> None:
    assert parse(CHAT | more, path).max_output_tokens == tokens


def test_who_pays_is_part_of_the_credential() -> None:
    org, project = ("openai-organization", "org-1"), ("openai-project", "proj_1")
    parsed = parse(CHAT, headers=(org, KEY, ("openai-beta", "x=1"), project, ("x-codex-turn-metadata", "{}")))
    assert parsed.secret == (org, KEY, project)
    assert parsed.headers == (("openai-beta", "x=1"),)
    assert OPENAI.secret((org, KEY, ("accept", "*/*"))) == (org, KEY)


def test_an_organisation_alone_is_no_credential() -> None:
    assert parse(CHAT, headers=(("openai-organization", "org-1"),)).secret == ()


@pytest.mark.parametrize(("count", "retry"), [("0", False), ("1", True), ("x", False)])
def test_a_retry_is_recognised(count: str, retry: bool) -> None:
    assert parse(CHAT, headers=(KEY, ("x-stainless-retry-count", count))).retry is retry


@pytest.mark.parametrize(
    ("path", "more", "tool_turn"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "tool", "tool_call_id": "c", "content": "1"}]}, True),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "1"}]}, False),
        ("/v1/chat/completions", {"messages": []}, False),
        ("/v1/responses", {"input": [{"type": "function_call_output", "call_id": "c", "output": "1"}]}, True),
        ("/v1/responses", {"input": [{"role": "user", "content": "1"}]}, False),
        ("/v1/responses", {"input": "1"}, False),
        ("/v1/embeddings", {"input": ["1"]}, False),
    ],
)
def test_the_results_of_tools_are_recognised(path: str, more: dict[str, Any], tool_turn: bool) -> None:
    assert parse({"model": "gpt-6-luna", **more}, path).tool_turn is tool_turn


# ---------------------------------------------------------------- batches


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/v1/completions"])
def test_calls_of_every_endpoint_ride_batches(path: str) -> None:
    assert parse(CHAT, path).unbatchable is None


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"background": True}, "`background`"),
        ({"previous_response_id": "resp_1"}, "`previous_response_id`"),
        ({"conversation": {"id": "conv_1"}}, "`conversation`"),
        ({"store": True}, "`store`"),
        ({"service_tier": "flex"}, "'flex'"),
        ({"service_tier": {"a": 1}}, "service tier"),
        ({"tools": [{"type": "code_interpreter", "container": "cntr_1"}]}, "container"),
        ({"tools": [{"type": "shell", "environment": {"container_id": "cntr_1"}}]}, "container"),
        ({"modalities": ["text", "audio"]}, "audio"),
    ],
)
def test_what_never_rides_one_says_why(more: dict[str, Any], reason: str) -> None:
    said = parse(CHAT | more, "/v1/responses").unbatchable or ""
    assert reason in said
    assert said.endswith(".")


@pytest.mark.parametrize(
    "more",
    [
        {"background": False, "store": False, "previous_response_id": None, "service_tier": "auto"},
        {"tools": [{"type": "code_interpreter", "container": {"type": "auto"}}, "odd"], "modalities": ["text"]},
        {"tools": 1, "modalities": 2},
    ],
)
def test_what_asks_for_nothing_special_rides(more: dict[str, Any]) -> None:
    assert parse(CHAT | more, "/v1/responses").unbatchable is None


def test_a_stored_prompt_may_keep_its_model_to_itself_and_then_can_not_ride() -> None:
    body = {"prompt": {"id": "pmpt_1"}, "input": "1"}
    assert "stored prompt" in (parse(body, "/v1/responses").unbatchable or "")


def test_a_query_can_not_ride_either() -> None:
    assert "query" in (parse(CHAT, query="?a=1").unbatchable or "")


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"messages": []}, "`model` is missing"),
        ({"model": 3}, "`model` must be"),
        ({"model": None}, "`model` must be"),
        ({"model": "m", "stream": "yes"}, "`stream`"),
        (b'{"model":"m","model":"m"}', "twice"),
        (b'{"model":"m","stream_options":{},"stream_options":{}}', "twice"),
    ],
)
def test_mistakes_are_named(body: Any, word: str) -> None:
    with pytest.raises(BadCall, match=word):
        parse(body)


def test_a_stored_prompt_may_name_the_model() -> None:
    assert parse({"prompt": {"id": "pmpt_1"}}, "/v1/responses").model == ""


def test_what_it_does_not_understand_it_says() -> None:
    with pytest.raises(BadCall, match="/v1/images/generations"):
        parse(CHAT, "/v1/images/generations")
    with pytest.raises(BadCall, match="zstd"):
        parse(CHAT, headers=(KEY, ("content-encoding", "zstd")))


# ---------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    ("base", "path", "url"),
    [
        ("https://api.openai.com/v1", "/v1/chat/completions", "https://api.openai.com/v1/chat/completions"),
        ("https://api.openai.com/v1/", "/v1/responses?a=/v1/", "https://api.openai.com/v1/responses?a=/v1/"),
        ("https://api.openai.com", "/v1/responses", "https://api.openai.com/v1/responses"),
        ("https://r.openai.azure.com/openai/v1", "/v1/embeddings", "https://r.openai.azure.com/openai/v1/embeddings"),
        ("https://h/api/paas/v4", "/v1/chat/completions", "https://h/api/paas/v4/chat/completions"),
        ("https://api.anthropic.com", "/v1/messages?beta=true", "https://api.anthropic.com/v1/messages?beta=true"),
        ("https://h/anthropic/v1", "/v1/messages", "https://h/anthropic/v1/messages"),
        ("https://h/nav1", "/v1/messages", "https://h/nav1/v1/messages"),
        ("https://h/v1", "/health", "https://h/v1/health"),
        ("https://h/v1", "/v10/x", "https://h/v1/v10/x"),
    ],
)
def test_the_version_stands_in_an_address_once(base: str, path: str, url: str) -> None:
    assert join(base, path) == url


def test_a_moderation_may_leave_its_model_to_the_provider() -> None:
    asked = parse({"input": "hello"}, "/v1/moderations")
    assert (asked.model, asked.flexible, asked.max_output_tokens) == ("", False, 0)
    assert "must know the model" in (asked.unbatchable or "")
    assert parse({"model": "omni-moderation-latest", "input": "hello"}, "/v1/moderations").unbatchable is None


def test_the_session_of_codex() -> None:
    of_codex = (KEY, ("originator", "codex_exec"), ("thread-id", "t"), ("session-id", "s"))
    assert parse(CHAT, headers=of_codex).session == "s"
    assert parse(CHAT, headers=(KEY, ("conversation_id", "c"))).session == "c"
    assert parse(CHAT).session == ""
