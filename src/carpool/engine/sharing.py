"""Sharing a store with other engines: the pulse, the accounts that this one leads, and what others did for its clients.

Each account has one leader, which alone makes its batches, follows them and spends its budget of requests. Every engine
admits calls, rescues those that its own doors await, and delivers what any of them settled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from carpool.engine.desk import Desk
from carpool.engine.waiting import Reply

LEAD_AGAIN_S = 1.0  # however much changes, who leads is not asked more often
QUICK_LOOK_S = 1.0  # between looks for answers whose hint was lost, at first and at last
SLOW_LOOK_S = 15.0
LOOK_AT = 1000  # tickets in one such look
REAWAIT = 250
HURRY_S = 0.1  # calls that came in elsewhere wake the planner at most so often


class Lease(NamedTuple):
    """For how long an engine has its lease, counts as alive, and when it says so again."""

    lease: float = 180.0  # well above the silence that a create may have
    pulse: float = 30.0  # short: so long its accounts have no leader when it dies
    beat: float = 10.0


class Sharing:
    def __init__(self, desk: Desk, lease: Lease) -> None:
        self._desk = desk
        self._lease = lease
        self._beat_at = 0.0
        self._lead_at = 0.0
        self._led_at = 0.0
        self._joined = False
        self._looked_at = 0.0
        self._pace = QUICK_LOOK_S
        self._waited = 0
        self._after = -1  # the ticket at which the last look ended
        self._ends: list[Callable[[], None]] = []

    async def start(self, now: float) -> None:
        await self._beat(now)
        # Before the first call comes in: a client that lost its process must find its ticket free to adopt.
        await self._lead(now)
        store = self._desk.store
        self._ends = [store.subscribe(self._settled), store.watch(self._changed)]

    def stop(self) -> None:
        for end in self._ends:
            end()

    async def step(self, now: float) -> float:
        if now >= self._beat_at or now < self._beat_at - self._lease.beat:
            await self._beat(now)
        if now >= self._lead_at or now < self._lead_at - self._lease.beat:
            await self._lead(now)
        return min(self._beat_at, self._lead_at, await self._look(now))

    # ------------------------------------------------------------ being alive, and leading

    def lead_soon(self) -> None:
        """There is a new credential, or somebody else may be gone."""
        self._lead_at = min(self._lead_at, self._led_at + LEAD_AGAIN_S)
        self._desk.wake_now()

    def enrolled(self) -> None:
        self._lead_at = 0.0
        self._desk.wake_now()

    async def _beat(self, now: float) -> None:
        desk = self._desk
        alive = await desk.store.join(desk.name, now, self._lease.lease, self._lease.pulse)
        self._beat_at = now + self._lease.beat
        if alive or not self._joined:
            self._joined = True
            self._lead_at = now
            return
        # Others took this engine for dead. Perhaps the store could not be reached, and they fared alike: they get the
        # time to say so before anything of theirs is taken.
        desk.lead(())
        self._lead_at = now + self._lease.beat
        await self._await_again()

    async def _await_again(self) -> None:
        desk, tickets = self._desk, list(self._desk.waiters)
        for start in range(0, len(tickets), REAWAIT):
            some = tickets[start : start + REAWAIT]
            await asyncio.gather(*(desk.store.await_ticket(ticket, desk.name) for ticket in some))
            await self._fetch(some)

    async def _lead(self, now: float) -> None:
        desk = self._desk
        self._led_at, self._lead_at = now, now + self._lease.beat
        accounts = {desk.keyring.account(credential) for credential in desk.keyring}
        desk.lead(await desk.store.lead(desk.name, accounts, now))
        await desk.store.take_over(desk.name, desk.led_credentials, now)

    # ------------------------------------------------------------ what others did

    def _changed(self, credentials: Sequence[str]) -> None:
        desk = self._desk
        if not credentials:
            self.lead_soon()
        elif any(desk.leads(credential) for credential in credentials):
            desk.wake_by(desk.now() + min(desk.policy.linger_ms / 1000, HURRY_S))

    def _settled(self, tickets: Sequence[int]) -> None:
        """Another engine may have brought the answer that a client waits for at this one's door."""
        desk = self._desk
        mine = [ticket for ticket in tickets if ticket in desk.waiters]
        if mine:
            desk.crew.spawn(self._fetch(mine), "fetch")
        elif not tickets:  # some may have gone untold
            self._looked_at, self._pace = 0.0, QUICK_LOOK_S
            desk.wake_now()

    async def _fetch(self, tickets: Sequence[int]) -> int:
        found = await self._desk.store.outcomes(tickets)
        for settled in found:
            self._desk.waiters.resolve(Reply.of(settled))
        return len(found)

    async def _look(self, now: float) -> float:
        """The net below the hints: answers that others brought and nobody told of. Says when to look again."""
        desk, waiting = self._desk, len(self._desk.waiters)
        if not waiting or not desk.other_credentials:
            self._waited = waiting
            return float("inf")
        if waiting > self._waited:
            self._pace = QUICK_LOOK_S
        self._waited = waiting
        if now >= self._looked_at + self._pace or now < self._looked_at:
            self._looked_at = now
            found = await self._fetch(self._some())
            self._pace = QUICK_LOOK_S if found else min(2 * self._pace, SLOW_LOOK_S)
        return self._looked_at + self._pace

    def _some(self) -> list[int]:
        """The next tickets in turn, so that each of many is looked after."""
        tickets = sorted(self._desk.waiters)
        later = [ticket for ticket in tickets if ticket > self._after] or tickets
        some = later[:LOOK_AT]
        self._after = some[-1] if some else -1
        return some
