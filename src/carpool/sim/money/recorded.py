"""The record of calls, made ready to be replayed: what each call asked and cost, and which calls belong together.

A store keeps a shape of each call and the purchases made for it. A call counts here if one of its purchases answered
it; calls that were refused or that nobody answered used nothing that could be replayed.

A *conversation* is a chain of calls, each of which came after the answer to the one before, with a prompt that begins
with the one before. Nothing names it in the record: it is found by the hashes of prefixes. So a client that rewrites
its history, as when it compacts it, begins a new conversation, and a fork runs beside the one that it left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from carpool.core.model import EntryKind, Lane, Prefixes, RecordedPurchase, Usage

CLOCK_S: Final = 1.0  # a client may have the whole answer a moment before its end is recorded

Conversation = Sequence["RecordedCall"]


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One answered call. `paid` sums up all that was bought for it; None if a part of that is unknown."""

    ticket: int
    arrived: float
    answered: float | None
    provider: str
    credential: str
    model: str
    client: str
    tags: Mapping[str, str]
    prefixes: Prefixes | None
    usage: Usage  # of the purchase that answered it
    lane: Lane  # of that purchase
    now_s: float | None  # how long its answer took, if that came from `now` or `flex` and is known
    budget_s: float | None
    max_output_tokens: int
    tool_turn: bool
    weight: int
    paid: int | None


def calls_of(pages: Iterable[Sequence[RecordedPurchase]]) -> list[RecordedCall]:
    """The answered calls of a record, by arrival. All purchases of a call stand next to each other."""
    calls = []
    for page in pages:
        for _, purchases in groupby(page, lambda purchase: purchase.entry.ticket):
            if (call := _call(list(purchases))) is not None:
                calls.append(call)
    return sorted(calls, key=lambda call: (call.arrived, call.ticket))


def _call(purchases: Sequence[RecordedPurchase]) -> RecordedCall | None:
    answering = [one for one in purchases if one.entry.usage is not None and one.entry.kind is not EntryKind.DUPLICATE]
    if not answering:
        return None
    shape, entry = answering[-1].call, answering[-1].entry
    assert entry.usage is not None
    amounts = [one.entry.paid for one in purchases]
    return RecordedCall(
        ticket=shape.ticket,
        arrived=shape.arrived,
        answered=answering[-1].answered,
        provider=entry.provider,
        credential=entry.credential,
        model=entry.model,
        client=shape.client,
        tags=entry.tags,
        prefixes=shape.prefixes,
        usage=entry.usage,
        lane=entry.lane,
        now_s=None if entry.lane is Lane.BATCH else shape.seconds,
        budget_s=None if shape.deadline is None else max(0.0, shape.deadline - shape.arrived),
        max_output_tokens=shape.max_output_tokens,
        tool_turn=shape.tool_turn,
        weight=shape.weight,
        paid=sum(amount for amount in amounts if amount is not None) if None not in amounts else None,
    )


def conversations(calls: Iterable[RecordedCall]) -> list[Conversation]:
    """The chains of calls, by their first arrival. A call that stands alone is a conversation of one."""
    found: list[list[RecordedCall]] = []
    ends: dict[tuple[str, str, int], list[list[RecordedCall]]] = defaultdict(list)  # where a conversation may go on
    for call in calls:
        own = _continued(call, ends)
        if own is None:
            own = []
            found.append(own)
        own.append(call)
        if call.prefixes is not None:
            ends[call.provider, call.credential, call.prefixes.end].append(own)
    return list(found)


def _continued(
    call: RecordedCall, ends: Mapping[tuple[str, str, int], list[list[RecordedCall]]]
) -> list[RecordedCall] | None:
    """The conversation that a call goes on with: of those that ended in its parent and were answered by then, the
    latest. Each end is continued once."""
    if call.prefixes is None or call.prefixes.parent is None:
        return None
    waiting = ends.get((call.provider, call.credential, call.prefixes.parent), [])
    for position in reversed(range(len(waiting))):
        answered = waiting[position][-1].answered
        if answered is not None and answered <= call.arrived + CLOCK_S:
            return waiting.pop(position)
    return None
