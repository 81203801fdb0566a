"""How the provider fails: with an error response, or by closing the connection."""

from collections.abc import Mapping

STATUS: Mapping[str, int] = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "conflict_error": 409,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}


class ApiError(Exception):
    """An error response; `kind` is the API's `error.type` and determines the status."""

    def __init__(self, kind: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message
        self.status = STATUS[kind]
        self.headers = dict(headers or {})

    def body(self, request_id: str) -> dict[str, object]:
        return error_body(self.kind, self.message, request_id)


class ConnectionCut(Exception):
    """The connection ends here without a (complete) answer.

    Raised out of the ASGI app. The HTTP server resets the TCP connection; an in-process driver sees the exception
    itself and can read from `after_acceptance` what its client cannot know.
    """

    def __init__(self, after_acceptance: bool) -> None:
        super().__init__(f"connection cut, after_acceptance={after_acceptance}")
        self.after_acceptance = after_acceptance


def error_body(kind: str, message: str, request_id: str) -> dict[str, object]:
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def invalid(message: str) -> ApiError:
    return ApiError("invalid_request_error", message)
