"""Replay a finished message as the event stream that a streaming client expects.

A batch returns a complete message, but the client may have asked for a stream. The replay must be indistinguishable
from a live stream for the SDKs, which assemble the events again, and the result must equal the original message:

- `message_start` has the message without its content and without what is known only at the end (stop reason,
  container). Like a live stream it starts with about one output token.
- Each content block becomes a start, deltas and a stop. Text, thinking and the input of tools start empty, and their
  deltas of 2,048 characters give the original when joined. Every other block type starts complete and has no deltas, so
  new block types work unchanged.
- The input of a tool is sent as the original JSON text, so its numbers arrive as the model wrote them. A thinking
  signature is verified by the provider in the next turn, so its bytes must not change.
- `message_delta` has the stop reason and the final usage, then `message_stop` follows.

Members are `msgspec.Raw`: whatever is not cut into deltas passes through as the provider's own bytes, unknown fields
included. `replay` checks the whole message before it returns, so that a malformed one raises while the status code can
still change.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from carpool.core.errors import MalformedResponse
from carpool.dialects.anthropic import errors
from carpool.dialects.event_stream import LIST, MEMBERS, NULL, TEXT, VALUES, Members, event, one_line, opens, pieces

PING = b'event: ping\ndata: {"type":"ping"}\n\n'

_EMPTY = msgspec.Raw(b'""')
_AT_THE_END = ("stop_reason", "stop_sequence", "stop_details", "container")
_OUTPUT_SIDE = ("output_tokens", "output_tokens_details")
_INPUT_SIDE = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
_DELTA_USAGE = (*_INPUT_SIDE, *_OUTPUT_SIDE, "server_tool_use")


def replay(body: bytes, stream_options: str = "") -> Iterator[bytes]:
    """The events of a finished message. Raises `MalformedResponse` before the first event."""
    try:
        body.decode()
        message = MEMBERS.decode(one_line(body))
        blocks = LIST.decode(message["content"])
        usage = MEMBERS.decode(message["usage"]) if opens(message, "usage", b"{") else {}
        events = [list(_block(index, block)) for index, block in enumerate(blocks)]
    except (KeyError, ValueError, RecursionError) as error:
        raise MalformedResponse(f"The provider's message can't be replayed as a stream: {error}.") from None
    return _events(message, usage, events)


def stream_error(body: bytes) -> bytes:
    """An error event. A body that is not an error of the provider, such as a gateway's HTML page, is replaced by one
    that the client can parse."""
    parsed = errors.read(body)
    shown = parsed.body if parsed else errors.error(502, "api_error", "The provider's answer could not be understood.")
    return b"event: error\ndata: %b\n\n" % one_line(shown)


def _events(message: Members, usage: Members, blocks: list[list[bytes]]) -> Iterator[bytes]:
    opening: dict[str, Any] = {**message, "content": [], "stop_reason": None, "stop_sequence": None}
    opening |= {name: None for name in _AT_THE_END if name in message}
    # A live stream starts with about one output token; the final count is in `message_delta`.
    no_output = bytes(usage.get("output_tokens", NULL)) in (b"0", b"null")
    opening["usage"] = usage | {name: NULL for name in usage if name in _OUTPUT_SIDE}
    opening["usage"]["output_tokens"] = msgspec.Raw(b"0" if no_output else b"1")
    yield event("message_start", message=opening)
    for block in blocks:
        yield from block
    end = {"stop_reason": NULL, "stop_sequence": NULL}
    end |= {name: message[name] for name in _AT_THE_END if name in message}
    counts = {"output_tokens": msgspec.Raw(b"0")} | {name: usage[name] for name in _DELTA_USAGE if name in usage}
    yield event("message_delta", delta=end, usage=counts)
    yield event("message_stop")


# ---------------------------------------------------------------- blocks


def _block(index: int, block: Members) -> Iterator[bytes]:
    opening, deltas = _cut(block)
    yield event("content_block_start", index=index, content_block=opening)
    for delta in deltas:
        yield event("content_block_delta", index=index, delta=delta)
    yield event("content_block_stop", index=index)


def _cut(block: Members) -> tuple[Members, list[dict[str, Any]]]:
    """The block as it starts, and the deltas that complete it. Block types without deltas start complete."""
    match TEXT.decode(block["type"]):
        case "text" if opens(block, "text", b'"'):
            return _text(block)
        case "thinking" if opens(block, "thinking", b'"'):
            return _thinking(block)
        case "tool_use" | "server_tool_use" if opens(block, "input", b"{"):
            return _tool(block)
        case _:
            return block, []


def _text(block: Members) -> tuple[Members, list[dict[str, Any]]]:
    opening = block | {"text": _EMPTY}
    deltas: list[dict[str, Any]] = []
    if opens(block, "citations", b"["):
        opening["citations"] = msgspec.Raw(b"[]")
        deltas = [{"type": "citations_delta", "citation": citation} for citation in VALUES.decode(block["citations"])]
    deltas += [{"type": "text_delta", "text": piece} for piece in pieces(TEXT.decode(block["text"]))]
    return opening, deltas


def _thinking(block: Members) -> tuple[Members, list[dict[str, Any]]]:
    opening = block | {"thinking": _EMPTY}
    thought = TEXT.decode(block["thinking"])
    deltas: list[dict[str, Any]] = [{"type": "thinking_delta", "thinking": piece} for piece in pieces(thought)]
    if opens(block, "signature", b'"'):
        opening["signature"] = _EMPTY
        deltas.append({"type": "signature_delta", "signature": block["signature"]})  # verified later: unchanged
    return opening, deltas


def _tool(block: Members) -> tuple[Members, list[dict[str, Any]]]:
    """The input is sent as text, so its numbers arrive as the model wrote them. The first piece is always empty."""
    opening = block | {"input": msgspec.Raw(b"{}")}
    raw = bytes(block["input"]).decode()
    texts = ["", *(pieces(raw) if raw != "{}" else [])]
    return opening, [{"type": "input_json_delta", "partial_json": text} for text in texts]
