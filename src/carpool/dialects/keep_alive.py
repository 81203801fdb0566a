"""Keep a streaming client connected while its response is not there yet.

A call in a batch may wait for minutes or hours, but a streaming client gives up after some time without data. So the
stream starts early: the proxy sends the response headers and `first()` at once, `again()` at intervals, and, once the
response has arrived, `rest()` of its replay (`dialects.*.replay`). Clients differ in what they count as activity:

- The SDKs skip SSE comments and pings, and any bytes keep their connection alive: `Pings` sends those of the dialect.
  They carry no content, so the whole replay follows.
- Claude Code treats a stream with nothing but pings as silent after a while. `EarlyMessage` sends a `message_start`,
then
  `message_delta` events that change nothing.
- Codex counts parsed events only. `EarlyResponse` sends `response.created`, then `response.in_progress`.

The two early variants have to invent parts of the beginning: an id, derived from the ticket so that it is stable, and
usage, which is not known yet. The client must see one consistent stream afterwards, so `rest` drops the replay's own
opening events and moves what only they contain to later ones: `EarlyMessage` merges the usage of the true
`message_start` into the final `message_delta`, where clients read it, and `EarlyResponse` continues its sequence
numbers.

Once a stream has started, the status code has been sent: a failure can only be reported as an error event.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

_Members = dict[str, msgspec.Raw]
_MEMBERS = msgspec.json.Decoder(_Members)
_FRESH = {"input_tokens": 0, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 0}


class Vigil(Protocol):
    def first(self) -> bytes:
        """What to send right after the response headers; may be empty."""
        ...

    def again(self) -> bytes:
        """The next keep-alive."""
        ...

    def rest(self, events: Iterator[bytes]) -> Iterator[bytes]:
        """The replayed response without what was already sent."""
        ...


class Pings:
    """The dialect's own keep-alive. It has no content, so the replay follows in full."""

    def __init__(self, keep_alive: bytes) -> None:
        self._keep_alive = keep_alive

    def first(self) -> bytes:
        return b""

    def again(self) -> bytes:
        return self._keep_alive

    def rest(self, events: Iterator[bytes]) -> Iterator[bytes]:
        return events


class EarlyMessage:
    """Anthropic's Messages: a `message_start` at once, then `message_delta` events that change nothing.

    The usage of the true `message_start` is sent with the final `message_delta`, where clients read it.
    """

    def __init__(self, model: str, ticket: str) -> None:
        self._model = model
        self._id = "msg_01" + hashlib.sha256(ticket.encode()).hexdigest()[:22]

    def first(self) -> bytes:
        message: dict[str, object] = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _FRESH,
        }
        return _event("message_start", {"message": message})

    def again(self) -> bytes:
        delta = {"stop_reason": None, "stop_sequence": None}
        return _event("message_delta", {"delta": delta, "usage": {"output_tokens": 0}})

    def rest(self, events: Iterator[bytes]) -> Iterator[bytes]:
        usage: _Members = {}
        for event in events:
            if event.startswith(b"event: message_start\n"):
                usage = _MEMBERS.decode(_MEMBERS.decode(_data(event)["message"])["usage"])
            elif event.startswith(b"event: message_delta\n"):
                data = _data(event)
                yield _event("message_delta", {**data, "usage": usage | _MEMBERS.decode(data["usage"])})
            else:
                yield event


class EarlyResponse:
    """OpenAI's Responses: `response.created` at once, then `response.in_progress`, with consecutive sequence numbers.

    Comments would not keep Codex connected, and a `ping` event would be visible to users of the SDK. The replay
    continues the numbers and skips its own first two events.
    """

    _OPENING = (b"event: response.created\n", b"event: response.in_progress\n")

    def __init__(self, model: str, ticket: str, at: float) -> None:
        self._response = {
            "id": "resp_" + hashlib.sha256(ticket.encode()).hexdigest()[:48],
            "object": "response",
            "created_at": int(at),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "model": model,
            "output": [],
            "parallel_tool_calls": True,
            "temperature": None,
            "tool_choice": "auto",
            "tools": [],
            "top_p": None,
            "usage": None,
        }
        self._number = -1

    def first(self) -> bytes:
        return self._next_event("response.created")

    def again(self) -> bytes:
        return self._next_event("response.in_progress")

    def rest(self, events: Iterator[bytes]) -> Iterator[bytes]:
        for event in events:
            if event.startswith(self._OPENING):
                continue
            if not event.startswith(b"event: "):  # a comment, or the end marker of the stream
                yield event
                continue
            self._number += 1
            yield _event(event[7 : event.index(b"\n")].decode(), _data(event) | {"sequence_number": self._number})

    def _next_event(self, name: str) -> bytes:
        self._number += 1
        return _event(name, {"response": self._response, "sequence_number": self._number})


def _data(event: bytes) -> dict[str, Any]:
    """The members of an event's data, each as its original bytes."""
    return dict(_MEMBERS.decode(event.partition(b"data: ")[2]))


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode({"type": name, **fields}))
