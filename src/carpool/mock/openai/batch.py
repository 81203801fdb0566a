"""A batch as OpenAI shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from carpool.mock.anthropic.digest import Failure
from carpool.mock.core.batch import Batch, Outcome
from carpool.mock.openai.digest import Asked


class Refused(Failure, frozen=True):
    """A request that will be answered with an error."""

    status: int
    body: dict[str, Any]


Problem = dict[str, Any]


def problem(code: str, message: str, line: int | None = None, param: str | None = None) -> Problem:
    """Why a batch fails as a whole."""
    return {"code": code, "message": message, "param": param, "line": line}


@dataclass(slots=True, kw_only=True)
class OpenAIBatch(Batch):
    requests: Sequence[Asked | Refused]
    endpoint: str
    model: str | None
    input_file_id: str
    window: str
    metadata: Mapping[str, str] | None
    tokens: int
    """Prompt tokens, which count against the model's limit until the batch has ended."""
    validated_at: float
    finalize_s: float
    keep_files_s: float
    name: str | None = None
    house: str = "openai"
    """The provider that it imitates."""
    flaw: Problem | None = None
    """The error in the file; it appears when the file has been read."""
    crowded: bool = False
    """It will exceed the limit, whatever that is."""
    at: float = 0.0
    """The time to which the batch has been advanced."""
    judged: bool = False
    begun: bool = False
    forgets: bool = False
    failure: Problem | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    _usage: dict[str, Any] | None = field(init=False, default=None)

    def _end(self) -> float:
        # A class with slots is not the one that its methods were written in: super() has to be told.
        if self.cancel_at is not None or self.held_since is not None:
            return super(OpenAIBatch, self)._end()
        done = max(self.ends, default=self.validated_at)
        return done + self.finalize_s if done <= self.expires else self.expires

    def judge(self, full: Problem | None) -> None:
        """The file has been read: the batch fails, because of an error or a limit, or it begins."""
        self.judged = True
        if self.cancel_at is not None:
            return
        self.failure = self.flaw or full
        self.begun = self.failure is None
        if self.failure is not None:
            self.ends_at, self.closed = self.validated_at, True
            self.let_go()

    def counts_at(self, now: float) -> bool:
        """Whether its tokens count then."""
        return self.begun and now < self.ends_at

    def hurry(self, now: float) -> None:
        self.validated_at, self.finalize_s = min(self.validated_at, now), 0.0
        super(OpenAIBatch, self).hurry(now)

    def let_go(self) -> None:
        """Its results can't be requested any more."""
        self._used()
        self.requests, self.usages = (), []

    # -- how it is shown

    @property
    def status(self) -> str:
        if not self.closed:
            return self._open_status()
        if self.failure is not None:
            return "failed"
        if self.cancel_at is not None:
            return "cancelled"
        return "expired" if self.ends_at == self.expires and Outcome.EXPIRED in self.outcomes else "completed"

    def _open_status(self) -> str:
        if self.cancel_at is not None:
            return "cancelling"
        if not self.begun:
            return "validating"
        return "finalizing" if self._finished() else "in_progress"

    def _finished(self) -> bool:
        return self.held_since is None and self.at >= max(self.ends, default=0.0)

    def view(self) -> dict[str, Any]:
        """The wire's Batch, as of the time to which it was advanced."""
        status = self.status
        told = status in ("finalizing", "completed")
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": None if self.failure is None else {"object": "list", "data": [self.failure]},
            "input_file_id": self.input_file_id,
            "completion_window": self.window,
            "status": status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self._stamp(self.created),
            "in_progress_at": self._stamp(self.validated_at if self.begun else None),
            "expires_at": self._stamp(self.expires),
            "finalizing_at": self._stamp(max(self.ends, default=None) if told else None),
            "completed_at": self._stamp(self.ends_at if status == "completed" else None),
            "failed_at": self._stamp(self.ends_at if status == "failed" else None),
            "expired_at": self._stamp(self.ends_at if status == "expired" else None),
            "cancelling_at": self._stamp(self.cancel_at),
            "cancelled_at": self._stamp(self.ends_at if status == "cancelled" else None),
            "request_counts": self._counts(),
            "metadata": self.metadata,
            "name": self.name,
            "usage": self._used() if self.closed and self.failure is None else None,
        }

    def _counts(self) -> dict[str, int]:
        if not self.begun:
            return {"total": 0, "completed": 0, "failed": 0}
        if self.forgets:
            return {"total": self.size, "completed": 0, "failed": 0}
        ended = self.outcomes
        if not self.closed:
            ended = bytearray(state for state, end in zip(ended, self.ends, strict=True) if state and end <= self.at)
        failed = ended.count(Outcome.ERRORED) + ended.count(Outcome.EXPIRED)
        return {"total": self.size, "completed": ended.count(Outcome.SUCCEEDED), "failed": failed}

    def _used(self) -> dict[str, Any]:
        if self._usage is None:
            usages = [usage for usage in self.usages if usage is not None]
            prompt, output = sum(usage.total_input for usage in usages), sum(usage.output for usage in usages)
            self._usage = {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": sum(usage.read for usage in usages)},
                "output_tokens": output,
                "output_tokens_details": {"reasoning_tokens": sum(usage.thinking for usage in usages)},
                "total_tokens": prompt + output,
            }
        return self._usage

    def _stamp(self, at: float | None) -> int | None:
        return None if at is None else int(at + self.clock_offset)
