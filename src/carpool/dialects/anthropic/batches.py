"""The Message Batches endpoints: requests, batch descriptions and result lines."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from urllib.parse import quote

import msgspec

from carpool.core.errors import MalformedResponse, Misuse
from carpool.core.model import NONCE_LETTERS, TICKET_LETTERS, Headers
from carpool.core.ports import Ask, BatchReport, ResultLine
from carpool.dialects.anthropic import errors, usage
from carpool.dialects.anthropic.usage import Count

PATH = "/v1/messages/batches"

_CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_BATCH_ID = re.compile(r"[a-zA-Z0-9_:-]{1,200}")  # nothing that could change a path
_IDENTITY = ("accept-encoding", "identity")
_JSON = ("content-type", "application/json")


# ---------------------------------------------------------------- to the provider


def send(endpoint: str, headers: Headers, body: bytes) -> Ask:
    return Ask("POST", endpoint, (*headers, _JSON, _IDENTITY), body)


def line(endpoint: str, custom_id: str, body: bytes) -> bytes:
    if not _CUSTOM_ID.fullmatch(custom_id):
        raise Misuse(f"{custom_id[:80]!r} can't name a call in a batch: 1 to 64 letters, digits, `_` and `-` can.")
    return b'{"custom_id":"%b","params":%b}' % (custom_id.encode(), body)


def line_overhead(endpoint: str) -> int:
    """Includes the comma: exact for carpool's own ids in all but the first line."""
    return len(line(endpoint, "x" * (NONCE_LETTERS + 1 + TICKET_LETTERS), b"")) + 1


def frame(nonce: str) -> tuple[bytes, bytes, bytes]:
    return b'{"requests":[', b",", b"]}"


def create(headers: Headers, endpoint: str, nonce: str, file_id: str | None, model: str = "") -> Ask:
    return Ask("POST", PATH, (*headers, _JSON, _IDENTITY))


def listing(headers: Headers, after: str | None, limit: int) -> Ask:
    cursor = f"&after_id={quote(after, safe='')}" if after else ""
    return Ask("GET", f"{PATH}?limit={min(max(limit, 1), 1000)}{cursor}", (*headers, _IDENTITY))


def retrieve(headers: Headers, provider_id: str) -> Ask:
    return Ask("GET", _path(provider_id), (*headers, _IDENTITY))


def cancel(headers: Headers, provider_id: str) -> Ask:
    return Ask("POST", f"{_path(provider_id)}/cancel", (*headers, _IDENTITY))


def results(headers: Headers, place: str) -> Ask:
    return Ask("GET", place, (*headers, _IDENTITY))


def results_at(provider_id: str) -> tuple[str, ...]:
    """Built from the id: a URL from a response must not decide where a key is sent."""
    return (f"{_path(provider_id)}/results",)


def _path(provider_id: str) -> str:
    if not _BATCH_ID.fullmatch(provider_id):
        raise Misuse(f"{provider_id[:80]!r} can't be the id of a batch.")
    return f"{PATH}/{provider_id}"


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
    try:
        batch = _BATCH.decode(body)
    except (ValueError, RecursionError) as error:
        raise MalformedResponse(f"The provider's description of a batch can't be understood: {error}.") from None
    return _report(batch)


def page(body: bytes, after: str | None = None) -> tuple[list[BatchReport], str | None]:
    """One batch that can't be parsed fails the whole page: skipping it could hide a batch that is ours."""
    try:
        listed = _PAGE.decode(body)
    except (ValueError, RecursionError) as error:
        raise MalformedResponse(f"The provider's list of batches can't be understood: {error}.") from None
    reports = [_report(batch) for batch in listed.data]
    if not listed.has_more or not reports:
        return reports, None
    return reports, listed.last_id or reports[-1].provider_id


def _report(batch: _Batch) -> BatchReport:
    if not _BATCH_ID.fullmatch(batch.id):
        raise MalformedResponse(f"The provider named a batch {batch.id[:80]!r}, which can't be an id.")
    return BatchReport(
        provider_id=batch.id,
        # An unknown state must neither end a running batch nor be polled forever.
        ended=batch.processing_status == "ended"
        or (batch.processing_status not in ("in_progress", "canceling") and batch.ended_at is not None),
        cancelling=batch.processing_status == "canceling",
        count=sum(batch.request_counts.values()),
        created_at=_time(batch.created_at),
        expires_at=_time(batch.expires_at) if batch.expires_at else None,
        ended_at=_time(batch.ended_at) if batch.ended_at else None,
        results=results_at(batch.id) if batch.results_url else None,
        archived=batch.archived_at is not None,
    )


def _time(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text.upper())
    except ValueError:
        raise MalformedResponse(f"The provider wrote {text[:40]!r} where a time should be.") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


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
    try:
        read = _LINE.decode(line)
    except (ValueError, RecursionError) as wrong:
        raise MalformedResponse(f"A result line can't be understood: {wrong}.") from None
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
