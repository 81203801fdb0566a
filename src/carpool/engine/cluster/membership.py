"""Membership of an engine among those that share a store: pulse, lease, leadership, takeover, and lost hints.

Any number of engines may share a store, in one process or in many. Every engine admits calls, rescues those that its
own clients await, and delivers what any engine settled. Each account (all credentials that buy with one secret) has one
leader, which alone creates its batches, polls them and spends its rate limit. The store enforces this: an intent of an
engine that does not lead the account claims nothing. An engine leads only accounts whose secret it holds.

Two time limits show that an engine is alive. `store.join` renews both every 10 s (`beat`):

- The pulse, 30 s. When it runs out, or the engine leaves, other engines may lead its accounts and take over its
  batches, and its tickets count as awaited by nobody. It is short because an account has no leader for that long.
- The lease, 180 s. A create is sent only while the lease outlasts the time that its response may take, and a create
  that died with its engine becomes `unknown` only when the lease has ended. So an engine that was suspended and wakes
  up with a stale lease buys nothing, and no engine judges a create that may still be under way.

Takeover: `_lead` asks the store which accounts this engine leads, and `store.take_over` assigns it the unfinished
batches of dead engines in those accounts.

An engine that was considered dead but lives learns it from its next beat. It leads nothing for one more beat, because
the others may have been cut off from the store alike and need time to report, and it awaits its clients' tickets again.

Hints between engines (calls that arrived, tickets that were settled) only save time and may be lost. `_poll_outcomes`
finds lost ones: it reads the outcomes of waiting tickets every 1 to 15 s.

Every engine also removes old calls from the store, a thousand at a time, and leaves the store when it closes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from carpool.core.errors import CarpoolError, KeyRefused
from carpool.core.keys import KeyHolder, KeyState, VirtualKey
from carpool.core.lifecycle import BOUGHT
from carpool.core.model import Headers
from carpool.engine.batch.api import BatchApi
from carpool.engine.context import EngineContext, Reply
from carpool.engine.events import BatchFound

QUICK_LOOK_S = 1.0  # shortest and longest interval between polls for outcomes whose hint was lost
SLOW_LOOK_S = 15.0
LOOK_AT = 1000  # tickets per poll
REAWAIT = 250  # tickets awaited again at a time
RETAIN_EVERY_S = 600.0
RETAIN_STEP = 1000  # calls removed at a time
UNDELIVERED_DAYS = 29.0  # the longest time a provider keeps results
DAY_S = 86_400.0


class Lease(NamedTuple):
    """How long an engine holds its lease, how long it counts as alive, and how often it renews both."""

    lease: float = 180.0  # well above the timeout of a create
    pulse: float = 30.0  # short: when the engine dies, its accounts have no leader for this long
    beat: float = 10.0


class Membership:
    def __init__(self, context: EngineContext, api: BatchApi, lease: Lease) -> None:
        self._context = context
        self._api = api
        self._retain_at = 0.0
        self._lease = lease
        self._beat_at = 0.0
        self._joined = False
        self._polled_at = 0.0
        self._poll_interval = QUICK_LOOK_S
        self._waiting_before = 0
        self._last_polled = -1  # the last ticket of the previous poll

    async def start(self, now: float) -> None:
        await self._beat(now)
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
        if now >= self._beat_at or now < self._beat_at - self._lease.beat:
            await self._beat(now)
        if now >= self._context.lead_at or now < self._context.lead_at - self._lease.beat:
            await self._lead(now)
        if now >= self._retain_at:
            before = now - self._context.policy.retain_days * DAY_S
            removed = await self._context.store.retain(before, now - UNDELIVERED_DAYS * DAY_S, RETAIN_STEP)
            self._retain_at = now + (1.0 if removed >= RETAIN_STEP else RETAIN_EVERY_S)
        return min(self._beat_at, self._context.lead_at, self._retain_at, await self._poll_outcomes(now))

    # ------------------------------------------------------------ pulse and leadership

    async def _beat(self, now: float) -> None:
        context = self._context
        alive = await self._join(now)
        if alive or not self._joined:
            self._joined = True
            context.lead_at = now
            return
        # Others considered this engine dead. If the store was unreachable, they may have been cut off as well: they
        # get time to renew their pulse before this engine takes over anything of theirs.
        context.lead(())
        context.lead_at = now + self._lease.beat
        await self._await_again()

    async def _join(self, now: float) -> bool:
        alive = await self._context.store.join(self._context.name, now, self._lease.lease, self._lease.pulse)
        self._beat_at = now + self._lease.beat
        return alive

    async def _await_again(self) -> None:
        """Awaits the tickets of all waiting clients again. With many clients this takes longer than a pulse lasts, so
        the pulse is renewed in between. Otherwise this would start over for ever."""
        context, tickets, done = self._context, list(self._context.waiters), 0
        while done < len(tickets):
            chunk = tickets[done : done + REAWAIT]
            await asyncio.gather(*(context.store.await_ticket(ticket, context.name) for ticket in chunk))
            await self._fetch(chunk)
            done += REAWAIT
            if context.now() >= self._beat_at and not await self._join(context.now()):
                done = 0

    async def _lead(self, now: float) -> None:
        context = self._context
        context.led_at, context.lead_at = now, now + self._lease.beat
        accounts = sorted({context.keyring.account(credential) for credential in context.keyring})
        context.lead(await context.store.lead(context.name, accounts, now))
        known = {batch.id for batch in await context.store.batches(context.name)}
        if await context.store.take_over(context.name, context.led_credentials, now):
            for batch in await context.store.batches(context.name):
                if batch.id not in known:
                    context.tell(BatchFound, batch, batch.provider_id or "", batch.count, str(batch.state))

    # ------------------------------------------------------------ hints from other engines

    def on_settled(self, tickets: Sequence[int]) -> None:
        """Another engine may have settled a call whose client waits at this one."""
        context = self._context
        mine = [ticket for ticket in tickets if ticket in context.waiters]
        if mine:
            context.background.spawn(self._fetch(mine), "fetch")
        elif not tickets:  # an empty hint: some hints may have been lost
            self._polled_at, self._poll_interval = 0.0, QUICK_LOOK_S
            context.wake_now()

    async def _fetch(self, tickets: Sequence[int]) -> int:
        outcomes = await self._context.store.outcomes(tickets)
        for settled in outcomes:
            self._context.waiters.resolve(Reply.of(settled))
        return len(outcomes)

    async def _poll_outcomes(self, now: float) -> float:
        """Polls for outcomes whose hint was lost. Returns when to poll again."""
        context, waiting = self._context, len(self._context.waiters)
        if not waiting or not context.other_credentials:
            self._waiting_before = waiting
            return float("inf")
        if waiting > self._waiting_before:
            self._poll_interval = QUICK_LOOK_S
        self._waiting_before = waiting
        if now >= self._polled_at + self._poll_interval or now < self._polled_at:
            self._polled_at = now
            tickets = sorted(context.waiters)  # round robin, so that each of many gets its turn
            chunk = ([ticket for ticket in tickets if ticket > self._last_polled] or tickets)[:LOOK_AT]
            self._last_polled = chunk[-1]
            resolved = await self._fetch(chunk)
            self._poll_interval = QUICK_LOOK_S if resolved else min(2 * self._poll_interval, SLOW_LOOK_S)
        return self._polled_at + self._poll_interval


# ------------------------------------------------------------ virtual keys
# Cached in memory, so that no call waits for the store. The store is polled once a second for keys that any process
# added or ended.

KEYS_LOOK_S = 1.0
USE_S = 60.0  # minimum time between two writes of a key's last use

# Takes a provider and an environment variable; returns the secret in each form in which it may be sent.
SecretLookup = Callable[[str, str], Sequence[Headers]]

_WHY: Mapping[KeyState, str] = {
    KeyState.EXPIRED: "has expired",
    KeyState.ROTATED: "was replaced by a new one",
    KeyState.REVOKED: "was revoked",
}


class VirtualKeyCache:
    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._lender: SecretLookup = lambda provider, env: ()
        self._watching: asyncio.Task[None] | None = None
        self._polled_at = 0.0
        self._virtual_keys: dict[str, KeyHolder] = {}
        self._written: dict[str, float] = {}
        self._change: int | None = None
        self.epoch = 0  # increases whenever a key may have become valid or invalid

    @property
    def expected(self) -> bool:
        """Whether there are valid keys."""
        return any(holder.key.live(self._context.now()) for holder in self._virtual_keys.values())

    async def open(self, lender: SecretLookup) -> None:
        """Reads the keys and adds their secrets to the keyring, so that batches bought with them continue."""
        self._lender = lender
        await self._read()
        self._watching = self._context.background.spawn(self._watch(), "keys")

    def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()

    def find(self, secret: str) -> KeyHolder:
        """The holder of a key. Raises for a key that is unknown or no longer valid."""
        holder = self._virtual_keys.get(self._context.keyring.digest(secret))
        if holder is None:
            raise KeyRefused("carpool does not know this virtual key. Ask whoever runs it for one: carpool keys add.")
        state = holder.key.state(self._context.now())
        if state in _WHY:
            raise KeyRefused(
                f"The virtual key {holder.key.name} {_WHY[state]}. Ask whoever runs carpool for a new one."
            )
        return holder

    # ------------------------------------------------------------ in the background

    async def _watch(self) -> None:
        context = self._context
        while True:
            await context.clock.sleep(KEYS_LOOK_S)
            try:
                await self._read()
                await self._write_uses()
                context.troubles.worked("reading the virtual keys")
            except CarpoolError as error:
                context.trouble("reading the virtual keys", error)

    async def _read(self) -> None:
        changed = await self._context.store.keys(self._change)
        if changed is not None:
            self._change, keys = changed
            self._virtual_keys = {key.digest: self._holder(key) for key in keys}
            self.epoch += 1
        now = self._context.now()
        for holder in self._virtual_keys.values():  # one may have expired since the last poll
            ends = holder.key.expires_at, holder.key.ends_at
            self.epoch += any(end is not None and self._polled_at < end <= now for end in ends)
        self._polled_at = now

    def _holder(self, key: VirtualKey) -> KeyHolder:
        """Ended keys are included, because batches bought with them still have to be collected."""
        context, secrets = self._context, self._lender(key.provider, key.env)
        base_url = context.upstreams[key.provider].base_url if key.provider in context.upstreams else ""
        names: Sequence[str] = ()
        if secrets:
            names, new = context.keyring.lend(key.uid, key.provider, base_url, secrets)
            added = context.keyring.add(key.provider, base_url, secrets)  # clients may also send the secret itself
            if new or added:
                context.lead_again()
        before = self._virtual_keys.get(key.digest)
        return KeyHolder(key, secrets, names, before is not None and before.used)

    async def _write_uses(self) -> None:
        now, uses = self._context.now(), {}
        for digest, holder in self._virtual_keys.items():
            if holder.used and now - self._written.get(digest, 0.0) >= USE_S:
                uses[digest] = self._written[digest] = now
                holder.used = False
        if uses:
            await self._context.store.used_keys(uses)
