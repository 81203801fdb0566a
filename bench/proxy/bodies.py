"""What is asked and what the provider answers: fixed bytes of about 4 KB either way, in the shapes of the real APIs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

MARK = "the fleet has arrived"
PROSE = "A quick brown fox counts the calls of the fleet while a lazy dog waits for the whole answer to come back. "
MODELS = {"/v1/messages": "claude-haiku-4-5", "/v1/chat/completions": "gpt-4o-mini"}
EVENTS = 10
HEADERS = {
    "content-type": "application/json",
    "x-api-key": "bench",
    "authorization": "Bearer bench",
    "anthropic-version": "2023-06-01",
    "user-agent": "bench-proxy/1",
}


def text(size: int) -> str:
    return f"{MARK}. {PROSE * (size // len(PROSE) + 1)}"[:size]


def compact(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def request(path: str, *, stream: bool = False) -> bytes:
    asked = [{"role": "user", "content": text(3900)}]
    body: dict[str, Any] = {"model": MODELS[path], "max_tokens": 256, "messages": asked}
    return compact(body | ({"stream": True} if stream else {}))


def message(content: str) -> dict[str, Any]:
    return {
        "id": "msg_01BenchProxy",
        "type": "message",
        "role": "assistant",
        "model": MODELS["/v1/messages"],
        "content": [{"type": "text", "text": content}] if content else [],
        "stop_reason": "end_turn" if content else None,
        "stop_sequence": None,
        "usage": {"input_tokens": 900, "output_tokens": 200},
    }


def completion() -> dict[str, Any]:
    said = {"role": "assistant", "content": text(3700), "refusal": None}
    return {
        "id": "chatcmpl-BenchProxy",
        "object": "chat.completion",
        "created": 1793491200,
        "model": MODELS["/v1/chat/completions"],
        "choices": [{"index": 0, "message": said, "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 900, "completion_tokens": 200, "total_tokens": 1100},
    }


def response() -> dict[str, Any]:
    part = {"type": "output_text", "text": text(3400), "annotations": []}
    said = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [part]}
    return {
        "id": "resp_BenchProxy",
        "object": "response",
        "created_at": 1793491200,
        "status": "completed",
        "model": MODELS["/v1/chat/completions"],
        "output": [said],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": 900,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 200,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 1100,
        },
    }


def answers() -> dict[str, bytes]:
    """What is answered at once, by path."""
    return {
        "/v1/messages": compact(message(text(3800))),
        "/v1/chat/completions": compact(completion()),
        "/v1/responses": compact(response()),
    }


def events(path: str) -> list[bytes]:
    """A whole stream, event by event; the first one is what the client waits for."""
    return [sse(event) for event in (messages() if path == "/v1/messages" else chunks())] + (
        [b"data: [DONE]\n\n"] if path != "/v1/messages" else []
    )


def sse(event: dict[str, Any]) -> bytes:
    head = f"event: {event['type']}\n".encode() if "type" in event else b""
    return head + b"data: " + compact(event) + b"\n\n"


def messages() -> Iterator[dict[str, Any]]:
    yield {"type": "message_start", "message": message("")}
    yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    for _ in range(EVENTS):
        yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": MARK}}
    yield {"type": "content_block_stop", "index": 0}
    ended = {"stop_reason": "end_turn", "stop_sequence": None}
    yield {"type": "message_delta", "delta": ended, "usage": {"output_tokens": 200}}
    yield {"type": "message_stop"}


def chunks() -> Iterator[dict[str, Any]]:
    whole = completion()
    for number in range(EVENTS + 2):
        delta = {"role": "assistant", "content": ""} if number == 0 else {"content": MARK}
        ended = "stop" if number == EVENTS + 1 else None
        choice = {"index": 0, "delta": {} if ended else delta, "logprobs": None, "finish_reason": ended}
        yield {name: whole[name] for name in ("id", "created", "model")} | {
            "object": "chat.completion.chunk",
            "choices": [choice],
        }
