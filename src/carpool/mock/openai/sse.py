"""Turns a finished answer into the events of its stream: chat chunks, or the sequence of a Response."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from carpool.mock.openai.answers import Answer

_encode = msgspec.json.Encoder().encode
_PIECES = 3
DONE = b"data: [DONE]\n\n"


def data(value: Any) -> bytes:
    return b"data: %s\n\n" % _encode(value)


# ---------------------------------------------------------------- chat completions


def chunks(answer: Answer, include_usage: bool, whole_calls: bool, closing: Sequence[str]) -> Iterator[bytes]:
    common = {key: value for key, value in answer.items() if key not in ("choices", "usage")}
    common["object"] = "chat.completion.chunk"
    if include_usage:
        common["usage"] = None
    for choice in answer["choices"]:
        for delta in _deltas(choice["message"], whole_calls):
            told = {"index": choice["index"], "delta": delta, "logprobs": None, "finish_reason": None}
            yield data({**common, "choices": [told]})
        last = {"index": choice["index"], "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
        yield data({**common, "choices": [last]} | _inside_of(closing, answer["usage"]))
    if include_usage:
        yield data({**common, "choices": [], "usage": answer["usage"]})
    yield DONE


def _inside_of(path: Sequence[str], value: Any) -> dict[str, Any]:
    for name in reversed(path):
        value = {name: value}
    return value if path else {}


def _deltas(message: Answer, whole_calls: bool) -> Iterator[dict[str, Any]]:
    content, refusal = message["content"], message["refusal"]
    yield {"role": "assistant", "content": "" if content is not None else None, "refusal": None}
    for piece in _split(content or ""):
        yield {"content": piece}
    for piece in _split(refusal or ""):
        yield {"refusal": piece}
    for index, call in enumerate(message.get("tool_calls") or ()):
        if whole_calls or call["type"] != "function":
            yield {"tool_calls": [{"index": index, **call}]}
            continue
        named = {"name": call["function"]["name"], "arguments": ""}
        yield {"tool_calls": [{"index": index, "id": call["id"], "type": "function", "function": named}]}
        for piece in _split(call["function"]["arguments"]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


# ---------------------------------------------------------------- responses


def events(answer: Answer) -> Iterator[bytes]:
    for number, (name, fields) in enumerate(_named(answer)):
        yield event(name, number, **fields)


def event(name: str, number: int, /, **fields: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), _encode({"type": name, "sequence_number": number, **fields}))


Named = tuple[str, dict[str, Any]]


def _named(answer: Answer) -> Iterator[Named]:
    begun = {**answer, "status": "in_progress", "output": [], "usage": None}
    begun |= {"completed_at": None, "incomplete_details": None}
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, item in enumerate(answer["output"]):
        at = {"item_id": item["id"], "output_index": index}
        yield "response.output_item.added", {"output_index": index, "item": _empty(item)}
        yield from _inside(item, at)
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{answer['status']}", {"response": answer}


def _empty(item: Answer) -> Answer:
    cleared: dict[str, Answer] = {
        "message": {"content": []},
        "function_call": {"arguments": ""},
        "custom_tool_call": {"input": ""},
    }
    empty = {**item, **cleared.get(item["type"], {"summary": []})}
    return {**empty, "status": "in_progress"} if "status" in item else empty


def _inside(item: Answer, at: dict[str, Any]) -> Iterator[Named]:
    match item["type"]:
        case "message":
            for index, part in enumerate(item["content"]):
                yield from _part(part, {**at, "content_index": index})
        case "function_call":
            for piece in _split(item["arguments"]):
                yield "response.function_call_arguments.delta", {**at, "delta": piece}
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield "response.function_call_arguments.done", {**at, **done}
        case "custom_tool_call":
            for piece in _split(item["input"]):
                yield "response.custom_tool_call_input.delta", {**at, "delta": piece}
            yield "response.custom_tool_call_input.done", {**at, "input": item["input"]}
        case "reasoning":
            for index, part in enumerate(item["summary"]):
                yield from _thought(part, {**at, "summary_index": index})


def _part(part: Answer, at: dict[str, Any]) -> Iterator[Named]:
    if part["type"] == "refusal":
        yield "response.content_part.added", {**at, "part": {**part, "refusal": ""}}
        for piece in _split(part["refusal"]):
            yield "response.refusal.delta", {**at, "delta": piece}
        yield "response.refusal.done", {**at, "refusal": part["refusal"]}
    else:
        yield "response.content_part.added", {**at, "part": {**part, "text": ""}}
        for piece in _split(part["text"]):
            yield "response.output_text.delta", {**at, "delta": piece, "logprobs": []}
        yield "response.output_text.done", {**at, "text": part["text"], "logprobs": []}
    yield "response.content_part.done", {**at, "part": part}


def _thought(part: Answer, at: dict[str, Any]) -> Iterator[Named]:
    yield "response.reasoning_summary_part.added", {**at, "part": {**part, "text": ""}}
    for piece in _split(part["text"]):
        yield "response.reasoning_summary_text.delta", {**at, "delta": piece}
    yield "response.reasoning_summary_text.done", {**at, "text": part["text"]}
    yield "response.reasoning_summary_part.done", {**at, "part": part}


def _split(text: str) -> Iterator[str]:
    size = max(1, -(-len(text) // _PIECES))
    for start in range(0, len(text), size):
        yield text[start : start + size]
