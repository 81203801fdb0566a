"""OpenAI's files and batches: what we ask of them, and what they say about a batch."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from urllib.parse import quote

import msgspec

from carpool.dialects.openai import errors
from carpool.dialects.openai.frames import one_line
from carpool.errors import Garbled, Misuse
from carpool.model import NONCE_LETTERS, TICKET_LETTERS, Headers
from carpool.ports import Ask, BatchReport

FILES = "/v1/files"
BATCHES = "/v1/batches"
WINDOW = "24h"
NONCE_KEY = "carpool_nonce"
MOST_LISTED = 100

_CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ID = re.compile(r"[a-zA-Z0-9_:.-]{1,200}")  # nothing that could turn a path elsewhere
_DOTS = re.compile(r"\.+")
_IDENTITY = ("accept-encoding", "identity")
_JSON = ("content-type", "application/json")

_RUNNING = frozenset({"validating", "in_progress", "finalizing", "cancelling"})
_ENDED = frozenset({"failed", "completed", "expired", "cancelled"})


# ---------------------------------------------------------------- to the provider


def line(endpoint: str, custom_id: str, body: bytes) -> bytes:
    """In one line: JSON has line breaks between tokens only, where a space means the same."""
    if not _CUSTOM_ID.fullmatch(custom_id):
        raise Misuse(f"{custom_id[:80]!r} can't name a call in a batch: 1 to 64 letters, digits, `_` and `-` can.")
    named = b'{"custom_id":"%b","method":"POST","url":"%b","body":' % (custom_id.encode(), endpoint.encode())
    return named + one_line(body) + b"}"


def line_overhead(endpoint: str) -> int:
    """With the line break: exact for carpool's own ids in all but the last line."""
    return len(line(endpoint, "x" * (NONCE_LETTERS + 1 + TICKET_LETTERS), b"")) + 1


def frame(nonce: str) -> tuple[bytes, bytes, bytes]:
    """The form around the lines. No line holds a line break, so none can end the form before its time."""
    boundary = _boundary(nonce).encode()
    head = (
        b'--%b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--%b\r\nContent-Disposition: form-data; name="file"; filename="%b"\r\n'
        b"Content-Type: application/jsonl\r\n\r\n"
    )
    return head % (boundary, boundary, file_name(nonce).encode()), b"\n", b"\n\r\n--%b--\r\n" % boundary


def file_name(nonce: str) -> str:
    return f"carpool-{nonce}.jsonl"


def _boundary(nonce: str) -> str:
    return f"carpool-form-{nonce}"


def upload(headers: Headers, nonce: str) -> Ask:
    form = ("content-type", f"multipart/form-data; boundary={_boundary(nonce)}")
    return Ask("POST", FILES, (*headers, form, _IDENTITY))


def create(headers: Headers, endpoint: str, nonce: str, file_id: str | None) -> Ask:
    if file_id is None:
        raise Misuse("A batch needs an uploaded file here.")
    asked = {
        "input_file_id": file_id,
        "endpoint": endpoint,
        "completion_window": WINDOW,
        "metadata": {NONCE_KEY: nonce},
    }
    return Ask("POST", BATCHES, (*headers, _JSON, _IDENTITY), msgspec.json.encode(asked))


def listing(headers: Headers, after: str | None, limit: int) -> Ask:
    cursor = f"&after={quote(after, safe='')}" if after else ""
    return Ask("GET", f"{BATCHES}?limit={min(max(limit, 1), MOST_LISTED)}{cursor}", (*headers, _IDENTITY))


def retrieve(headers: Headers, provider_id: str) -> Ask:
    return Ask("GET", _path(BATCHES, provider_id), (*headers, _IDENTITY))


def cancel(headers: Headers, provider_id: str) -> Ask:
    return Ask("POST", f"{_path(BATCHES, provider_id)}/cancel", (*headers, _IDENTITY))


def results(headers: Headers, place: str) -> Ask:
    return Ask("GET", place, (*headers, _IDENTITY))


def forget(headers: Headers, file_id: str) -> Ask:
    return Ask("DELETE", _path(FILES, file_id), (*headers, _IDENTITY))


def _path(under: str, name: str) -> str:
    if not _is_id(name):
        raise Misuse(f"{name[:80]!r} can't be the id of a batch or a file.")
    return f"{under}/{name}"


def _is_id(name: str) -> bool:
    return _ID.fullmatch(name) is not None and not _DOTS.fullmatch(name)


