"""Which conversation a request belongs to, and what is known of its turn."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.model import PromptChain
from carpool.core.ports import Parsed, RawRequest
from carpool.dialects import ANTHROPIC
from carpool.planners.caching.index import DEFAULT_TTL, LIVES

HEADERS = (("x-api-key", "k"), ("anthropic-version", "2023-06-01"))
MARK = {"cache_control": {"type": "ephemeral"}}
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
FIRST: dict[str, Any] = {
    "model": "claude-haiku-4-5",
    "max_tokens": 100,
    "system": [{"type": "text", "text": "You help.", **MARK}],
    "tools": [{"name": "look", "input_schema": {"type": "object"}}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Begin.", **MARK}]}],
}


def parsed(body: dict[str, Any]) -> Parsed:
    return ANTHROPIC.parse(RawRequest("POST", "/v1/messages", "", HEADERS, msgspec.json.encode(body)))


def conversation(body: dict[str, Any]) -> int:
    found = parsed(body).conversation
    assert found is not None
    assert chain(body).conversation == found
    return found


def chain(body: dict[str, Any]) -> PromptChain:
    return ANTHROPIC.prompt_chain(parsed(body))


def cache_life(body: dict[str, Any]) -> float:
    return max(LIVES[mark.ttl or DEFAULT_TTL] for mark in chain(body).marks)


def later() -> dict[str, Any]:
    """The same conversation two messages on; the mark has moved to its end."""
    body = copy.deepcopy(FIRST)
    del body["messages"][0]["content"][0]["cache_control"]
    body["messages"] += [
        {"role": "assistant", "content": [{"type": "text", "text": "Yes?"}]},
        {"role": "user", "content": [{"type": "text", "text": "Go on.", **MARK}]},
    ]
    return body


def test_a_later_turn_is_of_the_same_conversation() -> None:
    assert conversation(FIRST) == conversation(later())
    assert (chain(FIRST).parent is None, chain(later()).parent is None) == (True, False)
    assert cache_life(FIRST) == cache_life(later()) == 300.0


def test_text_and_a_block_of_text_are_the_same() -> None:
    body = later()
    body["messages"][0]["content"] = "Begin."
    assert conversation(body) == conversation(FIRST)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "claude-opus-4-5"},
        {"system": [{"type": "text", "text": "You help a little.", **MARK}]},
        {"tools": [{"name": "listen", "input_schema": {"type": "object"}}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Start.", **MARK}]}]},
    ],
)
def test_another_beginning_is_another_conversation(change: dict[str, Any]) -> None:
    assert conversation({**FIRST, **change}) != conversation(FIRST)


def test_what_changes_with_every_request_does_not_count() -> None:
    numbers = [
        conversation(
            {**FIRST, "system": [{"type": "text", "text": f"x-anthropic-billing-header: {n}"}, *FIRST["system"]]}
        )
        for n in range(2)
    ]
    assert numbers[0] == numbers[1] == conversation(FIRST)


def test_long_texts_differ_by_length_and_ends() -> None:
    texts = ["a" * 9000, "a" * 9001, "b" + "a" * 8999, "a" * 8999 + "b"]
    found = {conversation({**FIRST, "system": [{"type": "text", "text": text, **MARK}]}) for text in texts}
    assert len(found) == len(texts)


def test_without_a_mark_nothing_is_cached() -> None:
    body = later()
    del body["system"][0]["cache_control"], body["messages"][-1]["content"][0]["cache_control"]
    assert parsed(body).conversation is None
    assert cache_life({**body, **MARK}) == 300.0  # the automatic way


@pytest.mark.parametrize("place", ["system", "tools", "messages", "top"])
def test_an_hour_where_the_body_asks_for_it(place: str) -> None:
    body = later()
    if place == "top":
        body |= HOUR
        del body["messages"][-1]["content"][-1]["cache_control"]  # two marks of one block may not differ
    else:
        target = body[place][-1]["content"][-1] if place == "messages" else body[place][-1]
        target |= HOUR
    assert cache_life(body) == 3600.0


@pytest.mark.parametrize(
    ("content", "tools"),
    [
        ([{"type": "tool_result", "tool_use_id": "t", "content": "x"}], True),
        ([{"type": "text", "text": "and"}, {"type": "tool_result", "tool_use_id": "t"}], True),
        ([{"type": "mcp_tool_result", "tool_use_id": "t"}], True),
        ([{"type": "text", "text": "tool_result"}], False),
        ("tool_result", False),
        ([], False),
    ],
)
def test_tool_turns(content: Any, tools: bool) -> None:
    assert parsed({**FIRST, "messages": [{"role": "user", "content": content}]}).tool_turn is tools
    assert parsed({**FIRST, "messages": []}).tool_turn is False


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "text", "content", "role", "name", "cache_control", "ttl"]), inner)
    ),
    max_leaves=10,
)


@given(JUNK, JUNK, st.lists(JUNK, max_size=3), JUNK)
def test_any_body_is_taken(system: Any, tools: Any, messages: list[Any], mark: Any) -> None:
    body = {**FIRST, "system": system, "tools": tools, "messages": messages, "cache_control": mark}
    assert parsed(body) == parsed(body)
