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

Several pools may compete for the tokens of one account:

- Tenants (credentials: keys, virtual keys) get equal shares of the creates, however many pools they have (`Turns`).
- Of one tenant, the pool with the least slack goes first: the one with the earliest rescue time. A pool without
  deadlines counts as due after `PATIENCE`, so it can't starve.
- A pool with a rescue time within `PRESSING` goes before its tenant's turn, but only as long as its tenant is not far
  ahead of the others: nobody gets more than a share by being in a hurry all the time.
- A pool that holds more than one batch gets its next batch after all other pools got one.

The size is limited by the provider's count and byte limits and by `batch_max_size`. It also never equals the size of a
create of the same account whose outcome is unknown: reconciling finds suspects by their count, and a second batch of
equal size would look the same (see `planners.tracking`).
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from carpool.core.model import PoolView
from carpool.core.ports import BatchLimits
from carpool.planners.policy import RoutingPolicy
from carpool.planners.pressure.quota import BatchQuota
from carpool.planners.pressure.turns import FRESH, Turns
from carpool.planners.routing import pool_wait

FILL: Final = 0.95  # share of the provider's byte limit to use; the rest covers what is only estimated
PATIENCE: Final = 300.0  # after this wait a pool without deadlines counts as due
PRESSING: Final = 60.0  # a pool whose first rescue time is within this goes before its tenant's turn
RECHECK: Final = 15.0  # pace of checks while a pool is blocked by something other than time, as by an unresolved create


@dataclass(frozen=True, slots=True)
class Flush:
    """An order to make a batch from a pool: at most `max_count` calls, whose bodies total at most `max_bytes`."""

    pool: int
    credential: str
    max_count: int
    max_bytes: int
    model: str = ""  # set where a batch may hold one model only
    turns: Turns = field(default=FRESH, compare=False)  # of the account's tenants, after this batch


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
    accounts: Mapping[str, str] = MappingProxyType({}),
    tenants: Mapping[str, str] = MappingProxyType({}),
) -> FlushPlan:
    """Decide what to flush now. `overhead` is the bytes that a call takes in a create beyond its body; `unresolved`
    holds the sizes of creates with unknown outcome; `draining` flushes everything that the quota allows. `accounts`
    maps credentials that share another account to it: `batch_quotas` and `unresolved` are per account. `tenants` maps
    credentials to their tenant, where that has another name."""
    cap = limits.max_count if policy.batch_max_size is None else min(policy.batch_max_size, limits.max_count)
    sealer = _Sealer(policy, cap, int(limits.max_bytes * FILL), overhead, now, draining)
    by_account: dict[str, list[PoolView]] = defaultdict(list)
    for view in pools:
        by_account[accounts.get(view.key.credential, view.key.credential)].append(view)
    flushes: list[Flush] = []
    wakes = []
    for account, views in by_account.items():
        if account in batch_quotas:
            planning = _Account(sealer, batch_quotas[account], unresolved.get(account, frozenset()), tenants)
            planning.flush([view for view in views if view.count > 0])
            flushes += planning.flushes
            wakes += planning.ready_times()
    return FlushPlan(tuple(flushes), min((at if at > now else now + RECHECK for at in wakes), default=None))


@dataclass(slots=True)
class _Account:
    sealer: _Sealer
    quota: BatchQuota
    unresolved: frozenset[int]
    tenants: Mapping[str, str]
    flushes: list[Flush] = field(default_factory=list)
    waiting: list[PoolView] = field(default_factory=list)  # what stays

    def flush(self, views: Sequence[PoolView]) -> None:
        now = self.sealer.now
        if not self.quota.can_create(now):
            self.waiting += views
            return
        lines: dict[str, deque[PoolView]] = defaultdict(deque)  # by tenant, the most urgent pool first
        for view in sorted(views, key=_urgency):
            if self.sealer.opens_at(view) <= now:
                lines[self.tenants.get(view.key.credential, view.key.credential)].append(view)
            else:
                self.waiting.append(view)
        while lines and self.quota.can_create(now):
            lines = self._flush_each_once(lines)
        self.waiting += [view for line in lines.values() for view in line]

    def _flush_each_once(self, lines: dict[str, deque[PoolView]]) -> dict[str, deque[PoolView]]:
        """One round: returns what is left for the next."""
        now = self.sealer.now
        left: dict[str, deque[PoolView]] = defaultdict(deque)
        while lines and self.quota.can_create(now):
            tenant = self._next_tenant(lines)
            view = lines[tenant].popleft()
            flush = self.sealer.flush(view, self.unresolved, self.quota.turns.taken(tenant, lines))
            if not lines[tenant]:
                del lines[tenant]
            if flush is None:
                self.waiting.append(view)
                continue
            self.flushes.append(flush)
            self.quota = self.quota.spend_create(now, flush.turns)
            # What is left, as if all bodies had the same size; the store knows the exact sizes.
            if (rest := view.count - flush.max_count) > 0:
                view = replace(view, count=rest, bytes=view.bytes * rest // view.count)
                if self.sealer.opens_at(view) <= now:
                    left[tenant].append(view)
                else:
                    self.waiting.append(view)
        for tenant, line in lines.items():
            left[tenant].extendleft(reversed(line))
        return left

    def _next_tenant(self, lines: Mapping[str, deque[PoolView]]) -> str:
        turns, pressing_before = self.quota.turns, self.sealer.now + PRESSING

        def order(tenant: str) -> tuple[bool, float, tuple[float, float, int]]:
            rescue = lines[tenant][0].earliest_rescue
            pressing = rescue is not None and rescue <= pressing_before and turns.may_press(tenant, lines)
            return not pressing, turns.place(tenant), _urgency(lines[tenant][0])

        return min(lines, key=order)

    def ready_times(self) -> list[float]:
        ready = self.quota.create_ready_at(self.sealer.now)
        return [max(self.sealer.opens_at(view), ready) for view in self.waiting]


def _urgency(view: PoolView) -> tuple[float, float, int]:
    rescue = math.inf if view.earliest_rescue is None else view.earliest_rescue
    return min(rescue, view.oldest + PATIENCE), view.oldest, view.pool


@dataclass(frozen=True, slots=True)
class _Sealer:
    policy: RoutingPolicy
    cap: int  # calls of a batch
    room: int  # bytes of a batch
    overhead: int
    now: float
    draining: bool

    def opens_at(self, view: PoolView) -> float:
        """When the pool is ready to be flushed, without regard to the quota."""
        full = view.count >= self.cap or view.bytes + view.count * self.overhead >= self.room
        # A call from the future means that the clock was set back. It must not wait until the clock catches up.
        if self.draining or full or view.oldest > self.now:
            return self.now
        wait, minimum = pool_wait(self.policy), self.policy.batch_min_size
        if minimum is not None and view.count >= minimum:
            wait = min(self.policy.linger_ms / 1000, wait)
        return view.oldest + wait

    def flush(self, view: PoolView, taken: frozenset[int], turns: Turns) -> Flush | None:
        """Takes all calls that fit, but never as many as a create of the account whose outcome is unknown."""
        mean = view.bytes / view.count + self.overhead
        count = int(max(1, min(view.count, self.cap, self.room / mean if mean > 0 else math.inf)))
        while count in taken:
            count -= 1
        if count == 0:
            return None
        # The store sums bodies only, so the overhead of all lines is subtracted here.
        return Flush(
            view.pool, view.key.credential, count, max(1, self.room - count * self.overhead), view.key.model, turns
        )
