"""A batch as Anthropic shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from carpool.mock.anthropic.digest import Digest, Failure
from carpool.mock.core.batch import Batch, Outcome
from carpool.mock.core.clock import rfc3339

_DONE = (Outcome.SUCCEEDED, Outcome.ERRORED, Outcome.CANCELED, Outcome.EXPIRED)


@dataclass(slots=True, kw_only=True)
class MessageBatch(Batch):
    requests: Sequence[Digest | Failure]
    archives: float
    unlucky: frozenset[int]
    """Requests that will not find a cache entry even if there is one."""

    @property
    def status(self) -> str:
        if self.closed:
            return "ended"
        return "in_progress" if self.cancel_at is None else "canceling"

    def view(self, now: float, base_url: str) -> dict[str, object]:
        """The wire's MessageBatch. It must have been advanced to `now`."""
        ended, archived = self.closed, now >= self.archives
        results = f"{base_url}/v1/messages/batches/{self.id}/results"
        return {
            "id": self.id,
            "type": "message_batch",
            "processing_status": self.status,
            "request_counts": self._counts(ended),
            "created_at": self._stamp(self.created),
            "expires_at": self._stamp(self.expires),
            "ended_at": self._stamp(self.ends_at) if ended else None,
            "cancel_initiated_at": None if self.cancel_at is None else self._stamp(self.cancel_at),
            "archived_at": self._stamp(self.archives) if archived else None,
            "results_url": results if ended and not archived else None,
        }

    def _counts(self, ended: bool) -> dict[str, int]:
        done = {outcome.name.lower(): self.outcomes.count(outcome) if ended else 0 for outcome in _DONE}
        return {"processing": 0 if ended else self.size, **done}

    def _stamp(self, at: float) -> str:
        return rfc3339(at + self.clock_offset)
