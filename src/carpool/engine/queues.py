"""How much of a model a provider lets an account enqueue: what was too much waits until there is room again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from carpool.lifecycle import BatchState
from carpool.model import Batch

BYTES_PER_TOKEN = 4
WAIT_S = 15.0
LONGEST_WAIT_S = 900.0
_ENQUEUED = frozenset({BatchState.SUBMITTING, BatchState.UNKNOWN, BatchState.OPEN, BatchState.CANCELLING})


@dataclass(slots=True)
class _Queue:
    opens_at: float = 0.0
    refusals: int = 0  # in a row
    holds: int | None = None  # bytes of calls, all batches together, as the provider names its limit
    most: int | None = None  # bytes of one batch, as the refusals taught


class Queues:
    """By account and model. The provider counts everybody who shares the account, and tokens in its own way: its limit
    is a hint, its refusals are the truth."""

    def __init__(self) -> None:
        self._queues: dict[tuple[str, str], _Queue] = {}

    def full(self, account: str, batch: Batch, tokens: int | None, now: float) -> None:
        """A batch found no room. Nothing of this model goes before another has ended, or a while has passed."""
        queue = self._queues.setdefault((account, batch.key.model), _Queue())
        queue.opens_at = now + min(WAIT_S * 2.0 ** min(queue.refusals, 10), LONGEST_WAIT_S)
        queue.refusals += 1
        queue.most = max(1, batch.bytes // 2)
        if tokens is not None:
            queue.holds = tokens * BYTES_PER_TOKEN

    def freed(self, account: str, model: str) -> None:
        """One of our batches has ended: what it held is free, and larger ones may be tried again."""
        queue = self._queues.get((account, model))
        if queue is None:
            return
        queue.opens_at, queue.refusals = 0.0, 0
        queue.most = None if queue.most is None else queue.most * 2

    def opens_at(self, account: str, model: str) -> float:
        queue = self._queues.get((account, model))
        return 0.0 if queue is None else queue.opens_at

    def room(self, account: str, model: str, enqueued: int) -> int | None:
        """Bytes that one more batch may have while so many are enqueued; None where no bound is known. The first batch
        is tried however large its single call is: the provider knows best."""
        queue = self._queues.get((account, model))
        if queue is None:
            return None
        bounds = [queue.most] if queue.most is not None else []
        if queue.holds is not None:
            bounds.append(queue.holds - enqueued if enqueued else max(1, queue.holds))
        return min(bounds, default=None)


def enqueued(batches: Iterable[Batch], model: str) -> int:
    """Bytes of those batches of a model that the provider may still count."""
    return sum(batch.bytes for batch in batches if batch.key.model == model and batch.state in _ENQUEUED)
