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

from collections.abc import Iterator
from typing import Any

import msgspec

from carpool.core.errors import Garbled
from carpool.dialects.openai import errors

# ------------------------------------------------------------ frames
# Helpers for both of OpenAI's stream formats.

Members = dict[str, msgspec.Raw]

MEMBERS = msgspec.json.Decoder(Members)
LIST = msgspec.json.Decoder(list[Members])
VALUES = msgspec.json.Decoder(list[msgspec.Raw])
TEXT = msgspec.json.Decoder(str)
NULL = msgspec.Raw(b"null")

_PIECE = 2048  # characters in a delta


def one_line(body: bytes) -> bytes:
    """Replace line breaks by spaces. JSON has them between tokens only, and in an event each would start a new
    field."""
    return body.replace(b"\r", b" ").replace(b"\n", b" ")


def data(value: Any) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(value)


def pieces(text: str) -> list[str]:
    return [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]


def opens(members: Members, name: str, sign: bytes) -> bool:
    """Whether there is a member of that name whose value starts with `sign`, that is, has this JSON type."""
    return name in members and bytes(members[name]).startswith(sign)


def text_of(members: Members, name: str) -> str:
    """The string of that name; empty if there is none."""
    return TEXT.decode(members[name]) if opens(members, name, b'"') else ""


def objects(members: Members, name: str) -> list[Members]:
    return LIST.decode(members[name]) if opens(members, name, b"[") else []


# ------------------------------------------------------------ chat
# A chat completion or a legacy completion as chunks.

DONE = b"data: [DONE]\n\n"

_PER_CHUNK = frozenset({"choices", "object", "usage"})  # differ between chunks; all other members are in every chunk
_EMPTY = (b"null", b"[]")
_CUT = frozenset({"role", "content", "refusal", "tool_calls", "function_call"})  # sent in deltas; the rest in one piece


def chunks(
    body: bytes, include_usage: bool, whole_calls: bool = False, closing: tuple[str, ...] = ()
) -> Iterator[bytes]:
    """The chunks of a completion. `include_usage` is from the client's `stream_options`. `whole_calls`: tool calls are
    not cut, for SDKs that can't join them. `closing`: the path of the usage in the last chunk of a choice."""
    completion = MEMBERS.decode(body)
    common: dict[str, Any] = {name: value for name, value in completion.items() if name not in _PER_CHUNK}
    kind = "text_completion" if text_of(completion, "object") == "text_completion" else "chat.completion.chunk"
    common["object"] = kind
    if include_usage:
        common["usage"] = None
    for choice in LIST.decode(completion["choices"]):
        for part in _legacy(choice) if kind == "text_completion" else _parts(choice, whole_calls):
            last = closing and part["finish_reason"] is not None
            extra = _nested(closing, completion.get("usage", NULL)) if last else {}
            yield data(common | {"choices": [{"index": choice["index"], **part}]} | extra)
    if include_usage:
        yield data(common | {"choices": [], "usage": completion.get("usage", NULL)})
    yield DONE


def _nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    for name in reversed(path):
        value = {name: value}
    return dict(value)


def _legacy(choice: Members) -> Iterator[dict[str, Any]]:
    """The chunks of a legacy completion have the shape of the completion."""
    unfinished = {"finish_reason": None, "logprobs": None}
    for piece in pieces(text_of(choice, "text")):
        yield {"text": piece, **unfinished}
    yield {"text": "", "finish_reason": choice.get("finish_reason", NULL), "logprobs": choice.get("logprobs", NULL)}


def _parts(choice: Members, whole_calls: bool) -> Iterator[dict[str, Any]]:
    message = MEMBERS.decode(choice["message"])
    deltas: list[dict[str, Any]] = [
        {"role": message.get("role", "assistant"), "content": _first_content(message), "refusal": None}
    ]
    deltas += [{"content": piece} for piece in pieces(text_of(message, "content"))]
    deltas += [{"refusal": piece} for piece in pieces(text_of(message, "refusal"))]
    deltas += [{"tool_calls": [call]} for call in _calls(message, whole_calls)]
    deltas += _function(message)
    deltas += [{name: message[name]} for name in message if name not in _CUT and bytes(message[name]) not in _EMPTY]
    for position, delta in enumerate(deltas):
        # Log-probabilities belong to the content: they are sent with its first piece.
        logprobs = choice.get("logprobs", NULL) if position == min(1, len(deltas) - 1) else None
        yield {"delta": delta, "logprobs": logprobs, "finish_reason": None}
    yield {"delta": {}, "logprobs": None, "finish_reason": choice.get("finish_reason", NULL)}


def _first_content(message: Members) -> str | None:
    return "" if opens(message, "content", b'"') else None


def _calls(message: Members, whole: bool) -> Iterator[dict[str, Any]]:
    """The first delta of a call has its name, the others only pieces of its arguments. Other tool types are not cut."""
    for index, call in enumerate(objects(message, "tool_calls")):
        if whole or not opens(call, "function", b"{"):
            yield {"index": index, **call}
            continue
        function = MEMBERS.decode(call["function"])
        yield {"index": index, **call, "function": {**function, "arguments": ""}}
        for piece in pieces(text_of(function, "arguments")):
            yield {"index": index, "function": {"arguments": piece}}


