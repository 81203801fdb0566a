"""Base class of the SQL stores: each method queues one operation with the writer."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Concatenate, Generic, ParamSpec, TypeVar

from carpool.core.errors import CarpoolError
from carpool.core.keys import VirtualKey
from carpool.core.lifecycle import BatchState, TicketState
from carpool.core.model import (
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
from carpool.stores.operations import admission, batches, calls, keys, ledger, listing, settling
from carpool.stores.operations.session import Session
from carpool.stores.operations.writer import Told, Writer, each

# ------------------------------------------------------------ listeners
# Subscribers to settled tickets, pool changes and batch hints.

T = TypeVar("T")
Listener = Callable[[Sequence[T]], None]


@dataclass(slots=True, eq=False)  # compared by identity: a listener that subscribes twice has two subscriptions
class _Subscription(Generic[T]):
    loop: asyncio.AbstractEventLoop
    listener: Listener[T]
    ended: bool = False

    def hear(self, names: Sequence[T]) -> None:
        if not self.ended:  # it may have ended since the call was scheduled
            self.listener(names)


class Listeners(Generic[T]):
    """Calls each listener on the event loop on which it subscribed, after the notifying code has returned."""

    def __init__(self) -> None:
        self._subscriptions: list[_Subscription[T]] = []

    def __bool__(self) -> bool:
        return bool(self._subscriptions)

    def subscribe(self, listener: Listener[T]) -> Callable[[], None]:
        subscription = _Subscription(asyncio.get_running_loop(), listener)
        self._subscriptions.append(subscription)

        def end() -> None:
            if not subscription.ended:
                subscription.ended = True
                self._subscriptions.remove(subscription)

        return end

    def tell(self, names: Sequence[T]) -> None:
        """Notifies all listeners. Empty `names` mean that notifications may have been lost."""
        if not self._subscriptions:
            return
        current_loop = _running_loop()
        for subscription in tuple(self._subscriptions):
            if subscription.loop is current_loop:
                subscription.loop.call_soon(subscription.hear, names)
                continue
            try:
                subscription.loop.call_soon_threadsafe(subscription.hear, names)
            except RuntimeError:  # that loop is closed, so its listener is gone
                continue


def _running_loop() -> asyncio.AbstractEventLoop | None:
    """Returns the running event loop; None in a thread without one."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


P = ParamSpec("P")
R = TypeVar("R")


