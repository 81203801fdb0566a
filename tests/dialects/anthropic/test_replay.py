"""Replayed messages, judged by the provider's own SDK."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.core.errors import MalformedResponse
from carpool.dialects import ANTHROPIC

SIGNATURE = "EqQBCkgIAxABGAIiQL8+/3nFqk0=="
CITATION = {
    "type": "char_location",
    "cited_text": "Grass is green.",
    "document_index": 0,
    "document_title": "Lawn",
    "start_char_index": 0,
    "end_char_index": 15,
    "file_id": None,
}
BLOCKS: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": "Grüße, 🚗!\nSecond line.\r\n", "citations": None},
    "empty text": {"type": "text", "text": "", "citations": None},
    "long text": {"type": "text", "text": "0123456789ü🚗" * 3000, "citations": None},
    "cited text": {"type": "text", "text": "It is green.", "citations": [CITATION, CITATION | {"document_index": 1}]},
    "thinking": {"type": "thinking", "thinking": "Let me think. " * 400, "signature": SIGNATURE},
    "omitted thinking": {"type": "thinking", "thinking": "", "signature": SIGNATURE},
    "redacted thinking": {"type": "redacted_thinking", "data": "EmwKAhgBEgy3va3pzix/LafPsn4a"},
    "tool use": {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"a": [1, 2.5, None], "ü": {"🚗": ""}}},
    "tool use without input": {"type": "tool_use", "id": "toolu_2", "name": "look", "input": {}},
    "long tool use": {"type": "tool_use", "id": "toolu_3", "name": "look", "input": {"text": 'a "quoted"\n' * 2000}},
    "server tool use": {
        "type": "server_tool_use",
        "id": "srvtoolu_1",
        "name": "web_search",
        "input": {"query": "cars"},
    },
    "web search result": {
        "type": "web_search_tool_result",
        "tool_use_id": "srvtoolu_1",
        "content": [
            {"type": "web_search_result", "title": "T", "url": "u", "encrypted_content": "E==", "page_age": None}
        ],
    },
    "code execution result": {
        "type": "code_execution_tool_result",
        "tool_use_id": "srvtoolu_2",
        "content": {
            "type": "code_execution_result",
            "stdout": "1\n",
            "stderr": "",
            "return_code": 0,
            "content": [],
        },
    },
    "mcp tool use": {"type": "mcp_tool_use", "id": "mcptoolu_1", "name": "n", "server_name": "s", "input": {"a": 1}},
    "container upload": {"type": "container_upload", "file_id": "file_1"},
    "a block of the future": {"type": "hologram", "text": "whole", "rays": [{"x": 1.0}]},
}
USAGE = {
    "input_tokens": 12,
    "output_tokens": 345,
    "cache_creation_input_tokens": 30,
    "cache_read_input_tokens": 40,
    "cache_creation": {"ephemeral_5m_input_tokens": 10, "ephemeral_1h_input_tokens": 20},
    "output_tokens_details": {"thinking_tokens": 5},
    "server_tool_use": {"web_search_requests": 2, "web_fetch_requests": 0},
    "service_tier": "batch",
    "inference_geo": "us",
}


def message(*blocks: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude-opus-5",
        "content": list(blocks),
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": USAGE,
    } | fields


def events(body: bytes) -> list[dict[str, Any]]:
    """The events, after a look at their frames."""
    told = []
    for frame in ANTHROPIC.replay(body):
        name, data, *rest = frame.decode().split("\n")
        assert rest == ["", ""]
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        told.append(event)
    return told


class Ear:
    """The SDK, hearing a message as a stream or reading it whole."""

    def __init__(self) -> None:
        self._answer = httpx2.Response(500)
        self._http = httpx2.Client(transport=httpx2.MockTransport(lambda _: self._answer))
        self._client = anthropic.Anthropic(api_key="k", http_client=self._http)

    def hears(self, original: dict[str, Any], indent: int | None = None) -> dict[str, Any]:
        return self.hears_stream(b"".join(ANTHROPIC.replay(json.dumps(original, indent=indent).encode())))

    def hears_stream(self, stream: bytes) -> dict[str, Any]:
        self._answer = httpx2.Response(
            200, headers={"content-type": "text/event-stream"}, content=ANTHROPIC.keep_alive + stream
        )
        with self._client.messages.stream(model="m", max_tokens=9, messages=[]) as told:
            return told.get_final_message().to_dict(mode="json", exclude_unset=False, warnings=False)

    def reads(self, original: dict[str, Any]) -> dict[str, Any]:
        self._answer = httpx2.Response(200, json=original)
        plain = self._client.messages.create(model="m", max_tokens=9, messages=[])
        return plain.to_dict(mode="json", exclude_unset=False, warnings=False)

    def close(self) -> None:
        self._client.close()


@pytest.fixture(scope="module")
def ear() -> Iterator[Ear]:
    ear = Ear()
    yield ear
    ear.close()


def same(told: Any, plain: Any) -> bool:
    """Equal but for fields that one of the SDK's classes has and the other has not: those must be unset."""
    if isinstance(told, dict) and isinstance(plain, dict):
        return all(same(told.get(key), plain.get(key)) for key in told.keys() | plain.keys())
    if isinstance(told, list) and isinstance(plain, list):
        return len(told) == len(plain) and all(map(same, told, plain))
    return bool(told == plain)


@pytest.mark.parametrize("kind", BLOCKS)
def test_the_sdk_hears_what_was_said(ear: Ear, kind: str) -> None:
    original = message(BLOCKS[kind])
    told = ear.hears(original)
    assert same(told, ear.reads(original))
    assert same(told["content"], original["content"])


