"""Where prompts are cut into prefixes, and what counts as equal."""

from __future__ import annotations

import json
from typing import Any

import pytest

from carpool.core.model import CacheMark, Headers, PromptChain
from carpool.core.ports import RawRequest
from carpool.dialects import ANTHROPIC, OPENAI

KEY = (("x-api-key", "k"), ("authorization", "Bearer k"), ("anthropic-version", "2023-06-01"))
MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
SYSTEM = [{"type": "text", "text": "Be brief."}]
TOOLS = [{"name": "look", "input_schema": {"type": "object"}}]


def user(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text, **more}]}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


def sums(*messages: Any, headers: Headers = (), space: bool = False, **more: Any) -> PromptChain:
    body = {"model": "m", "max_tokens": 9, "system": SYSTEM, "tools": TOOLS, **more, "messages": list(messages)}
    text = json.dumps(body, separators=None if space else (",", ":")).encode()
    found = ANTHROPIC.prompt_chain(ANTHROPIC.parse(RawRequest("POST", "/v1/messages", "", (*KEY, *headers), text)))
    assert found is not None
    return found


def root(found: PromptChain) -> int:
    return found.positions[found.root]


def parent(found: PromptChain) -> int | None:
    return None if found.parent is None else found.positions[found.parent]


def end(found: PromptChain) -> int:
    return found.positions[-1]


# ---------------------------------------------------------------- turns


def test_a_turn_continues_the_prompt_of_the_turn_before() -> None:
    first = sums(user("a"))
    second = sums(user("a"), answer("b"), user("c"))
    third = sums(user("a"), answer("b"), user("c"), answer("d"), user("e"))
    assert parent(first) is None
    assert parent(second) == end(first)
    assert parent(third) == end(second)
    assert root(first) == root(second) == root(third)
    assert root(first) < end(first) < end(second) < end(third)


def test_an_answer_in_several_messages_counts_as_one() -> None:
    assert parent(sums(user("a"), answer("b"), answer("c"), user("d"), user("e"))) == end(sums(user("a")))


def test_a_prompt_that_ends_with_the_begin_of_its_answer() -> None:
    assert parent(sums(user("a"), answer("b"), user("c"), answer("{"))) == end(sums(user("a"), answer("b"), user("c")))


def test_no_turn_at_all() -> None:
    found = sums()
    assert end(found) == root(found)
    assert parent(found) is None


def test_another_history_is_another_parent() -> None:
    assert parent(sums(user("A"), answer("b"), user("c"))) != end(sums(user("a")))


# ---------------------------------------------------------------- what counts


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "other"},
        {"system": "Be briefer."},
        {"tools": [{"input_schema": {"type": "object"}, "name": "look"}]},  # another order of names
        {"thinking": {"type": "adaptive"}},
        {"output_config": {"effort": "low"}},
        {"context_management": {}},
        {"speed": "fast"},
    ],
)
def test_what_everything_depends_on_is_in_the_root(changes: dict[str, Any]) -> None:
    assert root(sums(user("a"))) != root(sums(user("a"), **changes))
    assert end(sums(user("a"))) != end(sums(user("a"), **changes))


def test_what_matters_from_the_messages_on() -> None:
    first, image = user("a"), user("b", source={"type": "image"})
    plain, forced, with_image = sums(first), sums(first, tool_choice={"type": "any"}), sums(first, image)
    assert root(plain) == root(forced) == root(with_image)
    assert len({plain.positions[3], forced.positions[3], with_image.positions[3]}) == 3


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
    assert marked.positions == sums(user("a"), answer("b"), user("c"), space=space).positions
    assert marked.marks == tuple(CacheMark(position, "1h") for position in (1, 2, 3, 5))


def test_a_mark_that_is_only_told_of_stays() -> None:
    told = '"cache_control":{"type":"ephemeral"}'
    assert sums(user(told, **MARK)).positions == sums(user(told)).positions
    assert sums(user(told)).size(-1) == sums(user("")).size(-1) + len(told)


