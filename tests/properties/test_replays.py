"""Any message, told as a stream and heard by the SDK, is the message that the SDK reads whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.dialects import ANTHROPIC
from tests.support.hypothesis_settings import STEADY

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.sampled_from(
    ["\r\n\n", "\u2028\u2029", "data: x\n\nevent: y\n\n", '"\\', "\x00\x1f\x7f", "🚗" * 1500, "a" * 5000]
)
COUNT = st.integers(0, 10**9)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
INPUT = st.dictionaries(TEXT, JSON, max_size=3)


def block(kind: str, **fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"type": st.just(kind), **fields})


CITATION = block(
    "char_location",
    cited_text=TEXT,
    document_index=COUNT,
    document_title=TEXT | st.none(),
    start_char_index=COUNT,
    end_char_index=COUNT,
    file_id=st.none(),
)
FOUND = block("web_search_result", title=TEXT, url=TEXT, encrypted_content=TEXT, page_age=st.none() | TEXT)
RAN = block("code_execution_result", stdout=TEXT, stderr=TEXT, return_code=COUNT, content=st.just([]))
BLOCKS = [
    block("text", text=TEXT, citations=st.none() | st.lists(CITATION, min_size=1, max_size=3)),
    block("thinking", thinking=TEXT, signature=TEXT),
    block("redacted_thinking", data=TEXT),
    block("tool_use", id=TEXT, name=TEXT, input=INPUT),
    block("server_tool_use", id=TEXT, name=st.just("web_search"), input=INPUT),
    block("web_search_tool_result", tool_use_id=TEXT, content=st.lists(FOUND, max_size=2)),
    block("code_execution_tool_result", tool_use_id=TEXT, content=RAN),
    block("container_upload", file_id=TEXT),
    block("mcp_tool_use", id=TEXT, name=TEXT, server_name=TEXT, input=INPUT),
    block("hologram", text=TEXT, rays=st.lists(JSON, max_size=2)),  # of the future
]
USAGE = st.fixed_dictionaries(
    {"input_tokens": COUNT, "output_tokens": COUNT},
    optional={
        "cache_creation_input_tokens": COUNT,
        "cache_read_input_tokens": COUNT,
        "service_tier": st.sampled_from(["standard", "batch"]),
        "server_tool_use": st.fixed_dictionaries({"web_search_requests": COUNT, "web_fetch_requests": COUNT}),
    },
)
MESSAGES = st.fixed_dictionaries(
    {
        "id": TEXT,
        "type": st.just("message"),
        "role": st.just("assistant"),
        "model": TEXT,
        "content": st.lists(st.one_of(BLOCKS), max_size=5),
        "stop_reason": st.sampled_from(["end_turn", "max_tokens", "tool_use", "refusal", "pause_turn"]),
        "stop_sequence": st.none() | TEXT,
        "usage": USAGE,
    }
)


class Ear:
    """The SDK, hearing a message as a stream or reading it whole."""

    def __init__(self) -> None:
        self._answer = httpx2.Response(500)
        http = httpx2.Client(transport=httpx2.MockTransport(lambda _: self._answer))
        self.client = anthropic.Anthropic(api_key="k", http_client=http)

    def hears(self, body: bytes) -> Any:
        stream = b"".join(ANTHROPIC.replay(body))
        self._answer = httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=stream)
        with self.client.messages.stream(model="m", max_tokens=9, messages=[]) as told:
            return plain(told.get_final_message())

    def reads(self, body: bytes) -> Any:
        self._answer = httpx2.Response(200, headers={"content-type": "application/json"}, content=body)
        return plain(self.client.messages.create(model="m", max_tokens=9, messages=[]))


def plain(message: Any) -> Any:
    return set_only(message.to_dict(mode="json", exclude_unset=False, warnings=False))


def set_only(value: Any) -> Any:
    """Without what is unset: the SDK's classes for streams and for messages differ in that."""
    if isinstance(value, dict):
        return {key: set_only(inner) for key, inner in value.items() if inner is not None}
    return [set_only(inner) for inner in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def ear() -> Iterator[Ear]:
    ear = Ear()
    yield ear
    ear.client.close()


@settings(STEADY, max_examples=120)
@given(message=MESSAGES, indent=st.none() | st.integers(0, 2), ascii_only=st.booleans())
def test_what_is_heard_is_what_is_read(ear: Ear, message: dict[str, Any], indent: int | None, ascii_only: bool) -> None:
    body = json.dumps(message, indent=indent, ensure_ascii=ascii_only).encode()
    heard = ear.hears(body)
    assert heard == ear.reads(body)
    assert heard["content"] == set_only(message["content"])


@pytest.mark.parametrize("kind", range(len(BLOCKS)))
def test_every_kind_of_block(ear: Ear, kind: int) -> None:
    @settings(STEADY, max_examples=15)
    @given(BLOCKS[kind])
    def one(told: dict[str, Any]) -> None:
        message = {"id": "m", "type": "message", "role": "assistant", "model": "m", "stop_reason": "end_turn"}
        body = json.dumps({**message, "content": [told], "usage": {"input_tokens": 1, "output_tokens": 2}}).encode()
        assert ear.hears(body) == ear.reads(body)

    one()
