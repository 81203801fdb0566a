"""Learns which of the tickets awaited here were settled by other engines.

An engine that settles calls sends their tickets to all others as a hint, through the store. An engine that awaits one
of them reads its outcome from the store. A hint may be lost, so the outcomes of all awaited tickets are also polled,
every second while that finds any or new clients come, and up to every 15 s otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

from carpool.engine.context import EngineContext, Reply

QUICK_POLL_S = 1.0  # shortest and longest interval between polls
SLOW_POLL_S = 15.0
TICKETS_PER_POLL = 1000


class SettledHints:
    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._polled_at = 0.0
        self._interval = QUICK_POLL_S
        self._waiting_before = 0
        self._last_polled = -1  # the last ticket of the previous poll

    def on_settled(self, tickets: Sequence[int]) -> None:
        """Another engine may have settled a call whose client waits at this one."""
        context = self._context
        mine = [ticket for ticket in tickets if ticket in context.waiters]
        if mine:
            context.background.spawn(self.fetch(mine), "fetch")
        elif not tickets:  # an empty hint: some hints may have been lost
            self._polled_at, self._interval = 0.0, QUICK_POLL_S
            context.wake_now()

    async def fetch(self, tickets: Sequence[int]) -> int:
        """Wakes the clients of those tickets that are settled. Returns how many are."""
        outcomes = await self._context.store.outcomes(tickets)
        for settled in outcomes:
            self._context.waiters.resolve(Reply.of(settled))
        return len(outcomes)

    async def poll(self, now: float) -> float:
        """Polls for outcomes whose hint was lost, if that is due. Returns when to poll again."""
        waiting = len(self._context.waiters)
        if waiting > self._waiting_before:
            self._interval = QUICK_POLL_S
        self._waiting_before = waiting
        if not waiting:
            return float("inf")
        if now >= self._polled_at + self._interval or now < self._polled_at:
            self._polled_at = now
            tickets = sorted(self._context.waiters)  # round robin, so that each of many gets its turn
            chunk = ([ticket for ticket in tickets if ticket > self._last_polled] or tickets)[:TICKETS_PER_POLL]
            self._last_polled = chunk[-1]
            resolved = await self.fetch(chunk)
            self._interval = QUICK_POLL_S if resolved else min(2 * self._interval, SLOW_POLL_S)
        return self._polled_at + self._interval
