"""What to change in a request for the sake of the prompt cache.

The plan here is the one that needs no forecast: it decides only what pays whatever comes.

- In a batch, marks of 5 minutes become marks of an hour: batches commonly take longer than 5 minutes, so a shorter mark
  is paid and not read.
- On `now`, a conversation that goes on and marks nothing gets marks of 5 minutes: its next turn reads what this one
  writes. A first turn is left alone, since it may be the only one.

Modes `off` and `observe` never change anything.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from carpool.core.model import CacheMark, CachePlan, CachingMode, Call, Lane, PromptChain

UNCHANGED: Final = CachePlan()
BYTES_A_TOKEN: Final = 5  # more than nearly all prompts have: a prompt of so many bytes reaches the minimum
LONG: Final = "1h"


def plan_for(call: Call, lane: Lane, least_tokens: int | None) -> CachePlan:
    """`least_tokens`: a shorter prefix is not cached; None if that is not known."""
    prompt = call.prompt
    if call.caching is not CachingMode.PLAN or prompt is None or prompt.implicit:
        return UNCHANGED
    if lane is Lane.BATCH:
        return CachePlan(ttl=LONG) if prompt.marks else UNCHANGED
    if prompt.marks or prompt.parent is None or least_tokens is None:
        return UNCHANGED
    enough = least_tokens * BYTES_A_TOKEN
    return CachePlan(mark_root=prompt.size(prompt.root) >= enough, mark_end=prompt.size(-1) >= enough)


def marked(prompt: PromptChain, plan: CachePlan) -> PromptChain:
    """A prompt with the marks that it has after the edits of a plan."""
    if plan == UNCHANGED:
        return prompt
    root, last = prompt.root, len(prompt.positions) - 1
    marks = [
        replace(mark, ttl=LONG) if LONG in (plan.ttl, plan.root_ttl if mark.position <= root else "") else mark
        for mark in prompt.marks
    ]
    if plan.mark_root and root and not any(mark.position <= root for mark in marks):
        marks.insert(0, CacheMark(root, plan.root_ttl or plan.ttl))
    if plan.mark_end and not any(mark.position > root for mark in marks):
        marks.append(CacheMark(last, plan.ttl))
    return replace(prompt, marks=tuple(marks))
