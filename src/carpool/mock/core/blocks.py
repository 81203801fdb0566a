"""A Messages body as the ordered blocks by which tokens and caches are counted: tools, then system, then messages."""

from collections.abc import Iterator
from typing import Any

import msgspec

Body = dict[str, Any]

canonical = msgspec.json.Encoder(order="deterministic").encode

_MEDIA = frozenset({"image", "document", "container_upload"})
MEDIA_TOKENS = 1500


def blocks(body: Body) -> Iterator[tuple[str, Any]]:
    """Every block with its level (`tools`, `system`, `messages`). A bare string is one block."""
    for tool in body.get("tools") or ():
        yield "tools", tool
    yield from _spread("system", body.get("system"))
    for message in body["messages"]:
        yield from _spread("messages", message["content"])


def _spread(level: str, content: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(content, str):
        yield level, content
    else:
        for block in content or ():
            yield level, block


def tokens_of(block: Any) -> int:
    """The mock's own rule: a token per four bytes of text, and one for the block itself; media have a fixed count."""
    if isinstance(block, dict):
        kind = block.get("type")
        if kind in _MEDIA:
            return MEDIA_TOKENS
        text = block.get("text") if kind == "text" else None
        size = len(text.encode()) if isinstance(text, str) else len(canonical(unmarked(block)))
    else:
        size = len(block) if block.isascii() else len(block.encode())
    return 1 + size // 4


def unmarked(block: Any) -> Any:
    """The block as the model sees it: cache markers are not part of it."""
    if isinstance(block, dict) and "cache_control" in block:
        return {key: value for key, value in block.items() if key != "cache_control"}
    return block


def count_tokens(body: Body) -> int:
    return sum(tokens_of(block) for _, block in blocks(body))


def last_text(body: Body) -> str:
    """The last text of the last message, which has a test's commands to the mock.

    Some clients end with a message of the role `system`, about where they run: it is not what was asked.
    """
    asked = [message for message in body["messages"] if message.get("role") != "system"]
    content = (asked or body["messages"])[-1]["content"]
    if isinstance(content, str):
        return content
    texts = [block["text"] for block in content if isinstance(block, dict) and isinstance(block.get("text"), str)]
    return texts[-1] if texts else ""