def test_all_blocks_in_one_message(ear: Ear) -> None:
    original = message(*BLOCKS.values())
    assert same(ear.hears(original, indent=2), ear.reads(original))
    starts = [event["index"] for event in events(json.dumps(original).encode()) if "content_block" in event]
    assert starts == list(range(len(BLOCKS)))


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_reason": "refusal", "stop_details": {"type": "refusal", "category": "cyber", "explanation": "No."}},
        {"stop_reason": "stop_sequence", "stop_sequence": "\n\nEnd"},
        {"container": {"id": "container_1", "expires_at": "2026-11-15T12:00:00Z"}},
        {"diagnostics": {"cache_miss_reason": {"type": "tools_changed"}}},
        {"from_the_future": {"a": 1.0}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_fields_around_the_content_arrive(ear: Ear, fields: dict[str, Any]) -> None:
    original = message(BLOCKS["text"], **fields)
    told = ear.hears(original)
    assert same(told, ear.reads(original))
    assert all(same(told[name], value) for name, value in fields.items())


def test_a_message_without_content_arrives(ear: Ear) -> None:
    original = message(stop_reason="max_tokens")
    assert same(ear.hears(original), ear.reads(original))


SOME_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(-1e9, 1e9) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
SOME_BLOCK = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, st.text()),
    st.builds(lambda text, sign: {"type": "thinking", "thinking": text, "signature": sign}, st.text(), st.text()),
    st.builds(
        lambda given: {"type": "tool_use", "id": "toolu_1", "name": "look", "input": given},
        st.dictionaries(st.text(max_size=8), SOME_JSON, max_size=4),
    ),
)


@settings(max_examples=40)
@given(blocks=st.lists(SOME_BLOCK, max_size=4))
def test_the_sdk_hears_any_message(ear: Ear, blocks: list[dict[str, Any]]) -> None:
    original = message(*blocks)
    told = ear.hears(original)
    assert same(told["content"], original["content"])
    assert same(told["usage"], original["usage"])


# ---------------------------------------------------------------- on the wire


def test_the_order_of_events() -> None:
    body = json.dumps(message(BLOCKS["cited text"], BLOCKS["thinking"], BLOCKS["container upload"])).encode()
    told = [event.get("delta", {}).get("type") or event["type"] for event in events(body)]
    thought = BLOCKS["thinking"]["thinking"]
    assert told == [
        "message_start",
        *("content_block_start", "citations_delta", "citations_delta", "text_delta", "content_block_stop"),
        "content_block_start",
        *["thinking_delta"] * -(-len(thought) // 2048),
        *("signature_delta", "content_block_stop"),
        *("content_block_start", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]


def test_the_start_tells_the_input_side_and_the_end_the_rest() -> None:
    start, *_, delta, _stop = events(json.dumps(message(BLOCKS["text"], diagnostics={"a": 1})).encode())
    opening = start["message"]
    assert (opening["content"], opening["stop_reason"], opening["diagnostics"]) == ([], None, {"a": 1})
    assert opening["usage"] == USAGE | {"output_tokens": 1, "output_tokens_details": None}
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    unsaid = ("cache_creation", "service_tier", "inference_geo")
    assert delta["usage"] == {name: value for name, value in USAGE.items() if name not in unsaid}


def test_numbers_and_signatures_keep_their_bytes() -> None:
    block = (
        rb'{"type":"tool_use","id":"t","name":"n","input":{"a":1.0, "b":1e5,"c":12345678901234567890123,"d":"\u00fc"}}'
    )
    thought = rb'{"type":"thinking","thinking":"","signature":"a\/b\u003d="}'
    body = b'{"content":[%b,%b],"odd":1.50,"usage":{"output_tokens":3}}' % (block, thought)
    stream = b"".join(ANTHROPIC.replay(body))
    assert b'"odd":1.50' in stream
    assert rb'"signature":"a\/b\u003d="' in stream
    pieces = [
        event["delta"].get("partial_json", "") for event in events(body) if event["type"] == "content_block_delta"
    ]
    assert "".join(pieces) == r'{"a":1.0, "b":1e5,"c":12345678901234567890123,"d":"\u00fc"}'


def test_deltas_are_of_a_bearable_size() -> None:
    assert max(map(len, ANTHROPIC.replay(json.dumps(message(BLOCKS["long text"])).encode()))) < 20_000


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"type":"error"}',
        b'{"content":null}',
        b'{"content":[1]}',
        b'{"content":[{}]}',
        b'{"content":["\xff"]}',
    ],
)
def test_trouble_is_known_before_the_first_event(body: bytes) -> None:
    with pytest.raises(MalformedResponse):
        ANTHROPIC.replay(body)


@pytest.mark.parametrize("usage", [b"", b',"usage":null', b',"usage":{"output_tokens":null}', b',"usage":{}'])
def test_a_message_without_usage_is_told(usage: bytes) -> None:
    told = events(b'{"content":[]%b}' % usage)
    assert told[0]["message"]["usage"]["output_tokens"] == 0


# ---------------------------------------------------------------- errors and pings


def test_the_sdk_raises_the_error_of_a_stream(ear: Ear) -> None:
    body = json.dumps(
        {"type": "error", "error": {"type": "overloaded_error", "message": "Busy."}, "request_id": "r"}, indent=1
    )
    with pytest.raises(anthropic.APIError, match="Busy"):
        ear.hears_stream(ANTHROPIC.stream_error(body.encode()))


@pytest.mark.parametrize("body", [b"", b"<html>\n\ndata: x\n\n</html>", b"[]", b'{"type":"message","content":[]}'])
def test_what_is_no_error_is_told_as_one(body: bytes) -> None:
    name, data, *rest = ANTHROPIC.stream_error(body).decode().split("\n")
    assert name == "event: error"
    assert rest == ["", ""]
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == "api_error"
