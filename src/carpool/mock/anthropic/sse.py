"""Turns a finished message into the events of its stream."""

from collections.abc import Iterator
from typing import Any

import msgspec

from carpool.mock.anthropic.answers import Message

_encode = msgspec.json.Encoder().encode
_IN_DELTA = ("stop_reason", "stop_sequence", "stop_details", "container")
_USAGE_IN_DELTA = (
    "input_tokens",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
    "output_tokens",
    "output_tokens_details",
    "server_tool_use",
)
_PIECES = 3


def event(name: str, **data: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), _encode({"type": name, **data}))


PING = event("ping")


def events(message: Message) -> Iterator[bytes]:
    """All events in order, pings not included."""
    usage = message["usage"]
    begun = {**message, "content": [], "stop_reason": None, "stop_sequence": None, "stop_details": None}
    yield event("message_start", message={**begun, "usage": {**usage, "output_tokens": min(1, usage["output_tokens"])}})
    for index, block in enumerate(message["content"]):
        yield event("content_block_start", index=index, content_block=_empty(block))
        for delta in _deltas(block):
            yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    delta = {name: message[name] for name in _IN_DELTA}
    yield event("message_delta", delta=delta, usage={name: usage[name] for name in _USAGE_IN_DELTA})
    yield event("message_stop")


def _empty(block: dict[str, Any]) -> dict[str, Any]:
    """The form a block starts with; what has no deltas starts whole."""
    kind = block["type"]
    if kind == "text":
        return {**block, "text": ""} | ({"citations": []} if "citations" in block else {})
    if kind == "thinking":
        return {**block, "thinking": "", "signature": ""}
    if kind in ("tool_use", "server_tool_use"):
        return {**block, "input": {}}
    return block


def _deltas(block: dict[str, Any]) -> Iterator[dict[str, Any]]:
    kind = block["type"]
    if kind == "text":
        for citation in block.get("citations", ()):
            yield {"type": "citations_delta", "citation": citation}
        for piece in _split(block["text"]):
            yield {"type": "text_delta", "text": piece}
    elif kind == "thinking":
        for piece in _split(block["thinking"]):
            yield {"type": "thinking_delta", "thinking": piece}
        yield {"type": "signature_delta", "signature": block["signature"]}
    elif kind in ("tool_use", "server_tool_use"):
        yield {"type": "input_json_delta", "partial_json": ""}
        for piece in _split(_encode(block["input"]).decode()):
            yield {"type": "input_json_delta", "partial_json": piece}


def _split(text: str) -> Iterator[str]:
    size = max(1, -(-len(text) // _PIECES))
    for start in range(0, len(text), size):
        yield text[start : start + size]
