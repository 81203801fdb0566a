"""The batch formats of OpenAI-compatible providers: a format that has other fields is converted to `BatchShape`."""

from __future__ import annotations

import re

import msgspec

from carpool.dialects.provider_api import moment

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


def nonce_of(name: str) -> str:
    """The nonce in such a name; empty for names that are not carpool's."""
    match = _NAMED.fullmatch(name)
    return match[1] if match else ""


class _Counts(msgspec.Struct):
    total: int | None = None
    completed: int | None = None
    failed: int | None = None


class _Problem(msgspec.Struct):
    code: str | None = None
    message: str | None = None


class _Problems(msgspec.Struct):
    data: list[_Problem] | None = None


class BatchShape(msgspec.Struct, kw_only=True):
    """The format of OpenAI, Groq and Azure. Azure has times as text, no counts, and empty names for missing files."""

    id: str
    status: str
    created_at: Time
    expires_at: Time = None
    completed_at: Time = None
    failed_at: Time = None
    expired_at: Time = None
    cancelled_at: Time = None
    input_file_id: str | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    request_counts: _Counts | None = None
    errors: _Problems | list[_Problem] | None = None
    metadata: dict[str, msgspec.Raw] | None = None

    def batch(self) -> BatchShape:
        return self

    def state(self) -> str:
        plain = self.status.lower()
        return _SPELLINGS.get(plain, plain)

    def source(self) -> str | None:
        """The uploaded file."""
        return self.input_file_id

    def nonce(self) -> str:
        try:
            return msgspec.json.decode((self.metadata or {})[NONCE_KEY], type=str)
        except (KeyError, ValueError):
            return ""  # not carpool's

    def counts(self) -> tuple[int, int]:
        """How many calls it has, and how many of them have a response, as far as it reports that."""
        counts = self.request_counts or _Counts()
        return counts.total or 0, (counts.completed or 0) + (counts.failed or 0)

    def problems(self) -> list[tuple[str, str]]:
        """Codes and messages."""
        listed = self.errors.data if isinstance(self.errors, _Problems) else self.errors
        return [(item.code or "", item.message or "") for item in listed or ()]


class MistralShape(BatchShape, kw_only=True):
    """A job, which may have several input files and states no expiry time."""

    input_files: list[str] | None = None
    output_file_id: str | None = msgspec.field(default=None, name="output_file")
    error_file_id: str | None = msgspec.field(default=None, name="error_file")
    total_requests: int = 0
    completed_requests: int = 0

    def source(self) -> str | None:
        return self.input_files[0] if self.input_files else None

    def counts(self) -> tuple[int, int]:
        return self.total_requests, self.completed_requests


class TogetherShape(BatchShape, kw_only=True):
    """Has no counts and no field for a nonce: only the name of the input file holds it."""

    created_at: Time = None
    expires_at: Time = msgspec.field(default=None, name="job_deadline")
    error: str | None = None

    def problems(self) -> list[tuple[str, str]]:
        return [("", self.error)] if self.error else []


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

    def batch(self) -> BatchShape:
        state, nonce = self._status(), nonce_of(self.name)
        return BatchShape(
            id=self.batch_id,
            status=state,
            created_at=latest(self.create_time),
            expires_at=self.expire_time,
            cancelled_at=latest(self.cancel_time) if state in ("cancelled", "failed") else None,
            input_file_id=self.input_file_id,
            request_counts=_Counts(self.state.num_requests, self.state.num_success, self.state.num_error),
            errors=_Problems([_Problem(message=self.cancel_by_xai_message)] if self.cancel_by_xai_message else None),
            metadata={NONCE_KEY: msgspec.Raw(msgspec.json.encode(nonce))},
        )

    def _status(self) -> str:
        if self.state.num_pending > 0:  # counters may go back after a cancel: with a pending call it has not ended
            return "in_progress" if self.cancel_time is None else "cancelling"
        if self.cancel_time is not None:
            bought = self.state.num_success or self.state.num_error
            return "failed" if self.cancel_by_xai_message and not bought else "cancelled"
        return "completed" if self.state.num_requests else "validating"


Shape = BatchShape | XaiShape


def seconds(time: Time) -> float | None:
    if time is None or isinstance(time, int | float):
        return None if time is None else float(time)
    return moment(time)


def latest(time: Time) -> float | None:
    """A bare date may mean any time of its day. The last second keeps a batch from seeming older than it is."""
    start = seconds(time)
    return start + _LAST_SECOND if start is not None and isinstance(time, str) and _DATE.fullmatch(time) else start
