"""What every store that works by operations on a session has in common: each method hands one to the writer."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from carpool.errors import CarpoolError
from carpool.keys import VirtualKey
from carpool.lifecycle import BatchState, TicketState
from carpool.model import (
    Admission,
    Admitted,
    Batch,
    CallRow,
    Due,
    Entry,
    Intent,
    Lane,
    OpenCalls,
    Outcome,
    Parcel,
    PoolView,
    Settled,
    Settlement,
    TicketView,
    Totals,
)
from carpool.stores import _admission, _batches, _calls, _keys, _ledger, _listing, _settling
from carpool.stores._listeners import Listener, Listeners
from carpool.stores._session import Session
from carpool.stores._writer import Told, Writer, each

P = ParamSpec("P")
R = TypeVar("R")


class OperatedStore(ABC):
    """Implements `ports.Store` but for its opening and closing, and for attempts that stand at once."""

    def __init__(self, writer: Writer, secret: bytes) -> None:
        self._writer = writer
        self._secret = secret
        self._listeners: Listeners[int] = Listeners()
        self._watchers: Listeners[str] = Listeners()
        self._followers: Listeners[int] = Listeners()

    @property
    @abstractmethod
    def durable(self) -> bool: ...

    @property
    def pepper(self) -> bytes:
        return self._secret

    async def _do(self, operation: Callable[Concatenate[Session, P], R], *item: P.args, **_: P.kwargs) -> R:
        result: R = await self._writer.do(each(operation), item)
        return result

    # engines
    async def join(self, engine: str, now: float, ttl: float, pulse: float | None = None) -> bool:
        return await self._do(_batches.join, engine, now, ttl, pulse)

    async def leave(self, engine: str) -> None:
        await self._do(_batches.leave, engine)
        self._tell_of_pools(())

    async def lead(self, engine: str, accounts: Iterable[str], now: float) -> set[str]:
        return await self._do(_batches.lead, engine, list(accounts), now)

    async def leaders(self, now: float) -> Mapping[str, str]:
        return await self._do(_batches.leaders, now)

    async def take_over(self, engine: str, credentials: Iterable[str], now: float) -> int:
        return await self._do(_batches.take_over, engine, list(credentials), now)

    # calls
    async def admit(self, admission: Admission) -> Admitted:
        [admitted] = await self.admit_all([admission])
        if isinstance(admitted, CarpoolError):
            raise admitted
        return admitted

    def admit_all(self, admissions: Sequence[Admission]) -> Awaitable[list[Admitted | CarpoolError]]:
        writing = self._writer.do(_admission.admit, admissions, len(admissions))
        if whose := tuple({one.call.credential for one in admissions if one.lane is Lane.BATCH}):
            if isinstance(writing, asyncio.Future):
                writing.add_done_callback(lambda _: self._tell_of_pools(whose))
            else:
                self._tell_of_pools(whose)
        return writing

    async def await_ticket(self, ticket: int, awaiter: str | None) -> None:
        await self._do(_calls.await_ticket, ticket, awaiter)

    async def delivered(self, tickets: Sequence[int], now: float) -> None:
        await self._writer.do(each(_calls.delivered), (list(tickets), now), relaxed=True)

    async def outcome(self, ticket: int, credential: str) -> Settled | None:
        return await self._do(_calls.outcome, ticket, credential)

    async def outcomes(self, tickets: Sequence[int]) -> list[Settled]:
        return await self._do(_calls.outcomes, list(tickets))

    async def parcel(self, ticket: int) -> Parcel | None:
        return await self._do(_calls.parcel, ticket)

    async def views(self, tickets: Sequence[int]) -> list[TicketView]:
        return await self._do(_calls.views, list(tickets))

    async def cancel(self, ticket: int, outcome: Outcome) -> bool:
        cancelled = await self._do(_calls.cancel, ticket, outcome)
        if cancelled:
            self._tell_of_settled((ticket,))
        return cancelled

    async def pools(self, credentials: Iterable[str]) -> list[PoolView]:
        return await self._do(_calls.pools, list(credentials))

    async def due(self, credentials: Iterable[str], until: float, limit: int, awaiter: str | None = None) -> list[Due]:
        return await self._do(_calls.due, list(credentials), until, limit, awaiter)

    async def next_due(self, credentials: Iterable[str], awaiter: str | None = None) -> float | None:
        return await self._do(_calls.next_due, list(credentials), awaiter)

    async def start_sending(self, entry: Entry, engine: str, now: float) -> bool:
        return await self._do(_ledger.start_sending, entry, engine, now)

    async def stop_sending(self, ticket: int) -> bool:
        return await self._do(_ledger.stop_sending, ticket)

    async def attempts(self, ticket: int) -> int:
        return await self._do(_ledger.attempts, ticket)

    # batches
    async def intend(self, intent: Intent) -> Batch | None:
        return await self._do(_batches.intend, intent)

    async def still_mine(self, batch: int, owner: str, until: float) -> bool:
        return await self._do(_batches.still_mine, batch, owner, until)

    async def depart(self, batch: int, owner: str, until: float, now: float) -> bool:
        return await self._do(_batches.depart, batch, owner, until, now)

    async def lines(self, batch: int) -> AsyncIterator[list[tuple[int, bytes]]]:
        after = -1
        while chunk := await self._do(_batches.lines, batch, after):
            after = chunk[-1][0]
            yield chunk

    async def move(self, batch: int, target: BatchState, *, owner: str | None = None, **changes: object) -> Batch:
        return await self._do(_batches.move, batch, target, changes, owner)

    async def annotate(self, batch: int, **changes: object) -> None:
        await self._do(_batches.annotate, batch, changes)

    async def release(
        self, batch: int, target: BatchState, lane: Lane, now: float, reason: str, owner: str | None = None
    ) -> int:
        returned = await self._do(_batches.release, batch, target, lane, now, reason, owner)
        if returned:
            self._tell_of_pools(())
        return returned

    async def batches(self, owner: str) -> list[Batch]:
        return await self._do(_batches.batches, owner)

    async def batch(self, batch: int) -> Batch | None:
        return await self._do(_batches.batch, batch)

    async def open_calls(self, batch: int) -> OpenCalls:
        return await self._do(_batches.open_calls, batch)

    async def tidy(self, batch: int, after: int, limit: int) -> int | None:
        return await self._do(_batches.tidy, batch, after, limit)

    async def unmentioned(self, batch: int, after: int, limit: int) -> list[int]:
        return await self._do(_batches.unmentioned, batch, after, limit)

    async def known_provider_ids(self, credential: str) -> set[str]:
        return await self._do(_batches.known_provider_ids, credential)

    async def suspect(self, batch: int, provider_id: str, verdict: str) -> None:
        await self._do(_batches.suspect, batch, provider_id, verdict)

    async def suspects(self, batch: int) -> dict[str, str]:
        return await self._do(_batches.suspects, batch)

    # settling
    async def settle(self, settlements: Sequence[Settlement], now: float) -> list[bool]:
        settled: list[bool] = await self._writer.do(_settling.settle, (settlements, now), len(settlements))
        tickets = tuple(one.ticket for one, won in zip(settlements, settled, strict=True) if won)
        if tickets:
            self._tell_of_settled(tickets)
        if any(one.requeue is not None for one in settlements):
            self._tell_of_pools(())
        return settled

    def _tell_of_settled(self, tickets: Sequence[int]) -> None:
        self._listeners.tell(tickets)

    def _tell_of_pools(self, credentials: Sequence[str]) -> None:
        self._watchers.tell(credentials)

    def subscribe(self, listener: Listener[int]) -> Callable[[], None]:
        return self._listeners.subscribe(listener)

    def watch(self, listener: Listener[str]) -> Callable[[], None]:
        return self._watchers.subscribe(listener)

    async def nudge(self, provider: str, provider_id: str) -> bool:
        batches = await self._do(_batches.unfinished, provider, provider_id)
        if batches:
            self._tell_of_batches(batches)
        return bool(batches)

    def _tell_of_batches(self, batches: Sequence[int]) -> None:
        self._followers.tell(batches)

    def heed(self, listener: Listener[int]) -> Callable[[], None]:
        return self._followers.subscribe(listener)

    # books and memory
    async def attempt(self, entry: Entry) -> None:
        if not self.attempted(entry):
            await self._writer.do(_ledger.record, entry, relaxed=True)

    def attempted(self, entry: Entry) -> bool:
        return False

    def record(self, entry: Entry, *, unhurried: bool = False) -> Awaitable[None]:
        return self._writer.do(_ledger.record, entry, relaxed=True, unhurried=unhurried)

    def completed(self, entry: Entry, told: Told) -> None:
        self._writer.hand(_ledger.record, entry, told)

    async def totals(self, credentials: Sequence[str] | None = None) -> list[Totals]:
        return await self._do(_ledger.totals, credentials)

    async def entries(self, ticket: int) -> list[Entry]:
        return await self._do(_ledger.entries, ticket)

    async def counts(self) -> Mapping[str, int]:
        return await self._do(_calls.counts)

    async def listed_calls(
        self, before: int | None, state: TicketState | None, limit: int, credentials: Sequence[str] | None = None
    ) -> list[CallRow]:
        return await self._do(_listing.listed_calls, before, state, limit, credentials)

    async def listed_call(self, ticket: int, credentials: Sequence[str] | None = None) -> CallRow | None:
        return await self._do(_listing.listed_call, ticket, credentials)

    async def listed_batches(
        self, before: int | None, state: BatchState | None, limit: int, credentials: Sequence[str] | None = None
    ) -> list[Batch]:
        return await self._do(_listing.listed_batches, before, state, limit, credentials)

    # virtual keys
    async def keys(self, known: int | None = None) -> tuple[int, list[VirtualKey]] | None:
        return await self._do(_keys.keys, known)

    async def write_keys(self, keys: Sequence[VirtualKey]) -> None:
        await self._do(_keys.write_keys, keys)

    async def used_keys(self, uses: Mapping[str, float]) -> None:
        await self._writer.do(each(_keys.used_keys), (dict(uses),), relaxed=True)

    async def remember(self, kind: str, key: str, value: str, now: float) -> None:
        await self._do(_ledger.remember, kind, key, value, now)

    async def recall(self, kind: str) -> Mapping[str, str]:
        return await self._do(_ledger.recall, kind)

    async def retain(self, before: float, undelivered_before: float, limit: int) -> int:
        return await self._do(_calls.retain, before, undelivered_before, limit)

    @abstractmethod
    async def aclose(self) -> None: ...
