"""Decide when to seal a batch: group commit, as one pure function.

A large batch is not cheaper per call than a small one, so waiting for more calls earns nothing. A pool is flushed as
soon as its account has a create token, after a short linger (`linger_ms`, 500 ms) so that a burst shares one batch.
Batches grow by themselves under load: while the account has no create token, calls collect in the pool, and the next
flush takes all of them. This is the group commit of databases, with the batch API's rate limit in the role of fsync.

A pool opens at once when it is full (by count or by bytes), when the engine drains, or when its oldest call lies in the
future because the clock was set back. Otherwise it opens after its wait:

- the linger, by default;
- `batch_window_ms`, if the user sets one;
- with `batch_min_size`: the linger once the minimum is reached, before that the window (30 s if unset).

Several pools may compete for the tokens of one account. They are served in rounds of one batch per pool, the earliest
rescue time first. A pool without deadlines counts as due after `PATIENCE`, so it can't starve. A pool that holds more
than one batch gets its next batch in the next round.

The size is limited by the provider's count and byte limits and by `batch_max_size`. It also never equals the size of a
create of the same account whose outcome is unknown: reconciling finds suspects by their count, and a second batch of
equal size would look the same (see `planners.tracking`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from carpool.core.model import PoolView
from carpool.core.ports import BatchLimits
from carpool.planners.batch_limits import BatchQuota
from carpool.planners.policy import RoutingPolicy
from carpool.planners.routing import pool_wait

FILL: Final = 0.95  # share of the provider's byte limit to use; the rest covers what is only estimated
PATIENCE: Final = 300.0  # after this wait a pool without deadlines counts as due
OWN_ACCOUNTS: Final[Mapping[str, str]] = MappingProxyType({})
RECHECK: Final = 15.0  # pace of checks while a pool is blocked by something other than time, as by an unresolved create


@dataclass(frozen=True, slots=True)
class Flush:
    """An order to make a batch from a pool: at most `max_count` calls, whose bodies total at most `max_bytes`."""

    pool: int
    credential: str
    max_count: int
    max_bytes: int
    model: str = ""  # set where a batch may hold one model only


@dataclass(frozen=True, slots=True)
class FlushPlan:
    flushes: tuple[Flush, ...]
    wake: float | None  # when to plan again; None when nothing waits


def plan(
    pools: Sequence[PoolView],
    batch_quotas: Mapping[str, BatchQuota],
    policy: RoutingPolicy,
    limits: BatchLimits,
    unresolved: Mapping[str, frozenset[int]],
    now: float,
    *,
    overhead: int,
    draining: bool = False,
    accounts: Mapping[str, str] = OWN_ACCOUNTS,
) -> FlushPlan:
    """Decide what to flush now. `overhead` is the bytes that a call takes in a create beyond its body; `unresolved`
    holds the sizes of creates with unknown outcome; `draining` flushes everything that the quota allows. `accounts`
    maps credentials that share another account to it: `batch_quotas` and `unresolved` are per account."""
    sealer = _Sealer(policy, limits, unresolved, now, overhead, draining, accounts)
    quotas = dict(batch_quotas)
    waiting = sorted((view for view in pools if view.count > 0 and sealer.account(view) in quotas), key=_urgency)
    flushes: list[Flush] = []
    # Plan in rounds, so that one huge pool doesn't take every token before the others get one.
    while planned := sealer.round(waiting, quotas):
        flushes += planned.values()
        waiting = [rest for view in waiting if (rest := _remainder(view, planned.get(view.pool))).count > 0]
    wake = min((sealer.wake(view, quotas[sealer.account(view)]) for view in waiting), default=None)
    return FlushPlan(tuple(flushes), wake)


def _urgency(view: PoolView) -> tuple[float, float, int]:
    rescue = math.inf if view.earliest_rescue is None else view.earliest_rescue
    return min(rescue, view.oldest + PATIENCE), view.oldest, view.pool


def _remainder(view: PoolView, flush: Flush | None) -> PoolView:
    """The pool after a flush. Assumes bodies of equal size; the store knows the exact sizes."""
    if flush is None:
        return view
    count = max(0, view.count - flush.max_count)
    return replace(view, count=count, bytes=view.bytes * count // view.count)


@dataclass(frozen=True, slots=True)
class _Sealer:
    policy: RoutingPolicy
    limits: BatchLimits
    unresolved: Mapping[str, frozenset[int]]
    now: float
    overhead: int
    draining: bool
    accounts: Mapping[str, str]

    def round(self, waiting: Sequence[PoolView], batch_quotas: dict[str, BatchQuota]) -> dict[int, Flush]:
        """Plan at most one flush per pool, in order, while its account has a token. Updates `batch_quotas`."""
        planned: dict[int, Flush] = {}
        for view in waiting:
            account = self.account(view)
            flush = self.flush(view) if batch_quotas[account].can_create(self.now) else None
            if flush is not None:
                planned[view.pool] = flush
                batch_quotas[account] = batch_quotas[account].spend_create(self.now)
        return planned

    def account(self, view: PoolView) -> str:
        return self.accounts.get(view.key.credential, view.key.credential)

    def flush(self, view: PoolView) -> Flush | None:
        if self.opens_at(view) > self.now:
            return None
        count = self.size(view)
        if count == 0:
            return None
        # The store sums bodies only, so the overhead of all lines is subtracted here.
        room = max(1, self.room - count * self.overhead)
        return Flush(view.pool, view.key.credential, count, room, view.key.model)

    def wake(self, view: PoolView, batch_quota: BatchQuota) -> float:
        at = max(self.opens_at(view), batch_quota.create_ready_at(self.now))
        return at if at > self.now else self.now + RECHECK

    def opens_at(self, view: PoolView) -> float:
        """When the pool is ready to be flushed, without regard to the quota."""
        # A call from the future means that the clock was set back. It must not wait until the clock catches up.
        if self.draining or view.oldest > self.now or self.full(view):
            return self.now
        return view.oldest + self.patience(view.count)

    def patience(self, count: int) -> float:
        linger = self.policy.linger_ms / 1000
        minimum = self.policy.batch_min_size
        if minimum is not None and count >= minimum:
            return min(linger, pool_wait(self.policy))
        return pool_wait(self.policy)

    def full(self, view: PoolView) -> bool:
        return view.count >= self.cap or view.bytes + view.count * self.overhead >= self.room

    def size(self, view: PoolView) -> int:
        """How many calls to take: all that fit, but never as many as a create whose outcome is unknown."""
        mean = view.bytes / view.count + self.overhead
        fitting = self.room / mean if mean > 0 else math.inf
        count = int(max(1, min(view.count, self.cap, fitting)))
        taken = self.unresolved.get(self.account(view), frozenset())
        while count in taken:
            count -= 1
        return count

    @property
    def cap(self) -> int:
        chosen = self.policy.batch_max_size
        return self.limits.max_count if chosen is None else min(chosen, self.limits.max_count)

    @property
    def room(self) -> int:
        return int(self.limits.max_bytes * FILL)
