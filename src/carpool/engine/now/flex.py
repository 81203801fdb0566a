"""The lane `flex`: synchronous at the price of a batch, but the provider may have no room. One attempt, then another
lane."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from carpool.core.errors import NotConnected, TimedOut
from carpool.core.model import Call, Entry, EntryKind, Lane, Value
from carpool.core.ports import Ask, HttpResponse
from carpool.core.upstream import WholeResponse, whole
from carpool.engine.context import EngineContext
from carpool.engine.now.send import Sender, SendRequest
from carpool.planners import ledger
from carpool.planners.routing import rescue_time

_NO_ROOM = frozenset({408, 429, 498, 503})
_AMBIGUOUS = _NO_ROOM | {400, 404}  # the body tells whether the tier or the call is refused


class FlexRefused(Value, frozen=True, gc=False):
    """Flex did not answer. `kind` is that of the next purchase: a rescue if this one may be billed nevertheless."""

    kind: EntryKind = EntryKind.PURCHASE
    tried: int = 1


class FlexSender:
    def __init__(self, context: EngineContext, sender: Sender) -> None:
        self._context = context
        self._sender = sender

    async def respond(
        self, call: Call, reason: str, as_is: Ask | None = None
    ) -> tuple[SendRequest, HttpResponse, Entry] | FlexRefused:
        """Sends one call, once. Returns what was sent, the response, and the ledger entry of the attempt."""
        flex = self._context.upstreams[call.provider].dialect.flex
        assert flex is not None  # otherwise no call is routed here
        if as_is is None:
            request = SendRequest(replace(call, body=flex.requested(call.body)), reason, lane=Lane.FLEX)
        else:
            request = SendRequest(call, reason, as_is=replace(as_is, body=flex.requested(as_is.body)), lane=Lane.FLEX)
        # A separate gate: that flex has no room says nothing about `now`.
        slot = self._sender.gates.enter(call.provider, request.payer, f"{call.model} (flex)", len(call.body))
        if slot is None:
            return self._refused(FlexRefused(tried=0))
        entry = self._sender.attempt(request, 1)
        try:
            await self._sender.record(entry)
            response = await self._in_time(request, rescue_time(call, self._context.forecast))
        except NotConnected as error:
            slot.failed(error)
            return await self._record_free(entry)
        except TimedOut as error:
            slot.failed(error)
            self._context.learner.flex_answered(call.provider, call.model, refused=True)
            return self._refused(FlexRefused(EntryKind.RESCUE))  # it may be billed: it stays in the ledger as unknown
        except BaseException as error:
            slot.failed(error)
            raise
        slot.answered(response)
        if response.status in _AMBIGUOUS:
            whole_response = await whole(response)
            if await self._refuses_flex(call, whole_response):
                self._context.learner.flex_answered(call.provider, call.model, refused=True)
                return await self._record_free(entry)
            response = whole_response  # the call itself is refused, as it would be on any lane
        self._context.learner.flex_answered(call.provider, call.model, refused=False)
        return request, response, entry

    async def _in_time(self, request: SendRequest, until: float | None) -> HttpResponse:
        try:
            async with asyncio.timeout(None if until is None else max(0.0, until - self._context.now())):
                return await self._sender.send(request)
        except TimeoutError as error:
            raise TimedOut("Flex took longer than this call can wait for it.") from error

    async def _refuses_flex(self, call: Call, response: WholeResponse) -> bool:
        """Whether the lane is refused, not the call."""
        dialect = self._context.upstreams[call.provider].dialect
        refusal = dialect.refusal(response.status, response.headers, response.body)
        if refusal.of_tier:
            await self._context.learned.refused(Lane.FLEX, call.credential, call.model, refusal.message)
        return refusal.of_tier or (response.status in _NO_ROOM and refusal.retryable)

    async def _record_free(self, entry: Entry) -> FlexRefused:
        await self._context.store.record(ledger.free(entry, "flex had no room"))
        return self._refused(FlexRefused())

    def _refused(self, refused: FlexRefused) -> FlexRefused:
        self._context.stats.flex_refused += 1
        return refused
