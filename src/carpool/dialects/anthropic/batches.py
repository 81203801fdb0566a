"""The Message Batches endpoints: requests, batch descriptions and result lines."""

from __future__ import annotations

from urllib.parse import quote

import msgspec

from carpool.core.errors import MalformedResponse
from carpool.core.model import Headers
from carpool.core.ports import Ask, BatchReport, ResultLine
from carpool.dialects.anthropic import errors, usage
from carpool.dialects.provider_api import IDENTITY, JSON, Count, checked_custom_id, checked_id, decode, moment, path_of

PATH = "/v1/messages/batches"


# ---------------------------------------------------------------- to the provider


def line(endpoint: str, custom_id: str, body: bytes) -> bytes:
    return b'{"custom_id":"%b","params":%b}' % (checked_custom_id(custom_id), body)


def frame(nonce: str) -> tuple[bytes, bytes, bytes]:
    return b'{"requests":[', b",", b"]}"


def create(headers: Headers, endpoint: str, nonce: str, file_id: str | None, model: str = "") -> Ask:
    return Ask("POST", PATH, (*headers, JSON, IDENTITY))


def listing(headers: Headers, after: str | None, limit: int) -> Ask:
    cursor = f"&after_id={quote(after, safe='')}" if after else ""
    return Ask("GET", f"{PATH}?limit={min(max(limit, 1), 1000)}{cursor}", (*headers, IDENTITY))


def results_at(provider_id: str) -> tuple[str, ...]:
    """Built from the id: a URL from a response must not decide where a key is sent."""
    return (f"{path_of(PATH, provider_id)}/results",)


# ---------------------------------------------------------------- from the provider


class _Batch(msgspec.Struct):
    id: str
    processing_status: str
    request_counts: dict[str, Count]
    created_at: str
    expires_at: str | None = None
    ended_at: str | None = None
    archived_at: str | None = None
    results_url: str | None = None


class _Page(msgspec.Struct):
    data: list[_Batch]
    has_more: bool = False
    last_id: str | None = None


_BATCH = msgspec.json.Decoder(_Batch)
_PAGE = msgspec.json.Decoder(_Page)


def requests_per_minute(headers: Headers) -> int | None:
    text = next((value.strip() for name, value in headers if name == "anthropic-ratelimit-requests-limit"), "")
    return int(text) or None if text.isascii() and text.isdigit() and len(text) < 10 else None


def report(body: bytes) -> BatchReport:
    return _report(decode(_BATCH, body, "The provider's description of a batch"))


def page(body: bytes, after: str | None = None) -> tuple[list[BatchReport], str | None]:
    """One batch that can't be parsed fails the whole page: skipping it could hide a batch that is ours."""
    listed = decode(_PAGE, body, "The provider's list of batches")
    reports = [_report(batch) for batch in listed.data]
    if not listed.has_more or not reports:
        return reports, None
    return reports, listed.last_id or reports[-1].provider_id


def _report(batch: _Batch) -> BatchReport:
    return BatchReport(
        provider_id=checked_id(batch.id),
        # An unknown state must neither end a running batch nor be polled forever.
        ended=batch.processing_status == "ended"
        or (batch.processing_status not in ("in_progress", "canceling") and batch.ended_at is not None),
        cancelling=batch.processing_status == "canceling",
        count=sum(batch.request_counts.values()),
        created_at=moment(batch.created_at),
        expires_at=moment(batch.expires_at) if batch.expires_at else None,
        ended_at=moment(batch.ended_at) if batch.ended_at else None,
        results=results_at(batch.id) if batch.results_url else None,
        archived=batch.archived_at is not None,
    )


# ---------------------------------------------------------------- a line of the results


class _Result(msgspec.Struct, gc=False):
    type: str
    message: msgspec.Raw = msgspec.Raw(b"")
    error: msgspec.Raw = msgspec.Raw(b"")


class _Line(msgspec.Struct, gc=False):
    custom_id: str
    result: _Result


_LINE = msgspec.json.Decoder(_Line)
_EXPIRED = errors.error(504, "timeout_error", "The batch expired before this request was processed.")
_CANCELED = errors.error(409, "conflict_error", "The batch was canceled before this request was processed.")


def result_line(line: bytes) -> ResultLine:
    read = decode(_LINE, line, "A result line")
    result = read.result
    match result.type:
        case "succeeded":
            message = bytes(result.message)
            if not message.startswith(b"{"):
                raise MalformedResponse("A result line says that its call succeeded, but carries no message.")
            model, used = usage.model_and_usage(message)
            return ResultLine(read.custom_id, "succeeded", 200, message, model, used, False)
        case "errored":
            error = errors.read(bytes(result.error))
            if error is None:
                raise MalformedResponse("A result line says that its call failed, but carries no error.")
            status, again = errors.status_of(error), errors.is_passing(error)
            return ResultLine(read.custom_id, "errored", status, error.body, "", None, again)
        case "expired":
            return ResultLine(read.custom_id, "expired", 504, _EXPIRED, "", None, True)
        case "canceled":
            return ResultLine(read.custom_id, "canceled", 409, _CANCELED, "", None, True)
        case other:
            raise MalformedResponse(f"A result line is of the unknown type {other[:40]!r}.")
