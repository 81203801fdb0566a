"""What people and health checks want to know about an engine: its calls, its costs, and whether it works."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from carpool.core.errors import CarpoolError
from carpool.core.lifecycle import BatchState, TicketState
from carpool.core.model import Batch, CallRow, Entry, EntryKind, Lane, Totals
from carpool.engine.context import EngineContext
from carpool.engine.now.gate import Gates, Hurdle

PROBE_S = 2.0
MOST_LOOKED_AT = 1000
OPEN_CALLS = (TicketState.QUEUED, TicketState.BOARDED, TicketState.SENDING)


@dataclass(frozen=True, slots=True)
class EngineSummary:
    waiting: int  # calls whose clients wait at this engine
    counts: Mapping[str, int]
    totals: list[Totals]
    pressure: list[Hurdle]  # accounts whose calls on `now` are delayed
    leads: int  # accounts whose batches this engine creates, for all engines on the store


@dataclass(frozen=True, slots=True)
class PurchaseRow:
    """One purchase of a call for display: its ledger entry, and its batch by the provider's id."""

    at: float
    lane: Lane
    kind: EntryKind
    batch: str | None
    batch_state: BatchState | None
    paid: int | None  # None: unknown
    would_have_paid: int | None
    reason: str


class Overview:
    def __init__(self, context: EngineContext, gates: Gates) -> None:
        self._context = context
        self._gates = gates

    async def calls(
        self, before: int | None, state: TicketState | None, limit: int, credentials: Sequence[str] | None = None
    ) -> list[CallRow]:
        return await self._context.store.listed_calls(before, state, limit, credentials)

    async def purchases(self, ticket: int) -> list[PurchaseRow]:
        """Everything that was bought for a call, or may have been, in chronological order."""
        rows = [await self._purchase(entry) for entry in await self._context.store.entries(ticket)]
        return sorted(rows, key=lambda row: row.at)

    async def _purchase(self, entry: Entry) -> PurchaseRow:
        batch = await self._context.store.batch(entry.purchase) if entry.purchase > 0 else None
        return PurchaseRow(
            at=entry.at if batch is None else batch.intended_at,
            lane=entry.lane,
            kind=entry.kind,
            batch=None if batch is None else batch.provider_id,
            batch_state=None if batch is None else batch.state,
            paid=entry.paid,
            would_have_paid=entry.would_have_paid,
            reason=entry.reason,
        )

    async def batches(
        self, before: int | None, state: BatchState | None, limit: int, credentials: Sequence[str] | None = None
    ) -> list[Batch]:
        return await self._context.store.listed_batches(before, state, limit, credentials)

    async def totals(self, credentials: Sequence[str]) -> list[Totals]:
        return await self._context.store.totals(credentials)

    async def summary(self) -> EngineSummary:
        context, store = self._context, self._context.store
        hurdles = self._gates.hurdles()
        return EngineSummary(
            len(context.waiters), await store.counts(), await store.totals(), hurdles, len(context.led)
        )

    async def keyless(self) -> int:
        """Number of open calls whose key is not in the keyring, among the newest calls only."""
        rows = [row for state in OPEN_CALLS for row in await self.calls(None, state, MOST_LOOKED_AT)]
        return sum(row.credential not in self._context.keyring for row in rows)

    async def trouble(self) -> str | None:
        """Why the store can't be written, or None if it can. Writes a value to find out."""
        context = self._context
        try:
            async with asyncio.timeout(PROBE_S):
                await context.store.remember("probe", "ready", context.name, context.now())
        except TimeoutError:
            return "The store does not answer."
        except CarpoolError as error:
            return str(error)
        return None
