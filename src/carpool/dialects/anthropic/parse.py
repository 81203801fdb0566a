"""Parse a client's Messages request: only what routing needs. The provider validates the rest."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from operator import itemgetter
from typing import Any

import msgspec
from msgspec import UNSET

from carpool.core.errors import BadCall
from carpool.core.keys import BEARER, strip_bearer
from carpool.core.model import Headers, PromptChain
from carpool.core.ports import Claim, Parsed, RawRequest
from carpool.dialects import json_object
from carpool.dialects.headers import DROPPED, DROPPED_PREFIXES, SortedHeaders, first, forwarded, session
from carpool.dialects.prompt import ChainBuilder, continued, conversation_number

# ------------------------------------------------------------ headers
# Which of a client's headers are sent to Anthropic with its call.

_HEADERS_NEVER_IN_A_BATCH = ("fast-mode", "research-preview-2026-02")  # betas
KEY_HEADERS = ("x-api-key", "authorization")
SECRETS = frozenset(KEY_HEADERS)
_BEARER_SINCE = "2026-10-21"  # unknown: whether later versions accept x-api-key, and earlier batches a token

_DROPPED = DROPPED | SECRETS | {"anthropic-beta", "anthropic-dangerous-direct-browser-access"}
_DROPPED_PREFIXES = (*DROPPED_PREFIXES, "x-claude-code-")
SESSION = "x-claude-code-session-id"
# Versions of Claude Code without that header state their session in `metadata.user_id`.
_SESSION_IN_USER_ID = re.compile(r'(?:_session_|"session_id"\s*:\s*")([0-9A-Za-z-]{8,64})')


@lru_cache(maxsize=256)  # a client sends the same headers with every call
def sort(headers: Headers) -> SortedHeaders:
    """Sort headers by purpose, all betas into one header. Raises `BadCall` for an unsupported content-encoding."""
    kept, retry = forwarded(headers, _DROPPED, _DROPPED_PREFIXES)
    listed = ",".join(value for name, value in headers if name == "anthropic-beta").split(",")
    betas = dict.fromkeys(beta.strip() for beta in listed if beta.strip())
    if betas:
        kept = sorted([*kept, ("anthropic-beta", ",".join(betas))], key=itemgetter(0))
    of_session = session(headers, SESSION)
    return SortedHeaders(tuple(kept), secret(headers), retry, tuple(_obstacles(kept, betas)), of_session)


def secret(headers: Headers) -> Headers:
    return tuple(pair for pair in headers if pair[0] in SECRETS)


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
_PATHS = frozenset({"complete", "messages", "organizations"})  # first segments below /v1/ that only Anthropic has

_MAX_TOKENS = 2**31 - 1  # limit for estimates; the provider validates the number itself
_NEVER_IN_A_BATCH = frozenset(
    {"speed", "store", "previous_thread_event_id", "cache_hint", "context_hint", "research_preview_2026_02"}
)


def claim(path: str, headers: Headers) -> Claim:
    names = {name for name, _ in headers}
    below_v1 = path[4:].partition("/")[0] if path.startswith("/v1/") else ""
    if below_v1 in _PATHS or any(name.startswith("anthropic-") for name in names):
        return Claim.OWN
    keys = (strip_bearer(name, value) or "" for name, value in headers if name == BEARER)
    return Claim.KEY if "x-api-key" in names or any(key.startswith("sk-ant-") for key in keys) else Claim.NONE


def endpoint_of(body: Mapping[str, Any]) -> tuple[Claim, str]:
    is_ours = "input" not in body and (str(body.get("model")).startswith("claude") or "max_tokens" in body)
    return Claim.KEY if is_ours else Claim.NONE, ENDPOINT


def handles(method: str, path: str) -> bool:
    """Whether `parse` supports this request."""
    return method == "POST" and path == ENDPOINT


def parse(raw: RawRequest) -> Parsed:
    if not handles(raw.method, raw.path):
        raise BadCall(f"carpool does not batch {raw.method} {raw.path}, only POST {ENDPOINT}.")
    headers = sort(raw.headers)
    document = json_object.read(raw.body)
    values = document.values
    max_tokens, messages, model = values.get("max_tokens"), values.get("messages"), values.get("model")
    if type(max_tokens) is not int:
        raise document.mistake("max_tokens", "an integer")
    if messages is msgspec.UNSET:  # holds a number that is too big to decode: the provider validates it
        messages = []
    if type(messages) is not list:
        raise document.mistake("messages", "a list")
    if type(model) is not str:
        raise document.mistake("model", "a string")
    return Parsed(
        endpoint=ENDPOINT,
        model=model,
        body=document.without("stream"),
        stream=document.stream(),
        max_output_tokens=min(max(max_tokens, 0), _MAX_TOKENS),
        headers=headers.forwarded,
        secret=headers.secret,
        unbatchable=_unbatchable(values, headers, raw.query),
        document=document,
        retry=headers.retry,
        conversation=_conversation(values, messages) if _is_marked(values, messages) else None,
        tool_turn=_is_tool_turn(messages),
        session=headers.session or _session_of_user(values),
    )


def _session_of_user(values: dict[str, Any]) -> str:
    metadata = values.get("metadata")
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    found = _SESSION_IN_USER_ID.search(user) if isinstance(user, str) else None
    return "" if found is None else found[1]


def _unbatchable(values: dict[str, Any], headers: SortedHeaders, query: str) -> str | None:
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


# ------------------------------------------------------------ conversations
# A turn repeats everything before it, so its model, system prompt, tools and first message identify the conversation.

_SHORT = 2_000
_LATEST = 4  # messages: cache marks of an ongoing conversation are at its end
_VOLATILE = "x-anthropic-billing-header"  # a block that changes with every request of a conversation


def _conversation(values: Mapping[str, Any], messages: list[Any]) -> int:
    first = next((message for message in _objects(messages) if message.get("role") == "user"), {})
    parts = [str(values.get("model")), *_texts(values.get("system"))]
    parts += (str(tool.get("name"))[:_SHORT] for tool in _objects(values.get("tools")))
    return conversation_number([*parts, *_texts(first.get("content"))])


def _is_marked(values: dict[str, Any], messages: list[Any]) -> bool:
    """This provider caches only marked content."""
    blocks = [values, *_objects(values.get("tools")), *_objects(values.get("system"))]
    for message in _objects(messages[-_LATEST:]):
        blocks += _objects(message.get("content"))
    return any(block.get("cache_control") for block in blocks)


def _is_tool_turn(messages: list[Any]) -> bool:
    """Whether the last message carries tool results."""
    last = messages[-1] if messages else None
    content = _objects(last.get("content")) if isinstance(last, dict) else []
    return any(str(block.get("type")).endswith("tool_result") for block in content)


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _texts(content: Any) -> list[str]:
    """The texts of some content. Cache marks move from turn to turn, so whole blocks can't be compared."""
    if isinstance(content, str):
        return [content]
    blocks = _objects(content)
    texts = [text if isinstance(text := block.get("text"), str) else str(block.get("type")) for block in blocks]
    return [text for text in texts if not text.startswith(_VOLATILE)]


