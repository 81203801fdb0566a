"""The way in: calls that arrive together are put on disk together, and each then has a seat."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Literal

from carpool.engine.desk import Desk
from carpool.engine.events import CallAdmitted
from carpool.engine.rescuing import Rescuer
from carpool.engine.waiting import Reply
from carpool.errors import CarpoolError, Closed, Crowded
from carpool.lifecycle import TicketState
from carpool.model import Admission, Admitted, Call, Lane, ticket_text
from carpool.routing import Decision, pool_key

Gone = Literal["keep", "cancel"]

GROUP = 250  # so many go to the store at once, while the next are still being understood
NO_TICKET: Final = -1
ADMISSION_PAUSE_S = 0.1  # arrivals wake the planner at most so often


@dataclass(slots=True, eq=False)
class Seat:
    """What a door holds while its call waits: not the call itself, which may be large.

    It is taken at once, and stands for a call on disk as soon as it has a ticket; then `aboard` says so, where somebody
    waits for that. `answer` brings the outcome, or why the call was not let in.
    """

    provider: str
    lane: Lane
    reason: str
    gone: Gone
    answer: asyncio.Future[Reply]
    aboard: asyncio.Future[None] | None
    ticket: int = NO_TICKET
    state: TicketState = TicketState.QUEUED
    left: bool = False  # its client went away before it had a ticket

    def fail(self, error: CarpoolError) -> None:
        """The call was not let in."""
        first = self.answer if self.aboard is None else self.aboard
        if not first.done():
            first.set_exception(error)


_Newcomer = tuple[Admission, Seat]


class Entrance:
    def __init__(self, desk: Desk, rescuer: Rescuer, leave: Callable[[Seat], None]) -> None:
        self._desk = desk
        self._rescuer = rescuer
        self._leave = leave
        self._arrivals: list[_Newcomer] = []
        self._standing: set[Seat] = set()  # being written to disk
        self._coming: dict[str, set[int]] = {}  # by credential, where each has its share of room

    def enter(self, call: Call, decision: Decision, gone: Gone, *, told: bool = False) -> Seat:
        """The seat of a call that is about to be on disk; `told`: somebody waits until it is."""
        desk = self._desk
        if self._inside + len(self._arrivals) >= desk.policy.max_waiting_calls:
            raise Crowded("Too many calls are waiting. Try again later, or raise max_waiting_calls.")
        if desk.policy.max_waiting_calls_per_credential is not None:
            self._check_share(call, desk.policy.max_waiting_calls_per_credential)
        key = pool_key(call, desk.upstreams[call.provider].dialect.mixes_models, desk.now())
        admission = Admission(call, key, decision.lane, decision.rescue_at, desk.name, decision.reason)
        future = asyncio.get_running_loop().create_future
        stays: Gone = "keep" if call.key is not None else gone
        seat = Seat(call.provider, decision.lane, decision.reason, stays, future(), future() if told else None)
        self._arrivals.append((admission, seat))
        if len(self._arrivals) == 1:
            desk.crew.spawn(self._rest(), "admit")
        elif len(self._arrivals) == GROUP:
            self._let_in()
        return seat

    @property
    def _inside(self) -> int:
        """How many wait, and are about to."""
        return len(self._desk.waiters) + len(self._standing)

    def _check_share(self, call: Call, most: int) -> None:
        """Nobody takes all the room there is. Who is being written to disk counts among those who wait."""
        coming = self._coming.setdefault(call.credential, set())
        if self._desk.waiters.of(call.credential) + len(coming) >= most:
            raise Crowded(
                f"{most} calls with this API key are waiting, as many as may. Try again later, or raise "
                "max_waiting_calls_per_credential."
            )
        coming.add(call.ticket)

    def _came(self, call: Call) -> None:
        coming = self._coming.get(call.credential, set())
        coming.discard(call.ticket)
        if not coming:
            self._coming.pop(call.credential, None)

    async def _rest(self) -> None:
        """Whoever arrived in the same moment and made no group of its own."""
        self._let_in()

    def _let_in(self) -> None:
        if self._arrivals:
            group, self._arrivals = self._arrivals, []
            self._standing.update(seat for _, seat in group)
            self._desk.crowd.grew(self._inside)
            writing = self._desk.store.admit_all([admission for admission, _ in group])
            self._desk.crew.spawn(self._seat_all(group, writing), "admit")

    async def _seat_all(self, group: list[_Newcomer], writing: Awaitable[list[Admitted | CarpoolError]]) -> None:
        try:
            await self._seat_each(group, writing)
        finally:  # whatever went wrong, nobody is left standing at the door
            for admission, seat in group:
                self._standing.discard(seat)
                if self._coming:
                    self._came(admission.call)
                if seat.ticket == NO_TICKET:
                    seat.fail(Closed("carpool stopped before this call was accepted. Send it again."))

    async def _seat_each(self, group: list[_Newcomer], writing: Awaitable[list[Admitted | CarpoolError]]) -> None:
        try:
            admitted = await writing
        except CarpoolError as error:
            if len(group) > 1:  # what one of them can't have must not keep the others out
                for one in group:
                    await self._seat_all([one], self._desk.store.admit_all([one[0]]))
                return
            admitted = [error]
        for (admission, seat), result in zip(group, admitted, strict=True):
            self._standing.discard(seat)
            if isinstance(result, CarpoolError):
                seat.fail(result)
            else:
                self._place(admission.call, seat, result)
        if self._desk.probe is not None:
            await asyncio.gather(*(self._desk.reached("admitted") for _ in group))
        self._desk.wake_by(self._desk.now() + min(self._desk.policy.linger_ms / 1000, ADMISSION_PAUSE_S))

    def _place(self, call: Call, seat: Seat, admitted: Admitted) -> None:
        """On disk first; then, before anything else can run, the waiter is in place."""
        desk = self._desk
        self._count(call, seat, admitted)
        seat.ticket, seat.lane, seat.state = admitted.ticket, admitted.lane, admitted.state
        if admitted.outcome is None:
            desk.waiters.put(admitted.ticket, seat.answer)
            if desk.policy.max_waiting_calls_per_credential is not None:
                desk.waiters.count(admitted.ticket, call.credential)
                self._came(call)
            if admitted.lane is Lane.NOW and admitted.state is TicketState.SENDING:
                self._rescuer.send_kept(call, seat.reason, admitted.ticket)
        elif not seat.answer.done():
            seat.answer.set_result(Reply(admitted.ticket, admitted.outcome, admitted.entry))
        if seat.left:
            self._leave(seat)
        elif seat.aboard is not None and not seat.aboard.done():
            seat.aboard.set_result(None)

    def _count(self, call: Call, seat: Seat, admitted: Admitted) -> None:
        desk = self._desk
        if not admitted.fresh:
            desk.stats.returned_calls += 1
        elif admitted.lane is Lane.NOW:
            desk.stats.sync_calls += 1
        else:
            desk.stats.batched_calls += 1
        if desk.bulletin.heard and admitted.outcome is None:
            text = ticket_text(admitted.ticket)
            desk.bulletin.tell(CallAdmitted(desk.now(), text, admitted.lane, seat.reason, credential=call.credential))
