"""Operations on calls by ticket: admit, leave, collect the answer later, cancel."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from carpool.core.errors import Closed
from carpool.core.lifecycle import TicketState
from carpool.core.model import Call, CallRow, Entry, Lane, Outcome, OutcomeKind
from carpool.engine.batch.admit import NO_TICKET, Admitter, Gone, PendingCall
from carpool.engine.batch.rescue import Rescuer
from carpool.engine.context import EngineContext
from carpool.engine.waiters import Reply
from carpool.planners.routing import Decision


class Tickets:
    def __init__(self, context: EngineContext, rescuer: Rescuer) -> None:
        self._context = context
        self._rescuer = rescuer
        self._admitter = Admitter(context, rescuer, self._release)

    # ------------------------------------------------------------ admitting a call

    async def board(self, call: Call, decision: Decision, gone: Gone = "keep") -> PendingCall:
        """Puts a call on disk. `gone` says what to do with it if its client leaves; with a key it is always kept."""
        pending_call = self._admitter.admit(call, decision, gone, wait_for_disk=True)
        assert pending_call.persisted is not None
        try:
            await pending_call.persisted
        except asyncio.CancelledError:  # it may be on disk already, but its caller does not know the ticket
            self.leave(pending_call)
            raise
        finally:
            pending_call.persisted = None  # breaks a reference cycle: an exception from it holds this frame
        return pending_call

    def take(self, call: Call, decision: Decision, gone: Gone) -> PendingCall:
        """Queues a call for the disk, for callers that wait for the answer only."""
        return self._admitter.admit(call, decision, gone)

    # ------------------------------------------------------------ leaving a call

    def leave(self, pending_call: PendingCall) -> None:
        """The client is gone and did not receive its answer, whether it is there already or not. If nobody else waits,
        the ticket becomes adoptable. An equal call that arrives before the store knows that is delayed."""
        if pending_call.left:
            return
        pending_call.left = True
        # A call that is not on disk yet is released when it is.
        if self._admitter.leaving(pending_call) and pending_call.ticket != NO_TICKET:
            self._release(pending_call)

    def _release(self, pending_call: PendingCall) -> None:
        if self._context.waiters.drop(pending_call.ticket, pending_call.answer):
            self._context.background.spawn(self._stop_awaiting(pending_call), "gone")
        else:
            self._admitter.left(pending_call)

    async def hold(self, pending_call: PendingCall, leaving: asyncio.Future[None], wait: float) -> Reply | None:
        """The answer, if it comes within `wait`. The client will collect it later, so the call counts as awaited."""
        try:
            if wait > 0 and not pending_call.answer.done():
                await asyncio.wait((pending_call.answer, leaving), timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            return pending_call.answer.result() if pending_call.answer.done() else None
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
            if pending_call.gone == "cancel":  # before it is adoptable: nobody must adopt a cancelled call
                await self.take_back(ticket, pending_call.provider)
            await context.store.stop_awaiting(ticket, context.name)
            if ticket in context.waiters:  # a client came for it by ticket meanwhile
                await context.store.await_ticket(ticket, context.name)
        except Closed:  # the next start on this store finds that nobody awaits it
            return
        finally:
            self._admitter.left(pending_call)

    # ------------------------------------------------------------ collecting an answer

    async def find(self, ticket: int, credentials: Sequence[str] | None = None) -> CallRow | None:
        """With `credentials`, finds only calls that belong to them."""
        return await self._context.store.listed_call(ticket, credentials)

    async def purchases(self, ticket: int, credentials: Sequence[str]) -> list[Entry]:
        """What these credentials bought for a call. The ledger outlives the call and its answer."""
        return await self._context.store.entries(ticket, credentials)

    async def collect(self, row: CallRow, leaving: asyncio.Future[None], wait: float) -> Reply | None:
        """The answer of a call, after at most `wait` seconds; None if there is none yet. The call counts as awaited."""
        context = self._context
        answer = context.waiters.add(row.ticket)  # before reading the store, so that no outcome is missed
        try:
            settled = await context.store.outcome(row.ticket, row.credential)
            if settled is not None:
                return Reply.of(settled)
            await self._await_again(row)
            if wait > 0:
                await asyncio.wait((answer, leaving), timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            return answer.result() if answer.done() else None
        finally:
            context.waiters.drop(row.ticket, answer)

    async def not_collected(self, row: CallRow) -> None:
        """The client that came by ticket left without an answer: the call is unawaited again if it was before."""
        if not row.awaited and row.ticket not in self._context.waiters:
            await self._context.store.stop_awaiting(row.ticket, self._context.name)

    async def _await_again(self, row: CallRow) -> None:
        context = self._context
        await context.store.await_ticket(row.ticket, context.name)
        if row.lane is Lane.NOW and row.state is TicketState.SENDING:
            await self._rescuer.resume(row.ticket, row.deadline)
        context.wake_now()

    async def cancel(self, row: CallRow) -> tuple[bool, TicketState]:
        """Cancels a waiting call, or stops awaiting a sent one. Returns whether it is cancelled, and its state."""
        if await self.take_back(row.ticket, row.provider):
            return True, TicketState.SETTLED
        current = await self.find(row.ticket)
        if current is None or current.state is TicketState.SETTLED:
            return False, TicketState.SETTLED
        await self._context.store.await_ticket(row.ticket, None)
        return False, current.state
