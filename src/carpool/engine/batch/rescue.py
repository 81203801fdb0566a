"""Rescue: sends calls on `now` whose batch would miss their deadline, as late as is safe and as cheaply as possible.

Every call with a deadline has a `rescue_at`: the time at which it must be sent on `now` to be answered in time. A call
that is still unanswered then is rescued, wherever it is. In its pool, it is simply bought on `now` instead. In a batch,
it becomes a second purchase in addition to one that may be billed too: the ledger enters it as a rescue, and the first
outcome that is settled wins. The results of a batch that has ended are already being fetched, so they get a part of the
time that is left before the call is sent again.

- Who rescues: the engine whose client awaits the call; the leader of the account if nobody awaits it. The owner of a
  batch also plans for calls that other engines rescue, because only the owner may cancel the batch.
- Cancelling: when all open calls of a batch need rescue, the batch is cancelled first, so that the provider does not
  bill what has not run yet. A batch that some calls can still wait for is not cancelled. Only a batch whose id is
  surely ours is ever cancelled.
- Rate: rescues share the free rate of their account and model, and the rate that the policy allows. Where the calls
  that may need a rescue get too many for the time that is left, the earliest are sent before their rescue time
  (`planners/rescue_room.py`). A further call for which there would be no room is not batched.
- No room: if the provider refuses the rescue (429, 5xx) until there is no time for a retry, the call is left to its
  batch, which is polled every two seconds and may still answer. At the deadline the wait ends.

Calls with a key that travel on `now` are sent from here as well, because they have a ticket on disk: another engine may
be sending the same ticket, or may have died while it did.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from carpool.core.errors import CarpoolError
from carpool.core.lifecycle import BOUGHT
from carpool.core.model import Batch, Call, Due, EntryKind, Lane, OpenCalls, SendableCall, ticket_text
from carpool.engine.batch.api import BatchApi
from carpool.engine.context import LATE, PRESSED, EngineContext
from carpool.engine.events import BatchLate, CallRescued
from carpool.engine.now.gate import BYTES_PER_TOKEN
from carpool.engine.now.send import Sender, SendRequest, Sent
from carpool.planners.pressure.quota import TokenBucket
from carpool.planners.rescue_room import EVERYTHING, UNLIMITED, FreeRate, Limited
from carpool.planners.tracking import early_start, rescue_plan

CANCEL_AGAIN_S = 2.0  # minimum time between two cancel requests for a batch
URGENT_POLL_S = 2.0  # poll interval of a batch that is the only one left to answer a call
TAKEN_S = 5.0  # poll interval for a call that another engine is sending
DUE_PER_STEP = 5000  # due calls planned in one step
AT_ONCE = 64  # concurrent rescues
UNDER_WAY_S = 0.5  # when to plan again while rescues are under way; the end of one wakes the planner too
OTHERS_S = 1.0  # the same while other engines rescue calls of this engine's batches


class Rescuer:
    def __init__(
        self, context: EngineContext, api: BatchApi, sender: Sender, poll_soon: Callable[[str, str], None]
    ) -> None:
        self._context = context
        self._api = api
        self._sender = sender
        self._poll_soon = poll_soon  # takes a provider and its batch id
        self._urgent_polls: dict[tuple[str, str], tuple[float, float]] = {}  # batch → (next poll, end)
        self._under_way: set[int] = set()
        rpm = context.policy.sync_rpm
        self._gap = 0.0 if rpm is None else 60 / rpm
        self._policy_rate = UNLIMITED if rpm is None else FreeRate(rpm / 60, requests=max(1.0, rpm / 60))
        self._pace = None if rpm is None else TokenBucket(rpm / 60, max(1.0, rpm / 60), 1.0, context.now())
        self._cancelling: set[int] = set()
        self._late: set[int] = set()  # batches reported as late
        self._cancel_after: dict[int, float] = {}  # batch → when another cancel may be sent

    # ------------------------------------------------------------ room

    def expect(self, ticket: int, call: Call, rescue_at: float) -> None:
        """A call rides a batch and may need a rescue at this time."""
        self._context.open_rescues.add(ticket, self._limited(call), rescue_at, len(call.body) / BYTES_PER_TOKEN)

    def has_room(self, call: Call, rescue_at: float) -> bool:
        """Whether the synchronous rate limits have room for a rescue of this call, beside those that ride batches."""
        room, now = self._context.open_rescues, self._context.now()
        limited, tokens = self._limited(call), len(call.body) / BYTES_PER_TOKEN
        return room.room_for(limited, rescue_at, tokens, self._sender.gates.free_rate(*limited), now) and room.room_for(
            EVERYTHING, rescue_at, tokens, self._policy_rate, now
        )

    def _limited(self, call: Call) -> Limited:
        return self._context.keyring.account(call.payer or call.credential), call.model

    def _early(self, at: float) -> dict[Limited, float]:
        """How much earlier rescues have to start that are limited by these. Only those that have to by this time."""
        room, gates = self._context.open_rescues, self._sender.gates
        early = {limited: room.early(limited, gates.free_rate(*limited), at) for limited in room.limits()}
        return {limited: seconds for limited, seconds in early.items() if seconds > 0}

    def _tight_at(self, now: float) -> float:
        """When the earliest rescue has to start because of those that come after it."""
        room, gates = self._context.open_rescues, self._sender.gates
        starts = (room.starts_at(limited, gates.free_rate(*limited)) for limited in room.limits())
        return max(now + UNDER_WAY_S, min(starts, default=math.inf))

    # ------------------------------------------------------------ steps

    async def step(self, now: float) -> float | None:
        """Sends the calls that are due, cancelling batches first where that saves money. Returns when to plan again."""
        wakes = self._poll_urgent(now), await self._send_due(now)
        return min((wake for wake in wakes if wake is not None), default=None)

    def _poll_urgent(self, now: float) -> float | None:
        """Polls batches that are the only ones left to answer some calls, until the deadlines of these calls."""
        self._urgent_polls = {batch: (at, until) for batch, (at, until) in self._urgent_polls.items() if now < until}
        for batch, (at, until) in self._urgent_polls.items():
            if at <= now:
                self._poll_soon(*batch)
                self._urgent_polls[batch] = now + URGENT_POLL_S, until
        return min((at for at, _ in self._urgent_polls.values()), default=None)

    async def _send_due(self, now: float) -> float | None:
        context = self._context
        upcoming = await self._next_due()
        if upcoming is None:
            return None
        slowest_cancel = max(map(context.forecast.cancel_seconds, context.upstreams), default=0.0)
        early, soon = self._early(now), self._early(now + slowest_cancel)
        tight_at = self._tight_at(now) - slowest_cancel
        horizon = slowest_cancel + max(DUE_PER_STEP * self._gap, *soon.values(), 0.0)
        due = [call for call in await self._due(now + horizon) if call.ticket not in self._under_way]
        mine = [call.rescue_at for call in due if self._mine(call)]
        if not due and upcoming - horizon > now:
            return min(upcoming - horizon, max(tight_at, now + UNDER_WAY_S))
        if not due:  # everything that is due is under way already, and may wait for its turn on `now`
            return now + UNDER_WAY_S
        shift = max(0.0, mine[0] - early_start(mine, now, context.policy.sync_rpm)) if mine else 0.0
        wakes: list[float | None] = [max(tight_at, now + UNDER_WAY_S)]
        for batch, calls in await self._by_batch(due):
            limits = {context.open_rescues.limited_by(call.ticket) for call in calls}
            ahead = max(shift, *(early.get(limited, 0.0) for limited in limits))
            lead = max(ahead, *(soon.get(limited, 0.0) for limited in limits)) - ahead
            wakes.append(await self._plan(batch, calls, now, ahead, lead))
        wakes.append(now + OTHERS_S if len(mine) < len(due) else None)
        return min((wake for wake in wakes if wake is not None and wake > now), default=None)

    async def _next_due(self) -> float | None:
        """When the next call is due: of those it awaits, and of all it leads, because it owns their batches."""
        context = self._context
        led, others = context.led_credentials, context.other_credentials
        times = [
            await context.store.next_due(led) if led else None,
            await context.store.next_due(others, context.name) if others else None,
        ]
        return min((at for at in times if at is not None), default=None)

    async def _due(self, until: float) -> list[Due]:
        context = self._context
        led, others = context.led_credentials, context.other_credentials
        calls = await context.store.due(led, until, DUE_PER_STEP) if led else []
        if len(calls) == DUE_PER_STEP and not all(map(self._mine, calls)):  # the others' must not crowd out its own
            calls += await context.store.due(led, until, DUE_PER_STEP, context.name)
        if others:
            calls += await context.store.due(others, until, DUE_PER_STEP, context.name)
        return sorted({call.ticket: call for call in calls}.values(), key=lambda call: (call.rescue_at, call.ticket))

    def _mine(self, call: Due) -> bool:
        """A call is rescued by the engine whose client awaits it; if nobody awaits it, by the leader."""
        return call.awaiter is None or call.awaiter == self._context.name

    async def _by_batch(self, due: Sequence[Due]) -> list[tuple[Batch | None, list[Due]]]:
        rows = {batch.id: batch for batch in self._context.batches}
        groups: dict[int | None, list[Due]] = defaultdict(list)
        for call in due:
            groups[call.batch].append(call)
        by_batch: list[tuple[Batch | None, list[Due]]] = [(None, groups.pop(None))] if None in groups else []
        for number, calls in groups.items():
            assert number is not None
            batch = rows.get(number)
            if batch is None and any(map(self._mine, calls)):  # another engine's, or just created
                batch = await self._context.store.batch(number)
            if batch is not None:
                by_batch.append((batch, calls))
        return by_batch

    async def _plan(self, batch: Batch | None, calls: list[Due], now: float, shift: float, lead: float) -> float | None:
        """`shift` moves rescues forward, when more are due than the synchronous rate allows at once; `lead` moves the
        cancel forward, because they will be soon."""
        context, mine = self._context, [call for call in calls if self._mine(call)]
        if batch is None:
            ready = [call for call in mine if call.lane is Lane.NOW or call.rescue_at - shift <= now]
            self._send(ready, None)
            return min((call.rescue_at - shift for call in mine if call not in ready), default=None)
        ours = batch.owner == context.name  # only its owner cancels a batch
        open_calls = await context.store.open_calls(batch.id) if ours else OpenCalls(0, 0, None)
        cancel_seconds = lead + context.forecast.cancel_seconds(batch.key.provider)
        plan = rescue_plan(batch, calls, open_calls, now, cancel_seconds, early=shift)
        if plan.cancel and batch.id not in self._cancelling and self._cancel_after.get(batch.id, 0.0) <= now:
            self._cancelling.add(batch.id)
            context.background.spawn(self._cancel(batch), f"cancel {batch.id}")
        resend = set(plan.resend)
        if (resend or plan.cancel) and batch.id not in self._late:
            self._late.add(batch.id)
            context.emit_batch_event(BatchLate, batch, batch.provider_id or "", batch.count)
        self._send([call for call in mine if call.ticket in resend], batch)
        if plan.cancel and (again := self._cancel_after.get(batch.id, 0.0)) > now:
            return again if plan.wake is None else min(again, plan.wake)
        return plan.wake

    def _send(self, calls: Sequence[Due], batch: Batch | None) -> None:
        for call in calls[: AT_ONCE - len(self._under_way)]:
            if not self._may_send():
                return
            self._under_way.add(call.ticket)
            self._context.open_rescues.remove(call.ticket)
            self._context.background.spawn(self._rescue(call, batch), f"rescue {ticket_text(call.ticket)}")

    def _may_send(self) -> bool:
        """Whether the synchronous rate of the policy allows another rescue."""
        if self._pace is None:
            return True
        now = self._context.now()
        if self._pace.available(now) < 1:
            self._context.wake_by(self._pace.wait_until(now))
            return False
        self._pace = self._pace.take(now)
        return True

    def send_kept(self, call: Call, reason: str, ticket: int) -> None:
        """Sends a call on `now` whose ticket is on disk because it has a key."""
        self._start(SendRequest(replace(call, ticket=ticket), reason, kept=True))

    async def resume(self, ticket: int, deadline: float | None) -> None:
        """Sends a kept call on `now` again whose sender may have died. No effect while another engine sends it."""
        sendable = None if ticket in self._under_way else await self._context.store.sendable_call(ticket)
        if sendable is not None:
            self._start(_request_of(sendable, deadline, EntryKind.PURCHASE, sendable.reason))

    def _start(self, request: SendRequest) -> None:
        if request.call.ticket not in self._under_way:
            self._under_way.add(request.call.ticket)
            self._context.background.spawn(self._send_kept(request), f"send {ticket_text(request.call.ticket)}")

    async def _send_kept(self, request: SendRequest) -> None:
        """Another engine may be sending the call. If that engine is dead, its pulse runs out, and this one sends."""
        context = self._context
        try:
            while await self._sender.resend(request) is Sent.TAKEN and request.call.ticket in context.waiters:
                await context.fetch_outcomes([request.call.ticket])
                await context.clock.sleep(TAKEN_S)
        finally:
            self._under_way.discard(request.call.ticket)

    async def _rescue(self, call: Due, batch: Batch | None) -> None:
        context = self._context
        try:
            late = call.deadline is not None and context.now() >= call.deadline
            if late and await context.store.attempts(call.ticket) > 0:  # neither a rescue nor the batch has answered
                await self._sender.settle_missed(call.ticket)
                return
            sendable = await context.store.sendable_call(call.ticket)
            if sendable is None:
                return
            bought_before = batch is not None or sendable.requeues > 0  # perhaps: a batch may have bought it, or will
            kind = EntryKind.RESCUE if bought_before else EntryKind.PURCHASE
            reason = LATE if batch is not None else "no batch could take it in time"
            if call.lane is Lane.NOW and sendable.reason:
                reason = sendable.reason
            sent = await self._sender.resend(_request_of(sendable, call.deadline, kind, reason))
            # A call that a refused create left to `now` is no rescue: nothing was bought for it, and no time ran out.
            if sent is not Sent.TAKEN and (bought_before or call.lane is Lane.BATCH):
                context.stats.rescued_calls += sent is Sent.SETTLED
                number, whose = batch.id if batch else None, context.keyring.credential(sendable.key.credential)
                context.event_hooks.emit(
                    CallRescued(context.now(), ticket_text(call.ticket), number, reason, credential=whose)
                )
            if sent is Sent.LEFT and batch is not None:
                self._poll_urgently(batch, call)
        except CarpoolError as error:
            context.trouble("rescuing a call", error, "" if batch is None else batch.key.provider)
        finally:
            self._under_way.discard(call.ticket)
            context.wake_now()

    def _poll_urgently(self, batch: Batch, call: Due) -> None:
        """Only its batch can still answer this call, so the batch is polled often until the deadline."""
        if batch.provider_id is not None and call.deadline is not None:
            name = batch.key.provider, batch.provider_id
            at, until = self._urgent_polls.get(name, (self._context.now(), 0.0))
            self._urgent_polls[name] = at, max(until, call.deadline)

    async def _cancel(self, batch: Batch) -> None:
        """Cancels a batch, so that what has not run is not billed. Only a batch whose id is surely ours."""
        context = self._context
        upstream, credential = context.upstreams[batch.key.provider], batch.key.credential
        try:
            if batch.provider_id is None or batch.state not in BOUGHT:
                return
            await context.store.annotate(batch.id, note=PRESSED)  # before the provider says that it stops
            response = await self._api.request(batch, upstream.dialect.cancel(batch.key.headers, batch.provider_id))
            self._cancel_after[batch.id] = context.now() + CANCEL_AGAIN_S
            if response.ok:
                context.learner.batch_cancelled(batch)
                await self._api.stopping(batch, PRESSED)
        except CarpoolError as error:
            self._cancel_after[batch.id] = context.now() + CANCEL_AGAIN_S
            context.trouble("cancelling a batch", error, upstream.provider, credential)
        finally:
            self._cancelling.discard(batch.id)
            context.wake_now()


def _request_of(sendable: SendableCall, deadline: float | None, kind: EntryKind, reason: str) -> SendRequest:
    key, at = sendable.key, 0.0
    bought = key.provider, key.dialect, key.endpoint, sendable.body, key.headers, key.credential, sendable.model
    return SendRequest(Call(sendable.ticket, *bought, at, deadline), reason, kind, kept=True)
