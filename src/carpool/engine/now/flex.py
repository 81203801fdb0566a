"""The lane `flex`: synchronous at the price of a batch, but the provider may have no room. One attempt, then another
lane."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from carpool.core.errors import NotConnected, TimedOut
from carpool.core.model import Call, Entry, EntryKind, Lane, Value
from carpool.core.ports import Ask, HttpResponse
from carpool.core.upstream import WholeResponse, whole
from carpool.engine.context import EngineContext, Reply
from carpool.engine.now.relay import Passage, Read
from carpool.engine.now.send import Sender, SendRequest
from carpool.planners import ledger
from carpool.planners.routing import flex_until

_NO_ROOM = frozenset({408, 429, 498, 503})
_AMBIGUOUS = _NO_ROOM | {400, 404}  # the body tells whether the tier or the call is refused


class FlexRefused(Value, frozen=True, gc=False):
    """Flex did not answer. `kind` is that of the next purchase: a rescue if this one may be billed nevertheless."""

    kind: EntryKind = EntryKind.PURCHASE
    tried: int = 1

    def onward(self, request: SendRequest) -> SendRequest:
        return replace(request, kind=self.kind, tried=self.tried)


class FlexSender:
    def __init__(self, context: EngineContext, sender: Sender) -> None:
        self._context = context
        self._sender = sender

    async def direct(self, call: Call, reason: str) -> Reply | FlexRefused:
        """Buys one call and returns its whole response."""
        request = self._send_request(call, reason, None)
        tried = await self._try(request, call)
        return tried if isinstance(tried, FlexRefused) else await self._sender.bring(request, *tried)

    async def forward(self, call: Call, reason: str, as_is: Ask | None = None) -> Passage | FlexRefused:
        """Buys one call and streams its response. Closing the passage aborts the request."""
        request = self._send_request(call, reason, as_is)
        tried = await self._try(request, call)
        return tried if isinstance(tried, FlexRefused) else self._sender.passing(request, *tried)

    def _send_request(self, call: Call, reason: str, as_is: Ask | None) -> SendRequest:
        flexed = self._context.upstreams[call.provider].dialect.flexed
        if as_is is not None:
            as_is = replace(as_is, body=flexed(as_is.body))
        request = SendRequest.of(call, reason, as_is=as_is)
        return replace(request, lane=Lane.FLEX, body=flexed(call.body) if as_is is None else b"")

    async def _try(self, request: SendRequest, call: Call) -> tuple[HttpResponse, Entry] | FlexRefused:
        # A separate gate: that flex has no room says nothing about `now`.
        slot = self._sender.gates.enter(request.provider, request.payer, f"{call.model} (flex)", len(call.body))
        if slot is None:
            return self._refused(FlexRefused(tried=0))
        entry = self._sender.attempt(request, 1)
        try:
            await self._sender.record(entry)
            response = await self._in_time(request, flex_until(call, self._context.forecast))
        except NotConnected as error:
            slot.failed(error)
            return await self._record_free(entry)
        except TimedOut as error:
            slot.failed(error)
            return self._refused(FlexRefused(EntryKind.RESCUE))  # it may be billed: it stays in the ledger as unknown
        except BaseException as error:
            slot.failed(error)
            raise
        slot.answered(response)
        if response.status not in _AMBIGUOUS:
            return response, entry
        return await self._check_refusal(call, await whole(response), entry)

    async def _in_time(self, request: SendRequest, until: float | None) -> HttpResponse:
        try:
            async with asyncio.timeout(None if until is None else max(0.0, until - self._context.now())):
                return await self._sender.send(request)
        except TimeoutError as error:
            raise TimedOut("Flex took longer than this call can wait for it.") from error

    async def _check_refusal(
        self, call: Call, response: WholeResponse, entry: Entry
    ) -> tuple[HttpResponse, Entry] | FlexRefused:
        dialect = self._context.upstreams[call.provider].dialect
        refusal = dialect.refusal(response.status, response.headers, response.body)
        if refusal.of_tier:
            account = self._context.keyring.account(call.credential)
            await self._context.learned.refused(Lane.FLEX, account, call.model, refusal.message)
        elif response.status not in _NO_ROOM or not refusal.retryable:
            return Read(response), entry  # the call itself is refused, as it would be on any lane
        return await self._record_free(entry)

    async def _record_free(self, entry: Entry) -> FlexRefused:
        await self._context.store.record(ledger.free(entry, "flex had no room"))
        return self._refused(FlexRefused())

    def _refused(self, refused: FlexRefused) -> FlexRefused:
        self._context.stats.flex_refused += 1
        return refused