def test_the_block_that_changes_with_every_request_does_not_count() -> None:
    def with_block(value: str) -> PromptChain:
        return sums(system=[{"type": "text", "text": f"x-anthropic-billing-header: cch={value};"}, *SYSTEM])

    assert with_block("1") == with_block("22") == sums()


def test_long_texts_count_to_the_last_byte() -> None:
    text = "x" * 20_000
    assert end(sums(user(text + "a"))) != end(sums(user(text + "b")))
    assert end(sums(user("a" + text))) != end(sums(user("b" + text)))


def test_text_and_a_block_of_text_are_the_same() -> None:
    assert sums({"role": "user", "content": "a"}, system="Be brief.").positions == sums(user("a")).positions


def test_who_says_it_and_where_a_block_ends_count() -> None:
    two = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    ends = {end(sums(one)) for one in (user("ab"), answer("ab"), {"role": "user", "content": two})}
    assert len(ends) == 3
    assert end(sums({"role": "user", "content": two})) == end(sums(user("a"), user("b")))


def test_an_automatic_mark_is_on_the_last_block() -> None:
    assert sums(user("a"), **MARK).marks == (CacheMark(3, "1h"),)
    assert sums(user("a", **MARK), cache_control={"type": "ephemeral"}).marks == (CacheMark(3, "1h"),)


def test_a_mark_within_a_result_is_on_its_block() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "c", **MARK}]}
    plain = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "c"}]}
    marked = sums({"role": "user", "content": [result]})
    assert marked.marks == (CacheMark(3, "1h"),)
    assert marked.positions == sums({"role": "user", "content": [plain]}).positions


def test_a_conversation_has_one_number_with_marks_and_without() -> None:
    numbers = {
        sums(user("a")).conversation,
        sums(user("a", **MARK)).conversation,
        sums(user("a"), answer("b"), user("c")).conversation,
    }
    assert len(numbers) == 1
    assert sums(user("b")).conversation not in numbers


def test_a_number_that_can_not_be_read() -> None:
    raw = RawRequest(
        "POST", "/v1/messages", "", KEY, b'{"model":"m","max_tokens":9,"messages":[],"top_k":' + b"9" * 5000 + b"}"
    )
    assert ANTHROPIC.prompt_chain(ANTHROPIC.parse(raw)) is None


# ---------------------------------------------------------------- OpenAI


def of_openai(path: str, **body: Any) -> PromptChain:
    raw = RawRequest("POST", path, "", KEY, json.dumps({"model": "m", **body}).encode())
    found = OPENAI.prompt_chain(OPENAI.parse(raw))
    assert found is not None
    return found


def test_a_chat_continues_and_its_system_prompt_is_the_root() -> None:
    system, asked = {"role": "system", "content": "s"}, {"role": "user", "content": "a"}
    said, more = {"role": "assistant", "content": "b"}, {"role": "tool", "tool_call_id": "1", "content": "c"}
    first = of_openai("/v1/chat/completions", messages=[system, asked])
    second = of_openai("/v1/chat/completions", messages=[system, asked, said, more])
    assert parent(second) == end(first)
    assert root(second) == root(first) == end(of_openai("/v1/chat/completions", messages=[system]))


def test_openai_caches_without_marks_unless_told_otherwise() -> None:
    asked = {
        "role": "user",
        "content": [{"type": "text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}}],
    }
    plain = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    path, explicit = "/v1/chat/completions", {"prompt_cache_options": {"mode": "explicit"}}
    assert of_openai(path, messages=[plain]).implicit
    assert not of_openai(path, messages=[plain], **explicit).implicit
    assert of_openai(path, messages=[asked], **explicit).marks == (CacheMark(1, ""),)
    assert of_openai(path, messages=[asked]).positions == of_openai(path, messages=[plain]).positions


def test_a_chat_has_one_number() -> None:
    system, asked, said = ({"role": role, "content": role} for role in ("system", "user", "assistant"))
    path = "/v1/chat/completions"
    first, second = of_openai(path, messages=[system, asked]), of_openai(path, messages=[system, asked, said, asked])
    assert first.conversation == second.conversation
    assert of_openai(path, messages=[system, said]).conversation != first.conversation


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
    assert parent(found) is None
    assert found.size(-1) > found.size(0) == 0
