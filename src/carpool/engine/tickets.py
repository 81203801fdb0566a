"""Calls by their ticket: a seat taken without waiting in line, an answer collected later, a call taken back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from carpool.engine.desk import Desk
from carpool.engine.entering import NO_TICKET, Entrance, Gone, Seat
from carpool.engine.rescuing import Rescuer
from carpool.engine.waiting import Reply
from carpool.lifecycle import TicketState
from carpool.model import Call, CallRow, Lane, Outcome, OutcomeKind
from carpool.routing import Decision


class Tickets:
    def __init__(self, desk: Desk, rescuer: Rescuer) -> None:
        self._desk = desk
        self._rescuer = rescuer
        self._entrance = Entrance(desk, rescuer, self.leave)

    # ------------------------------------------------------------ taking a seat

    async def board(self, call: Call, decision: Decision, gone: Gone = "keep") -> Seat:
        """Puts a call on disk. `gone` says what becomes of it when its client leaves; a key always keeps it."""
        seat = self._entrance.enter(call, decision, gone, told=True)
        assert seat.aboard is not None
        try:
            await seat.aboard
        except asyncio.CancelledError:  # it may be on disk already, but its caller never heard of it
            self.leave(seat)
            raise
        return seat

    def take(self, call: Call, decision: Decision, gone: Gone) -> Seat:
        """The seat of a call that is about to be put on disk: who waits for its answer only need not wait twice."""
        return self._entrance.enter(call, decision, gone)

    # ------------------------------------------------------------ leaving it

    def leave(self, seat: Seat) -> None:
        if seat.ticket == NO_TICKET:  # the entrance sees to it, if it comes in
            seat.left = True
        else:
            self.left(seat.ticket, seat.answer, seat.provider, seat.gone)

    def left(self, ticket: int, answer: asyncio.Future[Reply], provider: str, gone: Gone) -> None:
        """The client is gone. Without another who waits for it, the call is nobody's until somebody comes back."""
        crew = self._desk.crew
        if self._desk.waiters.drop(ticket, answer):
            # Both reach the store in this order and with nothing between them: no newcomer adopts what is cancelled,
            # and one that comes at once finds what is not.
            if gone == "cancel":
                crew.spawn(self.take_back(ticket, provider), "take back")
            crew.spawn(self._nobody_waits(ticket), "gone")

    async def hold(self, seat: Seat, leaving: asyncio.Future[None], wait: float) -> Reply | None:
        """The answer, if it comes within so long. Its client will come for it later: the call counts as awaited."""
        try:
            if wait > 0 and not seat.answer.done():
                await asyncio.wait((seat.answer, leaving), timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            return seat.answer.result() if seat.answer.done() else None
        finally:
            self._desk.waiters.drop(seat.ticket, seat.answer)

    async def take_back(self, ticket: int, provider: str) -> bool:
        """Ends a call that still waits in its pool. False, and no change, when it is on its way or answered."""
        desk = self._desk
        body = desk.upstreams[provider].dialect.error(409, "conflict_error", "The caller cancelled this call.")
        outcome = Outcome(OutcomeKind.CANCELLED, 409, body, desk.now(), Lane.BATCH, "cancelled by its caller")
        return await desk.store.cancel(ticket, outcome)

    async def _nobody_waits(self, ticket: int) -> None:
        desk = self._desk
        await desk.store.await_ticket(ticket, None)
        if ticket in desk.waiters:  # somebody came back for it meanwhile
            await desk.store.await_ticket(ticket, desk.name)

    # ------------------------------------------------------------ coming for it

    async def find(self, ticket: int, credentials: Sequence[str] | None = None) -> CallRow | None:
        """With `credentials` only where the call is theirs."""
        return await self._desk.store.listed_call(ticket, credentials)

    async def collect(self, row: CallRow, leaving: asyncio.Future[None], wait: float) -> Reply | None:
        """The answer of a call, waited for at most so long; None when it is not there yet. It counts as awaited."""
        desk = self._desk
        answer = desk.waiters.add(row.ticket)  # before the look into the store: nothing can slip between
        try:
            settled = await desk.store.outcome(row.ticket, row.credential)
            if settled is not None:
                return Reply.of(settled)
            await self._go_on(row)
            if wait > 0:
                await asyncio.wait((answer, leaving), timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            return answer.result() if answer.done() else None
        finally:
            desk.waiters.drop(row.ticket, answer)

    async def _go_on(self, row: CallRow) -> None:
        desk = self._desk
        await desk.store.await_ticket(row.ticket, desk.name)
        if row.lane is Lane.NOW and row.state is TicketState.SENDING:
            await self._rescuer.resume(row.ticket, row.deadline)
        desk.wake_now()

    async def cancel(self, row: CallRow) -> tuple[bool, TicketState]:
        """Takes a waiting call back, or leaves one that travels to itself. Says whether, and where it stands now."""
        if await self.take_back(row.ticket, row.provider):
            return True, TicketState.SETTLED
        now = await self.find(row.ticket)
        if now is None or now.state is TicketState.SETTLED:
            return False, TicketState.SETTLED
        await self._desk.store.await_ticket(row.ticket, None)
        return False, now.state
