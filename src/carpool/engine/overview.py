"""What people and probes want to know of an engine: what it holds, what it spent, and whether it is well."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from carpool.engine.desk import Desk
from carpool.engine.gating import Gates, Hurdle
from carpool.errors import CarpoolError
from carpool.lifecycle import BatchState, TicketState
from carpool.model import Batch, CallRow, Totals

PROBE_S = 2.0


@dataclass(frozen=True, slots=True)
class Summary:
    waiting: int  # clients whose door is at this engine
    counts: Mapping[str, int]
    totals: list[Totals]
    pressure: list[Hurdle]  # accounts whose calls on `now` are held up
    leads: int  # accounts whose batches this engine makes, for all that share its store


class Overview:
    def __init__(self, desk: Desk, gates: Gates) -> None:
        self._desk = desk
        self._gates = gates

    async def calls(
        self, before: int | None, state: TicketState | None, limit: int, credentials: Sequence[str] | None = None
    ) -> list[CallRow]:
        return await self._desk.store.listed_calls(before, state, limit, credentials)

    async def batches(
        self, before: int | None, state: BatchState | None, limit: int, credentials: Sequence[str] | None = None
    ) -> list[Batch]:
        return await self._desk.store.listed_batches(before, state, limit, credentials)

    async def totals(self, credentials: Sequence[str]) -> list[Totals]:
        return await self._desk.store.totals(credentials)

    async def summary(self) -> Summary:
        desk, store = self._desk, self._desk.store
        hurdles = self._gates.hurdles()
        return Summary(len(desk.waiters), await store.counts(), await store.totals(), hurdles, len(desk.led))

    async def trouble(self) -> str | None:
        """Why the store can't be written, or None when it can: something is written to find out."""
        desk = self._desk
        try:
            async with asyncio.timeout(PROBE_S):
                await desk.store.remember("probe", "ready", desk.name, desk.now())
        except TimeoutError:
            return "The store does not answer."
        except CarpoolError as error:
            return str(error)
        return None
