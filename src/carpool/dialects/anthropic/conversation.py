"""Recognise a conversation by its beginning, and determine the lifetime of its prompt cache.

A turn repeats everything before it, so its model, system prompt, tools and first message identify the conversation.
Long texts are compared by their length and their ends only: this runs for every call, and a mistake only costs a
discount.
"""

from __future__ import annotations

import hashlib
from typing import Any

from carpool.core.model import Turn

_SHORT = 2_000
_END = 800
_LATEST = 4  # messages: cache marks of an ongoing conversation are at its end
_VOLATILE = "x-anthropic-billing-header"  # a block that changes with every request of a conversation
_HOUR = 3600.0
_FIVE_MINUTES = 300.0


def turn_of(values: dict[str, Any]) -> Turn | None:
    life = _life(values)
    if life is None:
        return None
    messages = values.get("messages")
    parts = [str(values.get("model"))]
    parts += _texts(values.get("system"))
    parts += _names(values.get("tools"))
    parts += _first_message(messages)
    digest = hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return Turn(int.from_bytes(digest, "big"), life, _is_opening(messages))


def _is_opening(messages: Any) -> bool:
    listed = messages if isinstance(messages, list) else []
    return not any(isinstance(message, dict) and message.get("role") == "assistant" for message in listed)


def _life(values: dict[str, Any]) -> float | None:
    """The lifetime of the cache; None without a cache mark, since this provider caches only marked content."""
    messages = values.get("messages")
    latest = messages[-_LATEST:] if isinstance(messages, list) else []
    places: list[Any] = [[values]] if "cache_control" in values else []
    places += [values[name] for name in ("tools", "system") if name in values]
    places += [message.get("content") for message in latest if isinstance(message, dict)]
    life = None
    for place in places:
        if not isinstance(place, list):
            continue
        for block in place:
            if isinstance(block, dict) and (mark := block.get("cache_control")):
                if isinstance(mark, dict) and mark.get("ttl") == "1h":
                    return _HOUR
                life = _FIVE_MINUTES
    return life


def is_tool_turn(messages: Any) -> bool:
    """Whether the last message carries tool results."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    content = last.get("content") if isinstance(last, dict) else None
    if not isinstance(content, list):
        return False
    return any(isinstance(block, dict) and str(block.get("type")).endswith("tool_result") for block in content)


def _texts(content: Any) -> list[str]:
    """The texts of some content. Cache marks move from turn to turn, so whole blocks can't be compared."""
    if isinstance(content, str):
        return [_ends(content)]
    blocks = [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []
    texts = [text if isinstance(text := block.get("text"), str) else str(block.get("type")) for block in blocks]
    return [_ends(text) for text in texts if not text.startswith(_VOLATILE)]


def _names(tools: Any) -> list[str]:
    listed = tools if isinstance(tools, list) else []
    return [str(tool.get("name"))[:_SHORT] for tool in listed if isinstance(tool, dict)]


def _first_message(messages: Any) -> list[str]:
    for message in messages if isinstance(messages, list) else []:
        if isinstance(message, dict) and message.get("role") == "user":
            return _texts(message.get("content"))
    return []


def _ends(text: str) -> str:
    return text if len(text) <= _SHORT else f"{len(text)} {text[:_END]}{text[-_END:]}"
