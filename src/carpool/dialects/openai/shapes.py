"""The batch formats of OpenAI-compatible providers: one shape for each format, all converted to `Told`.

A shape renames fields that have other names and fills in what a format lacks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from carpool.core.errors import Garbled

NONCE_KEY = "carpool_nonce"

Time = int | float | str | None  # seconds; at some compatible providers ISO 8601

_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_LAST_SECOND = 86_399.0
_NAMED = re.compile(r"carpool-([0-9a-zA-Z]{1,64})(?:\.jsonl)?")

# Other spellings of the states, in lower case.
_SPELLINGS = {
    "queued": "validating",
    "running": "in_progress",
    "success": "completed",
    "timeout_exceeded": "expired",
    "cancellation_requested": "cancelling",
    "canceling": "cancelling",
    "canceled": "cancelled",
}


def name_of(nonce: str) -> str:
    """The name of uploads and batches, where they have one."""
    return f"carpool-{nonce}"


def nonce_of(name: str | None) -> str:
    """The nonce in such a name; empty for names that are not carpool's."""
    match = _NAMED.fullmatch(name or "")
    return match[1] if match else ""


class Problem(NamedTuple):
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Told:
    """A batch in the fields that all shapes have in common."""

    id: str
    status: str
    created_at: float
    expires_at: float | None
    ended_at: float | None
    count: int
    nonce: str
    source: str | None
    files: tuple[str, ...]  # result files, in the order in which they are read
    done: int  # calls with a response, as far as the batch reports it
    problems: tuple[Problem, ...]


class _Counts(msgspec.Struct):
    total: int | None = None
    completed: int | None = None
    failed: int | None = None


class _Problem(msgspec.Struct):
    code: str | None = None
    message: str | None = None


class _Problems(msgspec.Struct):
    data: list[_Problem] | None = None


class OpenAIShape(msgspec.Struct):
    """The format of OpenAI, Groq and Azure. Azure has times as text, no counts, and empty names for missing files."""

    id: str
    status: str
    created_at: Time
    input_file_id: str | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: _Problems | None = None
    expires_at: Time = None
    completed_at: Time = None
    failed_at: Time = None
    expired_at: Time = None
    cancelled_at: Time = None
    request_counts: _Counts | None = None
    metadata: dict[str, msgspec.Raw] | None = None

    def told(self) -> Told:
        counts = self.request_counts or _Counts()
        return Told(
            self.id,
            spelled(self.status),
            seconds(self.created_at) or 0.0,
            seconds(self.expires_at),
            seconds(self.completed_at or self.failed_at or self.expired_at or self.cancelled_at),
            counts.total or 0,
            _noted(self.metadata),
            self.input_file_id or None,
            tuple(name for name in (self.output_file_id, self.error_file_id) if name),
            (counts.completed or 0) + (counts.failed or 0),
            tuple(Problem(item.code or "", item.message or "") for item in (self.errors or _Problems()).data or ()),
        )


class _Complaint(msgspec.Struct):
    message: str = ""


class MistralShape(msgspec.Struct):
    """A job, which may have several input files and states no expiry time."""

    id: str
    status: str
    created_at: Time
    input_files: list[str] | None = None
    output_file: str | None = None
    error_file: str | None = None
    errors: list[_Complaint] | None = None
    completed_at: Time = None
    total_requests: int = 0
    completed_requests: int = 0
    metadata: dict[str, msgspec.Raw] | None = None

    def told(self) -> Told:
        return Told(
            self.id,
            spelled(self.status),
            seconds(self.created_at) or 0.0,
            None,
            seconds(self.completed_at),
            self.total_requests,
            _noted(self.metadata),
            self.input_files[0] if self.input_files else None,
            tuple(name for name in (self.output_file, self.error_file) if name),
            self.completed_requests,
            tuple(Problem("", item.message) for item in self.errors or ()),
        )


class TogetherShape(msgspec.Struct):
    """Has no counts and no field for a nonce: only the name of the input file holds it."""

    id: str
    status: str
    created_at: Time = None
    input_file_id: str | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    error: str | None = None
    job_deadline: Time = None
    completed_at: Time = None

    def told(self) -> Told:
        return Told(
            self.id,
            spelled(self.status),
            seconds(self.created_at) or 0.0,
            seconds(self.job_deadline),
            seconds(self.completed_at),
            0,
            "",
            self.input_file_id or None,
            tuple(name for name in (self.output_file_id, self.error_file_id) if name),
            0,
            (Problem("", self.error),) if self.error else (),
        )


class _State(msgspec.Struct):
    num_requests: int = 0
    num_pending: int = 0
    num_success: int = 0
    num_error: int = 0
    num_cancelled: int = 0


class XaiShape(msgspec.Struct):
    """Has no status, only counters. A batch that xAI itself cancelled did not pass validation."""

    batch_id: str
    name: str = ""
    create_time: Time = None
    expire_time: Time = None
    cancel_time: Time = None
    cancel_by_xai_message: str | None = None
    input_file_id: str | None = None
    state: _State = msgspec.field(default_factory=_State)

    def told(self) -> Told:
        status = self._status()
        return Told(
            self.batch_id,
            status,
            latest(self.create_time) or 0.0,
            seconds(self.expire_time),
            latest(self.cancel_time) if status in ("cancelled", "failed") else None,
            self.state.num_requests,
            nonce_of(self.name),
            self.input_file_id or None,
            (),
            self.state.num_success + self.state.num_error,
            (Problem("", self.cancel_by_xai_message),) if self.cancel_by_xai_message else (),
        )

    def _status(self) -> str:
        if self.state.num_pending > 0:  # counters may go back after a cancel: with a pending call it has not ended
            return "in_progress" if self.cancel_time is None else "cancelling"
        if self.cancel_time is not None:
            bought = self.state.num_success or self.state.num_error
            return "failed" if self.cancel_by_xai_message and not bought else "cancelled"
        return "completed" if self.state.num_requests else "validating"


Shape = OpenAIShape | MistralShape | TogetherShape | XaiShape


def spelled(status: str) -> str:
    plain = status.lower()
    return _SPELLINGS.get(plain, plain)


def seconds(time: Time) -> float | None:
    if time is None or isinstance(time, int | float):
        return None if time is None else float(time)
    try:
        moment = datetime.fromisoformat(time.upper())
    except ValueError:
        raise Garbled(f"The provider wrote {time[:40]!r} where a time should be.") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def latest(time: Time) -> float | None:
    """A bare date may mean any time of its day. The last second keeps a batch from seeming older than it is."""
    start = seconds(time)
    return start + _LAST_SECOND if start is not None and isinstance(time, str) and _DATE.fullmatch(time) else start


def _noted(metadata: dict[str, msgspec.Raw] | None) -> str:
    try:
        return msgspec.json.decode((metadata or {})[NONCE_KEY], type=str)
    except (KeyError, ValueError):
        return ""  # not carpool's
