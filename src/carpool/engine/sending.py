"""The lane `now`: synchronous purchases, direct ones and rescues. Nothing is bought a second time in silence."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from enum import Enum
from functools import partial

from msgspec.structs import replace

from carpool import ledger
from carpool.engine.desk import Desk
from carpool.engine.gating import KEPT_PATIENCE_S, Gates, Slot
from carpool.engine.held import OwnAnswer
from carpool.engine.passing import Passage, Tapped
from carpool.engine.relaying import Outlet, Purchase
from carpool.engine.settling import settle
from carpool.engine.upstream import Answer, Upstream, whole
from carpool.engine.waiting import Reply
from carpool.errors import DeadlineMissed, NotConnected, TooBusy, Unwell, WireError
from carpool.lifecycle import TicketState
from carpool.model import (
    Call,
    Entry,
    EntryKind,
    Headers,
    Lane,
    Outcome,
    OutcomeKind,
    Settlement,
    Usage,
    Value,
)
from carpool.ports import Ask, WireResponse

_Write = Callable[[Entry], Awaitable[None]]

SILENCE_S = 600.0
PASSING_S = 86_400.0  # of a call that passes as it is: how long silence may last is its client's to say
BACKOFF_S = 0.5
BACKOFF_MAX_S = 30.0
UNSENT = 0  # in place of the number of a purchase: nothing was, and nothing stands in the ledger


class Errand(Value, frozen=True, gc=False):
    """One call to be bought on `now`: what to send, for whom, until when. `deadline` None: nothing is retried.

    `as_is` is the client's own request, to be sent instead of one that the dialect makes.
    """

    ticket: int
    provider: str
    endpoint: str
    credential: str
    headers: Headers
    body: bytes
    model: str
    deadline: float | None
    kind: EntryKind
    reason: str
    tags: Mapping[str, str] | None = None
    kept: bool = False  # its ticket is on disk
    as_is: Ask | None = None
    lane: Lane = Lane.NOW
    tried: int = 0  # purchases that were tried before, and stand in the ledger

    @classmethod
    def of(cls, call: Call, reason: str, *, kept: bool = False, as_is: Ask | None = None) -> Errand:
        return cls(
            ticket=call.ticket,
            provider=call.provider,
            endpoint=call.endpoint,
            credential=call.credential,
            headers=call.headers,
            body=call.body,
            model=call.model,
            deadline=call.deadline,
            kind=EntryKind.PURCHASE,
            reason=reason,
            tags=call.tags,
            kept=kept,
            as_is=as_is,
        )


class Sent(Enum):
    """What became of a ticket that was to be bought on `now`."""

    SETTLED = "settled"
    LEFT = "left"  # to the batch that still carries it
    TAKEN = "taken"  # somebody else was quicker


class Sender:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.gates = Gates(desk)

    # direct calls: no ticket on disk, the client's connection is their life

    async def direct(self, errand: Errand) -> Reply:
        """Buys one call and brings its whole answer."""
        return await self.bring(errand, *await self._answered(errand, self.record))

    async def bring(self, errand: Errand, response: WireResponse, entry: Entry) -> Reply:
        answer = await whole(response)
        entry = self._priced(errand, entry, answer)
        self._complete(entry)
        return Reply(errand.ticket, _outcome(answer, errand, self._desk.now()), entry)

    async def forward(self, errand: Errand) -> Passage:
        """Opens an answer that passes. Closing it aborts the request."""
        return self.passing(errand, *await self._answered(errand, self.record))

    def passing(self, errand: Errand, response: WireResponse, entry: Entry) -> Passage:
        dialect = self._upstream(errand).dialect
        finish = partial(self.close, entry, response.status, dialect.seller)
        chunks = Tapped(response, dialect.usage_tap(), finish)
        return Passage(errand.ticket, response.status, response.headers, chunks, errand.reason, errand.lane)

    def relay(self, call: Call, ask: Ask, reason: str, outlet: Outlet) -> Purchase | None:
        """Buys a call with its client's own request, and hands its answer on. None where that takes more, such as
        retries: `forward` it. Should the connection never be made, the outlet hears of it as of anything else."""
        desk, upstream = self._desk, self._desk.upstreams[call.provider]
        wire = upstream.pouring
        if wire is None or call.deadline is not None or len(ask.body) > wire.most:
            return None
        slot = self.gates.enter(call.provider, call.credential, call.model, len(ask.body))
        if slot is None:
            return None
        entry = Entry(
            call.ticket,
            -1,
            desk.now(),
            Lane.NOW,
            EntryKind.PURCHASE,
            call.provider,
            call.credential,
            call.model,
            reason=reason,
            tags=call.tags,
        )
        try:
            if not desk.store.attempted(entry):
                slot.failed(asyncio.CancelledError())
                return None
        except BaseException as error:
            slot.failed(error)
            raise
        purchase = Purchase(self, upstream.dialect, entry, outlet, slot)
        purchase.start(wire, upstream.request(ask, (), PASSING_S), desk.crew)
        return purchase

    def close(self, entry: Entry, status: int, dialect: str, usage: Usage | None) -> Entry:
        """The purchase as it came out: a refusal is not billed."""
        final = ledger.free(entry) if status >= 400 else ledger.priced(entry, dialect, usage, self._desk.prices)
        self._complete(final)
        return final

    def void(self, entry: Entry) -> None:
        """It was never sent."""
        self._desk.crew.mind(self._desk.store.record(ledger.free(entry)), "record")

    def record(self, entry: Entry) -> Awaitable[None]:
        """The attempt stands in the ledger before the bytes go out: a crash then leaves an unknown, not a gap."""
        return self._desk.store.attempt(entry)

    def _complete(self, entry: Entry) -> None:
        """Written behind the answer's back: until then the attempt says unknown, which is true."""
        if entry.purchase == UNSENT:
            return
        self._desk.stats.count(entry, used=True)
        self._desk.store.completed(entry, self._desk.crew.told)

    # tickets: rescues, and calls that are kept under a key

    async def resend(self, errand: Errand) -> Sent:
        """Buys a ticket's call on `now` and settles it."""
        desk = self._desk
        try:
            response, entry = await self._answered(errand, self._begin)
            await desk.reached("resent")
            answer = await whole(response)
        except _Taken:
            return Sent.TAKEN
        except WireError as error:
            return await self._give_up(errand, error)
        if not answer.ok and await self._left_to_its_batch(errand, entry, answer):
            return Sent.LEFT
        outcome = _outcome(answer, errand, desk.now())
        await settle(desk, [Settlement(errand.ticket, outcome, self._priced(errand, entry, answer))])
        await desk.reached("resettled")
        return Sent.SETTLED

    async def _begin(self, entry: Entry) -> None:
        if not await self._desk.store.start_sending(entry, self._desk.name, self._desk.now()):
            raise _Taken
        await self._desk.reached("attempted")

    async def _left_to_its_batch(self, errand: Errand, entry: Entry, answer: Answer) -> bool:
        """The provider had no room, and there is no time to ask again. That says nothing about the call itself, which
        a batch that still carries it may answer until the deadline."""
        refusal = self._upstream(errand).dialect.refusal(answer.status, answer.headers, answer.body)
        if not refusal.retryable:
            return False
        await self._write_off(errand, entry)
        return await self._left(errand)

    async def _left(self, errand: Errand) -> bool:
        """Whether a batch still carries the call: it is the batch's again."""
        return await self._desk.insist(
            "leaving a call to its batch", lambda: self._desk.store.stop_sending(errand.ticket)
        )

    async def _write_off(self, errand: Errand, entry: Entry) -> None:
        """Nothing was billed. Of a call on disk this is written whatever happens: it stands as on its way, and nobody
        else would send it."""
        free = ledger.free(entry)
        if errand.kept:
            await self._desk.insist("writing off a purchase", lambda: self._desk.store.record(free))
        else:
            await self._desk.store.record(free)

    async def _give_up(self, errand: Errand, error: WireError) -> Sent:
        """No answer came. A batch that still carries the call may bring one; otherwise this is the end."""
        desk = self._desk
        if await self._left(errand):
            return Sent.LEFT
        body = self._upstream(errand).dialect.error(error.status, error.code, str(error))
        # A connection that was never made is tried again until the deadline allows no more.
        late = errand.deadline is not None and (isinstance(error, NotConnected) or desk.now() >= errand.deadline)
        kind = OutcomeKind.DEADLINE if late else OutcomeKind.ERRORED
        outcome = Outcome(kind, error.status, body, desk.now(), Lane.NOW, str(error))
        await settle(desk, [Settlement(errand.ticket, outcome)])
        return Sent.SETTLED

    async def miss(self, ticket: int) -> None:
        """The deadline is here, and nothing that was bought for this call has brought an answer."""
        desk = self._desk
        parcel = await desk.store.parcel(ticket)
        if parcel is not None:
            reason = "neither its batch nor its rescue answered in time"
            dialect = desk.upstreams[parcel.key.provider].dialect
            body = dialect.error(
                DeadlineMissed.status, DeadlineMissed.code, f"This call missed its deadline: {reason}."
            )
            outcome = Outcome(OutcomeKind.DEADLINE, DeadlineMissed.status, body, desk.now(), Lane.NOW, reason)
            await settle(desk, [Settlement(ticket, outcome)])

    # one purchase after another, inside the deadline

    async def _answered(self, errand: Errand, write: _Write) -> tuple[WireResponse, Entry]:
        """The first answer that is not worth another try. Every try stands in the ledger before it is made."""
        number = await self._desk.store.attempts(errand.ticket) if errand.kept else errand.tried
        until = self._until(errand)
        while True:
            number += 1
            slot = self._slot(errand)
            if slot is None:
                try:
                    slot = await self._turn(errand, number)
                except (TooBusy, Unwell) as error:
                    if errand.kept:
                        raise
                    return OwnAnswer(error, self._upstream(errand).dialect), self.attempt(errand, UNSENT)
                errand = await self._second_look(errand, slot)
            entry = self.attempt(errand, number)
            try:
                await write(entry)
                response = await self.send(errand)
            except NotConnected as error:
                slot.failed(error)
                delay = self._delay(until, number, None, slot)
                await self._write_off(errand, entry)
                if delay is None:
                    raise
            except BaseException as error:
                slot.failed(error)
                raise
            else:
                slot.answered(response)
                delay = self._retry_after(errand, until, number, response, slot)
                if delay is None:
                    return response, entry
                await response.aclose()
                await self._write_off(errand, entry)
            await self._desk.clock.sleep(delay)

    def _slot(self, errand: Errand) -> Slot | None:
        return self.gates.enter(errand.provider, errand.credential, errand.model, len(errand.body))

    def _turn(self, errand: Errand, number: int) -> Awaitable[Slot]:
        return self.gates.wait(
            errand.provider,
            errand.credential,
            errand.model,
            len(errand.body),
            tags=errand.tags,
            deadline=errand.deadline,
            kept=errand.kept,
            tried=number > 1,
        )

    async def _second_look(self, errand: Errand, slot: Slot) -> Errand:
        """A kept call that waited for its turn may have boarded a batch meanwhile: then this is a rescue."""
        if not errand.kept or errand.kind is not EntryKind.PURCHASE:
            return errand
        try:
            views = await self._desk.store.views([errand.ticket])
        except BaseException as error:
            slot.failed(error)
            raise
        aboard = any(view.state is TicketState.BOARDED or view.requeues for view in views)
        return replace(errand, kind=EntryKind.RESCUE) if aboard else errand

    def _until(self, errand: Errand) -> float | None:
        """How long it is tried. The outcome of a kept call is for ever, so a moment's refusal does not become it."""
        patient = errand.kept and errand.deadline is None
        return self._desk.now() + KEPT_PATIENCE_S if patient else errand.deadline

    def _retry_after(
        self, errand: Errand, until: float | None, number: int, response: WireResponse, slot: Slot
    ) -> float | None:
        if response.status < 400:
            return None
        refusal = self._upstream(errand).dialect.refusal(response.status, response.headers, b"")
        return self._delay(until, number, refusal.retry_after, slot) if refusal.retryable else None

    def _delay(self, until: float | None, number: int, asked: float | None, slot: Slot) -> float | None:
        """How long to wait before the next try; None when the time allows none."""
        if until is None:
            return None
        delay: float = min(BACKOFF_S * 2 ** (number - 1), BACKOFF_MAX_S) * (0.75 + self._desk.rng.random() / 2)
        delay = max(delay, asked or 0.0, slot.retry_wait())
        if self._desk.now() + delay >= until:
            return None
        slot.retried()
        return delay

    async def send(self, errand: Errand) -> WireResponse:
        upstream = self._upstream(errand)
        if errand.as_is is not None:  # with its own secret in it
            return await upstream.ask(errand.as_is, (), timeout=PASSING_S if errand.deadline is None else SILENCE_S)
        ask = upstream.dialect.send(errand.endpoint, errand.headers, errand.body)
        return await upstream.ask(ask, self._desk.keyring.secret(errand.credential), timeout=SILENCE_S)

    def _upstream(self, errand: Errand) -> Upstream:
        return self._desk.upstreams[errand.provider]

    # entries

    def attempt(self, errand: Errand, number: int) -> Entry:
        return ledger.attempt(
            ticket=errand.ticket,
            purchase=-number,
            at=self._desk.now(),
            provider=errand.provider,
            credential=errand.credential,
            model=errand.model,
            lane=errand.lane,
            kind=errand.kind,
            reason=errand.reason,
            tags=errand.tags,
        )

    def _priced(self, errand: Errand, entry: Entry, answer: Answer) -> Entry:
        if not answer.ok:
            return ledger.free(entry)
        dialect = self._upstream(errand).dialect
        return ledger.priced(entry, dialect.seller, dialect.usage(answer.body), self._desk.prices)


class _Taken(Exception):
    """The ticket was settled, or is being sent by somebody else."""


def _outcome(answer: Answer, errand: Errand, now: float) -> Outcome:
    kind = OutcomeKind.SUCCEEDED if answer.ok else OutcomeKind.ERRORED
    return Outcome(kind, answer.status, answer.body, now, errand.lane, errand.reason, answer.headers)
