"""Understands a client's Messages request: only what routing needs, the rest is for the provider to judge."""

from __future__ import annotations

from typing import Any

import msgspec

from carpool.dialects import faithful
from carpool.dialects.anthropic import headers as rules
from carpool.dialects.anthropic.conversation import is_tool_turn, turn_of
from carpool.errors import BadCall
from carpool.ports import Parsed, RawRequest

ENDPOINT = "/v1/messages"

_MOST_TOKENS = 2**31 - 1  # a bound for estimates; the provider judges the number itself
_NEVER_IN_A_BATCH = frozenset(
    {"speed", "store", "previous_thread_event_id", "cache_hint", "context_hint", "research_preview_2026_02"}
)


def handles(method: str, path: str) -> bool:
    """Whether this is a request that `parse` understands."""
    return method == "POST" and path == ENDPOINT


def parse(raw: RawRequest) -> Parsed:
    if not handles(raw.method, raw.path):
        raise BadCall(f"carpool does not batch {raw.method} {raw.path}, only POST {ENDPOINT}.")
    headers = rules.sort(raw.headers)
    document = faithful.read(raw.body)
    values = document.values
    model, max_tokens, stream = _read(values)
    return Parsed(
        endpoint=ENDPOINT,
        model=model,
        body=document.without("stream"),
        stream=stream,
        max_output_tokens=min(max(max_tokens, 0), _MOST_TOKENS),
        headers=headers.travelling,
        secret=headers.secret,
        unbatchable=_unbatchable(values, headers, raw.query),
        document=document,
        retry=headers.retry,
        turn=turn_of(values),
        tool_turn=is_tool_turn(values.get("messages")),
    )


def _read(values: dict[str, Any]) -> tuple[str, int, bool]:
    """What is as it should be costs no more than a look; otherwise somebody says why not."""
    model, max_tokens, stream = values.get("model"), values.get("max_tokens"), values.get("stream")
    listed = type(values.get("messages")) is list
    if listed and type(model) is str and type(max_tokens) is int and (stream is None or type(stream) is bool):
        return model, max_tokens, stream is True
    max_tokens = _max_tokens(values)
    _check_messages(values)
    return _model(values), max_tokens, _stream(values)


def _model(values: dict[str, Any]) -> str:
    model = values.get("model")
    if not isinstance(model, str):
        raise BadCall("`model` must be a string." if "model" in values else "`model` is missing.")
    return model


def _max_tokens(values: dict[str, Any]) -> int:
    max_tokens = values.get("max_tokens")
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool):
        raise BadCall("`max_tokens` must be an integer." if "max_tokens" in values else "`max_tokens` is missing.")
    return max_tokens


def _check_messages(values: dict[str, Any]) -> None:
    messages = values.get("messages")
    if messages is msgspec.UNSET:  # holds a number too big to decode: the provider's to judge
        return
    if not isinstance(messages, list):
        raise BadCall("`messages` must be a list." if "messages" in values else "`messages` is missing.")


def _stream(values: dict[str, Any]) -> bool:
    stream = values.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise BadCall("`stream` must be true or false.")
    return bool(stream)


def _unbatchable(values: dict[str, Any], headers: rules.Sorted, query: str) -> str | None:
    """Every reason why this call may not ride a batch, as sentences."""
    if not headers.unbatchable and not query and values["max_tokens"] and _NEVER_IN_A_BATCH.isdisjoint(values):
        return None
    reasons = [f"A batch may not carry `{field}`." for field in sorted(_NEVER_IN_A_BATCH & values.keys())]
    if values["max_tokens"] == 0:
        reasons.append("A batch may not carry `max_tokens: 0`.")
    reasons += headers.unbatchable
    if query and any(part not in ("", "beta=true") for part in query.lstrip("?").split("&")):
        reasons.append("A batch can't carry the query of a request.")
    return " ".join(reasons) or None
