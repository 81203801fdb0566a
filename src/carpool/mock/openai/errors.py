"""Error responses of the OpenAI mock."""

from collections.abc import Mapping
from typing import Any

from carpool.mock.core.errors import ApiError

# Both mocks share their faults; these are the ones for which OpenAI has another status, type or code.
_SHAPES: Mapping[str, tuple[int, str, str | None]] = {
    "authentication_error": (401, "invalid_request_error", "invalid_api_key"),
    "permission_error": (403, "invalid_request_error", None),
    "billing_error": (429, "insufficient_quota", "insufficient_quota"),
    "rate_limit_error": (429, "requests", "rate_limit_exceeded"),
    "api_error": (500, "server_error", None),
    "timeout_error": (504, "server_error", "timeout"),
    "overloaded_error": (503, "server_error", "server_is_overloaded"),
}


class OpenAIError(ApiError):
    """An error with OpenAI's fields: the parameter and the code."""

    def __init__(
        self, message: str, param: str | None = None, code: str | None = None, kind: str = "invalid_request_error"
    ) -> None:
        super().__init__(kind, message)
        self.param = param
        self.code = code


class Full(OpenAIError):
    """Groq's flex tier has no capacity: a status that no other provider has."""


def status_of(error: ApiError) -> int:
    if isinstance(error, Full):
        return 498
    return _SHAPES[error.kind][0] if error.kind in _SHAPES else error.status


def error_body(error: ApiError) -> dict[str, Any]:
    _, kind, code = _SHAPES.get(error.kind, (0, "invalid_request_error", None))
    param = None
    if isinstance(error, OpenAIError):
        param, code = error.param, error.code
    return {"error": {"message": error.message, "type": kind, "param": param, "code": code}}


def flat_status(error: ApiError) -> int:
    """Mistral's errors: a malformed request is 422."""
    return 422 if _misshapen(error) else status_of(error)


def flat_body(error: ApiError) -> dict[str, Any]:
    told = error_body(error)["error"]
    if _misshapen(error):
        return {"detail": [{"type": "value_error", "loc": ["body", told["param"]], "msg": told["message"]}]}
    return {"object": "error", **told}


def _misshapen(error: ApiError) -> bool:
    return isinstance(error, OpenAIError) and error.kind == "invalid_request_error" and error.param is not None


def text_status(error: ApiError) -> int:
    """xAI's errors: a wrong key is a bad request."""
    return 400 if error.kind == "authentication_error" else status_of(error)


def text_body(error: ApiError) -> dict[str, Any]:
    return {"code": error_body(error)["error"]["type"], "error": error.message}


def missing(name: str) -> OpenAIError:
    return OpenAIError(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")


def wrong_type(name: str, expected: str, value: object) -> OpenAIError:
    got = _ARTICLES.get(type(value), "an object")
    message = f"Invalid type for '{name}': expected {expected}, but got {got} instead."
    return OpenAIError(message, name, "invalid_type")


_ARTICLES: Mapping[type, str] = {
    str: "a string",
    int: "an integer",
    float: "a decimal",
    bool: "a boolean",
    list: "an array",
    type(None): "null",
}
