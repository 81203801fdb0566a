"""One batch of any API: its members, their schedule, and what a client or a test may do to it.

Nothing here runs by itself. When each request starts and ends is fixed at creation; `run` carries out what is due,
and every view of the batch is a function of the time it is asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from carpool.mock.anthropic.digest import Failure
from carpool.mock.core.bill import Usage

FOREVER = float("inf")


class Outcome(IntEnum):
    PENDING = 0
    SUCCEEDED = 1
    ERRORED = 2
    CANCELED = 3
    EXPIRED = 4


@dataclass(slots=True, kw_only=True)
class Batch(ABC):
    id: str
    workspace: str
    credential: str
    created: float
    expires: float
    seed: int
    custom_ids: Sequence[str]
    requests: Sequence[Any]
    """The digest of each request; a `Failure` for one that will be refused."""
    starts: array[float]
    ends: array[float]
    line_faults: Mapping[str, frozenset[int]]
    listed_from: float
    clock_offset: float = 0.0
    stranger: bool = False
    held_since: float | None = None
    cancel_at: float | None = None
    cancel_s: float = 0.0
    deleted: bool = False
    forgotten_from: float = FOREVER
    forgotten_until: float = FOREVER
    usages: list[Usage | None] = field(init=False)
    outcomes: bytearray = field(init=False)
    closed: bool = field(init=False, default=False)
    ends_at: float = field(init=False)
    _order: array[int] = field(init=False)
    _cursor: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.usages = [None] * self.size
        self.outcomes = bytearray(self.size)
        self._order = array("l", range(self.size))
        self._schedule()

    @property
    def size(self) -> int:
        return len(self.custom_ids)

    @property
    def tag(self) -> str:
        """Part of the ids of its members at the provider."""
        return self.id.rpartition("_")[2][:16]

    @property
    @abstractmethod
    def status(self) -> str:
        """As its API names it."""

    # -- the schedule

    def _schedule(self) -> None:
        """Sorts the requests that have not started, and computes when the batch will end."""
        self._order = array("l", sorted(self._order[self._cursor :], key=self.starts.__getitem__))
        self._cursor = 0
        self.ends_at = self._end()

    def _end(self) -> float:
        if self.cancel_at is not None:
            executing = (end for end, state in zip(self.ends, self.outcomes, strict=True) if state)
            return min(self.expires, max(self.cancel_at + self.cancel_s, max(executing, default=0.0)))
        if self.held_since is not None:
            return self.expires
        return min(self.expires, max(self.ends, default=self.created))

    @property
    def next_start(self) -> float:
        """When the next request is due; never, while the batch is held, cancelled or closed."""
        if self.held_since is not None or self.cancel_at is not None or self.closed or self._cursor == len(self._order):
            return FOREVER
        start = self.starts[self._order[self._cursor]]
        return start if start < self.expires else FOREVER

    def run(self, until: float, execute: Callable[[Any, int], Outcome]) -> None:
        """Executes, in order, every request that starts no later than `until`."""
        while self.next_start <= until:
            index = self._order[self._cursor]
            self._cursor += 1
            self.outcomes[index] = execute(self, index)

    def errs(self, index: int) -> bool:
        """Whether this request ends in an error, which costs nothing."""
        faults = self.line_faults
        failed = index in faults["line_api_error"] or index in faults["line_overloaded"]
        return failed or isinstance(self.requests[index], Failure)

    def close(self, now: float) -> None:
        """Once ended, requests that never ran are cancelled or expired."""
        if self.closed or now < self.ends_at:
            return
        rest = Outcome.EXPIRED if self.cancel_at is None else Outcome.CANCELED
        self.outcomes = self.outcomes.replace(b"\x00", bytes([rest]))
        self.closed = True

    @property
    def waiting(self) -> int:
        return 0 if self.closed else len(self._order) - self._cursor

    # -- control by tests and clients

    def cancel(self, now: float, takes: float) -> None:
        if self.cancel_at is None and not self.closed:
            self.cancel_at, self.cancel_s = now, takes
            self.ends_at = self._end()

    def hold(self, now: float) -> None:
        """Nothing more starts until `release`; what is executing finishes."""
        self.held_since = now
        self.ends_at = self._end()

    def release(self, now: float) -> None:
        if self.held_since is None:
            return
        delay, self.held_since = now - self.held_since, None
        self._move(lambda at: at + delay)

    def hurry(self, now: float) -> None:
        """Everything still open starts and ends now."""
        self.held_since = None
        if self.cancel_at is not None:
            self.cancel_s = now - self.cancel_at
        for index, state in enumerate(self.outcomes):
            if state:
                self.ends[index] = min(self.ends[index], now)
        self._move(lambda at: min(at, now))

    def _move(self, shift: Callable[[float], float]) -> None:
        for index in self._order[self._cursor :]:
            self.starts[index] = shift(self.starts[index])
            self.ends[index] = shift(self.ends[index])
        self._schedule()

    def denied(self, now: float) -> bool:
        """Whether the provider denies the batch at that time."""
        return self.deleted or self.forgotten_from <= now < self.forgotten_until

    def discard(self) -> None:
        """Deleted: its members can't be requested any more."""
        self.deleted = True
        self.requests, self.usages = (), []
