"""When to seal a batch: group commit, as one pure function.

A wide batch is no cheaper than a narrow one, so nothing waits for company: what is in a pool goes as soon as the
credential may create, after a short linger that lets a burst travel together. Under load batches widen by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from carpool.budget import Road
from carpool.model import PoolView
from carpool.policy import RoutingPolicy
from carpool.ports import Limits
from carpool.routing import pool_wait

FILL: Final = 0.95  # of the provider's byte limit; the rest is for what we can't count exactly
PATIENCE: Final = 300.0  # after so long a pool that nobody presses is as pressing as one that is due
OWN_ACCOUNTS: Final[Mapping[str, str]] = MappingProxyType({})
RECHECK: Final = 15.0  # while a count is taken, time alone changes nothing: look again anyway


@dataclass(frozen=True, slots=True)
class Flush:
    """Make a batch of at most so many calls of the pool, whose bodies have at most so many bytes together."""

    pool: int
    credential: str
    max_count: int
    max_bytes: int
    model: str = ""  # where a batch may have one only


@dataclass(frozen=True, slots=True)
class FlushPlan:
    flushes: tuple[Flush, ...]
    wake: float | None  # when the plan could change by itself; None when nothing waits


def plan(
    pools: Sequence[PoolView],
    roads: Mapping[str, Road],
    policy: RoutingPolicy,
    limits: Limits,
    unresolved: Mapping[str, frozenset[int]],
    now: float,
    *,
    overhead: int,
    draining: bool = False,
    accounts: Mapping[str, str] = OWN_ACCOUNTS,
) -> FlushPlan:
    """Decides what is flushed now. `overhead` is what a call costs in a create beyond its body; `unresolved` are the
    counts of creates with unknown outcome; `draining` flushes everything that the road allows. `accounts` names the
    account of those credentials that have none of their own: `roads` and `unresolved` are by account."""
    sealer = _Sealer(policy, limits, unresolved, now, overhead, draining, accounts)
    left = dict(roads)
    waiting = sorted((view for view in pools if view.count > 0 and sealer.account(view) in left), key=_pressing)
    flushes: list[Flush] = []
    # Round by round, so that one huge pool doesn't take every token before its neighbours had one.
    while made := sealer.round(waiting, left):
        flushes += made.values()
        waiting = [rest for view in waiting if (rest := _without(view, made.get(view.pool))).count > 0]
    wake = min((sealer.wake(view, left[sealer.account(view)]) for view in waiting), default=None)
    return FlushPlan(tuple(flushes), wake)


def _pressing(view: PoolView) -> tuple[float, float, int]:
    rescue = math.inf if view.earliest_rescue is None else view.earliest_rescue
    return min(rescue, view.oldest + PATIENCE), view.oldest, view.pool


def _without(view: PoolView, flush: Flush | None) -> PoolView:
    """What is left of a pool after a flush. The bodies are taken to be alike; the store knows better."""
    if flush is None:
        return view
    count = max(0, view.count - flush.max_count)
    return replace(view, count=count, bytes=view.bytes * count // view.count)


@dataclass(frozen=True, slots=True)
class _Sealer:
    policy: RoutingPolicy
    limits: Limits
    unresolved: Mapping[str, frozenset[int]]
    now: float
    overhead: int
    draining: bool
    accounts: Mapping[str, str]

    def round(self, waiting: Sequence[PoolView], roads: dict[str, Road]) -> dict[int, Flush]:
        """At most one flush for each pool, in order, while its road has a token; `roads` are spent from."""
        made: dict[int, Flush] = {}
        for view in waiting:
            account = self.account(view)
            flush = self.flush(view) if roads[account].can_create(self.now) else None
            if flush is not None:
                made[view.pool] = flush
                roads[account] = roads[account].spend_create(self.now)
        return made

    def account(self, view: PoolView) -> str:
        return self.accounts.get(view.key.credential, view.key.credential)

    def flush(self, view: PoolView) -> Flush | None:
        if self.opens_at(view) > self.now:
            return None
        count = self.size(view)
        if count == 0:
            return None
        # The store sums bodies only, so the overhead of all lines is set aside here.
        room = max(1, self.room - count * self.overhead)
        return Flush(view.pool, view.key.credential, count, room, view.key.model)

    def wake(self, view: PoolView, road: Road) -> float:
        at = max(self.opens_at(view), road.create_ready_at(self.now))
        return at if at > self.now else self.now + RECHECK

    def opens_at(self, view: PoolView) -> float:
        """When the pool may go, as far as it is up to the pool."""
        # A call from the future means that the clock was set back: it must not wait until the clock has caught up.
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
        """How many calls travel: all that fit, but never as many as a create whose outcome is unknown."""
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
