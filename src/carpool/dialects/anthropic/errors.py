"""Errors in the format of the Claude API: parsed from the provider, and written for clients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from carpool.core.model import Headers
from carpool.core.ports import Refusal
from carpool.dialects.provider_api import decode_or_none, refused

_STATUS = {
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
_TYPE = {status: kind for kind, status in _STATUS.items()}
_UNKNOWN = 500
_NO_CREDIT = "enforced_spend_limit_reached"  # a 429 for which a retry does not help


class _Details(msgspec.Struct):
    error_code: str | None = None


class _Error(msgspec.Struct):
    type: str
    message: str | None = None
    details: msgspec.Raw = msgspec.Raw(b"null")


class _Envelope(msgspec.Struct):
    type: Literal["error"]
    error: msgspec.Raw


_ENVELOPE = msgspec.json.Decoder(_Envelope)
_ERROR = msgspec.json.Decoder(_Error)
_DETAILS: msgspec.json.Decoder[_Details | None] = msgspec.json.Decoder(_Details | None)


@dataclass(frozen=True, slots=True)
class AnthropicErrorBody:
    kind: str
    message: str
    code: str | None
    body: bytes = field(repr=False)  # in the format of a response, with the provider's own text

    @property
    def status(self) -> int:
        return _STATUS.get(self.kind, _UNKNOWN)

    @property
    def is_temporary(self) -> bool:
        """Whether a retry of the same call may succeed."""
        return (self.status == 429 or self.status >= 500) and self.code != _NO_CREDIT


def read(raw: bytes) -> AnthropicErrorBody | None:
    """Parse the error of a response or of a result line; None if it is not an error."""
    envelope, body = decode_or_none(_ENVELOPE, raw), raw
    error = None if envelope is None else decode_or_none(_ERROR, envelope.error)
    if error is None:
        error, body = decode_or_none(_ERROR, raw), b'{"type":"error","error":%b}' % raw  # without its envelope
        if error is None or error.message is None:  # every object has a type, but only an error has a message
            return None
    details = decode_or_none(_DETAILS, error.details)
    return AnthropicErrorBody(error.type, error.message or "", details.error_code if details else None, body)


def refusal(status: int, headers: Headers, body: bytes) -> Refusal:
    error = read(body)
    no_credit = error is not None and error.code == _NO_CREDIT
    return refused(status, headers, error.message if error else "", no_credit=no_credit)


def error(status: int, code: str, message: str) -> bytes:
    kind = code or _TYPE.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
    valid = message.encode("utf-8", "replace").decode()  # a lone surrogate can't be encoded
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": valid}})
