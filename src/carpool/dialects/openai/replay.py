"""Replay a finished response as the event stream that a streaming client expects.

A batch returns a complete JSON body, but the client may have asked for a stream. The replay must be indistinguishable
from a live stream for the SDKs, which assemble the deltas again, and the result must equal the original body:

- Nothing is interpreted that does not have to be. Members are `msgspec.Raw`, so numbers, key order, unknown fields and
  signatures pass through as the provider's own bytes. Only texts that a live stream cuts into deltas are decoded:
  content, refusals and arguments. They are cut into pieces of 2,048 characters; the pieces joined give the text.
- Chat completions become chunks: one that names the role, then the content, tool calls and all other members of the
  message, then one with the finish reason, then `[DONE]`. A usage chunk has no choices, which breaks clients that did
  not ask for it, so it is sent only with `stream_options.include_usage`. Some OpenAI-compatible providers differ: tool
  calls in one piece (`whole_calls`), usage in the last chunk (`closing`).
- Responses become numbered events: created, in_progress, then for each item added, its deltas and done, then the final
  event with the whole original Response. What is known only at the end is null in the opening events.

`replay` builds all events before it returns, so that a malformed body raises while the status code can still change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from carpool.core.errors import MalformedResponse
from carpool.dialects.event_stream import LIST, MEMBERS, NULL, TEXT, VALUES, Members, event, one_line, opens, pieces
from carpool.dialects.openai import errors
from carpool.dialects.provider_api import decode_or_none


def text_of(members: Members, name: str) -> str:
    """The string of that name; empty if there is none."""
    return TEXT.decode(members[name]) if opens(members, name, b'"') else ""


def objects(members: Members, name: str) -> list[Members]:
    return LIST.decode(members[name]) if opens(members, name, b"[") else []


# ------------------------------------------------------------ chat
# A chat completion or a legacy completion as chunks.

_PER_CHUNK = frozenset({"choices", "object", "usage"})  # differ between chunks; all other members are in every chunk
_EMPTY = (b"null", b"[]")
_CUT = frozenset({"role", "content", "refusal", "tool_calls", "function_call"})  # sent in deltas; the rest in one piece


def chunks(
    completion: Members, include_usage: bool, whole_calls: bool = False, closing: tuple[str, ...] = ()
) -> Iterator[bytes]:
    """The chunks of a completion. `include_usage` is from the client's `stream_options`. `whole_calls`: tool calls are
    not cut, for SDKs that can't join them. `closing`: the path of the usage in the last chunk of a choice."""
    legacy, usage = text_of(completion, "object") == "text_completion", completion.get("usage", NULL)
    common: dict[str, Any] = {name: value for name, value in completion.items() if name not in _PER_CHUNK}
    common["object"] = "text_completion" if legacy else "chat.completion.chunk"
    if include_usage:
        common["usage"] = None
    nested: Any = usage
    for name in reversed(closing):
        nested = {name: nested}
    for choice in LIST.decode(completion["choices"]):
        for part in _legacy(choice) if legacy else _parts(choice, whole_calls):
            extra = nested if closing and part["finish_reason"] is not None else {}
            yield _chunk(common | {"choices": [{"index": choice["index"], **part}]} | extra)
    if include_usage:
        yield _chunk(common | {"choices": [], "usage": usage})
    yield b"data: [DONE]\n\n"


