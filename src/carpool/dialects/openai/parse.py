"""Parse a client's request to OpenAI: only what routing needs. The provider validates the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from msgspec import UNSET

from carpool.core.errors import BadCall
from carpool.core.keys import BEARER, strip_bearer
from carpool.core.model import Headers, PromptChain
from carpool.core.ports import Claim, Parsed, RawRequest
from carpool.dialects import json_object
from carpool.dialects.headers import DROPPED, DROPPED_PREFIXES, SortedHeaders, forwarded, session
from carpool.dialects.openai.providers import (
    CHAT,
    COMPATIBLE_PROVIDERS,
    EMBEDDINGS,
    MODERATIONS,
    OPENAI,
    RESPONSES,
    CompatibleProvider,
)
from carpool.dialects.prompt import ChainBuilder, continued, conversation_number

# ------------------------------------------------------------ headers
# Which of a client's headers are sent to OpenAI with its call.

PAYERS = frozenset({"openai-organization", "openai-project"})  # calls that differ in them have different credentials
_KEYS = frozenset().union(*[row.key_headers for row in COMPATIBLE_PROVIDERS.values()])
SECRETS = _KEYS | PAYERS
SUBAGENT = "x-openai-subagent"
# Headers of Codex about its session and about single requests.
_SESSION = ("session-id", "session_id", "conversation_id", "thread-id")
_OF_CODEX = {"originator", *_SESSION, SUBAGENT}
_DROPPED = DROPPED | SECRETS | _OF_CODEX
_DROPPED_PREFIXES = (*DROPPED_PREFIXES, "x-codex-")


@lru_cache(maxsize=256)  # a client sends the same headers with every call
def sort(headers: Headers) -> SortedHeaders:
    """Sort headers by purpose. Raises `BadCall` for a content-encoding that carpool can't read."""
    kept, retry = forwarded(headers, _DROPPED, _DROPPED_PREFIXES)
    return SortedHeaders(tuple(kept), secret(headers), retry, session=session(headers, *_SESSION))


def secret(headers: Headers) -> Headers:
    """The headers of the client's credential; an organisation without a key is none."""
    pairs = tuple(pair for pair in headers if pair[0] in SECRETS)
    return pairs if any(name in _KEYS for name, _ in pairs) else ()


COMPLETIONS = "/v1/completions"

# The output limit of each endpoint; all of them are optional.
_LIMITS: Mapping[str, tuple[str, ...]] = {
    CHAT: ("max_completion_tokens", "max_tokens"),
    RESPONSES: ("max_output_tokens",),
    COMPLETIONS: ("max_tokens",),
    EMBEDDINGS: (),
    MODERATIONS: (),
}
_DEFAULT_MAX_TOKENS = 4096  # the assumed output limit when the client sets none
_MAX_TOKENS = 2**31 - 1  # limit for estimates; the provider validates the number itself

# Fields that refer to state at the provider, or that ask for another mode of delivery.
_NEVER_IN_A_BATCH = ("background", "conversation", "previous_response_id", "store")
_STANDARD_TIERS = (None, "auto", "default")
_FLEXIBLE = (CHAT, RESPONSES)


# First segments below /v1/: its own, which compatible providers have copied, and those that other dialects have, too.
_PATHS = """
    assistants audio batches chat completions containers conversations embeddings evals fine_tuning images moderations
    organization projects realtime responses threads uploads vector_stores videos
"""
_OWN_SEGMENTS = frozenset(_PATHS.split())
_SHARED_SEGMENTS = frozenset({"files", "models"})


def claim(path: str, headers: Headers) -> Claim:
    """Its clients send nothing but a bearer token, so a request with one that no other dialect claims is OpenAI's. So
    its new endpoints work from the day they appear."""
    below_v1 = path[4:].partition("/")[0] if path.startswith("/v1/") else ""
    if below_v1 in _OWN_SEGMENTS:
        return Claim.PATH
    if below_v1 in _SHARED_SEGMENTS:
        return Claim.POSSIBLE
    keyed = any(
        name == "api-key" or (name == BEARER and strip_bearer(name, value) is not None) for name, value in headers
    )
    return Claim.POSSIBLE if keyed and (below_v1 or completed(path) != path) else Claim.NONE


def endpoint_of(body: Mapping[str, Any]) -> tuple[Claim, str]:
    if "input" in body:
        return Claim.KEY, EMBEDDINGS if "embed" in str(body.get("model")) else RESPONSES
    return Claim.POSSIBLE, CHAT


def completed(path: str) -> str:
    return "/v1" + path if path[1:].partition("/")[0] in _OWN_SEGMENTS | _SHARED_SEGMENTS else path


def handles(method: str, path: str) -> bool:
    """Whether `parse` supports this request."""
    return method == "POST" and path in _LIMITS


