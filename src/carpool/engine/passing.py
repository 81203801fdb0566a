"""An answer on its way through to its client, with the ledger reading along."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from carpool.engine.unpacking import reading
from carpool.model import Entry, Headers, Lane, Usage, discreet
from carpool.ports import UsageTap, WireResponse


class Tapped:
    """The chunks of an answer as they pass; the ledger reads along. Closing it, begun or not, ends it.

    `entry` is the purchase in the ledger, once all has passed.
    """

    __slots__ = ("_chunks", "_finish", "_read", "_response", "_tap", "entry")

    def __init__(self, response: WireResponse, tap: UsageTap, finish: Callable[[Usage | None], Entry]) -> None:
        self.entry: Entry | None = None
        self._response = response
        self._chunks = response.chunks()
        self._tap = tap
        self._read = reading(tap, response.headers)
        self._finish = finish

    def __aiter__(self) -> Tapped:
        return self

    async def __anext__(self) -> bytes:
        try:
            chunk = await anext(self._chunks)
        except StopAsyncIteration:
            await self._end(self._tap.usage())
            raise
        except BaseException:
            await self.aclose()
            raise
        self._read(chunk)
        return chunk

    async def aclose(self) -> None:
        await self._end(None)  # cut short: what was billed is unknown

    async def _end(self, usage: Usage | None) -> None:
        if self.entry is None:
            self.entry = self._finish(usage)
            await self._response.aclose()


class Passage(Struct, frozen=True):
    """An answer on its way through: the bytes pass as they come, the ledger reads along."""

    ticket: int
    status: int
    headers: Headers
    chunks: Tapped
    reason: str
    lane: Lane = Lane.NOW

    def __repr__(self) -> str:
        return discreet(self)
