"""Keeping deadlines: calls whose batch will be late travel on `now`, as late as is safe and as cheaply as possible."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from carpool.budget import Bucket
from carpool.engine.desk import Desk
from carpool.engine.events import CallRescued
from carpool.engine.sending import Errand, Sender, Sent
from carpool.engine.upstream import whole
from carpool.engine.waiting import Reply
from carpool.errors import CarpoolError
from carpool.lifecycle import BOUGHT
from carpool.model import Batch, Call, Due, EntryKind, Lane, OpenCalls, Parcel, ticket_text
from carpool.tracking import early_start, rescue_plan

ASK_SILENCE_S = 60.0
CANCEL_AGAIN_S = 2.0  # a cancel that failed is not tried again before
RELIED_ON_S = 2.0  # how often to look at a batch that is all that can still answer a call
TAKEN_S = 5.0  # how often to ask after a call that another engine is sending
LOOK_AHEAD = 5000  # due calls planned in one step
AT_ONCE = 64  # rescues under way at a time
UNDER_WAY_S = 0.5  # how soon to look again, beside when one of them ends
OTHERS_S = 1.0  # the same while other engines rescue calls of batches that are this one's
NOTHING_OPEN = OpenCalls(0, 0, None)


class Rescuer:
    def __init__(self, desk: Desk, sender: Sender, look_soon: Callable[[str, str], None]) -> None:
        self._desk = desk
        self._sender = sender
        self._look_soon = look_soon  # at a batch, by its provider and its id there
        self._relied_on: dict[tuple[str, str], tuple[float, float]] = {}  # such a batch → its next look, and the last
        self._under_way: set[int] = set()
        rpm = desk.policy.sync_rpm
        self._gap = 0.0 if rpm is None else 60 / rpm
        self._pace = None if rpm is None else Bucket(rpm / 60, max(1.0, rpm / 60), 1.0, desk.now())
        self._cancelling: set[int] = set()
        self._cancel_after: dict[int, float] = {}  # batch → when a cancel that failed may be tried again

    async def step(self, now: float) -> float | None:
        """Sends what is due, cancels what had better be cancelled first. Says when to look again."""
        wakes = self._look_on(now), await self._send_due(now)
        return min((wake for wake in wakes if wake is not None), default=None)

    def _look_on(self, now: float) -> float | None:
        """At batches that are all that can still answer some calls, until the deadlines of these."""
        self._relied_on = {batch: (at, until) for batch, (at, until) in self._relied_on.items() if now < until}
        for batch, (at, until) in self._relied_on.items():
            if at <= now:
                self._look_soon(*batch)
                self._relied_on[batch] = now + RELIED_ON_S, until
        return min((at for at, _ in self._relied_on.values()), default=None)

    async def _send_due(self, now: float) -> float | None:
        desk = self._desk
        upcoming = await self._next_due()
        if upcoming is None:
            return None
        horizon = desk.forecast.cancel_seconds + LOOK_AHEAD * self._gap
        due = [one for one in await self._due(now + horizon) if one.ticket not in self._under_way]
        mine = [one.rescue_at for one in due if self._mine(one)]
        if not due:  # those that are due already are under way, and may wait for their turn on `now`
            return max(upcoming - horizon, now + UNDER_WAY_S)
        shift = max(0.0, mine[0] - early_start(mine, now, desk.policy.sync_rpm)) if mine else 0.0
        groups = await self._by_batch(due)
        wakes = [await self._plan(batch, calls, now, shift) for batch, calls in groups]
        wakes.append(now + OTHERS_S if len(mine) < len(due) else None)
        return min((wake for wake in wakes if wake is not None and wake > now), default=None)

    async def _next_due(self) -> float | None:
        """Of calls that this engine awaits; and of all that it leads, since their batches are its own."""
        desk = self._desk
        led, others = desk.led_credentials, desk.other_credentials
        times = [
            await desk.store.next_due(led) if led else None,
            await desk.store.next_due(others, desk.name) if others else None,
        ]
        return min((at for at in times if at is not None), default=None)

    async def _due(self, until: float) -> list[Due]:
        desk = self._desk
        led, others = desk.led_credentials, desk.other_credentials
        found = await desk.store.due(led, until, LOOK_AHEAD) if led else []
        if len(found) == LOOK_AHEAD and not all(map(self._mine, found)):  # its own must not be lost behind the others'
            found += await desk.store.due(led, until, LOOK_AHEAD, desk.name)
        if others:
            found += await desk.store.due(others, until, LOOK_AHEAD, desk.name)
        return sorted({one.ticket: one for one in found}.values(), key=lambda one: (one.rescue_at, one.ticket))

    def _mine(self, one: Due) -> bool:
        """A call is rescued by the engine whose door awaits it, and what nobody awaits by the one that leads."""
        return one.awaiter is None or one.awaiter == self._desk.name

    async def _by_batch(self, due: Sequence[Due]) -> list[tuple[Batch | None, list[Due]]]:
        rows = {batch.id: batch for batch in self._desk.batches}
        groups: dict[int | None, list[Due]] = defaultdict(list)
        for one in due:
            groups[one.batch].append(one)
        found: list[tuple[Batch | None, list[Due]]] = [(None, groups.pop(None))] if None in groups else []
        for number, calls in groups.items():
            assert number is not None
            batch = rows.get(number)
            if batch is None and any(map(self._mine, calls)):  # another engine's, or made a moment ago
                batch = await self._desk.store.batch(number)
            if batch is not None:
                found.append((batch, calls))
        return found

    async def _plan(self, batch: Batch | None, calls: list[Due], now: float, shift: float) -> float | None:
        """A shift forward makes room where more must be rescued than fits through the synchronous rate at once."""
        desk, mine = self._desk, [one for one in calls if self._mine(one)]
        if batch is None:
            ready = [one for one in mine if one.lane is Lane.NOW or one.rescue_at - shift <= now]
            self._send(ready, None)
            return min((one.rescue_at - shift for one in mine if one not in ready), default=None)
        ours = batch.owner == desk.name  # only its owner cancels a batch
        opened = await desk.store.open_calls(batch.id) if ours else NOTHING_OPEN
        plan = rescue_plan(batch, calls, opened, now, desk.forecast.cancel_seconds, early=shift)
        if plan.cancel and batch.id not in self._cancelling and self._cancel_after.get(batch.id, 0.0) <= now:
            self._cancelling.add(batch.id)
            desk.crew.spawn(self._cancel(batch), f"cancel {batch.id}")
        resend = set(plan.resend)
        self._send([one for one in mine if one.ticket in resend], batch)
        if plan.cancel and (again := self._cancel_after.get(batch.id, 0.0)) > now:
            return again if plan.wake is None else min(again, plan.wake)
        return plan.wake

    def _send(self, calls: Sequence[Due], batch: Batch | None) -> None:
        for one in calls[: AT_ONCE - len(self._under_way)]:
            if not self._may_send():
                return
            self._under_way.add(one.ticket)
            self._desk.crew.spawn(self._rescue(one, batch), f"rescue {ticket_text(one.ticket)}")

    def _may_send(self) -> bool:
        """Rescues share the synchronous rate that the policy leaves to them."""
        if self._pace is None:
            return True
        now = self._desk.now()
        if self._pace.available(now) < 1:
            self._desk.wake_by(self._pace.wait_until(now))
            return False
        self._pace = self._pace.take(now)
        return True

    def send_kept(self, call: Call, reason: str, ticket: int) -> None:
        """A call on `now` whose ticket is on disk, because its client gave it a key."""
        if ticket not in self._under_way:
            self._under_way.add(ticket)
            errand = replace(Errand.of(call, reason, kept=True), ticket=ticket)
            self._desk.crew.spawn(self._send_kept(errand), f"send {ticket_text(ticket)}")

    async def resume(self, ticket: int, deadline: float | None) -> None:
        """A kept call on `now` may have lost its sender with the process that had it; where one lives, it goes on."""
        parcel = None if ticket in self._under_way else await self._desk.store.parcel(ticket)
        if parcel is None or ticket in self._under_way:
            return
        self._under_way.add(ticket)
        errand = _errand(parcel, deadline, EntryKind.PURCHASE, parcel.reason)
        self._desk.crew.spawn(self._send_kept(errand), f"send {ticket_text(ticket)}")

    async def _send_kept(self, errand: Errand) -> None:
        """Another engine may be sending it already. It may also be dead: then its lease lapses, and we send."""
        desk = self._desk
        try:
            while await self._sender.resend(errand) is Sent.TAKEN and errand.ticket in desk.waiters:
                for settled in await desk.store.outcomes([errand.ticket]):
                    desk.waiters.resolve(Reply.of(settled))
                await desk.clock.sleep(TAKEN_S)
        finally:
            self._under_way.discard(errand.ticket)

    async def _rescue(self, one: Due, batch: Batch | None) -> None:
        desk = self._desk
        try:
            if await self._too_late(one):
                return
            errand = await self._errand(one, batch)
            sent = Sent.TAKEN if errand is None else await self._sender.resend(errand)
            if errand is not None and sent is not Sent.TAKEN:
                desk.stats.rescued_calls += 1
                number, whose = batch.id if batch else None, errand.credential
                desk.bulletin.tell(
                    CallRescued(desk.now(), ticket_text(one.ticket), number, errand.reason, credential=whose)
                )
            if sent is Sent.LEFT and batch is not None:
                self._rely_on(batch, one)
        except CarpoolError as error:
            desk.trouble("rescuing", error)
        finally:
            self._under_way.discard(one.ticket)
            desk.wake_now()

    def _rely_on(self, batch: Batch, one: Due) -> None:
        """Nothing but its batch can answer this call any more."""
        if batch.provider_id is not None and one.deadline is not None:
            name = batch.key.provider, batch.provider_id
            at, until = self._relied_on.get(name, (self._desk.now(), 0.0))
            self._relied_on[name] = at, max(until, one.deadline)

    async def _too_late(self, one: Due) -> bool:
        """A rescue was tried, its answer never came, and the batch brought none either: the deadline ends the wait."""
        desk = self._desk
        if one.deadline is None or desk.now() < one.deadline or await desk.store.attempts(one.ticket) == 0:
            return False
        await self._sender.miss(one.ticket)
        return True

    async def _errand(self, one: Due, batch: Batch | None) -> Errand | None:
        parcel = await self._desk.store.parcel(one.ticket)
        if parcel is None:
            return None
        again = batch is not None or parcel.requeues > 0  # a batch may have bought it, or may yet
        reason = "its batch would be late" if batch is not None else "no batch could take it in time"
        kind = EntryKind.RESCUE if again else EntryKind.PURCHASE
        why = parcel.reason if one.lane is Lane.NOW and parcel.reason else reason
        return _errand(parcel, one.deadline, kind, why)

    async def _cancel(self, batch: Batch) -> None:
        """Asks the provider to stop, so that what did not run is not billed. Only a batch whose id is surely ours."""
        desk = self._desk
        upstream, credential = desk.upstreams[batch.key.provider], batch.key.credential
        try:
            if batch.provider_id is None or batch.state not in BOUGHT:
                return
            await desk.turn(credential)
            ask = upstream.dialect.cancel(batch.key.headers, batch.provider_id)
            answer = await whole(await upstream.ask(ask, desk.keyring.secret(credential), timeout=ASK_SILENCE_S))
            self._cancel_after[batch.id] = desk.now() + CANCEL_AGAIN_S
            if answer.ok:
                await desk.stopping(batch, "its calls are pressed for time")
        except CarpoolError as error:
            self._cancel_after[batch.id] = desk.now() + CANCEL_AGAIN_S
            desk.trouble("cancelling", error)
        finally:
            self._cancelling.discard(batch.id)
            desk.wake_now()


def _errand(parcel: Parcel, deadline: float | None, kind: EntryKind, reason: str) -> Errand:
    return Errand(
        ticket=parcel.ticket,
        provider=parcel.key.provider,
        endpoint=parcel.key.endpoint,
        credential=parcel.key.credential,
        headers=parcel.key.headers,
        body=parcel.body,
        model=parcel.model,
        deadline=deadline,
        kind=kind,
        reason=reason,
        kept=True,
    )