class OperatedStore(ABC):
    """Implements `ports.Store` except for opening, closing and synchronous attempts."""

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
        return await self._do(batches.join, engine, now, ttl, pulse)

    async def leave(self, engine: str) -> None:
        await self._do(batches.leave, engine)
        self._notify_pools(())

    async def lead(self, engine: str, accounts: Iterable[str], now: float) -> set[str]:
        return await self._do(batches.lead, engine, list(accounts), now)

    async def leaders(self, now: float) -> Mapping[str, str]:
        return await self._do(batches.leaders, now)

    async def take_over(self, engine: str, credentials: Iterable[str], now: float) -> int:
        return await self._do(batches.take_over, engine, list(credentials), now)

    # calls
    async def admit(self, admission: Admission) -> Admitted:
        [admitted] = await self.admit_all([admission])
        if isinstance(admitted, CarpoolError):
            raise admitted
        return admitted

    def admit_all(self, admissions: Sequence[Admission]) -> Awaitable[list[Admitted | CarpoolError]]:
        writing = self._writer.do(admission.admit, admissions, len(admissions))
        if credentials := tuple({asked.call.credential for asked in admissions if asked.lane is Lane.BATCH}):
            if isinstance(writing, asyncio.Future):
                writing.add_done_callback(lambda _: self._notify_pools(credentials))
            else:
                self._notify_pools(credentials)
        return writing

    async def await_ticket(self, ticket: int, awaiter: str | None) -> None:
        await self._do(calls.await_ticket, ticket, awaiter)

    async def stop_awaiting(self, ticket: int, engine: str) -> None:
        await self._do(calls.stop_awaiting, ticket, engine)

    async def delivered(self, tickets: Sequence[int], now: float) -> None:
        await self._writer.do(each(calls.delivered), (list(tickets), now), relaxed=True)

    async def outcome(self, ticket: int, credential: str) -> Settled | None:
        return await self._do(calls.outcome, ticket, credential)

    async def outcomes(self, tickets: Sequence[int]) -> list[Settled]:
        return await self._do(calls.outcomes, list(tickets))

    async def parcel(self, ticket: int) -> Parcel | None:
        return await self._do(calls.parcel, ticket)

    async def views(self, tickets: Sequence[int]) -> list[TicketView]:
        return await self._do(calls.views, list(tickets))

    async def cancel(self, ticket: int, outcome: Outcome) -> bool:
        cancelled = await self._do(calls.cancel, ticket, outcome)
        if cancelled:
            self._notify_settled((ticket,))
        return cancelled

    async def pools(self, credentials: Iterable[str]) -> list[PoolView]:
        return await self._do(calls.pools, list(credentials))

    async def due(self, credentials: Iterable[str], until: float, limit: int, awaiter: str | None = None) -> list[Due]:
        return await self._do(calls.due, list(credentials), until, limit, awaiter)

    async def next_due(self, credentials: Iterable[str], awaiter: str | None = None) -> float | None:
        return await self._do(calls.next_due, list(credentials), awaiter)

    async def start_sending(self, entry: Entry, engine: str, now: float) -> bool:
        return await self._do(ledger.start_sending, entry, engine, now)

    async def stop_sending(self, ticket: int) -> bool:
        return await self._do(ledger.stop_sending, ticket)

    async def attempts(self, ticket: int) -> int:
        return await self._do(ledger.attempts, ticket)

    # batches
    async def intend(self, intent: Intent) -> Batch | None:
        return await self._do(batches.intend, intent)

    async def still_mine(self, batch: int, owner: str, until: float) -> bool:
        return await self._do(batches.still_mine, batch, owner, until)

    async def depart(self, batch: int, owner: str, until: float, now: float) -> bool:
        return await self._do(batches.depart, batch, owner, until, now)

    async def lines(self, batch: int) -> AsyncIterator[list[tuple[int, bytes]]]:
        after = -1
        while chunk := await self._do(batches.lines, batch, after):
            after = chunk[-1][0]
            yield chunk

    async def move(self, batch: int, target: BatchState, *, owner: str | None = None, **changes: object) -> Batch:
        return await self._do(batches.move, batch, target, changes, owner)

    async def annotate(self, batch: int, **changes: object) -> None:
        await self._do(batches.annotate, batch, changes)

    async def release(
        self, batch: int, target: BatchState, lane: Lane, now: float, reason: str, owner: str | None = None
    ) -> int:
        returned = await self._do(batches.release, batch, target, lane, now, reason, owner)
        if returned:
            self._notify_pools(())
        return returned

    async def batches(self, owner: str) -> list[Batch]:
        return await self._do(batches.batches, owner)

    async def batch(self, batch: int) -> Batch | None:
        return await self._do(batches.batch, batch)

    async def open_calls(self, batch: int) -> OpenCalls:
        return await self._do(batches.open_calls, batch)

    async def tidy(self, batch: int, after: int, limit: int) -> int | None:
        return await self._do(batches.tidy, batch, after, limit)

    async def unmentioned(self, batch: int, after: int, limit: int) -> list[int]:
        return await self._do(batches.unmentioned, batch, after, limit)

    async def known_provider_ids(self, credential: str) -> set[str]:
        return await self._do(batches.known_provider_ids, credential)

    async def suspect(self, batch: int, provider_id: str, verdict: str) -> None:
        await self._do(batches.suspect, batch, provider_id, verdict)

    async def suspects(self, batch: int) -> dict[str, str]:
        return await self._do(batches.suspects, batch)

    # settling
    async def settle(self, settlements: Sequence[Settlement], now: float) -> list[bool]:
        settled: list[bool] = await self._writer.do(settling.settle, (settlements, now), len(settlements))
        tickets = tuple(settlement.ticket for settlement, won in zip(settlements, settled, strict=True) if won)
        if tickets:
            self._notify_settled(tickets)
        if any(settlement.requeue is not None for settlement in settlements):
            self._notify_pools(())
        return settled

    def _notify_settled(self, tickets: Sequence[int]) -> None:
        self._listeners.tell(tickets)

    def _notify_pools(self, credentials: Sequence[str]) -> None:
        self._watchers.tell(credentials)

    def subscribe(self, listener: Listener[int]) -> Callable[[], None]:
        return self._listeners.subscribe(listener)

    def on_pool_change(self, listener: Listener[str]) -> Callable[[], None]:
        return self._watchers.subscribe(listener)

    async def hint_batch(self, provider: str, provider_id: str) -> bool:
        unfinished = await self._do(batches.unfinished, provider, provider_id)
        if unfinished:
            self._notify_batches(unfinished)
        return bool(unfinished)

    def _notify_batches(self, batches: Sequence[int]) -> None:
        self._followers.tell(batches)

    def on_batch_hint(self, listener: Listener[int]) -> Callable[[], None]:
        return self._followers.subscribe(listener)

    # ledger and remembered values
    async def attempt(self, entry: Entry) -> None:
        if not self.attempted(entry):
            await self._writer.do(ledger.record, entry, relaxed=True)

    def attempted(self, entry: Entry) -> bool:
        return False

    def record(self, entry: Entry, *, unhurried: bool = False) -> Awaitable[None]:
        return self._writer.do(ledger.record, entry, relaxed=True, unhurried=unhurried)

    def completed(self, entry: Entry, told: Told) -> None:
        self._writer.hand(ledger.record, entry, told)

    async def totals(self, credentials: Sequence[str] | None = None) -> list[Totals]:
        return await self._do(ledger.totals, credentials)

    async def entries(self, ticket: int, credentials: Sequence[str] | None = None) -> list[Entry]:
        return await self._do(ledger.entries, ticket, credentials)

    async def counts(self) -> Mapping[str, int]:
        return await self._do(calls.counts)

    async def listed_calls(
        self, before: int | None, state: TicketState | None, limit: int, credentials: Sequence[str] | None = None
    ) -> list[CallRow]:
        return await self._do(listing.listed_calls, before, state, limit, credentials)

    async def listed_call(self, ticket: int, credentials: Sequence[str] | None = None) -> CallRow | None:
        return await self._do(listing.listed_call, ticket, credentials)

    async def listed_batches(
        self, before: int | None, state: BatchState | None, limit: int, credentials: Sequence[str] | None = None
    ) -> list[Batch]:
        return await self._do(listing.listed_batches, before, state, limit, credentials)

    # virtual keys
    async def keys(self, known: int | None = None) -> tuple[int, list[VirtualKey]] | None:
        return await self._do(keys.keys, known)

    async def write_keys(self, changed: Sequence[VirtualKey]) -> None:
        await self._do(keys.write_keys, changed)

    async def used_keys(self, uses: Mapping[str, float]) -> None:
        await self._writer.do(each(keys.used_keys), (dict(uses),), relaxed=True)

    async def remember(self, kind: str, key: str, value: str, now: float) -> None:
        await self._do(ledger.remember, kind, key, value, now)

    async def recall(self, kind: str) -> Mapping[str, str]:
        return await self._do(ledger.recall, kind)

    async def retain(self, before: float, undelivered_before: float, limit: int) -> int:
        return await self._do(calls.retain, before, undelivered_before, limit)

    @abstractmethod
    async def aclose(self) -> None: ...
