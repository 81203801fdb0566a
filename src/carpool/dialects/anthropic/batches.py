"""The Message Batches endpoints: what we ask of them, and what they say about a batch."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from urllib.parse import quote

import msgspec

from carpool.dialects.anthropic.usage import Count
from carpool.errors import Garbled, Misuse
from carpool.model import NONCE_LETTERS, TICKET_LETTERS, Headers
from carpool.ports import Ask, BatchReport

PATH = "/v1/messages/batches"
MOST_LISTED = 1000
FRAME = (b'{"requests":[', b",", b"]}")

_CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_BATCH_ID = re.compile(r"[a-zA-Z0-9_:-]{1,200}")  # nothing that could turn a path elsewhere
_IDENTITY = ("accept-encoding", "identity")
_JSON = ("content-type", "application/json")


# ---------------------------------------------------------------- to the provider


def send(endpoint: str, headers: Headers, body: bytes) -> Ask:
    return Ask("POST", endpoint, (*headers, _JSON, _IDENTITY), body)


def line(custom_id: str, body: bytes) -> bytes:
    if not _CUSTOM_ID.fullmatch(custom_id):
        raise Misuse(f"{custom_id[:80]!r} can't name a call in a batch: 1 to 64 letters, digits, `_` and `-` can.")
    return b'{"custom_id":"%b","params":%b}' % (custom_id.encode(), body)


# With the comma: exact for carpool's own ids in all but the first line.
LINE_OVERHEAD = len(line("x" * (NONCE_LETTERS + 1 + TICKET_LETTERS), b"") + FRAME[1])


def create(headers: Headers) -> Ask:
    return Ask("POST", PATH, (*headers, _JSON, _IDENTITY))


def listing(headers: Headers, after: str | None, limit: int) -> Ask:
    cursor = f"&after_id={quote(after, safe='')}" if after else ""
    return Ask("GET", f"{PATH}?limit={min(max(limit, 1), MOST_LISTED)}{cursor}", (*headers, _IDENTITY))


def retrieve(headers: Headers, provider_id: str) -> Ask:
    return Ask("GET", _path(provider_id), (*headers, _IDENTITY))


def cancel(headers: Headers, provider_id: str) -> Ask:
    return Ask("POST", f"{_path(provider_id)}/cancel", (*headers, _IDENTITY))


def results(headers: Headers, place: str) -> Ask:
    return Ask("GET", place, (*headers, _IDENTITY))


def results_path(provider_id: str) -> str:
    """Built from the id: no URL out of an answer may steer a request that carries a key."""
    return f"{_path(provider_id)}/results"


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


def report(body: bytes) -> BatchReport:
    try:
        batch = _BATCH.decode(body)
    except (ValueError, RecursionError) as error:
        raise Garbled(f"The provider's description of a batch can't be understood: {error}.") from None
    return _report(batch)


def page(body: bytes) -> tuple[list[BatchReport], str | None]:
    """One batch that can't be understood spoils the page: passing over it could hide a batch that is ours."""
    try:
        listed = _PAGE.decode(body)
    except (ValueError, RecursionError) as error:
        raise Garbled(f"The provider's list of batches can't be understood: {error}.") from None
    reports = [_report(batch) for batch in listed.data]
    if not listed.has_more or not reports:
        return reports, None
    return reports, listed.last_id or reports[-1].provider_id


def _report(batch: _Batch) -> BatchReport:
    if not _BATCH_ID.fullmatch(batch.id):
        raise Garbled(f"The provider named a batch {batch.id[:80]!r}, which can't be an id.")
    return BatchReport(
        provider_id=batch.id,
        # A state that is not known yet must neither end a running batch nor be polled for ever.
        ended=batch.processing_status == "ended"
        or (batch.processing_status not in ("in_progress", "canceling") and batch.ended_at is not None),
        cancelling=batch.processing_status == "canceling",
        count=sum(batch.request_counts.values()),
        created_at=_time(batch.created_at),
        expires_at=_time(batch.expires_at) if batch.expires_at else None,
        ended_at=_time(batch.ended_at) if batch.ended_at else None,
        results=(results_path(batch.id),) if batch.results_url else None,
        archived=batch.archived_at is not None,
    )


def _time(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text.upper())
    except ValueError:
        raise Garbled(f"The provider wrote {text[:40]!r} where a time should be.") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
