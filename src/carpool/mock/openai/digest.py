"""What the OpenAI mock reads from a request: enough to answer and bill it."""

import re
from collections.abc import Iterator
from hashlib import sha256
from typing import Any, Literal

import msgspec

from carpool.mock.anthropic.digest import SNIPPET, echo
from carpool.mock.core.blocks import canonical
from carpool.mock.core.errors import STATUS, ApiError
from carpool.mock.core.filler import fill
from carpool.mock.openai.cache import Prefixes, prefixes
from carpool.mock.openai.models import OpenAISpec
from carpool.mock.openai.tools import ToolCall, called
from carpool.mock.openai.validate import Body, check_chat, check_responses

Endpoint = Literal["chat", "responses", "embeddings", "completions", "moderations"]

_DIRECTIVE = re.compile(r"\[(tool|think|refuse|max|error:(\w+))\]")
_UNLIMITED = 4096
_NOT_MEANING = ("stream", "stream_options")


class Asked(msgspec.Struct, frozen=True):
    spec: OpenAISpec
    model: str
    """The name the client used, which the answer repeats."""
    fingerprint: str
    text: str
    """What the answer says."""
    input_tokens: int
    output_tokens: int
    body: Body
    endpoint: Endpoint
    prefixes: Prefixes | None = None
    """None if nothing is cached."""
    directive: str = ""
    tool: ToolCall | None = None
    stream: bool = False
    include_usage: bool = False
    tier: str = "default"


def openai_fingerprint(body: Body) -> str:
    """Identifies a body: equal for equal JSON, independent of key order and streaming."""
    return sha256(canonical({key: value for key, value in body.items() if key not in _NOT_MEANING})).hexdigest()[:16]


def expected_openai_text(body: Body) -> str:
    """The text of the answer to `body`, for tests that check that each client got its own."""
    return echo(openai_fingerprint(body), _last_text(_turns(body)))


def digest(endpoint: Literal["chat", "responses"], body: Any, mean_output: int) -> Asked:
    """Reads a decoded body; raises the provider's error for one that it refuses."""
    spec = check_chat(body) if endpoint == "chat" else check_responses(body)
    name = openai_fingerprint(body)
    turns = _turns(body)
    last = _last_text(turns)
    directive = _directive(last)
    most = _limit(body)
    options = body.get("stream_options") or {}
    tier = body.get("service_tier")
    beginnings = prefixes(spec.id, list(_blocks(body, turns)))
    return Asked(
        spec=spec,
        model=body["model"],
        fingerprint=name,
        text=_answer_text(body, endpoint, echo(name, last)),
        prefixes=beginnings,
        input_tokens=beginnings.tokens[-1],
        output_tokens=most if directive == "max" else 1 + int(name, 16) % min(most, 2 * mean_output - 1),
        body=body,
        endpoint=endpoint,
        directive=directive,
        tool=None if directive == "refuse" else called(body, directive == "tool", last[:SNIPPET]),
        stream=bool(body.get("stream")),
        include_usage=bool(options.get("include_usage")),
        tier="default" if tier in (None, "auto") else tier,
    )


def _turns(body: Body) -> list[Body]:
    turns = body["messages"] if "messages" in body else body["input"]
    return [{"role": "user", "content": turns}] if isinstance(turns, str) else turns


def _blocks(body: Body, turns: list[Body]) -> Iterator[Any]:
    """In the order in which prompts are cached: tools, instructions, turns."""
    yield from body.get("tools") or ()
    if body.get("instructions"):
        yield body["instructions"]
    yield from turns


def _last_text(turns: list[Body]) -> str:
    """The last text of the last turn, if that is the user's: it has a test's commands to the mock."""
    last = turns[-1]
    if last.get("role") != "user":
        return ""
    content = last["content"]
    if isinstance(content, str):
        return content
    texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return texts[-1] if texts else ""


def _directive(text: str) -> str:
    match = _DIRECTIVE.search(text)
    if match is None:
        return ""
    if match[2] is not None:
        if match[2] not in STATUS:
            return ""
        raise ApiError(match[2], f"You asked for {match[2]}.")
    return match[1]


def _limit(body: Body) -> int:
    limits = (body.get(name) for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"))
    return next((limit for limit in limits if limit is not None), _UNLIMITED)


def _answer_text(body: Body, endpoint: Endpoint, said: str) -> str:
    """An echo; as JSON if the client wants JSON."""
    text = body.get("text")
    wanted = (
        body.get("response_format") if endpoint == "chat" else text.get("format") if isinstance(text, dict) else None
    )
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "json_object":
        return canonical({"echo": said}).decode()
    if kind == "json_schema" and isinstance(wanted, dict):
        described = wanted.get("json_schema") if endpoint == "chat" else wanted
        return canonical(fill((described or {}).get("schema"), said)).decode()
    return said
