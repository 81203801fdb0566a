"""Membership of an engine among those that share a store: pulse, lease, leadership and takeover.

Any number of engines may share a store, in one process or in many. Every engine admits calls, rescues those that its
own clients await, and delivers what any engine settled. Each account (all credentials that buy with one secret) has one
leader, which alone creates its batches, polls them and spends its rate limit. The store enforces this: an intent of an
engine that does not lead the account claims nothing. An engine leads only accounts whose secret it holds.

Two time limits show that an engine is alive. `store.join` renews both every 10 s (`renew_every`):

- The pulse, 30 s. When it runs out, or the engine leaves, other engines may lead its accounts and take over its
  batches, and its tickets count as awaited by nobody. It is short because an account has no leader for that long.
- The lease, 180 s. A create is sent only while the lease outlasts the time that its response may take, and a create
  that died with its engine becomes `unknown` only when the lease has ended. So an engine that was suspended and wakes
  up with a stale lease buys nothing, and no engine judges a create that may still be under way.

Takeover: `_lead` asks the store which accounts this engine leads, and `store.take_over` assigns it the unfinished
batches of dead engines in those accounts.

An engine that was considered dead but lives learns it from its next renewal. It leads nothing until the one after that,
because the others may have been cut off from the store alike and need time to report, and it awaits its clients'
tickets again.

Hints between engines (calls that arrived, tickets that were settled) only save time and may be lost. The next
renewal finds the calls, and `outcomes.py` the outcomes.

Every engine also removes old calls from the store, a thousand at a time, and leaves the store when it closes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from carpool.core.errors import CarpoolError
from carpool.core.lifecycle import BOUGHT
from carpool.engine.batch.api import BatchApi
from carpool.engine.cluster.outcomes import OutcomePoller
from carpool.engine.context import EngineContext
from carpool.engine.events import BatchFound

REAWAIT = 250  # tickets awaited again at a time
RETAIN_EVERY_S = 600.0
RETAIN_STEP = 1000  # calls removed at a time
UNDELIVERED_DAYS = 29.0  # the longest time a provider keeps results
DAY_S = 86_400.0


class Lease(NamedTuple):
    """How long an engine holds its lease, how long it counts as alive, and how often it renews both."""

    lease: float = 180.0  # well above the timeout of a create
    pulse: float = 30.0  # short: when the engine dies, its accounts have no leader for this long
    renew_every: float = 10.0


class Membership:
    def __init__(self, context: EngineContext, api: BatchApi, lease: Lease) -> None:
        self._context = context
        self._api = api
        self._outcome_poller = OutcomePoller(context)
        self._retain_at = 0.0
        self._lease = lease
        self._renew_at = 0.0
        self._joined = False

    async def start(self, now: float) -> None:
        await self._renew(now)
        # Before the first call is admitted: a client whose process died must be able to adopt its ticket.
        await self._lead(now)

    async def leave(self) -> None:
        """Leaves the store. Batches of an in-memory store can't be collected later, so they are cancelled."""
        context = self._context
        try:
            for batch in [] if context.store.durable else await context.store.batches(context.name):
                if batch.state in BOUGHT and batch.provider_id is not None:
                    dialect = context.upstreams[batch.key.provider].dialect
                    await self._api.send(batch, dialect.cancel(batch.key.headers, batch.provider_id), timeout=5.0)
        except CarpoolError as error:
            context.trouble("cancelling batches at close", error)
        try:
            await context.store.leave(context.name)
        except CarpoolError as error:  # its pulse runs out by itself, and waiting clients must still be notified
            context.trouble("leaving the store", error)

    async def step(self, now: float) -> float:
        if now >= self._renew_at or now < self._renew_at - self._lease.renew_every:
            await self._renew(now)
        if now >= self._context.lead_at or now < self._context.lead_at - self._lease.renew_every:
            await self._lead(now)
        if now >= self._retain_at:
            before = now - self._context.policy.retain_days * DAY_S
            removed = await self._context.store.retain(before, now - UNDELIVERED_DAYS * DAY_S, RETAIN_STEP)
            await self._context.store.prune_tasks(before)
            again = await self._prune_shapes(now) or removed >= RETAIN_STEP
            self._retain_at = now + (1.0 if again else RETAIN_EVERY_S)
        wakes = self._renew_at, self._context.lead_at, self._retain_at
        if self._context.other_credentials:  # otherwise no other engine settles what this one awaits
            return min(*wakes, await self._outcome_poller.step(now))
        return min(wakes)

    async def _prune_shapes(self, now: float) -> bool:
        """Keeps the record of calls within its bounds. Returns whether there may be more to remove."""
        policy = self._context.policy
        before = now - policy.record_days * DAY_S
        return await self._context.store.prune_shapes(before, policy.record_max_calls) > 0

    # ------------------------------------------------------------ pulse and leadership

    async def _renew(self, now: float) -> None:
        context = self._context
        alive = await self._join(now)
        if alive or not self._joined:
            self._joined = True
            context.lead_at = now
            return
        # Others considered this engine dead. If the store was unreachable, they may have been cut off as well: they
        # get time to renew their pulse before this engine takes over anything of theirs.
        context.lead(())
        context.lead_at = now + self._lease.renew_every
        await self._reawait_tickets()

    async def _join(self, now: float) -> bool:
        alive = await self._context.store.join(self._context.name, now, self._lease.lease, self._lease.pulse)
        self._renew_at = now + self._lease.renew_every
        return alive

    async def _reawait_tickets(self) -> None:
        """Awaits the tickets of all waiting clients again. With many clients this takes longer than a pulse lasts, so
        the pulse is renewed in between. Otherwise this would start over for ever."""
        context, tickets, done = self._context, list(self._context.waiters), 0
        while done < len(tickets):
            chunk = tickets[done : done + REAWAIT]
            await asyncio.gather(*(context.store.await_ticket(ticket, context.name) for ticket in chunk))
            await context.fetch_outcomes(chunk)
            done += REAWAIT
            if context.now() >= self._renew_at and not await self._join(context.now()):
                done = 0

    async def _lead(self, now: float) -> None:
        context = self._context
        context.led_at, context.lead_at = now, now + self._lease.renew_every
        accounts = sorted({context.keyring.account(credential) for credential in context.keyring})
        context.lead(await context.store.lead(context.name, accounts, now))
        known = {batch.id for batch in await context.store.batches(context.name)}
        if await context.store.take_over(context.name, context.led_credentials, now):
            for batch in await context.store.batches(context.name):
                if batch.id not in known:
                    context.emit_batch_event(BatchFound, batch, batch.provider_id or "", batch.count, str(batch.state))

    # ------------------------------------------------------------ hints from other engines

    def on_settled(self, tickets: Sequence[int]) -> None:
        """Another engine may have settled calls whose clients wait at this one. Without tickets, hints may be lost."""
        context = self._context
        mine = [ticket for ticket in tickets if ticket in context.waiters]
        if mine:
            context.background.spawn(context.fetch_outcomes(mine), "fetch")
        elif not tickets:
            self._outcome_poller.poll_now()
