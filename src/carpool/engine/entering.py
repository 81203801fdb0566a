"""The way in: calls that arrive together are put on disk together, and each then has a seat."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from carpool.engine.desk import Desk
from carpool.engine.events import CallAdmitted
from carpool.engine.rescuing import Rescuer
from carpool.engine.waiting import Reply
from carpool.errors import CarpoolError, Closed
from carpool.lifecycle import TicketState
from carpool.model import Admission, Admitted, Call, Lane, ticket_text
from carpool.routing import Decision, pool_key

Gone = Literal["keep", "cancel"]

GROUP = 250  # so many go to the store at once, while the next are still being understood
ADMISSION_PAUSE_S = 0.1  # arrivals wake the planner at most so often


@dataclass(frozen=True, slots=True)
class Seat:
    """A call that is on disk, and what its door holds while it waits: not the call itself, which may be large."""

    ticket: int
    provider: str
    lane: Lane
    state: TicketState
    reason: str
    gone: Gone
    answer: asyncio.Future[Reply]


@dataclass(frozen=True, slots=True)
class _Newcomer:
    call: Call
    decision: Decision
    gone: Gone
    admission: Admission
    seat: asyncio.Future[Seat]


class Entrance:
    def __init__(self, desk: Desk, rescuer: Rescuer, leave: Callable[[Seat], None]) -> None:
        self._desk = desk
        self._rescuer = rescuer
        self._leave = leave
        self._arrivals: list[_Newcomer] = []

    def enter(self, call: Call, decision: Decision, gone: Gone) -> asyncio.Future[Seat]:
        """The seat of a call, once it is on disk. Who cancels it meanwhile has left, and the call is treated so."""
        desk = self._desk
        if len(desk.waiters) + len(self._arrivals) >= desk.policy.max_waiting_calls:
            raise Closed("Too many calls are waiting. Try again later, or raise max_waiting_calls.")
        key = pool_key(call, mixes_models=True, now=desk.now())
        admission = Admission(call, key, decision.lane, decision.rescue_at, desk.name, decision.reason)
        seat: asyncio.Future[Seat] = asyncio.get_running_loop().create_future()
        self._arrivals.append(_Newcomer(call, decision, gone, admission, seat))
        if len(self._arrivals) == 1:
            desk.crew.spawn(self._rest(), "admit")
        elif len(self._arrivals) == GROUP:
            self._let_in()
        return seat

    async def _rest(self) -> None:
        """Whoever arrived in the same moment and made no group of its own."""
        self._let_in()

    def _let_in(self) -> None:
        if self._arrivals:
            group, self._arrivals = self._arrivals, []
            writing = self._desk.store.admit_all([one.admission for one in group])
            self._desk.crew.spawn(self._seat_all(group, writing), "admit")

    async def _seat_all(self, group: list[_Newcomer], writing: Awaitable[list[Admitted | CarpoolError]]) -> None:
        try:
            await self._seat_each(group, writing)
        finally:  # whatever went wrong, nobody is left standing at the door
            for one in group:
                _fail(one, Closed("carpool stopped before this call was accepted. Send it again."))

    async def _seat_each(self, group: list[_Newcomer], writing: Awaitable[list[Admitted | CarpoolError]]) -> None:
        try:
            admitted = await writing
        except CarpoolError as error:
            if len(group) > 1:  # what one of them can't have must not keep the others out
                for one in group:
                    await self._seat_all([one], self._desk.store.admit_all([one.admission]))
                return
            admitted = [error]
        for one, result in zip(group, admitted, strict=True):
            if isinstance(result, CarpoolError):
                _fail(one, result)
            else:
                self._place(one, result)
        if self._desk.probe is not None:
            await asyncio.gather(*(self._desk.reached("admitted") for _ in group))
        self._desk.wake_by(self._desk.now() + min(self._desk.policy.linger_ms / 1000, ADMISSION_PAUSE_S))

    def _place(self, one: _Newcomer, admitted: Admitted) -> None:
        """On disk first; then, before anything else can run, the waiter is in place."""
        desk = self._desk
        self._count(one, admitted)
        if admitted.outcome is not None:
            answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
            answer.set_result(Reply(admitted.ticket, admitted.outcome))
        else:
            answer = desk.waiters.add(admitted.ticket)
            if admitted.lane is Lane.NOW and admitted.state is TicketState.SENDING:
                self._rescuer.send_kept(one.call, one.decision.reason, admitted.ticket)
        gone: Gone = "keep" if one.call.key is not None else one.gone
        reason = one.decision.reason
        seat = Seat(admitted.ticket, one.call.provider, admitted.lane, admitted.state, reason, gone, answer)
        if one.seat.cancelled():
            self._leave(seat)
        else:
            one.seat.set_result(seat)

    def _count(self, one: _Newcomer, admitted: Admitted) -> None:
        desk = self._desk
        if not admitted.fresh:
            desk.stats.returned_calls += 1
        elif admitted.lane is Lane.NOW:
            desk.stats.sync_calls += 1
        else:
            desk.stats.batched_calls += 1
        if desk.bulletin.heard and admitted.outcome is None:
            text = ticket_text(admitted.ticket)
            desk.bulletin.tell(CallAdmitted(desk.now(), text, admitted.lane, one.decision.reason))


def _fail(one: _Newcomer, error: CarpoolError) -> None:
    if not one.seat.done():
        one.seat.set_exception(error)
