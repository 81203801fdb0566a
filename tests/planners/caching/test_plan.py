"""What is changed in a request for the prompt cache, and what the index then expects."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from carpool.core.model import CacheMark, CachePlan, CachingMode, Call, Lane, PromptChain
from carpool.core.ports import RawRequest
from carpool.dialects import ANTHROPIC
from carpool.dialects.anthropic.caching import MessagesCacheEdits
from carpool.planners.caching.plan import BYTES_A_TOKEN, UNCHANGED, marked, plan_for

LARGE = 512 * BYTES_A_TOKEN
PROMPT = PromptChain((0, LARGE << 32, (LARGE + 9) << 32, (LARGE + 99) << 32), (), 1, 2, 7)
CALL = Call(
    ticket=1, provider="p", dialect="d", endpoint="/e", body=b"", headers=(), credential="c", model="m", arrived=0.0,
    caching=CachingMode.PLAN, prompt=PROMPT,
)  # fmt: skip
MARKED = replace(PROMPT, marks=(CacheMark(1, ""),))


@pytest.mark.parametrize("mode", [None, CachingMode.OFF, CachingMode.OBSERVE])
@pytest.mark.parametrize("lane", Lane)
@pytest.mark.parametrize("prompt", [PROMPT, MARKED, None])
def test_other_modes_change_nothing(mode: CachingMode | None, lane: Lane, prompt: PromptChain | None) -> None:
    assert plan_for(replace(CALL, caching=mode, prompt=prompt), lane, 512) == UNCHANGED


def test_a_conversation_that_goes_on_is_marked_on_now() -> None:
    assert plan_for(CALL, Lane.NOW, 512) == CachePlan(mark_root=True, mark_end=True)
    small = replace(PROMPT, positions=(0, 9 << 32, 99 << 32, LARGE << 32))
    assert plan_for(replace(CALL, prompt=small), Lane.NOW, 512) == CachePlan(mark_end=True)


@pytest.mark.parametrize(
    ("prompt", "least"),
    [(MARKED, 512), (replace(PROMPT, parent=None), 512), (PROMPT, None), (None, 512), (PROMPT, 9999)],
)
def test_what_is_left_alone_on_now(prompt: PromptChain | None, least: int | None) -> None:
    assert plan_for(replace(CALL, prompt=prompt), Lane.NOW, least) == UNCHANGED


def test_marks_live_for_an_hour_in_a_batch() -> None:
    assert plan_for(replace(CALL, prompt=MARKED), Lane.BATCH, 512) == CachePlan(ttl="1h")
    assert plan_for(CALL, Lane.BATCH, 512) == UNCHANGED
    assert plan_for(replace(CALL, prompt=replace(MARKED, implicit=True)), Lane.BATCH, 512) == UNCHANGED


MARK = {"cache_control": {"type": "ephemeral"}}
BODIES: list[dict[str, Any]] = [
    {"system": "s", "messages": [{"role": "user", "content": "a"}]},
    {"system": [{"type": "text", "text": "s", **MARK}], "messages": [{"role": "user", "content": "a"}]},
    {"tools": [{"name": "t"}], "messages": [{"role": "user", "content": [{"type": "text", "text": "a", **MARK}]}]},
    {**MARK, "messages": [{"role": "user", "content": "a"}]},
]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(
    "plan",
    [
        UNCHANGED,
        CachePlan(ttl="1h"),
        CachePlan(root_ttl="1h"),
        CachePlan(mark_root=True, mark_end=True),
        CachePlan(mark_root=True, mark_end=True, ttl="1h"),
        CachePlan(mark_root=True, root_ttl="1h"),
    ],
)
def test_the_index_expects_the_marks_that_are_sent(body: dict[str, Any], plan: CachePlan) -> None:
    def chain(text: bytes) -> PromptChain:
        found = ANTHROPIC.prompt_chain(
            ANTHROPIC.parse(RawRequest("POST", "/v1/messages", "", (("x-api-key", "k"),), text))
        )
        assert found is not None
        return found

    text = json.dumps({"model": "m", "max_tokens": 9, **body}).encode()
    edited = MessagesCacheEdits().edited(text, plan)
    sent = chain(text if edited is None else edited.body)
    known = {mark.position: mark.ttl or "5m" for mark in marked(chain(text), plan).marks}
    assert known == {mark.position: mark.ttl or "5m" for mark in sent.marks}
    assert sent.positions == chain(text).positions
