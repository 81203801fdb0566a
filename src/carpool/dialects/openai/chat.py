"""A finished chat completion told again as the chunks that a streaming client expects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from carpool.dialects.openai.frames import LIST, MEMBERS, NULL, Members, data, objects, opens, pieces, text_of

DONE = b"data: [DONE]\n\n"

_OWN = frozenset({"choices", "object", "usage"})
_NOTHING = (b"null", b"[]")
_CUT = frozenset({"role", "content", "refusal", "tool_calls", "function_call"})  # told in deltas; the rest comes whole


def chunks(
    body: bytes, include_usage: bool, whole_calls: bool = False, closing: tuple[str, ...] = ()
) -> Iterator[bytes]:
    """`include_usage` is the client's wish, from `stream_options`: a chunk without choices breaks who did not ask.
    `whole_calls`: its SDK knows no tool call in pieces. `closing`: where the last chunk of a choice has the usage."""
    answer = MEMBERS.decode(body)
    common: dict[str, Any] = {name: value for name, value in answer.items() if name not in _OWN}
    kind = "text_completion" if text_of(answer, "object") == "text_completion" else "chat.completion.chunk"
    common["object"] = kind
    if include_usage:
        common["usage"] = None
    for choice in LIST.decode(answer["choices"]):
        for part in _legacy(choice) if kind == "text_completion" else _parts(choice, whole_calls):
            told = _nested(closing, answer.get("usage", NULL)) if closing and part["finish_reason"] is not None else {}
            yield data(common | {"choices": [{"index": choice["index"], **part}]} | told)
    if include_usage:
        yield data(common | {"choices": [], "usage": answer.get("usage", NULL)})
    yield DONE


def _nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    for name in reversed(path):
        value = {name: value}
    return dict(value)


def _legacy(choice: Members) -> Iterator[dict[str, Any]]:
    """Chunks of a completion look like a completion."""
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
    deltas += [{name: message[name]} for name in message if name not in _CUT and bytes(message[name]) not in _NOTHING]
    for position, delta in enumerate(deltas):
        # Log-probabilities are those of the content: they come with its first piece.
        logprobs = choice.get("logprobs", NULL) if position == min(1, len(deltas) - 1) else None
        yield {"delta": delta, "logprobs": logprobs, "finish_reason": None}
    yield {"delta": {}, "logprobs": None, "finish_reason": choice.get("finish_reason", NULL)}


def _first_content(message: Members) -> str | None:
    return "" if opens(message, "content", b'"') else None


def _calls(message: Members, whole: bool) -> Iterator[dict[str, Any]]:
    """The first delta of a call names it, the others carry its arguments alone. Other kinds of tools come whole."""
    for index, call in enumerate(objects(message, "tool_calls")):
        if whole or not opens(call, "function", b"{"):
            yield {"index": index, **call}
            continue
        function = MEMBERS.decode(call["function"])
        yield {"index": index, **call, "function": {**function, "arguments": ""}}
        for piece in pieces(text_of(function, "arguments")):
            yield {"index": index, "function": {"arguments": piece}}


def _function(message: Members) -> list[dict[str, Any]]:
    """The old way to call a function, one per message."""
    if not opens(message, "function_call", b"{"):
        return []
    function = MEMBERS.decode(message["function_call"])
    named = {**function, "arguments": ""}
    cut = [{"function_call": {"arguments": piece}} for piece in pieces(text_of(function, "arguments"))]
    return [{"function_call": named}, *cut]
