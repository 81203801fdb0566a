"""A line of a batch's output file or error file, and the result pages that xAI has instead of files."""

from __future__ import annotations

from urllib.parse import quote

import msgspec

from carpool.core.errors import MalformedResponse
from carpool.core.ports import ResultLine
from carpool.dialects.openai import errors, usage
from carpool.dialects.openai.providers import CompatibleProvider
from carpool.dialects.provider_api import decode


class _Response(msgspec.Struct):
    status_code: int
    body: msgspec.Raw = msgspec.Raw(b"")

    def __repr__(self) -> str:  # never the body
        return f"<{type(self).__name__} {self.status_code}>"


class _Error(msgspec.Struct):
    code: str | None = None
    message: str | None = None


class _Line(msgspec.Struct):
    custom_id: str
    response: _Response | None = None
    error: _Error | None = None


class _Fault(msgspec.Struct):
    code: int | str | None = None
    message: str | None = None


class _Result(msgspec.Struct):
    response: dict[str, msgspec.Raw] | None = None  # one member, named after the endpoint
    error: str | _Fault | None = None


class _PagedLine(msgspec.Struct):
    batch_request_id: str
    batch_result: _Result


class _Page(msgspec.Struct):
    results: list[msgspec.Raw]
    pagination_token: str | None = None


_LINE = msgspec.json.Decoder(_Line)
_PAGED_LINE = msgspec.json.Decoder(_PagedLine)
_PAGE = msgspec.json.Decoder(_Page)
_CLIENT_ERRORS = frozenset({"batch_client_error"})  # codes of a request that would fail in any batch
_CANCELLED = ("canceled", 409, "conflict_error", "The batch was cancelled before this request was processed.")
_UNRUN = {
    "batch_expired": ("expired", 504, "timeout_error", "The batch expired before this request was processed."),
    **dict.fromkeys(("batch_cancelled", "batch_canceled"), _CANCELLED),  # as providers spell it
}


def result_line(provider: CompatibleProvider, line: bytes) -> ResultLine:
    read = _paged(line) if provider.pages_results else decode(_LINE, line, "A result line")
    if read.response is not None and read.response.status_code:
        return _answered(read.custom_id, read.response, provider)
    if read.error is not None:
        return _unanswered(read.custom_id, read.error)
    raise MalformedResponse("A result line carries neither a response nor an error.")


class XaiResultPages:
    """`ports.ResultPages`."""

    def lines(self, place: str, body: bytes) -> tuple[list[bytes], str | None]:
        page = decode(_PAGE, body, "A page of results")
        first = place.partition("&pagination_token=")[0]
        token = page.pagination_token if page.results else None
        following = f"{first}&pagination_token={quote(token, safe='')}" if token else None
        return [bytes(result) for result in page.results], following


def _paged(line: bytes) -> _Line:
    """Convert a result of a page to a line."""
    read = decode(_PAGED_LINE, line, "A result line")
    response, error = read.batch_result.response, read.batch_result.error
    if response:
        return _Line(read.batch_request_id, _Response(200, next(iter(response.values()))))
    if error is None or isinstance(error, str):
        return _Line(read.batch_request_id, None, None if error is None else _Error(None, error))
    if isinstance(error.code, int) and 400 <= error.code < 600:
        body = errors.error(error.code, "", error.message or "The batch could not run this request.")
        return _Line(read.batch_request_id, _Response(error.code, msgspec.Raw(body)))
    return _Line(read.batch_request_id, None, _Error(str(error.code or ""), error.message))


def _answered(custom_id: str, response: _Response, provider: CompatibleProvider) -> ResultLine:
    status, body = response.status_code, bytes(response.body)
    if 200 <= status < 300:
        if not body.startswith(b"{"):
            raise MalformedResponse("A result line says that its call succeeded, but carries no answer.")
        model, used = usage.model_and_usage(body, provider.reasoning_apart)
        return ResultLine(custom_id, "succeeded", 200, body, model, used, False)
    if not 400 <= status < 600:
        raise MalformedResponse(f"A result line has the status {status}, which is neither an answer nor an error.")
    read = errors.read(body)
    if read is None:
        body = errors.error(status, "", f"The batch answered this request with {status}.")
    return ResultLine(custom_id, "errored", status, body, "", None, errors.is_temporary(status, read))


def _unanswered(custom_id: str, error: _Error) -> ResultLine:
    """The request never ran. Unless the error blames the request itself, it may succeed in another batch."""
    if error.code in _CLIENT_ERRORS:
        body = errors.error(400, "invalid_request_error", error.message or "The batch refused this request.")
        return ResultLine(custom_id, "errored", 400, body, "", None, False)
    result, status, code, text = _UNRUN.get(error.code or "", ("errored", 500, error.code or "server_error", ""))
    body = errors.error(status, code, error.message or text or "The batch did not run this request.")
    return ResultLine(custom_id, result, status, body, "", None, True)
