"""Streams that begin before their answer: what is said early is not said again, and the whole still parses."""

import json
from typing import Any

from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

from carpool.dialects import get
from carpool.dialects.keep_alive import EarlyMessage, EarlyResponse, KeepAliveEvents

MESSAGE = {
    "id": "msg_true",
    "type": "message",
    "role": "assistant",
    "model": "claude-haiku-4-5-20251001",
    "content": [
        {"type": "text", "text": "hello"},
        {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": [1, 2.50]}},
    ],
    "stop_reason": "tool_use",
    "stop_sequence": None,
    "usage": {
        "input_tokens": 11,
        "cache_creation_input_tokens": 5,
        "cache_read_input_tokens": 7,
        "cache_creation": {"ephemeral_5m_input_tokens": 5, "ephemeral_1h_input_tokens": 0},
        "output_tokens": 13,
        "service_tier": "batch",
    },
}
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def told(stream: bytes) -> list[dict[str, Any]]:
    events = []
    for block in stream.decode().strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert events[-1]["type"] == name.removeprefix("event: ")
    return events


def snapshot(events: list[dict[str, Any]]) -> Any:
    message = None
    for event in events:
        parsed = EVENT.validate_python(event)
        message = accumulate_event(event=parsed, current_snapshot=message, json_bufs=BUFFERS)
    return message


BUFFERS: dict[int, bytes] = {}


def early_stream(signs: int) -> list[dict[str, Any]]:
    events_of_kind = EarlyMessage("claude-haiku-4-5", "0123456789abc")
    replayed = get("anthropic").replay(json.dumps(MESSAGE).encode())
    stream = (
        events_of_kind.first()
        + b"".join(events_of_kind.again() for _ in range(signs))
        + b"".join(events_of_kind.remaining(replayed))
    )
    return told(stream)


def test_a_message_that_began_early_has_one_start_and_true_usage() -> None:
    BUFFERS.clear()
    events = early_stream(3)
    assert [event["type"] for event in events].count("message_start") == 1
    assert events[0]["type"] == "message_start"
    assert [event["delta"]["stop_reason"] for event in events[1:4]] == [None, None, None]
    message = snapshot(events)
    assert message.stop_reason == "tool_use"
    assert [block.to_dict() for block in message.content] == MESSAGE["content"]
    usage = message.usage.to_dict()
    assert {name: usage[name] for name in ("input_tokens", "output_tokens")} == {
        "input_tokens": 11,
        "output_tokens": 13,
    }
    assert (usage["cache_creation_input_tokens"], usage["cache_read_input_tokens"]) == (5, 7)
    assert events[-2]["usage"] == MESSAGE["usage"]


def test_an_early_message_has_an_id_like_the_providers_own() -> None:
    first = early_stream(0)[0]["message"]
    assert first["id"].startswith("msg_01")
    assert len(first["id"]) == len("msg_01XFDUDYJgAACzvnptvVoYEL")
    assert first["model"] == "claude-haiku-4-5"
    other = told(EarlyMessage("m", "another").first())[0]["message"]
    assert other["id"] != first["id"]


def test_pings_leave_the_answer_as_it_is() -> None:
    events_of_kind = KeepAliveEvents(b"event: ping\ndata: {}\n\n")
    assert events_of_kind.first() == b""
    assert list(events_of_kind.remaining(iter([b"a", b"b"]))) == [b"a", b"b"]


def response_event(name: str, number: int, **more: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, 'sequence_number': number, **more})}\n\n".encode()


def test_a_response_that_began_early_is_numbered_on() -> None:
    events_of_kind = EarlyResponse("gpt-5.2", "0123456789abc", 1_800_000_000.5)
    stream = events_of_kind.first() + events_of_kind.again() + events_of_kind.again()
    answer = [
        response_event("response.created", 0, response={"id": "resp_true"}),
        response_event("response.in_progress", 1, response={"id": "resp_true"}),
        response_event("response.output_text.delta", 2, delta="hi", output_index=0),
        response_event("response.completed", 3, response={"id": "resp_true", "status": "completed"}),
    ]
    events = told(stream + b"".join(events_of_kind.remaining(iter(answer))))
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "in_progress",
        "output_text.delta",
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == [0, 1, 2, 3, 4]
    assert events[0]["response"]["id"] == events[2]["response"]["id"]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[3]["delta"] == "hi"
