"""Edits for the prompt cache: what is documented is changed, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.model import CachePlan
from carpool.dialects import ANTHROPIC
from carpool.dialects.anthropic.caching import MessagesCacheEdits
from carpool.mock.anthropic.cache import plan_cache
from carpool.mock.anthropic.models import find_model
from carpool.mock.core.errors import ApiError

EDITS = MessagesCacheEdits()
SHORT, LONG = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
BODY = (
    b'{"model": "m", "max_tokens": 9, "system": "Be brief.",\n '
    b'"messages": [{"role": "user", "content": "Hello"}], "x": 1e2}'
)


def edited(body: bytes, **plan: Any) -> str:
    found = EDITS.edited(body, CachePlan(**plan))
    return "" if found is None else found.body.decode()


def test_it_is_there_for_the_dialect() -> None:
    assert isinstance(ANTHROPIC.caching, MessagesCacheEdits)


def test_marks_are_added_where_there_are_none() -> None:
    found = EDITS.edited(BODY, CachePlan(mark_root=True, mark_end=True, root_ttl="1h"))
    assert found is not None
    assert found.edits == "a mark on the system prompt for 1h, a mark on the last message for 5m"
    assert found.body == (
        b'{"model": "m", "max_tokens": 9, "system": [{"type":"text","text":"Be brief.",'
        b'"cache_control":{"type":"ephemeral","ttl":"1h"}}],\n "messages": [{"role": "user", "content": '
        b'[{"type":"text","text":"Hello","cache_control":{"type":"ephemeral"}}]}], "x": 1e2}'
    )


def test_tools_are_marked_without_a_system_prompt() -> None:
    body = b'{"tools":[{"name":"a"},{"name":"b" }],"messages":[]}'
    assert edited(body, mark_root=True, mark_end=True) == (
        '{"tools":[{"name":"a"},{"name":"b","cache_control":{"type":"ephemeral"} }],"messages":[]}'
    )


def test_lives_are_extended_in_place() -> None:
    body = (
        b'{"system":[{"type":"text","text":"a","cache_control":{"type":"ephemeral"}}],"messages":[{"role":"user",'
        b'"content":[{"type":"text","text":"b","cache_control": {"ttl": "5m", "type":"ephemeral"}}]}]}'
    )
    root = body.decode().replace('"ephemeral"}', '"ephemeral","ttl":"1h"}', 1)
    assert edited(body, root_ttl="1h") == root
    assert edited(body, ttl="1h") == root.replace('"5m"', '"1h"')
    assert edited(root.replace('"5m"', '"1h"').encode(), ttl="1h", mark_root=True, mark_end=True) == ""


def test_an_automatic_mark_counts_and_is_extended() -> None:
    body = b'{"cache_control":{"type":"ephemeral"},"messages":[{"role":"user","content":"a"}]}'
    assert edited(body, mark_end=True) == ""
    assert edited(body, ttl="1h") == body.decode().replace('"ephemeral"', '"ephemeral","ttl":"1h"')


@pytest.mark.parametrize(
    "content", ['""', "[]", '[{"type":"text","text":""}]', '[{"type":"thinking","thinking":"t"}]', "null", "[1]"]
)
def test_what_can_not_be_marked(content: str) -> None:
    body = b'{"messages":[{"role":"user","content":%b}]}' % content.encode()
    assert edited(body, mark_root=True, mark_end=True) == ""


@pytest.mark.parametrize("body", [b"", b"[]", b'{"system":"a","system":"b"}', b'{"messages":[{"a":1,"a":2}]}', b"{"])
def test_what_can_not_be_read_stays(body: bytes) -> None:
    assert edited(body, mark_root=True, mark_end=True, ttl="1h") == ""


def test_there_are_never_more_than_four_marks() -> None:
    text = {"type": "text", "text": "a", "cache_control": SHORT}
    body = json.dumps({"system": "s", "messages": [{"role": "user", "content": [text] * 4}]}).encode()
    assert edited(body, mark_root=True) == ""


# ---------------------------------------------------------------- any body, any plan

PLANS = st.builds(
    CachePlan,
    ttl=st.sampled_from(["", "5m", "1h"]),
    root_ttl=st.sampled_from(["", "5m", "1h"]),
    mark_root=st.booleans(),
    mark_end=st.booleans(),
)
MARKS = st.sampled_from([None, None, None, {**SHORT, "ttl": "5m"}, SHORT, LONG])
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    def block(kind: str) -> dict[str, Any]:
        inner = [block("text")] if kind == "tool_result" and draw(st.booleans()) else draw(TEXT)
        made = {"tool": {"name": inner, "input_schema": {}}, "text": {"type": "text", "text": inner}}.get(kind)
        made, mark = made or {"type": kind, "tool_use_id": "t", "content": inner}, draw(MARKS)
        return made if mark is None else {**made, "cache_control": mark}

    def content() -> Any:
        kinds = draw(st.lists(st.sampled_from(["text", "tool_result"]), max_size=3))
        return draw(TEXT) if draw(st.booleans()) else [block(kind) for kind in kinds]

    body: dict[str, Any] = {"model": "claude-sonnet-5-5", "max_tokens": 9}
    if draw(st.booleans()):
        body["tools"] = [block("tool") for _ in range(draw(st.integers(0, 2)))]
    if draw(st.booleans()):
        body["system"] = draw(TEXT) if draw(st.booleans()) else [block("text")]
    roles = ["user", "assistant", "user"][: draw(st.integers(1, 3))]
    body["messages"] = [{"role": role, "content": content()} for role in roles]
    return body if draw(st.integers(0, 5)) else {**body, "cache_control": SHORT}


def plain(value: Any, inside: str = "") -> Any:
    """Without marks, and with texts that stand alone as blocks."""
    if isinstance(value, str) and inside in ("system", "content"):
        return [{"type": "text", "text": value}]
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {name: plain(one, name) for name, one in value.items() if name != "cache_control"}
    return value


def is_within(part: bytes, whole: bytes) -> bool:
    rest = iter(whole)
    return all(byte in rest for byte in part)


def flattened(content: Any) -> Any:
    if isinstance(content, str):
        return content
    found = []
    for block in content:
        found += [*(flattened(block["content"]) if isinstance(block.get("content"), list) else ()), block]
    return found


def valid(body: dict[str, Any]) -> bool:
    """Whether the provider takes its marks, those within results included."""
    spec = find_model("claude-sonnet-5-5")
    assert spec is not None
    messages = [{"role": one["role"], "content": flattened(one["content"])} for one in body["messages"]]
    try:
        plan_cache({**body, "messages": messages}, spec)
    except ApiError:
        return False
    return True


@given(bodies(), PLANS, st.booleans(), st.booleans())
def test_only_what_is_documented_changes(body: dict[str, Any], plan: CachePlan, ascii_only: bool, spaced: bool) -> None:
    text = json.dumps(body, separators=None if spaced else (",", ":"), ensure_ascii=ascii_only).encode()
    found = EDITS.edited(text, plan)
    if found is None:
        return
    after = json.loads(found.body)
    assert plain(after) == plain(body)
    assert is_within(text.replace(b'"5m"', b""), found.body)
    assert found.edits
    if valid(body):
        assert valid(after), found.edits
    again = EDITS.edited(found.body, plan)
    assert again is None, again.edits


# ---------------------------------------------------------------- pings


def test_a_ping_asks_for_no_output() -> None:
    assert EDITS.ping(BODY) == BODY.replace(b'"max_tokens": 9', b'"max_tokens":0')


@pytest.mark.parametrize(
    "more",
    [
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"tool_choice": {"type": "any"}},
        {"tool_choice": {"type": "tool", "name": "t"}},
        {"output_format": {"type": "json_schema"}},
        {"output_config": {"format": {"type": "json_schema"}}},
    ],
)
def test_what_a_provider_refuses_with_no_output_has_no_ping(more: dict[str, Any]) -> None:
    assert EDITS.ping(json.dumps({**json.loads(BODY), **more}).encode()) is None


def test_thinking_that_adapts_and_a_free_choice_have_one() -> None:
    more = {"thinking": {"type": "adaptive"}, "tool_choice": {"type": "auto"}, "output_config": {"effort": "low"}}
    assert EDITS.ping(json.dumps({**json.loads(BODY), **more}).encode()) is not None
    assert EDITS.ping(b"[]") is None


def test_which_errors_may_be_due_to_an_edit() -> None:
    refusal = b'{"error":{"message":"A maximum of 4 blocks with cache_control may be provided."}}'
    assert EDITS.blamed(400, refusal)
    assert not EDITS.blamed(429, refusal)
    assert not EDITS.blamed(400, b'{"error":{"message":"messages: too long"}}')
