"""Edits of a Messages request for the prompt cache: marks are added, and the lives of marks are extended.

The provider wants at most four marks, and none with a longer life after one with a shorter life. So a longer life in
the messages also holds for tools and system prompt, and a new mark never breaks the order. A mark is added at the end
of tools and system prompt, and at the end of the last message, each only where the client marks nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from carpool.core.errors import BadCall
from carpool.core.model import CachePlan
from carpool.core.ports import EditedBody
from carpool.dialects import json_object
from carpool.dialects.json_object import Span, element_spans, spliced, value_spans

MAX_MARKS: Final = 4
SHORT, LONG = "5m", "1h"
_MARK: Final = "cache_control"
_UNMARKABLE: Final = frozenset({"thinking", "redacted_thinking"})
_BLAMED: Final = (b"cache_control", b"ttl", b"breakpoint", b"ephemeral")
_decode = msgspec.json.Decoder().decode
_TEXTS: Final = {SHORT: b'{"type":"ephemeral"}', LONG: b'{"type":"ephemeral","ttl":"1h"}'}


@dataclass(slots=True)
class _Mark:
    """A mark of the client, in the order of the prompt."""

    where: Span
    ttl: str
    in_root: bool


class MessagesCacheEdits:
    """`ports.CacheEdits`."""

    def edited(self, body: bytes, plan: CachePlan) -> EditedBody | None:
        try:
            return _Editor(body).edit(plan)
        except (BadCall, msgspec.DecodeError, RecursionError):  # the provider says best what is wrong with it
            return None

    def ping(self, body: bytes) -> bytes | None:
        try:
            document = json_object.read(body)
            values = document.values
            thinking, choice, config = (
                _object(values.get(name)) for name in ("thinking", "tool_choice", "output_config")
            )
            if thinking.get("type") == "enabled" or choice.get("type") in ("any", "tool"):
                return None
            if config.get("format") or values.get("output_format") or "max_tokens" not in values:
                return None
            return document.having("max_tokens", b"0")
        except BadCall:
            return None

    def blamed(self, status: int, body: bytes) -> bool:
        return status == 400 and any(word in body for word in _BLAMED)


class _Editor:
    def __init__(self, body: bytes) -> None:
        self._body = body
        self._members = value_spans(body, Span(0, len(body)))
        self._marks: list[_Mark] = []
        for name in ("tools", "system", "messages"):
            if name in self._members:
                self._collect(name)
        if _MARK in self._members:
            self._found(self._members[_MARK], in_root=False)
        self._splices: list[tuple[int, int, bytes]] = []

    # ------------------------------------------------------------ the client's marks

    def _collect(self, name: str) -> None:
        for where in self._list(self._members[name]):
            block = self._object(where)
            if name == "messages":
                for inner in self._list(block.get("content")):
                    self._collect_block(self._object(inner), in_root=False)
            else:
                self._collect_block(block, in_root=True)

    def _collect_block(self, block: dict[str, Span], *, in_root: bool) -> None:
        for inner in self._list(block.get("content")):
            self._collect_block(self._object(inner), in_root=in_root)
        if _MARK in block:
            self._found(block[_MARK], in_root=in_root)

    def _found(self, where: Span, *, in_root: bool) -> None:
        mark = _decode(where.of(self._body))
        if isinstance(mark, dict):
            self._marks.append(_Mark(where, LONG if mark.get("ttl") == LONG else SHORT, in_root))

    def _list(self, where: Span | None) -> list[Span]:
        return element_spans(self._body, where) if where is not None and self._begins(where, b"[") else []

    def _object(self, where: Span) -> dict[str, Span]:
        return value_spans(self._body, where) if self._begins(where, b"{") else {}

    def _begins(self, where: Span, bracket: bytes) -> bool:
        return self._body.startswith(bracket, where.start)

    # ------------------------------------------------------------ edits

    def edit(self, plan: CachePlan) -> EditedBody | None:
        edits = [*self._extend(plan), *self._add(plan)]
        return EditedBody(spliced(self._body, self._splices), ", ".join(edits)) if edits else None

    def _extend(self, plan: CachePlan) -> Iterator[str]:
        """Extends lives. A life in the messages holds for all before them."""
        extended = 0
        for mark in self._marks:
            if mark.ttl == SHORT and LONG in (plan.ttl, plan.root_ttl if mark.in_root else ""):
                self._set_ttl(mark.where)
                mark.ttl = LONG
                extended += 1
        if extended:
            yield f"{extended} marks for 1h" if extended > 1 else "1 mark for 1h"

    def _set_ttl(self, where: Span) -> None:
        members = value_spans(self._body, where)
        if "ttl" in members:
            self._splices.append((*members["ttl"], b'"1h"'))
        else:
            last = max(span.end for span in members.values())
            self._splices.append((last, last, b',"ttl":"1h"'))

    def _add(self, plan: CachePlan) -> Iterator[str]:
        room = MAX_MARKS - len(self._marks)
        later = [mark.ttl for mark in self._marks if not mark.in_root]
        if plan.mark_root and room and not any(mark.in_root for mark in self._marks):
            ttl = LONG if LONG in (plan.ttl, plan.root_ttl, *later) else SHORT
            if place := self._mark_root(ttl):
                self._marks.insert(0, _Mark(Span(0, 0), ttl, in_root=True))
                room -= 1
                yield f"a mark on {place} for {ttl}"
        if plan.mark_end and room and not later:
            earlier = {mark.ttl for mark in self._marks}
            ttl = LONG if plan.ttl == LONG and SHORT not in earlier else SHORT
            if self._mark_end(ttl):
                yield f"a mark on the last message for {ttl}"

    def _mark_root(self, ttl: str) -> str:
        """What was marked; empty if nothing can be."""
        for name, place in (("system", "the system prompt"), ("tools", "the tools")):
            if name in self._members and self._mark_last(self._members[name], ttl):
                return place
        return ""

    def _mark_end(self, ttl: str) -> bool:
        messages = self._list(self._members.get("messages"))
        last = self._object(messages[-1]) if messages else {}
        return "content" in last and self._mark_last(last["content"], ttl)

    def _mark_last(self, content: Span, ttl: str) -> bool:
        """Marks the last block of some content; a text that stands alone becomes a block."""
        if self._begins(content, b'"'):
            if len(content.of(self._body)) == 2:
                return False  # an empty text can't be marked
            mark = b',"cache_control":%b}]' % _TEXTS[ttl]
            self._splices += [
                (content.start, content.start, b'[{"type":"text","text":'),
                (content.end, content.end, mark),
            ]
            return True
        blocks = self._list(content)
        members = self._object(blocks[-1]) if blocks else {}
        values = _object(_decode(blocks[-1].of(self._body))) if members else {}
        if not values or _MARK in values or values.get("type") in _UNMARKABLE or values.get("text") == "":
            return False
        end = max(span.end for span in members.values())
        self._splices.append((end, end, b',"cache_control":%b' % _TEXTS[ttl]))
        return True


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
