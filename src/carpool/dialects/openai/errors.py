"""Errors in OpenAI's format: parsed from the provider, and written for clients."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from carpool.core.model import Headers
from carpool.core.ports import Refusal
from carpool.dialects.openai.providers import CompatibleProvider
from carpool.dialects.provider_api import decode_or_none, refused

_NO_CREDIT = "insufficient_quota"  # a 429 for which a retry does not help
# carpool's own codes, mapped to OpenAI's where it has one.
_CODES = {
    "api_error": None,
    "authentication_error": "invalid_api_key",
    "invalid_request_error": None,
    "not_found_error": "not_found",
    "rate_limit_error": "rate_limit_exceeded",
    "timeout_error": "timeout",
}


_FULL = "token_limit_exceeded"
_NO_MODEL = frozenset({"model_not_found", "unsupported_model", "model_not_supported"})
_TOO_MANY = frozenset({"too_many_tasks", "file_too_large", "too_many_requests_in_file"})
_TOO_MUCH = re.compile(r"too many|too large|more than the|exceeds the (maximum|limit)", re.IGNORECASE)
_HOLDS = re.compile(r"limit:?\s*([\d,_]{1,20})\s*enqueued tokens", re.IGNORECASE)
_FILE_NOT_READY = re.compile(r"cannot find file|no such file object", re.IGNORECASE)
_LONGEST = 1000


class OpenAIErrorBody(msgspec.Struct):
    message: str | None = None
    type: str | None = None
    code: str | int | None = None
    param: str | None = None


class _Detail(msgspec.Struct):
    msg: str | None = None


class _Envelope(msgspec.Struct):
    """OpenAI's envelope, or what compatible providers send instead: a text, a bare error, or missing form fields."""

    error: OpenAIErrorBody | str | None = None
    message: str | None = None
    detail: list[_Detail] | str | None = None
    type: str | None = None
    code: str | int | None = None
    param: str | None = None

    def read(self) -> OpenAIErrorBody | None:
        if isinstance(self.error, OpenAIErrorBody):
            return self.error
        if self.error is not None or self.message is not None:  # the code beside a text is its type
            return OpenAIErrorBody(self.error or self.message, self.type, self.code, self.param)
        if isinstance(self.detail, list):
            return OpenAIErrorBody("; ".join(problem.msg for problem in self.detail if problem.msg))
        return None if self.detail is None else OpenAIErrorBody(self.detail)


_ENVELOPE = msgspec.json.Decoder(_Envelope)
_NOT_HERE = frozenset({405, 501})  # no such endpoint, like 404
_KEY = re.compile(r"api key|authenticat|unauthori[sz]ed", re.IGNORECASE)


def read(body: bytes) -> OpenAIErrorBody | None:
    """Parse the error of a response; None if it is not an error."""
    envelope = decode_or_none(_ENVELOPE, body)
    return None if envelope is None else envelope.read()


def is_temporary(status: int, error: OpenAIErrorBody | None) -> bool:
    """Whether a retry of the same call may succeed."""
    return (status in (408, 409, 429) or status >= 500) and not _has_no_credit(error)


def _has_no_credit(error: OpenAIErrorBody | None) -> bool:
    return error is not None and _NO_CREDIT in (error.code, error.type)


def refusal(provider: CompatibleProvider, status: int, headers: Headers, body: bytes) -> Refusal:
    error = read(body)
    no_credit, message = _has_no_credit(error), error.message or "" if error else ""
    plain = refused(status, headers, message, no_credit=no_credit)
    if status in provider.busy:
        return replace(plain, retryable=not no_credit)
    if status in _NOT_HERE or (status in provider.keyless and _KEY.search(message)):
        return replace(plain, cannot_batch=True, retryable=False)
    if error is None or status not in (400, 404):
        return plain
    if _FILE_NOT_READY.search(message):  # a 404 that says nothing about the batch API
        return replace(plain, file_not_ready=True, retryable=True, cannot_batch=False)
    return replace(plain, of_model=error.code in _NO_MODEL, of_tier=error.param == "service_tier")


def failure(problems: Sequence[tuple[str, str]]) -> Refusal:
    """The refusal of a batch that failed as a whole, from its codes and messages: nothing of it was bought."""
    codes = {code for code, _ in problems}
    message = next((text for _, text in problems if text), "The provider failed the batch and did not say why.")
    message = message[:_LONGEST]
    if _FULL in codes:
        holds = next((int(re.sub(r"\D", "", match[1])) for _, text in problems if (match := _HOLDS.search(text))), None)
        return Refusal(400, message, retryable=True, queue_full=True, queue_tokens=holds)
    if codes & _NO_MODEL:
        return Refusal(400, message, retryable=False, cannot_batch=True, of_model=True)
    return Refusal(400, message, retryable=False, too_large=bool(codes & _TOO_MANY or _TOO_MUCH.search(message)))


def error(status: int, code: str, message: str) -> bytes:
    valid = message.encode("utf-8", "replace").decode()  # a lone surrogate can't be encoded
    kind = "requests" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"
    content = {"message": valid, "type": kind, "param": None, "code": _CODES.get(code, code or None)}
    return msgspec.json.encode({"error": content})
