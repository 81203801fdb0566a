"""What people and probes want to know of an engine: what it holds, what it spent, and whether it is well."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from carpool.engine.desk import Desk
from carpool.errors import CarpoolError
from carpool.lifecycle import BatchState, TicketState
from carpool.model import Batch, CallRow, Totals

PROBE_S = 2.0


@dataclass(frozen=True, slots=True)
class Summary:
    waiting: int  # clients whose door is at this engine
    counts: Mapping[str, int]
    totals: list[Totals]


class Overview:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def calls(self, before: int | None, state: TicketState | None, limit: int) -> list[CallRow]:
        return await self._desk.store.listed_calls(before, state, limit)

    async def batches(self, before: int | None, state: BatchState | None, limit: int) -> list[Batch]:
        return await self._desk.store.listed_batches(before, state, limit)

    async def summary(self) -> Summary:
        store = self._desk.store
        return Summary(len(self._desk.waiters), await store.counts(), await store.totals())

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
