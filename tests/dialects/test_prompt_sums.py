"""Where prompts are cut into prefixes, and what counts as equal."""

from __future__ import annotations

import json
from typing import Any

import pytest

from carpool.core.model import Headers
from carpool.core.ports import PromptSums, RawRequest
from carpool.dialects import ANTHROPIC, OPENAI

KEY = (("x-api-key", "k"), ("authorization", "Bearer k"), ("anthropic-version", "2023-06-01"))
MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
SYSTEM = [{"type": "text", "text": "Be brief."}]
TOOLS = [{"name": "look", "input_schema": {"type": "object"}}]


def user(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text, **more}]}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


def sums(*messages: Any, headers: Headers = (), space: bool = False, **more: Any) -> PromptSums:
    body = {"model": "m", "max_tokens": 9, "system": SYSTEM, "tools": TOOLS, **more, "messages": list(messages)}
    text = json.dumps(body, separators=None if space else (",", ":")).encode()
    found = ANTHROPIC.prompt_sums(ANTHROPIC.parse(RawRequest("POST", "/v1/messages", "", (*KEY, *headers), text)))
    assert found is not None
    return found


def root(found: PromptSums) -> tuple[int, int]:
    return found.root, found.root_bytes


def parent(found: PromptSums) -> tuple[int, int]:
    return found.parent, found.parent_bytes


def end(found: PromptSums) -> tuple[int, int]:
    return found.end, found.end_bytes


# ---------------------------------------------------------------- turns


def test_a_turn_continues_the_prompt_of_the_turn_before() -> None:
    first = sums(user("a"))
    second = sums(user("a"), answer("b"), user("c"))
    third = sums(user("a"), answer("b"), user("c"), answer("d"), user("e"))
    assert parent(first) == (0, 0)
    assert parent(second) == end(first)
    assert parent(third) == end(second)
    assert root(first) == root(second) == root(third)
    assert root(first)[1] < end(first)[1] < end(second)[1] < end(third)[1]


def test_an_answer_in_several_messages_counts_as_one() -> None:
    assert parent(sums(user("a"), answer("b"), answer("c"), user("d"), user("e"))) == end(sums(user("a")))


def test_a_prompt_that_ends_with_the_begin_of_its_answer() -> None:
    assert parent(sums(user("a"), answer("b"), user("c"), answer("{"))) == end(sums(user("a"), answer("b"), user("c")))


def test_no_turn_at_all() -> None:
    found = sums()
    assert end(found) == root(found)
    assert parent(found) == (0, 0)


def test_another_history_is_another_parent() -> None:
    assert parent(sums(user("A"), answer("b"), user("c"))) != end(sums(user("a")))


# ---------------------------------------------------------------- what counts


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "other"},
        {"system": "Be brief."},
        {"tools": [{"input_schema": {"type": "object"}, "name": "look"}]},  # another order of names
        {"thinking": {"type": "adaptive"}},
        {"output_config": {"effort": "low"}},
        {"context_management": {}},
        {"speed": "fast"},
    ],
)
def test_what_everything_depends_on_is_in_the_root(changes: dict[str, Any]) -> None:
    assert sums(user("a")).root != sums(user("a"), **changes).root
    assert sums(user("a")).end != sums(user("a"), **changes).end


def test_betas_count_as_a_set() -> None:
    one, other = sums(headers=(("anthropic-beta", "x,y"),)), sums(headers=(("anthropic-beta", "y,x"),))
    assert root(one) == root(other) != root(sums())


@pytest.mark.parametrize("changes", [{"max_tokens": 1}, {"stream": True}, {"metadata": {"user_id": "u"}}])
def test_other_options_do_not_count(changes: dict[str, Any]) -> None:
    assert sums(user("a")) == sums(user("a"), **changes)


@pytest.mark.parametrize("space", [False, True])
def test_cache_marks_do_not_count_wherever_they_stand(space: bool) -> None:
    marked = sums(
        user("a", **MARK),
        answer("b"),
        {"role": "user", "content": [{**MARK, "type": "text", "text": "c"}]},
        system=[{**SYSTEM[0], **MARK}],
        tools=[{"name": "look", **MARK, "input_schema": {"type": "object"}}],
        space=space,
    )
    assert marked == sums(user("a"), answer("b"), user("c"), space=space)


def test_a_mark_that_is_only_told_of_stays() -> None:
    told = '"cache_control":{"type":"ephemeral"}'
    assert sums(user(told, **MARK)) == sums(user(told))
    assert sums(user(told)).end_bytes > sums(user("")).end_bytes + len(told)


def test_the_block_that_changes_with_every_request_does_not_count() -> None:
    def with_block(value: str) -> PromptSums:
        return sums(system=[{"type": "text", "text": f"x-anthropic-billing-header: cch={value};"}, *SYSTEM])

    assert with_block("1") == with_block("22") == sums()


def test_long_texts_count_to_the_last_byte() -> None:
    text = "x" * 20_000
    assert sums(user(text + "a")).end != sums(user(text + "b")).end
    assert sums(user("a" + text)).end != sums(user("b" + text)).end


# ---------------------------------------------------------------- OpenAI


def of_openai(path: str, **body: Any) -> PromptSums:
    raw = RawRequest("POST", path, "", KEY, json.dumps({"model": "m", **body}).encode())
    found = OPENAI.prompt_sums(OPENAI.parse(raw))
    assert found is not None
    return found


def test_a_chat_continues_and_its_system_prompt_is_the_root() -> None:
    system, asked = {"role": "system", "content": "s"}, {"role": "user", "content": "a"}
    said, more = {"role": "assistant", "content": "b"}, {"role": "tool", "tool_call_id": "1", "content": "c"}
    first = of_openai("/v1/chat/completions", messages=[system, asked])
    second = of_openai("/v1/chat/completions", messages=[system, asked, said, more])
    assert parent(second) == end(first)
    assert root(second) == root(first) == end(of_openai("/v1/chat/completions", messages=[system]))


def test_a_response_continues_after_calls_and_reasoning() -> None:
    asked = {"role": "user", "content": "a"}
    said = [{"type": "reasoning", "summary": []}, {"type": "function_call", "call_id": "1", "name": "f"}]
    more = {"type": "function_call_output", "call_id": "1", "output": "b"}
    first = of_openai("/v1/responses", instructions="i", input=[asked])
    second = of_openai("/v1/responses", instructions="i", input=[asked, *said, more])
    assert parent(second) == end(first)
    assert root(second) == root(first)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "text"}),
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/v1/completions", {"prompt": "p"}),
        ("/v1/responses", {"prompt": {"id": "stored"}}),
        ("/v1/chat/completions", {"messages": 12345678901234567890123}),
        ("/v1/chat/completions", {"messages": [1, None, {"role": []}, {"type": {}}]}),
    ],
)
def test_a_prompt_that_is_no_conversation_has_an_end(path: str, body: dict[str, Any]) -> None:
    found = of_openai(path, **body)
    assert parent(found) == (0, 0)
    assert found.end_bytes > found.root_bytes == 0
