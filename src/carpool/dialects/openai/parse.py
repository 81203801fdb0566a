"""Understands a client's request to OpenAI: only what routing needs, the rest is for the provider to judge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from carpool.dialects import faithful
from carpool.dialects.openai import headers as rules
from carpool.dialects.openai.relatives import OPENAI, Relative
from carpool.errors import BadCall
from carpool.ports import Parsed, RawRequest

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
EMBEDDINGS = "/v1/embeddings"
COMPLETIONS = "/v1/completions"
MODERATIONS = "/v1/moderations"

# Where each endpoint says how long its answer may get; none of them has to.
_LIMITS: Mapping[str, tuple[str, ...]] = {
    CHAT: ("max_completion_tokens", "max_tokens"),
    RESPONSES: ("max_output_tokens",),
    COMPLETIONS: ("max_tokens",),
    EMBEDDINGS: (),
    MODERATIONS: (),
}
_UNSAID = 4096  # tokens to reckon with when the client names no limit
_MOST_TOKENS = 2**31 - 1  # a bound for estimates; the provider judges the number itself

# Its state lies with the provider and is spoken of by name, or it asks for another way of being served.
_NEVER_IN_A_BATCH = ("background", "conversation", "previous_response_id", "store")
_STANDARD_TIERS = (None, "auto", "default")
_FLEXIBLE = (CHAT, RESPONSES)


def handles(method: str, path: str) -> bool:
    """Whether this is a request that `parse` understands."""
    return method == "POST" and path in _LIMITS


def parse(raw: RawRequest, relative: Relative = OPENAI) -> Parsed:
    if not handles(raw.method, raw.path):
        raise BadCall(f"carpool does not understand {raw.method} {raw.path}, only POST {', '.join(_LIMITS)}.")
    headers = rules.sort(raw.headers)
    document = faithful.read(raw.body)
    values = document.values
    stream = _stream(values)
    if "stream_options" in values:  # refused by the provider where `stream` is not there
        document = faithful.read(document.without("stream_options"))
    model = _model(values, raw.path)
    return Parsed(
        endpoint=raw.path,
        model=model,
        body=document.without("stream"),
        stream=stream,
        max_output_tokens=_max_tokens(values, raw.path),
        headers=headers.travelling,
        secret=headers.secret,
        unbatchable=" ".join((*_obstacles(values, model, _query(raw, relative)), *_not_there(raw, relative))) or None,
        document=document,
        retry=headers.retry,
        flexible=raw.path in _FLEXIBLE
        and values.get("service_tier") in (None, "auto")
        and not values.get("background"),
        tool_turn=_is_tool_turn(values.get("input") if raw.path == RESPONSES else values.get("messages")),
    )


def _model(values: dict[str, Any], endpoint: str) -> str:
    model = values.get("model")
    # A stored prompt may name the model, and moderations have one that is the provider's choice.
    if model is None and (isinstance(values.get("prompt"), dict) or endpoint == MODERATIONS):
        return ""
    if not isinstance(model, str):
        raise BadCall("`model` must be a string." if "model" in values else "`model` is missing.")
    return model


def _stream(values: dict[str, Any]) -> bool:
    stream = values.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise BadCall("`stream` must be true or false.")
    return bool(stream)


def _max_tokens(values: dict[str, Any], endpoint: str) -> int:
    names = _LIMITS[endpoint]
    for name in names:
        limit = values.get(name)
        if isinstance(limit, int) and not isinstance(limit, bool):
            return min(max(limit, 0), _MOST_TOKENS)
    return _UNSAID if names else 0


def _is_tool_turn(turns: object) -> bool:
    """Whether the last turn carries the results of tools."""
    last = turns[-1] if isinstance(turns, list) and turns else None
    if not isinstance(last, dict):
        return False
    return last.get("role") in ("tool", "function") or str(last.get("type")).endswith("_output")


def _obstacles(values: dict[str, Any], model: str, query: str) -> Iterator[str]:
    """Every reason of its own why this call may not ride a batch, as sentences."""
    for field in _NEVER_IN_A_BATCH:
        if values.get(field):
            yield f"A batch may not carry `{field}`."
    tier = values.get("service_tier")
    if tier not in _STANDARD_TIERS:
        yield f"A batch may not ask for the service tier {str(tier)[:40]!r}."
    if any(_names_container(tool) for tool in _list(values.get("tools"))):
        yield "A batch may not use a container that exists already."
    if "audio" in _list(values.get("modalities")):
        yield "A batch may not answer in audio."
    if not model:
        yield "A batch must know the model, and this call leaves it to a stored prompt or to the provider."
    if query.strip("?&"):
        yield "A batch can't carry the query of a request."


def _query(raw: RawRequest, relative: Relative) -> str:
    """What a request's query says beyond what all requests of the relative say."""
    return "" if raw.query.strip("?&") == relative.query else raw.query


def _not_there(raw: RawRequest, relative: Relative) -> Iterator[str]:
    """Why the provider's batches have no place for a request like this."""
    if relative.endpoints is not None and raw.path not in relative.endpoints:
        yield f"{relative.said} takes no {raw.path} in batches."
    if relative.max_line is not None and len(raw.body) > relative.max_line:
        yield f"A call in a batch of {relative.said} has at most {relative.max_line // 1_000_000} MB."


def _names_container(tool: object) -> bool:
    if not isinstance(tool, dict):
        return False
    environment = tool.get("environment")
    return isinstance(tool.get("container"), str) or (isinstance(environment, dict) and "container_id" in environment)


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