def _function(message: Members) -> list[dict[str, Any]]:
    """The deprecated `function_call`, at most one per message."""
    if not opens(message, "function_call", b"{"):
        return []
    function = MEMBERS.decode(message["function_call"])
    named = {**function, "arguments": ""}
    cut = [{"function_call": {"arguments": piece}} for piece in pieces(text_of(function, "arguments"))]
    return [{"function_call": named}, *cut]


# ------------------------------------------------------------ responses
# A Response as a sequence of events, numbered from 0.

Event = dict[str, Any]

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
    opening: Event = {**response, "status": "in_progress", "output": []}
    opening |= {name: None for name in _AT_THE_END if name in response}
    yield _event("response.created", response=opening)
    yield _event("response.in_progress", response=opening)
    for index, item in enumerate(items):
        yield from _item(index, item)
    yield _event(_FINAL.get(text_of(response, "status"), "response.completed"), response=response)


# ---------------------------------------------------------------- items


def _item(index: int, item: Members) -> Iterator[Event]:
    at = {"item_id": item.get("id", item.get("call_id", "")), "output_index": index}
    kind = text_of(item, "type")
    opening: Event = {**item, "status": "in_progress"} if "status" in item else dict(item)
    middle: list[Event] = []
    match kind:
        case "message":
            opening["content"] = []
            middle = [event for place, part in _numbered(item, "content") for event in _part(at | place, part)]
        case "reasoning":
            opening |= {name: [] for name in ("summary", "content") if opens(item, name, b"[")}
            middle = list(_reasoning(at, item))
        case "function_call":
            opening["arguments"] = ""
            middle = _text_deltas(at, item, "response.function_call_arguments", "arguments", ("name",))
        case "custom_tool_call":
            opening["input"] = ""
            middle = _text_deltas(at, item, "response.custom_tool_call_input", "input")
        case _ if text_of(item, "status") == "completed":
            middle = [_event(f"response.{kind}.{stage}", **at) for stage in _STAGES.get(kind, ())]
    yield _event("response.output_item.added", output_index=index, item=opening)
    yield from middle
    yield _event("response.output_item.done", output_index=index, item=item)


def _numbered(item: Members, name: str, index: str = "content_index") -> Iterator[tuple[Event, Members]]:
    for position, part in enumerate(objects(item, name)):
        yield {index: position}, part


def _text_deltas(at: Event, item: Members, name: str, field: str, repeated: tuple[str, ...] = ()) -> list[Event]:
    """A text that the model generates: its pieces as deltas, then the whole as a done event."""
    whole = {field: item.get(field, ""), **{name: item[name] for name in repeated if name in item}}
    cut = [_event(f"{name}.delta", **at, delta=piece) for piece in pieces(text_of(item, field))]
    return [*cut, _event(f"{name}.done", **at, **whole)]


def _part(at: Event, part: Members) -> Iterator[Event]:
    match text_of(part, "type"):
        case "output_text":
            yield from _text(at, part)
        case "refusal":
            yield _event("response.content_part.added", **at, part={**part, "refusal": ""})
            yield from _text_deltas(at, part, "response.refusal", "refusal")
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
        yield from _text_deltas(where, part, "response.reasoning_summary_text", "text")
        yield _event("response.reasoning_summary_part.done", **where, part=part)
    for place, part in _numbered(item, "content"):
        where = at | place
        yield _event("response.content_part.added", **where, part={**part, "text": ""})
        yield from _text_deltas(where, part, "response.reasoning_text", "text")
        yield _event("response.content_part.done", **where, part=part)


def _event(name: str, /, **fields: Any) -> Event:
    return {"type": name, **fields}


# The SDKs skip comments. Codex does not count them as activity: see `keep_alive.EarlyResponse`.
KEEP_ALIVE = b": still working on it\n\n"
USAGE = "usage"


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Wishes(msgspec.Struct):
    stream_options: _StreamOptions | None = None


_WISHES = msgspec.json.Decoder(_Wishes)


def wish(body: bytes) -> str:
    """`USAGE` if the client asked for the usage at the end of its stream, else empty."""
    if b"include_usage" not in body:
        return ""
    try:
        options = _WISHES.decode(body).stream_options
    except (ValueError, RecursionError):
        return ""
    return USAGE if options is not None and options.include_usage else ""


def replay(
    body: bytes, include_usage: bool = False, whole_calls: bool = False, closing: tuple[str, ...] = ()
) -> Iterator[bytes]:
    """The events of a finished response of any endpoint. Raises `Garbled` before the first event."""
    try:
        body.decode()
        flat = one_line(body)
        kind = text_of(MEMBERS.decode(flat), "object")
        if kind == "response":
            return iter(list(sequence(flat)))
        if kind in ("chat.completion", "text_completion"):
            return iter(list(chunks(flat, include_usage, whole_calls, closing)))
    except (KeyError, ValueError, RecursionError) as error:
        raise Garbled(f"The provider's answer can't be told as a stream: {error}.") from None
    raise Garbled(f"An answer of the kind {kind[:40]!r} can't be told as a stream.")


def stream_error(body: bytes) -> bytes:
    """An event that makes the SDKs raise, for both stream formats. A body that is not an error of the provider, such as
    a gateway's HTML page, is replaced by one that the client can parse."""
    if errors.read(body) is None:
        body = errors.error(502, "api_error", "The provider's answer could not be understood.")
    return b"event: error\ndata: %b\n\n" % one_line(body)
