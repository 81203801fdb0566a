"""Streams that begin before their answer is there: what each kind of client takes for a sign of life.

A `Vigil` says what to send at the beginning and then from time to time, and what is left to say when the answer comes.
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
        """What follows the head at once; may be nothing."""
        ...

    def again(self) -> bytes:
        """The next sign of life."""
        ...

    def rest(self, events: Iterator[bytes]) -> Iterator[bytes]:
        """The replayed answer, without what was said already."""
        ...


class Pings:
    """The dialect's own keep-alive: it says nothing, so that nothing needs to be left out later."""

    def __init__(self, keep_alive: bytes) -> None:
        self._keep_alive = keep_alive

    def first(self) -> bytes:
        return b""

    def again(self) -> bytes:
        return self._keep_alive

    def rest(self, events: Iterator[bytes]) -> Iterator[bytes]:
        return events


class EarlyMessage:
    """Messages: a `message_start` at once, then a `message_delta` that changes nothing.

    Claude Code takes pings for silence after a while, but not these. What only the true `message_start` would have said
    of the usage is said at the end, where it is counted.
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
    """Responses: `response.created` at once, then `response.in_progress`, numbered on.

    Codex counts parsed events only, comments do not keep it; and a `ping` would surface to users of the SDK. The replay
    goes on with the numbers, and with its own two first events left out.
    """

    _BEGUN = (b"event: response.created\n", b"event: response.in_progress\n")

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
        return self._say("response.created")

    def again(self) -> bytes:
        return self._say("response.in_progress")

    def rest(self, events: Iterator[bytes]) -> Iterator[bytes]:
        for event in events:
            if event.startswith(self._BEGUN):
                continue
            if not event.startswith(b"event: "):  # a comment, or what ends the stream
                yield event
                continue
            self._number += 1
            yield _event(event[7 : event.index(b"\n")].decode(), _data(event) | {"sequence_number": self._number})

    def _say(self, name: str) -> bytes:
        self._number += 1
        return _event(name, {"response": self._response, "sequence_number": self._number})


def _data(event: bytes) -> dict[str, Any]:
    """The members of an event's data, each as the bytes that it was."""
    return dict(_MEMBERS.decode(event.partition(b"data: ")[2]))


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode({"type": name, **fields}))
