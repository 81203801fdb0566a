"""Polls the store for outcomes of tickets that clients await here and another engine settled.

Usually a hint tells of them at once. A hint may be lost, so the outcomes of all awaited tickets are polled as well,
every second while that finds any or new clients come, and up to every 15 s otherwise.
"""

from __future__ import annotations

from carpool.engine.context import EngineContext

QUICK_POLL_S = 1.0  # shortest and longest interval between polls
SLOW_POLL_S = 15.0
TICKETS_PER_POLL = 1000


class OutcomePoller:
    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._polled_at = 0.0
        self._interval = QUICK_POLL_S
        self._waiting_before = 0
        self._last_polled = -1  # the last ticket of the previous poll

    def poll_now(self) -> None:
        """Polls at once: some hints may have been lost."""
        self._polled_at, self._interval = 0.0, QUICK_POLL_S
        self._context.wake_now()

    async def step(self, now: float) -> float:
        """Polls if that is due. Returns when to poll again."""
        context, waiting = self._context, len(self._context.waiters)
        if waiting > self._waiting_before:
            self._interval = QUICK_POLL_S
        self._waiting_before = waiting
        if not waiting:
            return float("inf")
        if now >= self._polled_at + self._interval or now < self._polled_at:
            self._polled_at = now
            tickets = sorted(context.waiters)  # round robin, so that each of many gets its turn
            chunk = ([ticket for ticket in tickets if ticket > self._last_polled] or tickets)[:TICKETS_PER_POLL]
            self._last_polled = chunk[-1]
            resolved = await context.fetch_outcomes(chunk)
            self._interval = QUICK_POLL_S if resolved else min(2 * self._interval, SLOW_POLL_S)
        return self._polled_at + self._interval
