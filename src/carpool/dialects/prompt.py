"""Prompts as hash chains: what two prompts have in common from their beginning on.

A provider reuses what it computed for an earlier prompt as far as a new prompt begins with the same content. So a
prompt is a chain of positions: first the settings on which everything depends, then every tool, every block of the
system prompt and every block of the messages. Each position stands for all content up to its end. Two prompts that
have a position in common share a prefix; no tree is needed to find it.

A position is told by a CRC-32 of all content before its end and by the size of that content. A CRC takes a fifth of
the time of a cryptographic hash. Whether two positions are equal only decides about money, and never across
workspaces: `planners.caching.index` and `engine.recording` add what isolates them.

Content counts as the client sent it: the order of names matters to providers, too, and is kept. White space between
JSON tokens does not count, nor does it matter whether a text stands alone or in a block. Cache marks don't count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any
from zlib import crc32

import msgspec

from carpool.core.model import CacheMark, PromptChain

_encode = msgspec.json.Encoder().encode
_PIECE = 5_000  # `crc32` releases the GIL above 5 KB, and getting it back may take longer than the sum
_SHORT = 2_000
_END = 800


class ChainBuilder:
    """Builds a chain piece by piece. `mark` is the name of the member that marks a block for the cache."""

    def __init__(self, head: bytes, mark: str) -> None:
        self._checksum, self._size = crc32(head), 0
        self._mark = mark
        self._positions: list[int] = []
        self._marks: list[CacheMark] = []

    def __len__(self) -> int:
        return len(self._positions)

    def at(self, index: int) -> int:
        return self._positions[index]

    def setting(self, value: Any) -> None:
        """Something that all later positions depend on."""
        self._add(_encode(value))

    def end_settings(self) -> None:
        """The first position: no content yet."""
        self._positions.append(self._size << 32 | self._checksum)

    def block(self, kind: str, block: Any) -> None:
        """One position. `kind` is what a provider tells apart: tools, system prompt, roles."""
        if type(block) is str:
            text = block.encode("utf-8", "surrogatepass")
        elif type(block) is dict:
            kind, text = self._read(kind, block)
        else:
            kind, text = f"{kind}{{", _encode(block)
        self._checksum = crc32(f"{kind} {len(text)} ".encode("utf-8", "surrogatepass"), self._checksum)
        self._add(text)
        self._positions.append(self._size << 32 | self._checksum)

    def _add(self, text: bytes) -> None:
        size = len(text)
        self._size += size
        if size <= _PIECE:
            self._checksum = crc32(text, self._checksum)
            return
        view = memoryview(text)
        for start in range(0, size, _PIECE):
            self._checksum = crc32(view[start : start + _PIECE], self._checksum)

    def _read(self, kind: str, block: dict[str, Any]) -> tuple[str, bytes]:
        if self._mark in block:
            self._marked(block[self._mark], len(self._positions))
            block = _unmarked(block, self._mark)
        content = block.get("content")
        if type(content) is list and (inner := [one for one in content if type(one) is dict and self._mark in one]):
            self._marked(inner[-1][self._mark], len(self._positions))
            block = {**block, "content": [_unmarked(one, self._mark) for one in content]}
        if len(block) == 2 and block.get("type") == "text" and type(text := block.get("text")) is str:
            return kind, text.encode("utf-8", "surrogatepass")
        return f"{kind}{{", _encode(block)

    def _marked(self, mark: Any, position: int) -> None:
        if mark is not None:
            ttl = mark.get("ttl") if type(mark) is dict else None
            self._marks.append(CacheMark(position, ttl if type(ttl) is str else ""))

    def mark_end(self, mark: Any) -> None:
        """Marks the last position, unless it is marked already."""
        last = len(self._positions) - 1
        if not any(one.position == last for one in self._marks):
            self._marked(mark, last)

    def chain(self, root: int, parent: int | None, conversation: int, *, implicit: bool = False) -> PromptChain:
        return PromptChain(tuple(self._positions), tuple(self._marks), root, parent, conversation, implicit)


def _unmarked(block: Any, mark: str) -> Any:
    if type(block) is dict and mark in block:
        return {name: value for name, value in block.items() if name != mark}
    return block


def continued(turns: Sequence[bool]) -> int:
    """The number of turns before the last answer, which may consist of several; 0 if there is none. An agent sends its
    earlier prompt again, then the answer that it got, then what is new. So that is where the earlier prompt ended, and
    nothing must be remembered to find it. `turns` says of each turn whether it is an answer."""
    count = len(turns)
    while count and not turns[count - 1]:
        count -= 1
    while count and turns[count - 1]:
        count -= 1
    return count


def conversation_number(parts: Iterable[str]) -> int:
    """63 bits that tell a conversation by what all its turns have in common. Long texts are compared by their length
    and their ends only: this runs for every call, and a mistake only costs a discount."""
    text = "\0".join([part if len(part) <= _SHORT else _ends(part) for part in parts])
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _ends(text: str) -> str:
    return f"{len(text)} {text[:_END]}{text[-_END:]}"
