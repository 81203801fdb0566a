"""Checks a body as OpenAI does, before anything is billed."""

from typing import Any

from carpool.mock.openai.errors import OpenAIError, missing, wrong_type
from carpool.mock.openai.models import OpenAISpec, find_model
from carpool.mock.openai.providers import TABLE
from carpool.mock.openai.tools import check_tools

Body = dict[str, Any]

_BOTH = frozenset(
    [
        "metadata",
        "model",
        "moderation",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "stream",
        "stream_options",
        "temperature",
        "tool_choice",
        "tools",
        "top_logprobs",
        "top_p",
        "user",
    ]
)
_CHAT = _BOTH | frozenset(
    [
        "audio",
        "frequency_penalty",
        "function_call",
        "functions",
        "logit_bias",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "modalities",
        "n",
        "prediction",
        "presence_penalty",
        "reasoning_effort",
        "response_format",
        "seed",
        "stop",
        "verbosity",
        "web_search_options",
    ]
)
_RESPONSES = _BOTH | frozenset(
    [
        "access_programs",
        "background",
        "client_metadata",
        "context_management",
        "conversation",
        "image",
        "include",
        "input",
        "instructions",
        "max_output_tokens",
        "max_tool_calls",
        "previous_response_id",
        "prompt",
        "reasoning",
        "text",
        "truncation",
    ]
)
_EMBEDDINGS = frozenset({"dimensions", "encoding_format", "input", "model", "user"})
_COMPLETIONS = frozenset(
    [
        "best_of",
        "echo",
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "max_tokens",
        "model",
        "n",
        "presence_penalty",
        "prompt",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "suffix",
        "temperature",
        "top_p",
        "user",
    ]
)
_MODERATIONS = frozenset({"input", "model"})
_ROLES = ("system", "assistant", "user", "function", "tool", "developer")
_LEAST_OUTPUT = 16
_MOST_INPUTS = 2048


def check_chat(body: Any) -> OpenAISpec:
    _check_names(body, _CHAT | _also(body))
    _check_list("messages", body.get("messages"))
    _check_messages(body["messages"])
    spec = _check_model(body, "talk")
    _check_common(body, spec)
    check_tools(body, "chat")
    if spec.thinks and body.get("max_tokens") is not None:
        said = "'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
        raise OpenAIError(f"Unsupported parameter: {said}", "max_tokens", "unsupported_parameter")
    for name in ("max_tokens", "max_completion_tokens"):
        _check_limit(body, name, 1)
    return spec


def check_responses(body: Any) -> OpenAISpec:
    _check_names(body, _RESPONSES)
    spec = _check_model(body, "talk")
    asked = body.get("input")
    if asked is None:
        raise missing("input")
    if not isinstance(asked, str):
        _check_list("input", asked)
        _check_items(asked)
    _check_common(body, spec)
    check_tools(body, "responses")
    _check_limit(body, "max_output_tokens", _LEAST_OUTPUT)
    earlier = body.get("previous_response_id")
    if earlier is not None:  # this provider keeps none
        message = f"Previous response with id '{earlier}' not found."
        raise OpenAIError(message, "previous_response_id", "previous_response_not_found")
    if body.get("background"):
        raise OpenAIError("Background mode is not offered here.", "background", "unsupported_parameter")
    return spec


def check_embeddings(body: Any) -> OpenAISpec:
    _check_names(body, _EMBEDDINGS)
    spec = _check_model(body, "embed")
    given = body.get("input")
    if given is None:
        raise missing("input")
    inputs = given if isinstance(given, list) else [given]
    whole = all(isinstance(one, int) for one in inputs)
    sound = inputs and (whole or all(one and isinstance(one, str | list) for one in inputs))
    if not sound or (not whole and len(inputs) > _MOST_INPUTS):
        raise OpenAIError("'$.input' is invalid. Please check the API reference.", "input")
    if body.get("encoding_format") not in (None, "float", "base64"):
        raise OpenAIError("Invalid value for 'encoding_format'.", "encoding_format", "invalid_value")
    wanted = body.get("dimensions")
    if wanted is not None and (not isinstance(wanted, int) or not 0 < wanted <= spec.dimensions):
        raise OpenAIError("Invalid value for 'dimensions'.", "dimensions", "invalid_value")
    return spec


def check_completions(body: Any) -> OpenAISpec:
    _check_names(body, _COMPLETIONS)
    spec = _check_model(body, "complete")
    prompt = body.get("prompt")
    if prompt is None:
        raise missing("prompt")
    if not isinstance(prompt, str):
        raise wrong_type("prompt", "a string", prompt)
    if body.get("stream"):
        raise OpenAIError("Streaming is not offered here.", "stream", "unsupported_parameter")
    _check_limit(body, "max_tokens", 1)
    return spec


