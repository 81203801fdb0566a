"""Errors in OpenAI's shape: read from the provider, and written for clients."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from carpool.dialects.refusing import refused
from carpool.model import Headers
from carpool.ports import Refusal

_SPENT = "insufficient_quota"  # a 429 that no waiting helps
_UNREADABLE = (ValueError, RecursionError)
# carpool's own codes where OpenAI has another word for the same, or none.
_CODES = {
    "api_error": None,
    "authentication_error": "invalid_api_key",
    "invalid_request_error": None,
    "not_found_error": "not_found",
    "rate_limit_error": "rate_limit_exceeded",
    "timeout_error": "timeout",
}


class _Error(msgspec.Struct):
    message: str | None = None
    type: str | None = None
    code: str | int | None = None


class _Envelope(msgspec.Struct):
    error: _Error


_ENVELOPE = msgspec.json.Decoder(_Envelope)


@dataclass(frozen=True, slots=True)
class ProviderError:
    message: str
    type: str
    code: str


def read(body: bytes) -> ProviderError | None:
    """An error as an answer carries it; None when it is none."""
    try:
        error = _ENVELOPE.decode(body).error
    except _UNREADABLE:
        return None
    return ProviderError(error.message or "", error.type or "", "" if error.code is None else str(error.code))


def refusal(status: int, headers: Headers, body: bytes) -> Refusal:
    error = read(body)
    spent = error is not None and _SPENT in (error.code, error.type)
    return refused(status, headers, error.message if error else "", spent=spent)


def error(status: int, code: str, message: str) -> bytes:
    sound = message.encode("utf-8", "replace").decode()  # half a surrogate pair would not encode
    said = {"message": sound, "type": _type(status), "param": None, "code": _CODES.get(code, code or None)}
    return msgspec.json.encode({"error": said})


def _type(status: int) -> str:
    if status == 429:
        return "requests"
    return "server_error" if status >= 500 else "invalid_request_error"