def parse(raw: RawRequest, provider: CompatibleProvider = OPENAI) -> Parsed:
    if not handles(raw.method, raw.path):
        raise BadCall(f"carpool does not understand {raw.method} {raw.path}, only POST {', '.join(_LIMITS)}.")
    headers = sort(raw.headers)
    document = json_object.read(raw.body)
    values = document.values
    stream = document.stream()
    if "stream_options" in values:  # the provider refuses it without `stream`
        document = json_object.read(document.without("stream_options"))
    model = values.get("model")
    # A stored prompt may set the model, and moderations have a default model.
    if model is None and (isinstance(values.get("prompt"), dict) or raw.path == MODERATIONS):
        model = ""
    if not isinstance(model, str):
        raise document.mistake("model", "a string")
    return Parsed(
        endpoint=raw.path,
        model=model,
        body=document.without("stream"),
        stream=stream,
        max_output_tokens=_max_tokens(values, raw.path),
        headers=headers.forwarded,
        secret=headers.secret,
        unbatchable=" ".join((*_obstacles(values, model, _query(raw, provider)), *_not_offered(raw, provider))) or None,
        document=document,
        retry=headers.retry,
        session=headers.session,
        flexible=raw.path in _FLEXIBLE
        and values.get("service_tier") in (None, "auto")
        and not values.get("background"),
        tool_turn=_is_tool_turn(values.get("input") if raw.path == RESPONSES else values.get("messages")),
    )


def _max_tokens(values: dict[str, Any], endpoint: str) -> int:
    names = _LIMITS[endpoint]
    for name in names:
        limit = values.get(name)
        if isinstance(limit, int) and not isinstance(limit, bool):
            return min(max(limit, 0), _MAX_TOKENS)
    return _DEFAULT_MAX_TOKENS if names else 0


def _is_tool_turn(turns: object) -> bool:
    """Whether the last turn carries tool results."""
    last = turns[-1] if isinstance(turns, list) and turns else None
    if not isinstance(last, dict):
        return False
    return last.get("role") in ("tool", "function") or str(last.get("type")).endswith("_output")


def _obstacles(values: dict[str, Any], model: str, query: str) -> Iterator[str]:
    """All reasons in the call itself why it can't go into a batch, as sentences."""
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


def _query(raw: RawRequest, provider: CompatibleProvider) -> str:
    """The request's query without what every request to this provider has."""
    return "" if raw.query.strip("?&") == provider.query else raw.query


def _not_offered(raw: RawRequest, provider: CompatibleProvider) -> Iterator[str]:
    """All reasons why the provider does not accept such a request in a batch."""
    if provider.endpoints is not None and raw.path not in provider.endpoints:
        yield f"{provider.display_name} takes no {raw.path} in batches."
    if provider.max_line is not None and len(raw.body) > provider.max_line:
        yield f"A call in a batch of {provider.display_name} has at most {provider.max_line // 1_000_000} MB."


def _names_container(tool: object) -> bool:
    if not isinstance(tool, dict):
        return False
    environment = tool.get("environment")
    return isinstance(tool.get("container"), str) or (isinstance(environment, dict) and "container_id" in environment)


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


# ------------------------------------------------------------ prompts
# The positions of a prompt: each tool, the instructions, each message or item. The system prompt is at the begin of
# the turns. A prompt that is no list is one position.
#
# Most models cache without marks. With `prompt_cache_options: {mode: explicit}` only marked blocks count.

MARK = "prompt_cache_breakpoint"
OPTIONS = "prompt_cache_options"
_SETTINGS = ("reasoning", "reasoning_effort", "response_format", "text")
_PROMPTS = ("messages", "input", "prompt")
_SYSTEM_ROLES = frozenset({"system", "developer"})


def prompt_chain(parsed: Parsed) -> PromptChain | None:
    values = parsed.document.values
    if any(value is UNSET for value in values.values()):
        return None
    builder = ChainBuilder(parsed.model.encode("utf-8", "surrogatepass"), MARK)
    for name in _SETTINGS:
        if name in values:
            builder.setting((name, values[name]))
    builder.end_settings()
    tools, turns = values.get("tools"), _turns_of(values)
    for tool in tools if isinstance(tools, list) else ():
        builder.block("tool", tool)
    if "instructions" in values:
        builder.block("system", values["instructions"])
    leading = next((number for number, turn in enumerate(turns) if not _is_system(turn)), len(turns))
    for turn in turns[:leading]:
        builder.block("", turn)
    root, parent, rest = len(builder) - 1, None, turns[leading:]
    before = continued([_is_answer(turn) for turn in rest])
    for number, turn in enumerate(rest):
        if number == before and number:
            parent = len(builder) - 1
        builder.block("", turn)
    first = builder.at(root + 1 if rest else root)  # the same in all turns
    return builder.chain(root, parent, conversation_number([str(first)]), implicit=_is_implicit(values))


def _turns_of(values: Mapping[str, Any]) -> list[Any]:
    name = next((name for name in _PROMPTS if name in values), "")
    value = values[name] if name else []
    return value if isinstance(value, list) else [value]


def _is_implicit(values: Mapping[str, Any]) -> bool:
    options = values.get(OPTIONS)
    return not (isinstance(options, dict) and options.get("mode") == "explicit")


def _is_system(turn: Any) -> bool:
    role = turn.get("role") if isinstance(turn, dict) else None
    return isinstance(role, str) and role in _SYSTEM_ROLES


def _is_answer(turn: Any) -> bool:
    """An item of `input` has a type; `*_call` and `reasoning` are what the model said."""
    if not isinstance(turn, dict):
        return False
    kind = turn.get("type")
    return turn.get("role") == "assistant" or kind == "reasoning" or (isinstance(kind, str) and kind.endswith("_call"))
