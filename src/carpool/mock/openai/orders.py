"""The fields of a create, as OpenAI and each compatible provider name them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from carpool.mock.openai.errors import OpenAIError, missing, wrong_type

_MOST_METADATA, _LONGEST_KEY, _LONGEST_VALUE = 16, 64, 512
_LONGEST_HOURS = 7 * 24
_CHAT = "/v1/chat/completions"

Paths = frozenset[str]


@dataclass(frozen=True, slots=True)
class Order:
    file_id: str
    endpoint: str
    window: str = "24h"
    metadata: Mapping[str, str] | None = None
    name: str | None = None
    model: str | None = None


def openai(body: Any, paths: Paths, windows: Paths) -> Order:
    _check_texts(body, ("input_file_id", "endpoint", "completion_window"))
    _check_endpoint(body, paths)
    if body["completion_window"] not in windows:
        message = (
            f"Invalid value: '{body['completion_window']}'. Value must be {' or '.join(map(repr, sorted(windows)))}."
        )
        raise OpenAIError(message, "completion_window", "invalid_value")
    metadata = body.get("metadata")
    if metadata is not None:
        _check_metadata(metadata)
    return Order(body["input_file_id"], body["endpoint"], body["completion_window"], metadata)


def together(body: Any, paths: Paths, windows: Paths) -> Order:
    """It has no metadata: a client that sends some takes it for another provider."""
    _check_known(body, {"input_file_id", "endpoint", "completion_window", "model_id", "priority"})
    return openai(body, paths, windows)


def mistral(body: Any, paths: Paths, windows: Paths) -> Order:
    _check_known(body, {"input_files", "requests", "endpoint", "model", "agent_id", "metadata", "timeout_hours"})
    _check_texts(body, ("endpoint", "model"))
    _check_endpoint(body, paths)
    files, hours = body.get("input_files"), body.get("timeout_hours", 24)
    if not isinstance(files, list) or len(files) != 1 or not isinstance(files[0], str):
        raise wrong_type("input_files", "an array with one file", files)
    if not isinstance(hours, int) or not 0 < hours < _LONGEST_HOURS:
        raise OpenAIError("Input should be less than 168", "timeout_hours")
    if body.get("metadata") is not None:
        _check_metadata(body["metadata"])
    return Order(files[0], body["endpoint"], f"{hours}h", body.get("metadata"), model=body["model"])


def xai(body: Any, paths: Paths, windows: Paths) -> Order:
    _check_known(body, {"name", "input_file_id"})
    _check_texts(body, ("name", "input_file_id"))
    return Order(body["input_file_id"], _CHAT, name=body["name"])


# ---------------------------------------------------------------- parts


def _check_known(body: Any, known: set[str]) -> None:
    for name in body if isinstance(body, dict) else ():
        if name not in known:
            raise OpenAIError(f"Unknown parameter: '{name}'.", name, "unknown_parameter")


def _check_texts(body: Any, names: tuple[str, ...]) -> None:
    if not isinstance(body, dict):
        raise OpenAIError("We could not parse the JSON body of your request: it is not an object.")
    for name in names:
        if body.get(name) is None:
            raise missing(name)
        if not isinstance(body[name], str):
            raise wrong_type(name, "a string", body[name])


def _check_endpoint(body: Any, paths: Paths) -> None:
    if body["endpoint"] not in paths:
        supported = ", ".join(f"'{path}'" for path in sorted(paths))
        message = f"Invalid value: '{body['endpoint']}'. Supported values are: {supported}."
        raise OpenAIError(message, "endpoint", "invalid_value")


def _check_metadata(metadata: Any) -> None:
    if not isinstance(metadata, Mapping):
        raise wrong_type("metadata", "an object", metadata)
    if len(metadata) > _MOST_METADATA:
        raise OpenAIError("Invalid 'metadata': too many properties.", "metadata", "object_above_max_properties")
    for name, value in metadata.items():
        if not isinstance(value, str):
            raise wrong_type(f"metadata.{name}", "a string", value)
        if len(name) > _LONGEST_KEY or len(value) > _LONGEST_VALUE:
            raise OpenAIError("Invalid 'metadata': string too long.", "metadata", "string_above_max_length")
