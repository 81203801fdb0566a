"""Checks a Messages body as the provider does; batches forbid a few more things."""

from typing import Any

from carpool.mock.anthropic.models import ModelSpec, find_model
from carpool.mock.core.blocks import Body
from carpool.mock.core.errors import ApiError, invalid

_NOT_IN_BATCH = frozenset(
    ("speed", "store", "previous_thread_event_id", "cache_hint", "context_hint", "research_preview_2026_02")
)
_ROLES = frozenset({"user", "assistant", "system"})
_CHOICES = ("auto", "any", "tool", "none")
BATCH_MAX_OUTPUT = 300_000


def check_body(body: Any, in_batch: bool) -> ModelSpec:
    """The model the body asks for; raises the provider's error if it would be refused."""
    if not isinstance(body, dict):
        raise invalid("The request body must be an object.")
    spec = check_prompt(body)
    _check_max_tokens(body, spec, in_batch)
    stream = body.get("stream", False)
    if not isinstance(stream, bool):
        raise invalid("stream: Input should be a valid boolean")
    if in_batch:
        _check_batchable(body, spec)
    return spec


def check_prompt(body: Body) -> ModelSpec:
    """What token counting needs as well: a model and messages."""
    model = body.get("model")
    if not isinstance(model, str):
        raise invalid("model: Field required" if model is None else "model: Input should be a valid string")
    _check_messages(body.get("messages"))
    for name in ("tools", "system"):
        value = body.get(name)
        if value is None or (name == "system" and isinstance(value, str)):
            continue
        if not isinstance(value, list) or not all(isinstance(block, dict) for block in value):
            raise invalid(f"{name}: Input should be a valid list of objects")
    _check_tool_choice(body)
    spec = find_model(model)
    if spec is None:
        raise ApiError("not_found_error", f"model: {model}")
    return spec


def _check_tool_choice(body: Body) -> None:
    choice = body.get("tool_choice")
    if choice is None:
        return
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind not in _CHOICES:
        raise invalid(f"tool_choice: Input tag {kind!r} does not match any of {', '.join(map(repr, _CHOICES))}")
    if not body.get("tools"):
        raise invalid("tool_choice: may only be specified while providing tools")
    if kind != "tool":
        return
    named = choice.get("name")
    if not isinstance(named, str):
        raise invalid("tool_choice.tool.name: Field required")
    if all(tool.get("name") != named for tool in body["tools"]):
        raise invalid(f"tool_choice: Tool '{named}' not found in provided tools")


def _check_messages(messages: Any) -> None:
    if messages is None:
        raise invalid("messages: Field required")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages: at least one message is required")
    for position, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise invalid(f"messages.{position}.role: Input should be 'user', 'assistant' or 'system'")
        content = message.get("content")
        if isinstance(content, list):
            if not all(isinstance(block, dict) and isinstance(block.get("type"), str) for block in content):
                raise invalid(f"messages.{position}.content: every block needs a type")
        elif not isinstance(content, str):
            raise invalid(f"messages.{position}.content: Field required")


def _check_max_tokens(body: Body, spec: ModelSpec, in_batch: bool) -> None:
    most = body.get("max_tokens")
    if most is None:
        raise invalid("max_tokens: Field required")
    if not isinstance(most, int) or isinstance(most, bool) or most < 0:
        raise invalid("max_tokens: Input should be a valid positive integer")
    limit = max(spec.max_output, BATCH_MAX_OUTPUT) if in_batch else spec.max_output
    if most > limit:
        raise invalid(f"max_tokens: {most} > {limit}, which is the maximum allowed number of output tokens")
    if most == 0:
        _check_warm_up(body)


def _check_warm_up(body: Body) -> None:
    """`max_tokens: 0` only fills the cache; it can't be combined with parameters that need an answer."""
    thinking, choice, output = body.get("thinking"), body.get("tool_choice"), body.get("output_config")
    if (
        body.get("stream")
        or (isinstance(thinking, dict) and thinking.get("type") == "enabled")
        or (isinstance(choice, dict) and choice.get("type") in ("any", "tool"))
        or (isinstance(output, dict) and output.get("format") is not None)
    ):
        raise invalid("max_tokens: 0 is not allowed with streaming, thinking, a forced tool or an output format")


def _check_batchable(body: Body, spec: ModelSpec) -> None:
    if body.get("stream"):
        raise invalid("stream: streaming is not supported in batches")
    for name in sorted(_NOT_IN_BATCH & body.keys()):
        if body[name] is not None:
            raise invalid(f"{name}: not supported in batches")
    if body["max_tokens"] == 0:
        raise invalid("max_tokens: must be at least 1 in batches")
    if not spec.batch:
        raise invalid(f"model: {spec.id} is not available in batches")
