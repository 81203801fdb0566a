"""Admission: puts calls on disk before anything else happens to them, and records which answers were delivered.

A frontend gets a `PendingCall` at once. Calls that arrive in the same tick are written as one group, because one
transaction for many calls is much cheaper than one for each. The pending call has a ticket when the call is on disk,
and only then is a waiter registered for the outcome.

A client that lost its connection or its process comes back with an equal call. It must find its old ticket, or the call
would be bought twice. The store finds it by its key, or without a key by adoption: an equal call of the same credential
takes over a ticket that nobody awaits any more. A ticket stays adoptable until its outcome was delivered
completely and that is on disk (`Deliveries`). Admission therefore has three results: a ticket, fresh or found; an
error; or `Undecided`, while the engine that awaits the equal call may be dead or alive. An undecided call is neither
merged with the other nor bought in addition. It is tried again until the doubt is over, or until its own deadline
requires a separate purchase (`pressed`). If its client leaves meanwhile, it is not admitted at all.

A client that leaves delays an equal call. That a client has left is written to the store in the background
(`Tickets.leave`), so a client that reconnects at once may arrive before. The old ticket would still count as awaited,
and the equal call would be bought as a second one. So `Tickets` counts the fingerprints of the calls whose clients
are leaving (`_leaving`) and holds equal calls back until the store knows, unless they are pressed for time.

A client may also reconnect to another process, which knows nothing of that. So a batch call that is marked as a retry
is first held back for `RETRY_HOLD_S`, in which the process of the earlier attempt writes that its client has left. The
time counts from the first such retry here, so a client that times out sooner gets its answer with a later one.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Literal

from msgspec.structs import replace

from carpool.core.bounded import BoundedMap
from carpool.core.errors import CarpoolError, Closed, TooManyWaiting, Undecided
from carpool.core.lifecycle import TicketState
from carpool.core.model import Admission, Admitted, Call, CallRow, Lane, Outcome, OutcomeKind, ticket_text
from carpool.engine.batch.rescue import Rescuer
from carpool.engine.context import HURRY_S, EngineContext, Reply
from carpool.engine.events import CallAdmitted
from carpool.engine.recording import CallRecorder
from carpool.planners.routing import Decision, pool_key

OnDisconnect = Literal["keep", "cancel"]

GROUP = 250  # calls written at once, while the next ones are still being parsed
NO_TICKET: Final = -1
RETRY_HOLD_S = 0.2  # two writes to a slow store
RETRY_SERIES_S = 10.0  # a retry that comes later is a first one again
MAX_RETRY_SERIES = 10_000
ASK_AGAIN_S = 0.5  # between two attempts to admit an undecided call


@dataclass(slots=True, eq=False)
class PendingCall:
    """What a frontend holds while its call waits: not the call itself, which may be large.

    It exists before the call is on disk. `ticket` is set when it is, and `persisted` is resolved, if the frontend waits
    for that. `answer` yields the outcome, or the error with which the call was rejected.
    """

    provider: str
    lane: Lane
    reason: str
    on_disconnect: OnDisconnect
    answer: asyncio.Future[Reply]
    persisted: asyncio.Future[None] | None
    ticket: int = NO_TICKET
    state: TicketState = TicketState.QUEUED
    fingerprint: int = 0  # of its call
    left: bool = False  # its client disconnected without the answer

    def fail(self, error: CarpoolError) -> None:
        """The call was rejected."""
        first = self.answer if self.persisted is None else self.persisted
        if not first.done():
            first.set_exception(error)
            if self.left:
                first.exception()  # marks the exception as retrieved, so that asyncio does not complain


_Arrival = tuple[Admission, PendingCall]


class Tickets:
    def __init__(self, context: EngineContext, rescuer: Rescuer, recorder: CallRecorder) -> None:
        self._context = context
        self._rescuer = rescuer
        self._recorder = recorder
        self._arrivals: list[_Arrival] = []
        self._arriving: set[PendingCall] = set()  # not on disk yet
        self._leaving: dict[int, int] = {}  # fingerprint → calls whose client left, until the store knows
        self._retried_at: BoundedMap[int, float] = BoundedMap(MAX_RETRY_SERIES)  # fingerprint → first retry here
        self.find = context.store.listed_call
        self.purchases = context.store.entries  # of a call; the ledger outlives the call and its answer

    def admit(
        self, call: Call, decision: Decision, on_disconnect: OnDisconnect, *, wait_for_disk: bool = False
    ) -> PendingCall:
        """Queues a call for the disk. With `wait_for_disk` the pending call has a future that says when it is there."""
        context = self._context
        if self._waiting_count >= context.policy.max_waiting_calls:
            raise TooManyWaiting("Too many calls are waiting. Try again later, or raise max_waiting_calls.")
        if (limit := context.policy.max_waiting_calls_per_credential) is not None:
            if context.waiters.of(call.credential) >= limit:
                raise TooManyWaiting(
                    f"{limit} calls with this API key are waiting, as many as may. Try again later, or raise "
                    "max_waiting_calls_per_credential."
                )
            context.waiters.count(call.ticket, call.credential)
        key = pool_key(call, context.upstreams[call.provider].dialect.mixes_models, context.now())
        admission = Admission(call, key, decision.lane, decision.rescue_at, context.name, decision.reason)
        if decision.lane is Lane.BATCH and decision.rescue_at is not None:  # before others are decided on
            self._rescuer.expect(call.ticket, call, decision.rescue_at)
        future = asyncio.get_running_loop().create_future
        keep_or_cancel: OnDisconnect = "keep" if call.key is not None else on_disconnect
        pending_call = PendingCall(
            call.provider, decision.lane, decision.reason, keep_or_cancel, future(), future() if wait_for_disk else None
        )
        pending_call.fingerprint = call.fingerprint
        self._arriving.add(pending_call)
        self._arrivals.append((admission, pending_call))
        if len(self._arrivals) == 1:
            context.background.spawn(self._write_rest(), "admit")
        elif len(self._arrivals) == GROUP:
            self._write_group()
        return pending_call

    async def admit_to_disk(self, call: Call, decision: Decision, on_disconnect: OnDisconnect = "keep") -> PendingCall:
        """Puts a call on disk. `gone` says what to do with it if its client leaves; with a key it is always kept."""
        pending_call = self.admit(call, decision, on_disconnect, wait_for_disk=True)
        assert pending_call.persisted is not None
        try:
            await pending_call.persisted
        except asyncio.CancelledError:  # it may be on disk already, but its caller does not know the ticket
            self.leave(pending_call)
            raise
        finally:
            pending_call.persisted = None  # breaks a reference cycle: an exception from it holds this frame
        return pending_call

    @property
    def _waiting_count(self) -> int:
        """Calls that wait, including those not on disk yet."""
        return len(self._context.waiters) + len(self._arriving)

    async def _write_rest(self) -> None:
        """Runs in the next tick of the event loop, and writes the calls that did not fill a group."""
        self._write_group()

    def _write_group(self) -> None:
        context, group, self._arrivals = self._context, self._arrivals, []
        if not group:
            return
        context.gc_freezer.grew(self._waiting_count)
        delayed, group = self._split_delayed(group, first=True)
        if delayed:
            context.background.spawn(self._admit_group(delayed, None), "admit")
        if group:
            writing = context.store.admit_all([admission for admission, _ in group])
            context.background.spawn(self._admit_group(group, writing), "admit")

    # ------------------------------------------------------------ clients that leave and come back at once

    def _left(self, pending_call: PendingCall) -> None:
        """The store knows that the client left, or never got the call."""
        self._leaving[pending_call.fingerprint] -= 1
        if not self._leaving[pending_call.fingerprint]:
            del self._leaving[pending_call.fingerprint]

    def _split_delayed(self, group: list[_Arrival], *, first: bool = False) -> tuple[list[_Arrival], list[_Arrival]]:
        """Splits off the calls that must wait because the client of an equal call is leaving, here or, when they are
        admitted for the `first` time, at another process."""
        if not self._leaving and not (first and any(admission.call.retry for admission, _ in group)):
            return [], group  # the usual case
        delayed: list[_Arrival] = []
        others: list[_Arrival] = []
        for admission, pending_call in group:
            waits = pending_call.fingerprint in self._leaving or (first and self._may_be_early(admission))
            (delayed if waits and not admission.pressed else others).append((admission, pending_call))
        return delayed, others

    def _may_be_early(self, admission: Admission) -> bool:
        """Whether another process may still await this call for a client that has left it."""
        call = admission.call
        if not call.retry or call.key is not None or admission.lane is not Lane.BATCH:
            return False
        since = call.arrived - self._retried_at.get(call.fingerprint, -math.inf)
        if not 0 <= since < RETRY_SERIES_S:
            self._retried_at[call.fingerprint] = call.arrived
        return not RETRY_HOLD_S <= since < RETRY_SERIES_S

    # ------------------------------------------------------------ writing to disk

    async def _admit_group(
        self, group: list[_Arrival], writing: Awaitable[list[Admitted | CarpoolError]] | None
    ) -> None:
        """Admits a group. `writing` is None for calls that must wait before they are written."""
        try:
            undecided = group if writing is None else await self._admit_each(group, writing)
            pause = RETRY_HOLD_S if writing is None else ASK_AGAIN_S
            while undecided:
                await self._context.clock.sleep(pause)
                undecided = await self._ask_again(undecided)
                pause = ASK_AGAIN_S
        finally:  # whatever went wrong, no client waits for ever
            for admission, pending_call in group:
                if pending_call in self._arriving:
                    self._reject(
                        admission, pending_call, Closed("carpool stopped before this call was accepted. Send it again.")
                    )

    async def _ask_again(self, undecided: list[_Arrival]) -> list[_Arrival]:
        """Tries undecided calls again. A call that must be sent now is admitted as a separate purchase. A call whose
        client left is rejected: when the client comes back, it must find the equal call that is on disk already."""
        now, remaining = self._context.now(), []
        for admission, pending_call in undecided:
            if pending_call.left:
                self._reject(admission, pending_call, Closed("Its client left before this call was accepted."))
            else:
                pressed = admission.rescue_at is not None and admission.rescue_at <= now
                remaining.append((replace(admission, pressed=pressed), pending_call))
        delayed, group = self._split_delayed(remaining)
        if not group:
            return delayed
        writing = self._context.store.admit_all([admission for admission, _ in group])
        return delayed + await self._admit_each(group, writing)

    def _reject(self, admission: Admission, pending_call: PendingCall, why: CarpoolError) -> None:
        self._arriving.discard(pending_call)
        self._context.waiters.uncount(admission.call.ticket)
        self._context.open_rescues.remove(admission.call.ticket)
        pending_call.fail(why)
        if pending_call.left:
            self._left(pending_call)

    async def _admit_each(
        self, group: list[_Arrival], writing: Awaitable[list[Admitted | CarpoolError]]
    ) -> list[_Arrival]:
        """Returns the calls of which the store could not decide yet whether they are on disk already."""
        try:
            admitted = await writing
        except CarpoolError as error:
            if len(group) > 1:  # one bad call must not keep the others out
                singly = [
                    await self._admit_each([arrival], self._context.store.admit_all([arrival[0]])) for arrival in group
                ]
                return [arrival for left_over in singly for arrival in left_over]
            admitted = [error.with_traceback(None)]  # the traceback holds this frame, and so the whole group
        undecided = []
        for (admission, pending_call), result in zip(group, admitted, strict=True):
            if isinstance(result, Undecided):
                undecided.append((admission, pending_call))
                continue
            if isinstance(result, CarpoolError):
                self._reject(admission, pending_call, result)
            else:
                self._arriving.discard(pending_call)
                if admission.rescue_at is not None:
                    self._expect_rescue(admission.call, admission.rescue_at, result)
                self._register_waiter(admission.call, pending_call, result)
        if self._context.probe is not None:
            await asyncio.gather(*(self._context.reached("admitted") for _ in range(len(group) - len(undecided))))
        self._context.wake_by(self._context.now() + min(self._context.policy.linger_ms / 1000, HURRY_S))
        return undecided

    def _expect_rescue(self, call: Call, rescue_at: float, admitted: Admitted) -> None:
        """The call may be known under another ticket, or answered."""
        self._context.open_rescues.remove(call.ticket)
        if admitted.outcome is None and admitted.lane is Lane.BATCH:
            self._rescuer.expect(admitted.ticket, call, rescue_at)

    def _register_waiter(self, call: Call, pending_call: PendingCall, admitted: Admitted) -> None:
        """Registers the waiter of a call that is on disk, before anything else can run."""
        context = self._context
        self._count(call, admitted)
        if context.event_hooks.has_listeners and admitted.outcome is None:
            text, why, whose = ticket_text(admitted.ticket), pending_call.reason, call.credential
            context.event_hooks.emit(CallAdmitted(context.now(), text, admitted.lane, why, credential=whose))
        pending_call.ticket, pending_call.lane, pending_call.state = admitted.ticket, admitted.lane, admitted.state
        context.waiters.uncount(call.ticket)
        if admitted.outcome is None:
            context.waiters.put(admitted.ticket, pending_call.answer)
            if context.policy.max_waiting_calls_per_credential is not None:  # perhaps under another ticket than its own
                context.waiters.count(admitted.ticket, call.credential)
            if admitted.lane is Lane.NOW and admitted.state is TicketState.SENDING:
                self._rescuer.send_kept(call, pending_call.reason, admitted.ticket)
        elif not pending_call.answer.done():
            pending_call.answer.set_result(Reply(admitted.ticket, admitted.outcome, admitted.entry))
        if pending_call.left:
            self._release(pending_call)
        elif pending_call.persisted is not None and not pending_call.persisted.done():
            pending_call.persisted.set_result(None)

    def _count(self, call: Call, admitted: Admitted) -> None:
        stats = self._context.stats
        if call.task and admitted.outcome is None:
            self._context.tasks.asked(replace(call, ticket=admitted.ticket), again=not admitted.fresh)
        if not admitted.fresh:
            stats.returned_calls += 1
            return
        if admitted.lane is Lane.NOW:
            stats.sync_calls += 1
        else:
            stats.batched_calls += 1
        self._recorder.admitted(call.shape)
        self._context.prompt_caches.admitted(call, admitted.ticket)

    # ------------------------------------------------------------ leaving a call

    def leave(self, pending_call: PendingCall) -> None:
        """The client is gone and did not receive its answer, whether it is there already or not. If nobody else waits,
        the ticket becomes adoptable. An equal call that arrives before the store knows that is delayed."""
        if pending_call.left:
            return
        pending_call.left = True
        if pending_call.ticket == NO_TICKET and pending_call not in self._arriving:
            return  # it was rejected, so the store has nothing to learn
        self._leaving[pending_call.fingerprint] = self._leaving.get(pending_call.fingerprint, 0) + 1
        if pending_call.ticket != NO_TICKET:  # otherwise it is released when it is on disk
            self._release(pending_call)

    def _release(self, pending_call: PendingCall) -> None:
        if self._context.waiters.drop(pending_call.ticket, pending_call.answer):
            self._context.open_rescues.remove(pending_call.ticket)  # nobody waits for it any more
            self._context.background.spawn(self._stop_awaiting(pending_call), "gone")
        else:
            self._left(pending_call)

    async def hold(self, pending_call: PendingCall, leaving: asyncio.Future[None], wait: float) -> Reply | None:
        """The answer, if it comes within `wait`. The client will collect it later, so the call counts as awaited."""
        try:
            return await _answer_within(wait, pending_call.answer, leaving)
        finally:
            self._context.waiters.drop(pending_call.ticket, pending_call.answer)

    async def take_back(self, ticket: int, provider: str) -> bool:
        """Cancels a call that still waits in its pool. Returns False, without a change, if it was sent or answered."""
        context = self._context
        body = context.upstreams[provider].dialect.error(409, "conflict_error", "The caller cancelled this call.")
        outcome = Outcome(OutcomeKind.CANCELLED, 409, body, context.now(), Lane.BATCH, "cancelled by its caller")
        return await context.store.cancel(ticket, outcome)

    async def _stop_awaiting(self, pending_call: PendingCall) -> None:
        context, ticket = self._context, pending_call.ticket
        try:
            if pending_call.on_disconnect == "cancel":  # before it is adoptable: nobody must adopt a cancelled call
                await self.take_back(ticket, pending_call.provider)
            await context.store.stop_awaiting(ticket, context.name)
            if ticket in context.waiters:  # a client came for it by ticket meanwhile
                await context.store.await_ticket(ticket, context.name)
        except Closed:  # the next start on this store finds that nobody awaits it
            return
        finally:
            self._left(pending_call)

    # ------------------------------------------------------------ collecting an answer

    async def collect(self, row: CallRow, leaving: asyncio.Future[None], wait: float) -> Reply | None:
        """The answer of a call, after at most `wait` seconds; None if there is none yet. The call counts as awaited."""
        context = self._context
        answer = context.waiters.add(row.ticket)  # before reading the store, so that no outcome is missed
        try:
            settled = await context.store.outcome(row.ticket, row.credential)
            if settled is not None:
                return Reply.of(settled)
            await context.store.await_ticket(row.ticket, context.name)
            if row.lane is Lane.NOW and row.state is TicketState.SENDING:
                await self._rescuer.resume(row.ticket, row.deadline)
            context.wake_now()
            return await _answer_within(wait, answer, leaving)
        finally:
            context.waiters.drop(row.ticket, answer)

    async def not_collected(self, row: CallRow) -> None:
        """The client that came by ticket left without an answer: the call is unawaited again if it was before."""
        if not row.awaited and row.ticket not in self._context.waiters:
            await self._context.store.stop_awaiting(row.ticket, self._context.name)

    async def cancel(self, row: CallRow) -> tuple[bool, TicketState]:
        """Cancels a waiting call, or stops awaiting a sent one. Returns whether it is cancelled, and its state."""
        if await self.take_back(row.ticket, row.provider):
            return True, TicketState.SETTLED
        current = await self.find(row.ticket)
        if current is None or current.state is TicketState.SETTLED:
            return False, TicketState.SETTLED
        await self._context.store.await_ticket(row.ticket, None)
        return False, current.state


async def _answer_within(wait: float, answer: asyncio.Future[Reply], leaving: asyncio.Future[None]) -> Reply | None:
    if wait > 0 and not answer.done():
        await asyncio.wait((answer, leaving), timeout=wait, return_when=asyncio.FIRST_COMPLETED)
    return answer.result() if answer.done() else None


# ------------------------------------------------------------ deliveries
# Answers that clients have received are recorded in groups, because their rows are spread over the store. Until then
# the ticket is awaited by this engine, so that nobody else can adopt it. If the connection breaks right after the last
# byte, the client may not have its answer: the delivery is taken back, and the ticket stays adoptable.

WRITE_S = 0.1


class Deliveries:
    def __init__(self, context: EngineContext, leave: Callable[[PendingCall], None]) -> None:
        self._context = context
        self._leave = leave
        # By ticket, with the pending call of the client, if there is one: not on disk yet.
        self._pending: dict[int, PendingCall | None] = {}
        self._due: dict[int, PendingCall | None] = {}  # to be written next
        self._writing: asyncio.Task[None] | None = None
        self.closed = False  # no more deliveries are accepted

    def add(self, ticket: int, pending_call: PendingCall | None = None) -> None:
        """The client has received its whole answer."""
        if self.closed:
            return
        self._due.pop(ticket, None)  # delivered again, it may be taken back for as long as the first time
        self._pending[ticket] = pending_call
        if self._writing is None or self._writing.done():
            self._writing = self._context.background.spawn(self._write_later(), "delivered")

    def take_back(self, ticket: int) -> None:
        """The connection broke right after the answer, so the client may not have it. No effect once it is on disk."""
        pending_call = self._pending.pop(ticket, None) or self._due.pop(ticket, None)
        if pending_call is not None:
            self._leave(pending_call)

    async def close(self) -> None:
        """Writes the remaining deliveries."""
        self.closed = True
        if self._writing is not None:
            self._writing.cancel()
            self._due |= self._pending
            self._pending = {}
            await self._write()

    async def _write_later(self) -> None:
        while self._pending:
            self._due, self._pending = self._pending, {}
            await self._context.clock.sleep(WRITE_S)
            await self._write()

    async def _write(self) -> None:
        """Records the deliveries that were not taken back."""
        tickets, self._due = list(self._due), {}
        if tickets:
            await self._context.store.delivered(tickets, self._context.now())
