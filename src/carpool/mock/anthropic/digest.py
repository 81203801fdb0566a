"""What the provider keeps of a request: enough to answer, bill and cache it, and not the body itself."""

import re
from hashlib import sha256
from typing import Any

import msgspec

from carpool.mock.anthropic.cache import CachePlan, plan_cache
from carpool.mock.anthropic.models import ModelSpec
from carpool.mock.anthropic.validate import check_body
from carpool.mock.core.blocks import Body, canonical, count_tokens, last_text
from carpool.mock.core.errors import STATUS, ApiError
from carpool.mock.core.filler import arguments, fill

_DIRECTIVE = re.compile(r"\[(tool|think|blocks|refuse|max|error:(\w+))\]")
SNIPPET = 40


class ToolUse(msgspec.Struct, frozen=True, gc=False):
    name: str
    input: dict[str, Any]
    alone: bool = False
    """The request forces a tool: the answer has no text in addition to the call."""


class Digest(msgspec.Struct, frozen=True, gc=False):
    spec: ModelSpec
    model: str
    """The name the client used, which the answer repeats."""
    fingerprint: str
    snippet: str
    input_tokens: int
    output_tokens: int
    directive: str = ""
    tool: ToolUse | None = None
    structured: str | None = None
    """The answer, if the request has a schema for it."""
    plan: CachePlan | None = None
    geo_us: bool = False
    fast: bool = False
    stream: bool = False


class Failure(msgspec.Struct, frozen=True, gc=False):
    """A request that will be refused, and its error."""

    kind: str
    message: str


def fingerprint(body: Body) -> str:
    """Identifies a body: equal for equal JSON, independent of key order and streaming."""
    if "stream" in body:
        body = {key: value for key, value in body.items() if key != "stream"}
    return sha256(canonical(body)).hexdigest()[:16]


def expected_text(body: Body) -> str:
    """The text of the answer to `body`, for tests that check that each client got its own."""
    return echo(fingerprint(body), last_text(body))


def echo(name: str, text: str) -> str:
    return f"echo:{name} {text[:SNIPPET]}".rstrip()


def digest(body: Any, raw: bytes | bytearray, mean_output: int, in_batch: bool) -> Digest:
    """Reads a decoded body; raises the provider's error for one that it refuses. `raw` is the same body as bytes."""
    spec = check_body(body, in_batch)
    name = fingerprint(body)
    text = last_text(body)
    directive = _directive(text)
    most: int = body["max_tokens"]
    return Digest(
        spec=spec,
        # A batch keeps a hundred thousand of these: share the name where it is the catalogue's own.
        model=spec.id if body["model"] == spec.id else body["model"],
        fingerprint=name,
        snippet=text[:SNIPPET],
        input_tokens=count_tokens(body),
        output_tokens=most if directive == "max" else _output_tokens(name, most, mean_output),
        directive=directive,
        tool=_tool(body, directive, text[:SNIPPET]),
        structured=_structured(body, echo(name, text)),
        plan=plan_cache(body, spec) if b'"cache_control"' in raw else None,
        geo_us=body.get("inference_geo") == "us",
        fast=body.get("speed") == "fast",
        stream=bool(body.get("stream")),
    )


def digest_or_failure(raw: msgspec.Raw, mean_output: int) -> Digest | Failure:
    """A batch request's params: errors in them appear only in the results."""
    try:
        copy = bytes(raw)
        return digest(msgspec.json.decode(copy), copy, mean_output, in_batch=True)
    except ApiError as error:
        return Failure(error.kind, error.message)
    except msgspec.DecodeError as error:
        return Failure("invalid_request_error", f"params: {error}")


def _directive(text: str) -> str:
    if "[" not in text:
        return ""
    match = _DIRECTIVE.search(text)
    if match is None:
        return ""
    if match[2] is not None:
        if match[2] not in STATUS:
            return ""
        raise ApiError(match[2], f"You asked for {match[2]}.")
    return match[1]


def _output_tokens(name: str, most: int, mean: int) -> int:
    return 1 + int(name, 16) % min(most, 2 * mean - 1) if most else 0


def _structured(body: Body, text: str) -> str | None:
    output = body.get("output_config")
    wanted = (output.get("format") if isinstance(output, dict) else None) or body.get("output_format")
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        return canonical(fill(wanted.get("schema"), text)).decode()
    return None


def _tool(body: Body, directive: str, snippet: str) -> ToolUse | None:
    """A tool is called if the user asks for it, or if the request forces it."""
    choice = body.get("tool_choice") or {}
    forced = choice.get("type") in ("any", "tool")
    if directive == "refuse" or choice.get("type") == "none" or not (forced or directive == "tool"):
        return None
    tools = [tool for tool in body.get("tools") or () if isinstance(tool.get("name"), str)]
    if choice.get("type") == "tool":
        tools = [tool for tool in tools if tool["name"] == choice["name"]]
    # Server tools have no schema, and are called at the provider.
    tools.sort(key=lambda tool: "input_schema" not in tool)
    if not tools:
        return None
    return ToolUse(tools[0]["name"], arguments(tools[0].get("input_schema"), snippet), alone=forced)
