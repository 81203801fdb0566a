"""The lane `flex`: cheap as a batch and synchronous, but the provider may have no room. One try; then another lane."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from msgspec.structs import replace

from carpool import ledger
from carpool.engine.desk import Desk
from carpool.engine.passing import Passage
from carpool.engine.sending import Errand, Sender
from carpool.engine.upstream import Answer, whole
from carpool.engine.waiting import Reply
from carpool.errors import NotConnected, TimedOut
from carpool.model import Call, Entry, EntryKind, Lane, Value
from carpool.ports import Ask, WireResponse
from carpool.routing import flex_until

_NO_ROOM = frozenset({408, 429, 498, 503})
_UNSURE = _NO_ROOM | {400, 404}  # their words tell what is refused: the tier, or the call


class Refused(Value, frozen=True, gc=False):
    """Flex did not answer. `kind` is that of the next purchase: a rescue where this one may be billed after all."""

    kind: EntryKind = EntryKind.PURCHASE
    tried: int = 1

    def onward(self, errand: Errand) -> Errand:
        return replace(errand, kind=self.kind, tried=self.tried)


class Flexer:
    def __init__(self, desk: Desk, sender: Sender) -> None:
        self._desk = desk
        self._sender = sender

    async def direct(self, call: Call, reason: str) -> Reply | Refused:
        """Buys one call and brings its whole answer."""
        errand = self._errand(call, reason, None)
        tried = await self._try(errand, call)
        return tried if isinstance(tried, Refused) else await self._sender.bring(errand, *tried)

    async def forward(self, call: Call, reason: str, as_is: Ask | None = None) -> Passage | Refused:
        """Opens an answer that passes. Closing it aborts the request."""
        errand = self._errand(call, reason, as_is)
        tried = await self._try(errand, call)
        return tried if isinstance(tried, Refused) else self._sender.passing(errand, *tried)

    def _errand(self, call: Call, reason: str, as_is: Ask | None) -> Errand:
        flexed = self._desk.upstreams[call.provider].dialect.flexed
        if as_is is not None:
            as_is = replace(as_is, body=flexed(as_is.body))
        errand = Errand.of(call, reason, as_is=as_is)
        return replace(errand, lane=Lane.FLEX, body=flexed(call.body) if as_is is None else b"")

    async def _try(self, errand: Errand, call: Call) -> tuple[WireResponse, Entry] | Refused:
        # A gate of its own: that flex has no room says nothing about `now`.
        slot = self._sender.gates.enter(errand.provider, errand.credential, f"{call.model} (flex)", len(call.body))
        if slot is None:
            return self._refused(Refused(tried=0))
        entry = self._sender.attempt(errand, 1)
        try:
            await self._sender.record(entry)
            response = await self._in_time(errand, flex_until(call, self._desk.forecast))
        except NotConnected as error:
            slot.failed(error)
            return await self._free(entry)
        except TimedOut as error:
            slot.failed(error)
            return self._refused(Refused(EntryKind.RESCUE))  # it may be billed: the ledger keeps it as unknown
        except BaseException as error:
            slot.failed(error)
            raise
        slot.answered(response)
        if response.status not in _UNSURE:
            return response, entry
        return await self._unsure(call, await whole(response), entry)

    async def _in_time(self, errand: Errand, until: float | None) -> WireResponse:
        try:
            async with asyncio.timeout(None if until is None else max(0.0, until - self._desk.now())):
                return await self._sender.send(errand)
        except TimeoutError as error:
            raise TimedOut("Flex took longer than this call can wait for it.") from error

    async def _unsure(self, call: Call, answer: Answer, entry: Entry) -> tuple[WireResponse, Entry] | Refused:
        dialect = self._desk.upstreams[call.provider].dialect
        refusal = dialect.refusal(answer.status, answer.headers, answer.body)
        if refusal.of_tier:
            account = self._desk.keyring.account(call.credential)
            await self._desk.learned.refused(Lane.FLEX, account, call.model, refusal.message)
        elif answer.status not in _NO_ROOM or not refusal.retryable:
            return Read(answer), entry  # the call itself is refused, and would be on any lane
        return await self._free(entry)

    async def _free(self, entry: Entry) -> Refused:
        await self._desk.store.record(ledger.free(entry, "flex had no room"))
        return self._refused(Refused())

    def _refused(self, refused: Refused) -> Refused:
        self._desk.stats.flex_refused += 1
        return refused


class Read:
    """An answer that was read already. Implements `ports.WireResponse`."""

    def __init__(self, answer: Answer) -> None:
        self.status, self.headers, self._body = answer.status, answer.headers, answer.body

    async def chunks(self) -> AsyncIterator[bytes]:
        yield self._body

    async def read(self) -> bytes:
        return self._body

    async def aclose(self) -> None:
        return
