"""Where the prefixes of a prompt end that calls may share: for the record of calls, never for routing.

A provider reuses what it computed for an earlier prompt as far as a new prompt begins with the same bytes. So a prompt
is a chain: first what everything else depends on (model, options that change the prompt, tools, system prompt), called
its *root*, then the turns of the conversation. Three ends of that chain are told:

- the root: calls of one kind of agent share it;
- the parent: where the prompt of the turn before ended. An agent sends its earlier prompt again, then the answer that
  it got, then what is new. So that is before the last answer, and no earlier prompt must be remembered to find it;
- the end of the prompt.

Each is told by a CRC-32 of all bytes before it, which takes a fifth of the time of a cryptographic hash. The engine
makes a keyed hash of checksum and size (`engine.recording`). Bytes count as the client sent them: the order of names
matters to providers too. Cache marks (`cache_control`) move from turn to turn and do not count, nor does the block that
Claude Code changes with every request.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any
from zlib import crc32

import msgspec

from carpool.core.model import Headers
from carpool.core.ports import Document, Parsed, PromptSums
from carpool.dialects.anthropic.parse import VOLATILE

_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
_MARK_NAME = b'"cache_control"'
_MARK = re.compile(rb'"cache_control"\s*:\s*(?:null|\{[^{}]*\})\s*')
_COMMA = re.compile(rb",\s*")
_BEFORE_MARK = 8  # bytes in which the comma before a mark is looked for; clients write it with one space at most
_PIECE = 5_000  # `crc32` releases the GIL above 5 KB, and getting it back may take longer than the sum

_ANTHROPIC_ROOT = ("thinking", "output_config", "output_format", "speed", "context_management", "tools")
_OPENAI_ROOT = ("tools", "instructions", "reasoning", "reasoning_effort", "response_format", "text")
_SYSTEM_ROLES = frozenset({"system", "developer"})


class _Chain:
    """Checksum and size of the bytes so far."""

    __slots__ = ("bytes", "value")

    def __init__(self, head: bytes) -> None:
        self.value, self.bytes = crc32(head), 0

    def add(self, part: msgspec.Raw, blocks: Any = ()) -> None:
        """Adds a part without the cache marks of its blocks."""
        text: bytes | msgspec.Raw = part
        if isinstance(blocks, list):
            for block in blocks:
                if isinstance(block, dict) and "cache_control" in block:
                    text = _without_marks(bytes(part))
                    break
        size = len(text)
        self.bytes += size
        if size <= _PIECE:
            self.value = crc32(text, self.value)
            return
        view = memoryview(text)
        for start in range(0, size, _PIECE):
            self.value = crc32(view[start : start + _PIECE], self.value)


def anthropic(parsed: Parsed) -> PromptSums:
    document = parsed.document
    values, members = document.values, document.members
    chain = _Chain(_head(parsed.model, parsed.headers))
    for name in _ANTHROPIC_ROOT:
        if name in members:
            chain.add(members[name], values[name])
    if "system" in members:
        for part, block in _system(members["system"], values["system"]):
            chain.add(part, [block])
    return _sums(chain, *_turns(document, "messages"), _is_answer_of_anthropic)


def openai(parsed: Parsed) -> PromptSums:
    document = parsed.document
    chain = _Chain(_head(parsed.model, ()))
    for name in _OPENAI_ROOT:
        if name in document.members:
            chain.add(document.members[name])
    name = next((name for name in ("messages", "input", "prompt") if name in document.members), "messages")
    raws, turns = _turns(document, name)
    leading = 0
    while leading < len(turns) and _role(turns[leading]) in _SYSTEM_ROLES:
        chain.add(raws[leading])
        leading += 1
    return _sums(chain, raws[leading:], turns[leading:], _is_answer_of_openai)


@lru_cache(maxsize=256)  # a client sends the same headers with every call
def _head(model: str, headers: Headers) -> bytes:
    """What is shared only by calls of one model with the same betas."""
    betas = ",".join(value for name, value in headers if name == "anthropic-beta").split(",")
    return "\0".join([model, *sorted(betas)]).encode("utf-8", "surrogatepass")


def _system(raw: msgspec.Raw, system: Any) -> list[tuple[msgspec.Raw, Any]]:
    """The blocks of the system prompt, without the one that changes with every request."""
    if not isinstance(system, list):
        return [(raw, system)]
    blocks = zip(_ITEMS.decode(raw), system, strict=True)
    return [(part, block) for part, block in blocks if not _is_volatile(block)]


def _is_volatile(block: Any) -> bool:
    return isinstance(block, dict) and str(block.get("text")).startswith(VOLATILE)


def _turns(document: Document, name: str) -> tuple[Sequence[msgspec.Raw], Sequence[Any]]:
    """The turns of a conversation, each as the client sent it and decoded. A prompt that is no list is one turn."""
    value, raw = document.values.get(name), document.members.get(name)
    if raw is None:
        return (), ()
    return (_ITEMS.decode(raw), value) if isinstance(value, list) else ((raw,), (value,))


def _sums(
    chain: _Chain, raws: Sequence[msgspec.Raw], turns: Sequence[Any], is_answer: Callable[[Any], bool]
) -> PromptSums:
    root, root_bytes, parent, parent_bytes = chain.value, chain.bytes, 0, 0
    continued = _continued(turns, is_answer)
    for number, (raw, turn) in enumerate(zip(raws, turns, strict=True)):
        if number == continued and number:
            parent, parent_bytes = chain.value, chain.bytes
        chain.add(raw, turn.get("content") if isinstance(turn, dict) else ())
    return PromptSums(root, root_bytes, parent, parent_bytes, chain.value, chain.bytes)


def _continued(turns: Sequence[Any], is_answer: Callable[[Any], bool]) -> int:
    """The number of turns before the last answer, which may consist of several items; 0 if there is none."""
    count = len(turns)
    while count and not is_answer(turns[count - 1]):
        count -= 1
    while count and is_answer(turns[count - 1]):
        count -= 1
    return count


def _role(turn: Any) -> Any:
    return turn.get("role") if isinstance(turn, dict) else None


def _is_answer_of_anthropic(turn: Any) -> bool:
    return isinstance(turn, dict) and turn.get("role") == "assistant"


def _is_answer_of_openai(turn: Any) -> bool:
    """An item of `input` has a type; `*_call` and `reasoning` are what the model said."""
    if not isinstance(turn, dict):
        return False
    kind = turn.get("type")
    return turn.get("role") == "assistant" or kind == "reasoning" or (isinstance(kind, str) and kind.endswith("_call"))


def _without_marks(text: bytes) -> bytes:
    """The text without its cache marks, and without the comma that each of them needs."""
    pieces, done = [], 0
    at = text.find(_MARK_NAME)
    while at >= 0:
        mark = _MARK.match(text, at)
        after = at + len(_MARK_NAME)
        if mark is not None:
            start, after = at, mark.end()
            before = text[max(0, at - _BEFORE_MARK) : at]
            if before.rstrip().endswith(b","):
                start -= len(before) - len(before.rstrip()) + 1
            elif (comma := _COMMA.match(text, after)) is not None:
                after = comma.end()
            pieces.append(text[done:start])
            done = after
        at = text.find(_MARK_NAME, after)
    return b"".join([*pieces, text[done:]])
