"""Parse a client's Messages request: only what routing needs. The provider validates the rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec

from carpool.core.errors import BadCall
from carpool.core.model import Headers
from carpool.core.ports import Parsed, RawRequest
from carpool.dialects import json_object
from carpool.dialects.anthropic.conversation import is_tool_turn, turn_of
from carpool.dialects.headers import DROPPED, DROPPED_PREFIXES, check_encoding, first, is_positive

# ------------------------------------------------------------ headers
# Which of a client's headers are sent to Anthropic with its call.

_NAME = itemgetter(0)
_HEADERS_NEVER_IN_A_BATCH = ("fast-mode", "research-preview-2026-02")  # betas
KEY_HEADERS = ("x-api-key", "authorization")
SECRETS = frozenset(KEY_HEADERS)
_BEARER_SINCE = "2026-10-21"  # unknown: whether later versions accept x-api-key, and earlier batches a token

_DROPPED = DROPPED | {"anthropic-dangerous-direct-browser-access"}
_DROPPED_PREFIXES = (*DROPPED_PREFIXES, "x-claude-code-")


class AnthropicHeaders(NamedTuple):
    """A client's headers, sorted by purpose."""

    travelling: Headers  # sent upstream with the call, sorted by name
    secret: Headers
    betas: tuple[str, ...]  # without duplicates, in the client's order; one header in `travelling`
    retry: bool  # the client's SDK marks the request as a retry
    unbatchable: tuple[str, ...]  # why calls with these headers can't go into a batch, as sentences

    def __repr__(self) -> str:  # never the secret
        return f"<Sorted {len(self.travelling)} headers>"


@lru_cache(maxsize=256)  # a client sends the same headers with every call
def sort(headers: Headers) -> AnthropicHeaders:
    """Sort headers by purpose. Raises `BadCall` for a content-encoding that carpool can't read."""
    check_encoding(headers)
    kept: list[tuple[str, str]] = []
    secret: list[tuple[str, str]] = []
    betas: dict[str, None] = {}
    retry = False
    nominated: tuple[str, ...] = ()
    for name, value in headers:
        if name in SECRETS:
            secret.append((name, value))
        elif name == "anthropic-beta":
            betas |= dict.fromkeys(filter(None, map(str.strip, value.split(","))))
        elif name == "x-stainless-retry-count":
            retry = retry or is_positive(value)
        elif name == "connection":
            nominated += tuple(listed.strip().lower() for listed in value.split(","))
        elif name not in _DROPPED and not name.startswith(_DROPPED_PREFIXES):
            kept.append((name, value.strip()))
    if nominated:  # `connection` may declare any header to be hop-by-hop
        kept = [header for header in kept if header[0] not in nominated]
    if betas:
        kept.append(("anthropic-beta", ",".join(betas)))
    kept.sort(key=_NAME)  # stable: repeated names stay in the client's order
    return AnthropicHeaders(tuple(kept), tuple(secret), tuple(betas), retry, tuple(_obstacles(kept, betas)))


def key_header(headers: Headers) -> str:
    """The header in which SDKs that use this API version send their key."""
    return KEY_HEADERS[(first(headers, "anthropic-version") or "") >= _BEARER_SINCE]


def _obstacles(kept: list[tuple[str, str]], betas: Iterable[str]) -> Iterator[str]:
    for beta in betas:
        if beta.lower().replace("_", "-").startswith(_HEADERS_NEVER_IN_A_BATCH):
            yield f"A batch may not use the beta {beta}."
    if not any(value for name, value in kept if name == "anthropic-version"):
        yield "A batch needs an anthropic-version header."


ENDPOINT = "/v1/messages"

_MOST_TOKENS = 2**31 - 1  # limit for estimates; the provider validates the number itself
_NEVER_IN_A_BATCH = frozenset(
    {"speed", "store", "previous_thread_event_id", "cache_hint", "context_hint", "research_preview_2026_02"}
)


def handles(method: str, path: str) -> bool:
    """Whether `parse` supports this request."""
    return method == "POST" and path == ENDPOINT


def parse(raw: RawRequest) -> Parsed:
    if not handles(raw.method, raw.path):
        raise BadCall(f"carpool does not batch {raw.method} {raw.path}, only POST {ENDPOINT}.")
    headers = sort(raw.headers)
    document = json_object.read(raw.body)
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
    """Model, output limit and `stream`. Fast path for valid values; otherwise the slow path raises the error."""
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
    if messages is msgspec.UNSET:  # holds a number that is too big to decode: the provider validates it
        return
    if not isinstance(messages, list):
        raise BadCall("`messages` must be a list." if "messages" in values else "`messages` is missing.")


def _stream(values: dict[str, Any]) -> bool:
    stream = values.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise BadCall("`stream` must be true or false.")
    return bool(stream)


def _unbatchable(values: dict[str, Any], headers: AnthropicHeaders, query: str) -> str | None:
    """All reasons why this call can't go into a batch, as sentences."""
    if not headers.unbatchable and not query and values["max_tokens"] and _NEVER_IN_A_BATCH.isdisjoint(values):
        return None
    reasons = [f"A batch may not carry `{field}`." for field in sorted(_NEVER_IN_A_BATCH & values.keys())]
    if values["max_tokens"] == 0:
        reasons.append("A batch may not carry `max_tokens: 0`.")
    reasons += headers.unbatchable
    if query and any(part not in ("", "beta=true") for part in query.lstrip("?").split("&")):
        reasons.append("A batch can't carry the query of a request.")
    return " ".join(reasons) or None