def check_moderations(body: Any) -> OpenAISpec:
    _check_names(body, _MODERATIONS)
    spec = _check_model({"model": "omni-moderation-latest", **body}, "moderate")
    given = body.get("input")
    if given is None:
        raise missing("input")
    inputs = given if isinstance(given, list) else [given]
    if not inputs or not all(isinstance(one, str | dict) for one in inputs):
        raise OpenAIError("'$.input' is invalid. Please check the API reference.", "input")
    return spec


# ---------------------------------------------------------------- parts


def _check_names(body: Any, known: frozenset[str]) -> None:
    if not isinstance(body, dict):
        raise OpenAIError("We could not parse the JSON body of your request: it is not an object.")
    for name in body:
        if name not in known:
            raise OpenAIError(f"Unknown parameter: '{name}'.", name, "unknown_parameter")


def _also(body: Any) -> frozenset[str]:
    """What the provider of this model accepts in addition to OpenAI's parameters."""
    model = body.get("model") if isinstance(body, dict) else None
    spec = find_model(model) if isinstance(model, str) else None
    return frozenset() if spec is None else TABLE[spec.house].also


def _check_model(body: Body, use: str) -> OpenAISpec:
    model = body.get("model")
    if model is None:
        raise OpenAIError("you must provide a model parameter")
    if not isinstance(model, str):
        raise wrong_type("model", "a string", model)
    spec = find_model(model)
    if spec is None:
        message = f"The model `{model}` does not exist or you do not have access to it."
        raise OpenAIError(message, None, "model_not_found", "not_found_error")
    if spec.use != use:
        raise OpenAIError("This is not a model for this endpoint.", "model", None, "not_found_error")
    return spec


def _check_common(body: Body, spec: OpenAISpec) -> None:
    if not isinstance(body.get("stream") or False, bool):
        raise wrong_type("stream", "a boolean", body["stream"])
    if body.get("stream_options") is not None and not body.get("stream"):
        message = "The 'stream_options' parameter is only allowed when 'stream' is enabled."
        raise OpenAIError(message, "stream_options")
    tier = body.get("service_tier")
    if tier not in (None, "auto", "default") and tier not in spec.tiers:
        raise OpenAIError(f"Invalid service_tier argument: {tier}.", "service_tier", "invalid_value")


def _check_limit(body: Body, name: str, least: int) -> None:
    limit = body.get(name)
    if limit is None:
        return
    if not isinstance(limit, int) or isinstance(limit, bool):
        raise wrong_type(name, "an integer", limit)
    if limit < least:
        message = (
            f"Invalid '{name}': integer below minimum value. Expected a value >= {least}, but got {limit} instead."
        )
        raise OpenAIError(message, name, "integer_below_min_value")


def _check_list(name: str, value: Any) -> None:
    if value is None:
        raise missing(name)
    if not isinstance(value, list):
        raise wrong_type(name, "an array of objects", value)
    if not value:
        raise OpenAIError(
            f"Invalid '{name}': empty array. Expected an array with minimum length 1.", name, "empty_array"
        )
    for position, one in enumerate(value):
        if not isinstance(one, dict):
            raise wrong_type(f"{name}[{position}]", "an object", one)


def _check_messages(messages: list[Body]) -> None:
    asked: set[str] = set()  # tool calls without an answer yet
    for position, message in enumerate(messages):
        role = message.get("role")
        if role not in _ROLES:
            supported = ", ".join(f"'{one}'" for one in _ROLES)
            error = f"Invalid value: '{role}'. Supported values are: {supported}."
            raise OpenAIError(error, f"messages[{position}].role", "invalid_value")
        if role == "tool":
            if message.get("tool_call_id") not in asked:
                error = "messages with role 'tool' must be a response to a preceding message with 'tool_calls'."
                raise OpenAIError(f"Invalid parameter: {error}", f"messages.[{position}].role")
            asked.discard(message["tool_call_id"])
        elif asked:
            break
        else:
            asked = {call["id"] for call in message.get("tool_calls") or ()}
        if message.get("content") is None and role != "assistant":
            raise missing(f"messages[{position}].content")
    if asked:
        error = f"did not have response messages: {', '.join(sorted(asked))}"
        raise OpenAIError(
            f"An assistant message with 'tool_calls' must be followed by tool messages; these tool_call_ids {error}",
            "messages",
        )


def _check_items(items: list[Body]) -> None:
    called: set[str] = set()
    for position, item in enumerate(items):
        kind = item.get("type", "message")
        if kind in ("function_call", "custom_tool_call"):
            called.add(str(item.get("call_id")))
        elif kind in ("function_call_output", "custom_tool_call_output") and item.get("call_id") not in called:
            raise OpenAIError(
                f"No tool call found for function call output with call_id {item.get('call_id')}.", "input"
            )
        elif kind == "message" and item.get("content") is None:
            raise missing(f"input[{position}].content")
