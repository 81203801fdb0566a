"""The lane `now`: synchronous purchases, direct ones and rescues. Every attempt is in the ledger before it is sent.

An attempt is entered without a price, as an unknown purchase. When its response has ended, the entry gets the price:
zero if the provider refused it or the connection was never made, the price of its usage otherwise. If the process dies,
or the response breaks off before its usage is known, the entry stays unknown: the ledger never claims that something
was free that may be billed.

A direct call has no ticket on disk. It is retried only while its deadline allows, and only after a response that a
retry may change or a connection that was never made. A cut connection is not retried: the provider may have bought the
call.

A ticket on disk, a rescue or a call with a key, is sent by one engine at a time: `start_sending` enters the attempt and
marks the ticket in one transaction. If the provider has no room until the deadline, the ticket is left to the batch
that still contains it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import Enum
from functools import partial

from msgspec.structs import replace

from carpool.core.bounded import backoff
from carpool.core.errors import DeadlineMissed, NotConnected, ProviderFailing, TooBusy, WireError
from carpool.core.lifecycle import TicketState
from carpool.core.model import Call, Entry, EntryKind, Lane, Outcome, OutcomeKind, Settlement, Value
from carpool.core.ports import Ask, Dialect, HttpResponse, Refusal, ResponseEnd, ResponseReceiver
from carpool.core.upstream import Upstream, WholeResponse, whole
from carpool.engine.context import EngineContext, Reply
from carpool.engine.now.gate import KEPT_MAX_WAIT_S, Gates, Slot
from carpool.engine.now.relay import Purchase, StreamedResponse, TappedChunks, local_refusal
from carpool.engine.recording import CallRecorder
from carpool.planners import ledger
from carpool.planners.caching.plan import UNCHANGED

_RecordAttempt = Callable[[Entry], Awaitable[None]]

IDLE_TIMEOUT_S = 600.0
RELAY_TIMEOUT_S = 86_400.0  # timeout of a relayed call: its client decides how long to wait
BACKOFF_S = 0.5
BACKOFF_MAX_S = 30.0
UNSENT = 0  # purchase number of an entry that was never sent


class SendRequest(Value, frozen=True, gc=False):
    """One call to buy on `now` or `flex`. Without a deadline nothing is retried.

    `as_is` is the client's own request, which is sent instead of one built by the dialect.
    """

    call: Call
    reason: str
    kind: EntryKind = EntryKind.PURCHASE
    kept: bool = False  # the ticket is on disk
    as_is: Ask | None = None
    lane: Lane = Lane.NOW
    tried: int = 0  # earlier attempts that are in the ledger

    @property
    def payer(self) -> str:
        """The name of the secret that pays."""
        return self.call.payer or self.call.credential


class Sent(Enum):
    """The result of an attempt to buy a ticket on `now`."""

    SETTLED = "settled"
    LEFT = "left"  # to the batch that still contains it
    TAKEN = "taken"  # settled, or being sent by somebody else


class Sender:
    def __init__(self, context: EngineContext, recorder: CallRecorder) -> None:
        self._context = context
        self._recorder = recorder
        self.gates = Gates(context)
        # Writes the attempt to the ledger before the request is sent: a crash then leaves an unknown, not a gap.
        self.record = context.store.attempt

    # ------------------------------------------------------------ direct calls: no ticket on disk

    async def respond(self, request: SendRequest) -> tuple[SendRequest, HttpResponse, Entry]:
        """Buys one call. Returns the response to its last attempt, and the ledger entry of that. If the provider may
        have refused edits for the prompt cache, the call is sent again as it came: an error is not billed."""
        edited = self._edited(request)
        response, entry = await self._response_after_retries(edited, self.record)
        if edited is request or not 400 <= response.status < 500:
            return edited, response, entry
        refusal = await whole(response)
        if not self._context.prompt_caches.refused(request.call, refusal.status, refusal.body):
            return edited, refusal, entry
        await self._write_off(edited, entry)
        request = replace(request, tried=-entry.purchase)
        return request, *await self._response_after_retries(request, self.record)

    def _edited(self, request: SendRequest) -> SendRequest:
        """The request with the edits of its cache plan; the same one if there are none."""
        call, as_is = request.call, request.as_is
        found = self._context.prompt_caches.edited(call, call.body if as_is is None else as_is.body)
        if found is None:
            return request
        (call, edits), body = found
        reason = f"{request.reason} For the prompt cache: {edits}."
        if as_is is None:
            return replace(request, call=replace(call, body=body), reason=reason)
        return replace(request, call=call, as_is=replace(as_is, body=body), reason=reason)

    async def read_reply(self, request: SendRequest, response: HttpResponse, entry: Entry) -> Reply:
        """Reads the whole response."""
        whole_response = await whole(response)
        entry = self._priced(request, entry, whole_response)
        self._complete(entry)
        if request.call.task:
            self._context.tasks.closed(entry, answered=whole_response.ok)
        if whole_response.ok:
            self._answered(request.call, entry, whole=True)
        return Reply(request.call.ticket, _outcome(whole_response, request, self._context.now()), entry)

    def stream_response(self, request: SendRequest, response: HttpResponse, entry: Entry) -> StreamedResponse:
        """Streams the response. Closing the streamed aborts the request."""
        dialect = self._upstream(request).dialect
        finish = partial(self.close_entry, entry, response.status, dialect, call=request.call)
        chunks = TappedChunks(response, dialect.usage_tap(), finish)
        ticket = request.call.ticket if entry.sent else None
        return StreamedResponse(ticket, response.status, response.headers, chunks, request.reason, request.lane)

    def relay(self, call: Call, ask: Ask, reason: str, receiver: ResponseReceiver) -> Purchase | None:
        """Buys a call with its client's own request, and pushes the response to `receiver`, errors included. Returns
        None if the call needs more than that, such as retries: then use `forward`."""
        context, upstream = self._context, self._context.upstreams[call.provider]
        http_client = upstream.push_client
        if http_client is None or call.deadline is not None or len(ask.body) > http_client.max_push_bytes:
            return None
        if context.prompt_caches.plan(call, Lane.NOW) != UNCHANGED:
            return None
        slot = self.gates.enter(call.provider, call.credential, call.model, len(ask.body))
        if slot is None:
            return None
        bought = Lane.NOW, EntryKind.PURCHASE, call.provider, call.credential, call.model
        entry = Entry(call.ticket, -1, context.now(), *bought, reason=reason, tags=call.tags)
        try:
            if not context.store.attempted(entry):
                slot.failed(asyncio.CancelledError())
                return None
        except BaseException as error:
            slot.failed(error)
            raise
        follows = call.shape is not None or call.prompt is not None or call.task
        record = partial(self.close_entry, call=call) if follows else self.close_entry
        lost = partial(context.tasks.closed, answered=False)
        purchase = Purchase(record, self.record_unsent, lost, upstream.dialect, entry, receiver, slot)
        purchase.start(http_client, upstream.request(ask, (), RELAY_TIMEOUT_S), context.background)
        return purchase

    def close_entry(
        self, entry: Entry, status: int, dialect: Dialect, end: ResponseEnd, call: Call | None = None
    ) -> Entry:
        """Prices and records a finished purchase: an error is not billed, and a response that broke off has no known
        price."""
        if status >= 400:
            finished = ledger.free(entry)
        elif end.final:
            finished = self._context.prices.priced(entry, dialect, end.usage)
            self._context.learner.call_answered(finished)
        else:
            finished = replace(entry, usage=end.usage)
        self._complete(finished)
        if call is not None and call.task:
            self._context.tasks.closed(finished, answered=status < 400 and end.answered)
        if call is not None and status < 400:
            self._answered(call, finished, whole=end.answered)
        return finished

    def _answered(self, call: Call, entry: Entry, *, whole: bool) -> None:
        self._context.prompt_caches.answered(call, entry, self._context.now())
        if call.shape is not None:
            self._recorder.answered(call.shape, entry, whole=whole)

    def record_unsent(self, entry: Entry) -> None:
        """Records that the request was never sent, so nothing was bought."""
        free = ledger.free(entry)
        self._context.tasks.closed(free, answered=False)
        self._context.store.completed(free, self._context.background.log_failure)

    def _complete(self, entry: Entry) -> None:
        """Writes the price without delaying the response. Until then the attempt is unknown, which is true."""
        if not entry.sent:
            return
        self._context.stats.count(entry, used=True)
        self._context.store.completed(entry, self._context.background.log_failure)

    # ------------------------------------------------------------ tickets: rescues, and calls with a key

    async def resend(self, request: SendRequest) -> Sent:
        """Buys a ticket's call on `now` and settles it."""
        context = self._context
        try:
            response, entry = await self._response_after_retries(request, self._start_sending)
            await context.reached("resent")
            whole_response = await whole(response)
        except _Taken:
            return Sent.TAKEN
        except WireError as error:
            return await self._give_up(request, error)
        if not whole_response.ok:
            # The provider had no room, and there is no time for a retry: a batch that contains the call may answer.
            dialect = self._upstream(request).dialect
            if dialect.refusal(whole_response.status, whole_response.headers, whole_response.body).retryable:
                await self._write_off(request, entry)
                if await self._leave_to_batch(request):
                    return Sent.LEFT
        outcome = _outcome(whole_response, request, context.now())
        priced = self._priced(request, entry, whole_response)
        context.prompt_caches.answered(request.call, priced, context.now())
        await context.settle([Settlement(request.call.ticket, outcome, priced)])
        await context.reached("resettled")
        return Sent.SETTLED

    async def _start_sending(self, entry: Entry) -> None:
        if not await self._context.store.start_sending(entry, self._context.name, self._context.now()):
            raise _Taken
        await self._context.reached("attempted")

    async def _leave_to_batch(self, request: SendRequest) -> bool:
        """Leaves the call to the batch that still contains it. False if there is none."""
        return await self._context.retry_write(
            "leaving a call to its batch", lambda: self._context.store.stop_sending(request.call.ticket)
        )

    async def _write_off(self, request: SendRequest, entry: Entry) -> None:
        """Records that nothing was billed. For a call on disk this is retried until it succeeds: otherwise the call
        would count as being sent, and nobody else would send it."""
        free = ledger.free(entry)
        if request.kept:
            await self._context.retry_write("writing off a purchase", lambda: self._context.store.record(free))
        else:
            await self._context.store.record(free)

    async def _give_up(self, request: SendRequest, error: WireError) -> Sent:
        """No response came. If no batch still contains the call, it is settled with this error."""
        context = self._context
        if await self._leave_to_batch(request):
            return Sent.LEFT
        body = self._upstream(request).dialect.error(error.status, error.code, str(error))
        # A failed connection is retried until the deadline, so it means that the deadline was missed.
        deadline = request.call.deadline
        late = deadline is not None and (isinstance(error, NotConnected) or context.now() >= deadline)
        kind = OutcomeKind.DEADLINE if late else OutcomeKind.ERRORED
        outcome = Outcome(kind, error.status, body, context.now(), Lane.NOW, str(error))
        await context.settle([Settlement(request.call.ticket, outcome)])
        return Sent.SETTLED

    async def settle_missed(self, ticket: int) -> None:
        """Settles a call whose deadline has passed and for which no purchase was answered."""
        context = self._context
        sendable = await context.store.sendable_call(ticket)
        if sendable is not None:
            reason = "neither its batch nor its rescue answered in time"
            dialect = context.upstreams[sendable.key.provider].dialect
            body = dialect.error(
                DeadlineMissed.status, DeadlineMissed.code, f"This call missed its deadline: {reason}."
            )
            outcome = Outcome(OutcomeKind.DEADLINE, DeadlineMissed.status, body, context.now(), Lane.NOW, reason)
            await context.settle([Settlement(ticket, outcome)])

    # ------------------------------------------------------------ attempts and retries within the deadline

    async def _response_after_retries(
        self, request: SendRequest, record_attempt: _RecordAttempt
    ) -> tuple[HttpResponse, Entry]:
        """Returns the first response that is not worth a retry. Every attempt is in the ledger before it is sent."""
        call, kept = request.call, request.kept
        number = await self._context.store.attempts(call.ticket) if kept else request.tried
        waits_long = kept and call.deadline is None  # its outcome is final, and a short outage should not become it
        until = self._context.now() + KEPT_MAX_WAIT_S if waits_long else call.deadline
        dialect = self._upstream(request).dialect
        while True:
            number += 1
            wanted = call.provider, request.payer, call.model, len(call.body)
            slot = self.gates.enter(*wanted)
            if slot is None:
                try:
                    slot = await self.gates.wait(*wanted, call.tags, call.deadline, kept=kept, tried=number > 1)
                except (TooBusy, ProviderFailing) as error:
                    if request.kept:
                        raise
                    return local_refusal(error, dialect), self.attempt(request, UNSENT)
                request = await self._recheck_kind(request, slot)
            entry = self.attempt(request, number)
            try:
                await record_attempt(entry)
                response = await self.send(request)
            except NotConnected as error:
                slot.failed(error)
                delay = self._delay(until, number, None, slot)
                await self._write_off(request, entry)
                if delay is None:
                    raise
            except BaseException as error:
                slot.failed(error)
                raise
            else:
                slot.answered(response)
                refusal = dialect.refusal(response.status, response.headers, b"") if response.status >= 400 else None
                delay = None if refusal is None else self._delay(until, number, refusal, slot)
                if delay is None:
                    return response, entry
                await response.aclose()
                await self._write_off(request, entry)
            await self._context.clock.sleep(delay)

    async def _recheck_kind(self, request: SendRequest, slot: Slot) -> SendRequest:
        """A kept call that waited for its slot may be in a batch by now. Then this purchase is a rescue."""
        if not request.kept or request.kind is not EntryKind.PURCHASE:
            return request
        try:
            views = await self._context.store.views([request.call.ticket])
        except BaseException as error:
            slot.failed(error)
            raise
        in_batch = any(view.state is TicketState.BOARDED or view.requeues for view in views)
        return replace(request, kind=EntryKind.RESCUE) if in_batch else request

    def _delay(self, until: float | None, number: int, refusal: Refusal | None, slot: Slot) -> float | None:
        """How long to wait before the next attempt; None if there is no time for one, or if it would not help."""
        if until is None or (refusal is not None and not refusal.retryable):
            return None
        asked = None if refusal is None else refusal.retry_after
        delay = backoff(number, BACKOFF_S, BACKOFF_MAX_S, self._context.rng.random())
        delay = max(delay, asked or 0.0, slot.retry_wait())
        if self._context.now() + delay >= until:
            return None
        slot.retried()
        return delay

    async def send(self, request: SendRequest) -> HttpResponse:
        call, upstream = request.call, self._upstream(request)
        if request.as_is is not None:  # it contains the client's own secret
            return await upstream.ask(
                request.as_is, (), timeout=RELAY_TIMEOUT_S if call.deadline is None else IDLE_TIMEOUT_S
            )
        ask = upstream.dialect.send(call.endpoint, call.headers, call.body)
        return await upstream.ask(ask, self._context.keyring.secret(request.payer), timeout=IDLE_TIMEOUT_S)

    def _upstream(self, request: SendRequest) -> Upstream:
        return self._context.upstreams[request.call.provider]

    # ------------------------------------------------------------ ledger entries

    def attempt(self, request: SendRequest, number: int) -> Entry:
        call, at, whose = request.call, self._context.now(), self._context.keyring.credential(request.payer)
        kind, what = request.kind, (call.provider, whose, call.model)
        return Entry(call.ticket, -number, at, request.lane, kind, *what, reason=request.reason, tags=call.tags)

    def _priced(self, request: SendRequest, entry: Entry, response: WholeResponse) -> Entry:
        if not response.ok:
            return ledger.free(entry)
        dialect = self._upstream(request).dialect
        priced = self._context.prices.priced(entry, dialect, dialect.usage(response.body))
        self._context.learner.call_answered(priced)
        return priced


class _Taken(Exception):
    """The ticket is settled, or somebody else is sending it."""


def _outcome(response: WholeResponse, request: SendRequest, now: float) -> Outcome:
    kind = OutcomeKind.SUCCEEDED if response.ok else OutcomeKind.ERRORED
    return Outcome(kind, response.status, response.body, now, request.lane, request.reason, response.headers)
