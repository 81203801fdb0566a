"""Keep a streaming client connected while its response is not there yet.

A call in a batch may wait for minutes or hours, but a streaming client gives up after some time without data. So the
stream starts early: the proxy sends the response headers and `first()` at once, `again()` at intervals, and, once the
response has arrived, `remaining()` of its replay (`dialects.*.replay`). Clients differ in what they count as activity:

- The SDKs skip SSE comments and pings, and any bytes keep their connection alive: `KeepAliveEvents` sends those of the
  dialect. They carry no content, so the whole replay follows.
- Claude Code treats a stream with nothing but pings as silent after a while. `EarlyMessage` sends a `message_start`,
  then `message_delta` events that change nothing.
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
import math
from collections.abc import Iterator
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple

from carpool.core.model import Headers, ticket_text
from carpool.dialects.event_stream import MEMBERS, Members, event

_FRESH = {"input_tokens": 0, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 0}


class KeepAliveEvents:
    """The dialect's own keep-alive. It has no content, so the replay follows in full."""

    early = False  # whether they begin the answer

    def __init__(self, keep_alive: bytes) -> None:
        self._keep_alive = keep_alive

    def first(self) -> bytes:
        """What to send right after the response headers; may be empty."""
        return b""

    def again(self) -> bytes:
        """The next keep-alive."""
        return self._keep_alive

    def remaining(self, events: Iterator[bytes]) -> Iterator[bytes]:
        """The replayed response without what was already sent."""
        return events


class EarlyMessage(KeepAliveEvents):
    """Anthropic's Messages: a `message_start` at once, then `message_delta` events that change nothing.

    The usage of the true `message_start` is sent with the final `message_delta`, where clients read it.
    """

    early = True

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
        return event("message_start", message=message)

    def again(self) -> bytes:
        delta = {"stop_reason": None, "stop_sequence": None}
        return event("message_delta", delta=delta, usage={"output_tokens": 0})

    def remaining(self, events: Iterator[bytes]) -> Iterator[bytes]:
        usage: Members = {}
        for each in events:
            if each.startswith(b"event: message_start\n"):
                usage = MEMBERS.decode(MEMBERS.decode(_data(each)["message"])["usage"])
            elif each.startswith(b"event: message_delta\n"):
                data = _data(each)
                yield event("message_delta", **{**data, "usage": usage | MEMBERS.decode(data["usage"])})
            else:
                yield each


class EarlyResponse(KeepAliveEvents):
    """OpenAI's Responses: `response.created` at once, then `response.in_progress`, with consecutive sequence numbers.

    Comments would not keep Codex connected, and a `ping` event would be visible to users of the SDK. The replay
    continues the numbers and skips its own first two events.
    """

    early = True
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

    def remaining(self, events: Iterator[bytes]) -> Iterator[bytes]:
        for each in events:
            if each.startswith(self._OPENING):
                continue
            if not each.startswith(b"event: "):  # a comment, or the end marker of the stream
                yield each
                continue
            self._number += 1
            name = each[7 : each.index(b"\n")].decode()
            yield event(name, **(_data(each) | {"sequence_number": self._number}))

    def _next_event(self, name: str) -> bytes:
        self._number += 1
        return event(name, response=self._response, sequence_number=self._number)


def _data(each: bytes) -> dict[str, Any]:
    """The members of an event's data except its type, each as its original bytes."""
    return {name: raw for name, raw in MEMBERS.decode(each.partition(b"data: ")[2]).items() if name != "type"}


# ------------------------------------------------------------ kinds of clients


# Measured to accept any number of 1xx responses. Others accept only a few, or mistake the first for the response.
PATIENT_WITH_1XX = frozenset({"python", "js"})
# SDKs that by default time out after five seconds of silence, and accept any number of 1xx responses. Their headers do
# not say which timeout is configured.
SHORT_TIMEOUT_AGENTS = ("mistral-client-python/", "speakeasy-sdk/python")  # mistralai
SHORT_TIMEOUT_S = 5.0
# How many seconds a client waits for the next bytes; some send a word such as NOT_GIVEN.
LIMITS = ("x-stainless-read-timeout", "x-stainless-timeout")
_RELEVANT = frozenset({"user-agent", "x-stainless-lang", "x-claude-code-session-id", "originator", "prefer", *LIMITS})


class ClientKind(StrEnum):
    CLAUDE_CODE = "claude-code"
    CODEX = "codex"
    SDK = "sdk"
    OTHER = "other"


class Client(NamedTuple):
    """What the headers tell about a client. `name` is for the log: a product name, without version or comment."""

    kind: ClientKind
    name: str
    accepts_1xx: bool
    prefer: str = ""
    limit: float = math.inf  # seconds of silence after which it times out, if known


def recognise(headers: Headers) -> Client:
    relevant = {name: value for name, value in headers if name in _RELEVANT}
    agent, language = relevant.get("user-agent", ""), relevant.get("x-stainless-lang", "").lower()
    if agent.startswith("claude-cli/") or "x-claude-code-session-id" in relevant:
        kind = ClientKind.CLAUDE_CODE
    elif agent.startswith("codex") or relevant.get("originator", "").startswith("codex"):
        kind = ClientKind.CODEX
    else:
        kind = ClientKind.SDK if language else ClientKind.OTHER
    short_timeout = agent.startswith(SHORT_TIMEOUT_AGENTS)
    limit = min(
        [SHORT_TIMEOUT_S if short_timeout else math.inf, *(_seconds(relevant.get(name, "")) for name in LIMITS)]
    )
    product = agent.partition("/")[0].partition(" ")[0][:40]  # `AsyncAnthropic/Python 2.8` is `AsyncAnthropic`
    name = product if product.isascii() and product.isprintable() else ""
    return Client(kind, name, short_timeout or language in PATIENT_WITH_1XX, relevant.get("prefer", ""), limit)


@lru_cache(maxsize=256)  # a client sends the same headers with every call
def client_label(headers: Headers, subagent_headers: frozenset[str]) -> str:
    """The kind of client in a word, for the record of calls: `claude-code/subagent`, `AsyncOpenAI`, `curl`."""
    client = recognise(headers)
    known = client.kind in (ClientKind.CLAUDE_CODE, ClientKind.CODEX)
    label = client.kind.value if known else client.name or client.kind.value
    return label if subagent_headers.isdisjoint([name for name, _ in headers]) else f"{label}/subagent"


def _seconds(text: str) -> float:
    """The seconds, or infinity if the text is not a positive number."""
    try:
        seconds = float(text)
    except ValueError:
        return math.inf
    return seconds if seconds > 0 else math.inf  # NaN is not


def keep_alive_events(
    ping: bytes, endpoint: str, client: Client, model: str, ticket: int, now: float
) -> KeepAliveEvents:
    """The keep-alive events for this kind of streaming client. `ping` is that of its dialect."""
    # SDKs require one response id in all events, and it is not known yet: they get comments, which they ignore.
    if endpoint.endswith("/responses") and client.kind is not ClientKind.SDK:
        return EarlyResponse(model, ticket_text(ticket), now)
    if client.kind is ClientKind.CLAUDE_CODE and endpoint.endswith("/messages"):
        return EarlyMessage(model, ticket_text(ticket))
    return KeepAliveEvents(ping)