# ---------------------------------------------------------------- from the provider


class _File(msgspec.Struct):
    id: str


class _Counts(msgspec.Struct):
    total: int | None = None
    completed: int | None = None
    failed: int | None = None


class _Problem(msgspec.Struct):
    code: str | None = None
    message: str | None = None


class _Problems(msgspec.Struct):
    data: list[_Problem] | None = None


_Time = int | float | str | None  # seconds; at relatives also ISO 8601


class _Batch(msgspec.Struct):
    id: str
    status: str
    created_at: _Time
    input_file_id: str | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: _Problems | None = None
    expires_at: _Time = None
    completed_at: _Time = None
    failed_at: _Time = None
    expired_at: _Time = None
    cancelled_at: _Time = None
    request_counts: _Counts | None = None
    metadata: dict[str, msgspec.Raw] | None = None


class _Page(msgspec.Struct):
    data: list[_Batch]
    has_more: bool = False
    last_id: str | None = None


_FILE = msgspec.json.Decoder(_File)
_BATCH = msgspec.json.Decoder(_Batch)
_PAGE = msgspec.json.Decoder(_Page)
_UNREADABLE = (ValueError, RecursionError)


def uploaded(body: bytes) -> str:
    try:
        name = _FILE.decode(body).id
    except _UNREADABLE as error:
        raise Garbled(f"The provider's answer to an upload can't be understood: {error}.") from None
    return _known(name)


def report(body: bytes) -> BatchReport:
    try:
        batch = _BATCH.decode(body)
    except _UNREADABLE as error:
        raise Garbled(f"The provider's description of a batch can't be understood: {error}.") from None
    return _report(batch)


def page(body: bytes) -> tuple[list[BatchReport], str | None]:
    """One batch that can't be understood spoils the page: passing over it could hide a batch that is ours."""
    try:
        listed = _PAGE.decode(body)
    except _UNREADABLE as error:
        raise Garbled(f"The provider's list of batches can't be understood: {error}.") from None
    reports = [_report(batch) for batch in listed.data]
    if not listed.has_more or not reports:
        return reports, None
    return reports, listed.last_id or reports[-1].provider_id


def _report(batch: _Batch) -> BatchReport:
    status = batch.status.lower()  # relatives write it with a capital
    ended_at: _Time = batch.completed_at or batch.failed_at or batch.expired_at or batch.cancelled_at
    # A state that is not known yet must neither end a running batch nor be polled for ever.
    ended = status in _ENDED or (status not in _RUNNING and ended_at is not None)
    files = [_known(name) for name in (batch.output_file_id, batch.error_file_id) if name]
    failed = status == "failed" and not files
    if ended and not files and _promises(batch):
        ended = False  # it says that there are results, and does not name them yet
    counts = batch.request_counts or _Counts()
    problems = [(one.code or "", one.message or "") for one in (batch.errors or _Problems()).data or ()]
    return BatchReport(
        provider_id=_known(batch.id),
        ended=ended,
        cancelling=status == "cancelling",
        count=counts.total or 0,
        created_at=_seconds(batch.created_at) or 0.0,
        expires_at=_seconds(batch.expires_at),
        ended_at=_seconds(ended_at),
        results=tuple(f"{FILES}/{name}/content" for name in files) if ended else None,
        archived=False,
        nonce=_nonce(batch.metadata),
        failure=errors.failure(problems) if failed else None,
        files=(*((_known(batch.input_file_id),) if batch.input_file_id else ()), *files),
    )


def _promises(batch: _Batch) -> bool:
    counts = batch.request_counts or _Counts()
    return batch.status.lower() == "completed" and bool(counts.completed or counts.failed)


def _nonce(metadata: dict[str, msgspec.Raw] | None) -> str:
    try:
        return msgspec.json.decode((metadata or {})[NONCE_KEY], type=str)
    except (KeyError, ValueError):
        return ""  # a stranger's


def _known(name: str) -> str:
    if not _is_id(name):
        raise Garbled(f"The provider named something {name[:80]!r}, which can't be an id.")
    return name


def _seconds(time: _Time) -> float | None:
    if time is None or isinstance(time, int | float):
        return None if time is None else float(time)
    try:
        moment = datetime.fromisoformat(time.upper())
    except ValueError:
        raise Garbled(f"The provider wrote {time[:40]!r} where a time should be.") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