def _chunk(value: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(value)


def _legacy(choice: Members) -> Iterator[dict[str, Any]]:
    """The chunks of a legacy completion have the shape of the completion."""
    for piece in pieces(text_of(choice, "text")):
        yield {"text": piece, "finish_reason": None, "logprobs": None}
    yield {"text": "", "finish_reason": choice.get("finish_reason", NULL), "logprobs": choice.get("logprobs", NULL)}


def _parts(choice: Members, whole_calls: bool) -> Iterator[dict[str, Any]]:
    message = MEMBERS.decode(choice["message"])
    content = "" if opens(message, "content", b'"') else None
    deltas: list[dict[str, Any]] = [{"role": message.get("role", "assistant"), "content": content, "refusal": None}]
    deltas += [{name: piece} for name in ("content", "refusal") for piece in pieces(text_of(message, name))]
    for index, call in enumerate(objects(message, "tool_calls")):
        if whole_calls or not opens(call, "function", b"{"):  # other tool types are not cut
            deltas.append({"tool_calls": [{"index": index, **call}]})
            continue
        first, *others = _cut_function(call["function"])
        deltas.append({"tool_calls": [{"index": index, **call, "function": first}]})
        deltas += [{"tool_calls": [{"index": index, "function": other}]} for other in others]
    if opens(message, "function_call", b"{"):  # deprecated, and at most one per message
        deltas += [{"function_call": part} for part in _cut_function(message["function_call"])]
    deltas += [{name: message[name]} for name in message if name not in _CUT and bytes(message[name]) not in _EMPTY]
    for position, delta in enumerate(deltas):
        # Log-probabilities belong to the content: they are sent with its first piece.
        logprobs = choice.get("logprobs", NULL) if position == min(1, len(deltas) - 1) else None
        yield {"delta": delta, "logprobs": logprobs, "finish_reason": None}
    yield {"delta": {}, "logprobs": None, "finish_reason": choice.get("finish_reason", NULL)}


def _cut_function(raw: msgspec.Raw) -> list[dict[str, Any]]:
    """The first part of a called function has its name, the others only pieces of its arguments."""
    function = MEMBERS.decode(raw)
    return [{**function, "arguments": ""}, *({"arguments": piece} for piece in pieces(text_of(function, "arguments")))]


# ------------------------------------------------------------ responses
# A Response as a sequence of events, numbered from 0.

Fields = dict[str, Any]
Event = tuple[str, Fields]

_AT_THE_END = ("usage", "error", "incomplete_details", "completed_at", "tool_usage")
_FINAL = {"incomplete": "response.incomplete", "failed": "response.failed"}
# The progress events of the provider's own tools, between the start and the end of their item.
_STAGES = {
    "web_search_call": ("in_progress", "searching", "completed"),
    "file_search_call": ("in_progress", "searching", "completed"),
    "code_interpreter_call": ("in_progress", "interpreting", "completed"),
    "image_generation_call": ("in_progress", "generating", "completed"),
    "mcp_call": ("in_progress", "completed"),
    "mcp_list_tools": ("in_progress", "completed"),
}


def _events(response: Members) -> Iterator[Event]:
    items = objects(response, "output")
    if not opens(response, "output", b"["):
        raise KeyError("output")
    opening: Fields = {**response, "status": "in_progress", "output": []}
    opening |= {name: None for name in _AT_THE_END if name in response}
    yield "response.created", {"response": opening}
    yield "response.in_progress", {"response": opening}
    for index, item in enumerate(items):
        yield from _item(index, item)
    yield _FINAL.get(text_of(response, "status"), "response.completed"), {"response": response}


def _item(index: int, item: Members) -> Iterator[Event]:
    at: Fields = {"item_id": item.get("id", item.get("call_id", "")), "output_index": index}
    kind = text_of(item, "type")
    opening: Fields = {**item, "status": "in_progress"} if "status" in item else dict(item)
    middle: Iterable[Event] = ()
    match kind:
        case "message":
            opening["content"] = []
            parts = enumerate(objects(item, "content"))
            middle = [each for number, part in parts for each in _part(at | {"content_index": number}, part)]
        case "reasoning":
            opening |= {name: [] for name in ("summary", "content") if opens(item, name, b"[")}
            middle = _reasoning(at, item)
        case "function_call":
            opening["arguments"] = ""
            middle = _text_deltas(at, item, "response.function_call_arguments", "arguments", ("name",))
        case "custom_tool_call":
            opening["input"] = ""
            middle = _text_deltas(at, item, "response.custom_tool_call_input", "input")
        case _ if text_of(item, "status") == "completed":
            middle = [(f"response.{kind}.{stage}", at) for stage in _STAGES.get(kind, ())]
    yield "response.output_item.added", {"output_index": index, "item": opening}
    yield from middle
    yield "response.output_item.done", {"output_index": index, "item": item}


def _text_deltas(at: Fields, item: Members, name: str, field: str, repeated: tuple[str, ...] = ()) -> Iterator[Event]:
    """A text that the model generates: its pieces as deltas, then the whole as a done event."""
    for piece in pieces(text_of(item, field)):
        yield f"{name}.delta", {**at, "delta": piece}
    yield f"{name}.done", {**at, field: item.get(field, ""), **{name: item[name] for name in repeated if name in item}}


def _whole(name: str, at: Fields, part: Members, emptied: Fields, middle: Iterable[Event]) -> Iterator[Event]:
    """A part that starts without what its events add."""
    yield f"{name}.added", {**at, "part": {**part, **emptied}}
    yield from middle
    yield f"{name}.done", {**at, "part": part}


def _part(at: Fields, part: Members) -> Iterator[Event]:
    emptied: Fields = {}
    middle: Iterable[Event] = ()
    match text_of(part, "type"):
        case "output_text":
            emptied, middle = {"text": "", "annotations": []}, _text(at, part)
        case "refusal":
            emptied, middle = {"refusal": ""}, _text_deltas(at, part, "response.refusal", "refusal")
    return _whole("response.content_part", at, part, emptied, middle)


def _text(at: Fields, part: Members) -> Iterator[Event]:
    for piece in pieces(text_of(part, "text")):
        yield "response.output_text.delta", {**at, "delta": piece, "logprobs": []}
    annotations = VALUES.decode(part["annotations"]) if opens(part, "annotations", b"[") else []
    for index, annotation in enumerate(annotations):
        yield "response.output_text.annotation.added", {**at, "annotation_index": index, "annotation": annotation}
    logprobs = part["logprobs"] if opens(part, "logprobs", b"[") else []
    yield "response.output_text.done", {**at, "text": part.get("text", NULL), "logprobs": logprobs}


def _reasoning(at: Fields, item: Members) -> Iterator[Event]:
    for number, part in enumerate(objects(item, "summary")):
        where = at | {"summary_index": number}
        texts = _text_deltas(where, part, "response.reasoning_summary_text", "text")
        yield from _whole("response.reasoning_summary_part", where, part, {"text": ""}, texts)
    for number, part in enumerate(objects(item, "content")):
        where = at | {"content_index": number}
        texts = _text_deltas(where, part, "response.reasoning_text", "text")
        yield from _whole("response.content_part", where, part, {"text": ""}, texts)


# ------------------------------------------------------------ any stream

# The SDKs skip comments. Codex does not count them as activity: see `keep_alive.EarlyResponse`.
KEEP_ALIVE = b": still working on it\n\n"
USAGE = "usage"


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _StreamRequest(msgspec.Struct):
    stream_options: _StreamOptions | None = None


_STREAM_REQUEST = msgspec.json.Decoder(_StreamRequest)


def stream_options(body: bytes) -> str:
    """`USAGE` if the client asked for the usage at the end of its stream, else empty."""
    if b"include_usage" not in body:
        return ""
    request = decode_or_none(_STREAM_REQUEST, body) or _StreamRequest()
    return USAGE if request.stream_options is not None and request.stream_options.include_usage else ""


def replay(
    body: bytes, include_usage: bool = False, whole_calls: bool = False, closing: tuple[str, ...] = ()
) -> Iterator[bytes]:
    """The events of a finished response of any endpoint. Raises `MalformedResponse` before the first event."""
    try:
        body.decode()
        members = MEMBERS.decode(one_line(body))
        kind = text_of(members, "object")
        if kind == "response":
            events = enumerate(_events(members))
            return iter([event(name, sequence_number=number, **fields) for number, (name, fields) in events])
        if kind in ("chat.completion", "text_completion"):
            return iter(list(chunks(members, include_usage, whole_calls, closing)))
    except (KeyError, ValueError, RecursionError) as error:
        raise MalformedResponse(f"The provider's answer can't be replayed as a stream: {error}.") from None
    raise MalformedResponse(f"An answer of the kind {kind[:40]!r} can't be replayed as a stream.")


def stream_error(body: bytes) -> bytes:
    """An event that makes the SDKs raise, for both stream formats. A body that is not an error of the provider, such as
    a gateway's HTML page, is replaced by one that the client can parse."""
    if errors.read(body) is None:
        body = errors.error(502, "api_error", "The provider's answer could not be understood.")
    return b"event: error\ndata: %b\n\n" % one_line(body)
