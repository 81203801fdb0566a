"""A finished Response told again as the event sequence that a streaming client expects, numbered from 0."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from carpool.dialects.openai.frames import (
    MEMBERS,
    NULL,
    VALUES,
    Members,
    objects,
    opens,
    pieces,
    text_of,
)

Event = dict[str, Any]

_AT_THE_END = ("usage", "error", "incomplete_details", "completed_at", "tool_usage")
_FINAL = {"incomplete": "response.incomplete", "failed": "response.failed"}
# What the provider's own tools say of themselves between the beginning and the end of their item.
_STAGES = {
    "web_search_call": ("in_progress", "searching", "completed"),
    "file_search_call": ("in_progress", "searching", "completed"),
    "code_interpreter_call": ("in_progress", "interpreting", "completed"),
    "image_generation_call": ("in_progress", "generating", "completed"),
    "mcp_call": ("in_progress", "completed"),
    "mcp_list_tools": ("in_progress", "completed"),
}


def sequence(body: bytes) -> Iterator[bytes]:
    """The whole stream of a finished Response."""
    for number, event in enumerate(_events(body)):
        numbered = {"type": event["type"], "sequence_number": number, **event}
        yield b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(numbered))


def _events(body: bytes) -> Iterator[Event]:
    response = MEMBERS.decode(body)
    items = objects(response, "output")
    if not opens(response, "output", b"["):
        raise KeyError("output")
    beginning: Event = {**response, "status": "in_progress", "output": []}
    beginning |= {name: None for name in _AT_THE_END if name in response}
    yield _event("response.created", response=beginning)
    yield _event("response.in_progress", response=beginning)
    for index, item in enumerate(items):
        yield from _item(index, item)
    yield _event(_FINAL.get(text_of(response, "status"), "response.completed"), response=response)


# ---------------------------------------------------------------- items


def _item(index: int, item: Members) -> Iterator[Event]:
    at = {"item_id": item.get("id", item.get("call_id", "")), "output_index": index}
    kind = text_of(item, "type")
    begun: Event = {**item, "status": "in_progress"} if "status" in item else dict(item)
    middle: list[Event] = []
    match kind:
        case "message":
            begun["content"] = []
            middle = [event for place, part in _numbered(item, "content") for event in _part(at | place, part)]
        case "reasoning":
            begun |= {name: [] for name in ("summary", "content") if opens(item, name, b"[")}
            middle = list(_reasoning(at, item))
        case "function_call":
            begun["arguments"] = ""
            middle = _written(at, item, "response.function_call_arguments", "arguments", ("name",))
        case "custom_tool_call":
            begun["input"] = ""
            middle = _written(at, item, "response.custom_tool_call_input", "input")
        case _ if text_of(item, "status") == "completed":
            middle = [_event(f"response.{kind}.{stage}", **at) for stage in _STAGES.get(kind, ())]
    yield _event("response.output_item.added", output_index=index, item=begun)
    yield from middle
    yield _event("response.output_item.done", output_index=index, item=item)


def _numbered(item: Members, name: str, index: str = "content_index") -> Iterator[tuple[Event, Members]]:
    for position, part in enumerate(objects(item, name)):
        yield {index: position}, part


def _written(at: Event, item: Members, name: str, field: str, repeated: tuple[str, ...] = ()) -> list[Event]:
    """What a model writes for a tool: pieces, then the whole."""
    whole = {field: item.get(field, ""), **{name: item[name] for name in repeated if name in item}}
    cut = [_event(f"{name}.delta", **at, delta=piece) for piece in pieces(text_of(item, field))]
    return [*cut, _event(f"{name}.done", **at, **whole)]


def _part(at: Event, part: Members) -> Iterator[Event]:
    match text_of(part, "type"):
        case "output_text":
            yield from _text(at, part)
        case "refusal":
            yield _event("response.content_part.added", **at, part={**part, "refusal": ""})
            yield from _written(at, part, "response.refusal", "refusal")
            yield _event("response.content_part.done", **at, part=part)
        case _:
            yield _event("response.content_part.added", **at, part=part)
            yield _event("response.content_part.done", **at, part=part)


def _text(at: Event, part: Members) -> Iterator[Event]:
    yield _event("response.content_part.added", **at, part={**part, "text": "", "annotations": []})
    for piece in pieces(text_of(part, "text")):
        yield _event("response.output_text.delta", **at, delta=piece, logprobs=[])
    annotations = VALUES.decode(part["annotations"]) if opens(part, "annotations", b"[") else []
    for index, annotation in enumerate(annotations):
        yield _event("response.output_text.annotation.added", **at, annotation_index=index, annotation=annotation)
    logprobs = part["logprobs"] if opens(part, "logprobs", b"[") else []
    yield _event("response.output_text.done", **at, text=part.get("text", NULL), logprobs=logprobs)
    yield _event("response.content_part.done", **at, part=part)


def _reasoning(at: Event, item: Members) -> Iterator[Event]:
    for place, part in _numbered(item, "summary", "summary_index"):
        where = at | place
        yield _event("response.reasoning_summary_part.added", **where, part={**part, "text": ""})
        yield from _written(where, part, "response.reasoning_summary_text", "text")
        yield _event("response.reasoning_summary_part.done", **where, part=part)
    for place, part in _numbered(item, "content"):
        where = at | place
        yield _event("response.content_part.added", **where, part={**part, "text": ""})
        yield from _written(where, part, "response.reasoning_text", "text")
        yield _event("response.content_part.done", **where, part=part)


def _event(name: str, /, **fields: Any) -> Event:
    return {"type": name, **fields}