# ------------------------------------------------------------ prompts
# The positions of a Messages request: each tool, each block of the system prompt, each block of a message.
#
# What the cache depends on besides content comes first. `tool_choice`, and whether there are images, matter only from
# the messages on. The block that Claude Code changes with every request does not count: its requests read the cache all
# the same.

MARK = "cache_control"
_SETTINGS = ("thinking", "output_config", "output_format", "speed", "context_management")
_IMAGE = b'"image"'  # within a text its quotes would be escaped


def prompt_chain(parsed: Parsed) -> PromptChain | None:
    values = parsed.document.values
    messages = values.get("messages")
    if not isinstance(messages, list) or any(value is UNSET for value in values.values()):
        return None
    builder = ChainBuilder(_head(parsed.model, parsed.headers), MARK)
    _root(builder, values)
    root, parent = len(builder) - 1, None
    if "tool_choice" in values:
        builder.setting(values["tool_choice"])
    if _IMAGE in parsed.body:
        builder.setting("image")
    before = continued([_role(message) == "assistant" for message in messages])
    for number, message in enumerate(messages):
        if number == before and number:
            parent = len(builder) - 1
        role = _role(message)
        content = message.get("content") if isinstance(message, dict) else message
        for block in content if isinstance(content, list) else (content,):
            builder.block(role, block)
    if MARK in values:  # automatic: the last block
        builder.mark_end(values[MARK])
    known = parsed.conversation
    return builder.chain(root, parent, _conversation(values, messages) if known is None else known)


def _root(builder: ChainBuilder, values: Mapping[str, Any]) -> None:
    for name in _SETTINGS:
        if name in values:
            builder.setting((name, values[name]))
    builder.end_settings()
    tools, system = values.get("tools"), values.get("system")
    for tool in tools if isinstance(tools, list) else ():
        builder.block("tool", tool)
    for block in system if isinstance(system, list) else () if system is None else (system,):
        if not (isinstance(block, dict) and str(block.get("text")).startswith(_VOLATILE)):
            builder.block("system", block)


@lru_cache(maxsize=256)  # a client sends the same headers with every call
def _head(model: str, headers: Headers) -> bytes:
    """What only calls of one model with the same betas share."""
    betas = ",".join(value for name, value in headers if name == "anthropic-beta").split(",")
    return "\0".join([model, *sorted(betas)]).encode("utf-8", "surrogatepass")


def _role(message: Any) -> str:
    return str(message.get("role")) if isinstance(message, dict) else ""
