"""Base class of the SQL stores: each method queues one operation with the writer."""

from __future__ import annotations

import asyncio
import inspect
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, TypeVar

from carpool.core.errors import CarpoolError
from carpool.core.lifecycle import BatchState
from carpool.core.model import Admission, Admitted, Batch, CallShape, Entry, Lane, Settlement
from carpool.stores.operations import admission, batches, calls, forecasts, ledger, shapes, tasks
from carpool.stores.operations.session import Session
from carpool.stores.operations.writer import Groups, OnDone, Writer, each

# ------------------------------------------------------------ listeners
# Subscribers to hints: settled tickets, pool changes, batches that may have ended.

SETTLED, POOLS, BATCHES = "settled", "pools", "batches"

Listener = Callable[[Sequence[Any]], None]


class HintListeners:
    """The listeners of a store. Calls each of them on the event loop on which it subscribed, after the notifying code
    has returned."""

    def __init__(self) -> None:
        self._subscriptions: dict[str, dict[object, tuple[asyncio.AbstractEventLoop, Listener]]] = {
            topic: {} for topic in (SETTLED, POOLS, BATCHES)
        }

    def notify(self, topic: str, names: Sequence[Any]) -> None:
        """Notifies all listeners, from any thread. Empty `names` mean that notifications may have been lost."""
        if not self._subscriptions[topic]:
            return
        try:
            current_loop = asyncio.get_running_loop()
        except RuntimeError:  # a thread without one
            current_loop = None
        for key, (loop, _) in tuple(self._subscriptions[topic].items()):
            schedule = loop.call_soon if loop is current_loop else loop.call_soon_threadsafe
            with suppress(RuntimeError):  # that loop is closed, so its listener is gone
                schedule(self._call_listener, topic, key, names)

    def _call_listener(self, topic: str, key: object, names: Sequence[Any]) -> None:
        if key in self._subscriptions[topic]:  # it may have ended since the call was scheduled
            self._subscriptions[topic][key][1](names)

    def _listen(self, topic: str, listener: Listener) -> Callable[[], None]:
        key, subscriptions = object(), self._subscriptions[topic]
        subscriptions[key] = (asyncio.get_running_loop(), listener)

        def end() -> None:
            subscriptions.pop(key, None)

        return end

    def subscribe(self, listener: Callable[[Sequence[int]], None]) -> Callable[[], None]:
        return self._listen(SETTLED, listener)

    def on_pool_change(self, listener: Callable[[Sequence[str]], None]) -> Callable[[], None]:
        return self._listen(POOLS, listener)

    def on_batch_hint(self, listener: Callable[[Sequence[int]], None]) -> Callable[[], None]:
        return self._listen(BATCHES, listener)


# ------------------------------------------------------------ opening

S = TypeVar("S", bound=Session)


async def open_in_thread(open_store: Callable[[], S]) -> S:
    """Opens in another thread. If the caller is cancelled meanwhile, what was opened is closed."""
    opening = asyncio.get_running_loop().run_in_executor(None, open_store)
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:

        def opened(opening: asyncio.Future[S]) -> None:
            if not opening.cancelled() and opening.exception() is None:
                opening.result().close()

        opening.add_done_callback(opened)
        raise


# ------------------------------------------------------------ the store

P = ParamSpec("P")
R = TypeVar("R")


def _queued(
    operation: Callable[Concatenate[Session, P], R],
    hint: Callable[[tuple[Any, ...], R], tuple[str, Sequence[Any]] | None] | None = None,
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
    """Makes the method that queues an operation and waits until it is committed. `hint` returns what listeners then
    receive, from the arguments and the result: a topic and its names, or None."""
    work, signature = each(operation), inspect.signature(operation)

    async def method(store: OperatedStore, /, *args: P.args, **named: P.kwargs) -> R:
        item: tuple[Any, ...] = args
        if named:
            bound = signature.bind(None, *args, **named)
            bound.apply_defaults()
            item = bound.args[1:]
        result: R = await store.writer.do(work, tuple([_snapshot(value) for value in item]))
        if hint is not None and (notification := hint(item, result)) is not None:
            store.notify(*notification)
        return result

    return method


def _snapshot(argument: object) -> object:
    """Copies a collection: the writer thread reads it while the caller may already change the original."""
    if isinstance(argument, Iterable) and not isinstance(argument, (str, bytes, Mapping)):
        return list(argument)
    return argument


class OperatedStore(HintListeners):
    """Implements `ports.Store` except for opening, closing and synchronous attempts."""

    def __init__(self, session: Session, groups: Groups, *, threaded: bool) -> None:
        super().__init__()
        self._session = session
        self.writer = Writer(groups, threaded=threaded)
        self.pepper = session.pepper

    durable: bool

    # leases
    join = _queued(batches.join)
    lead = _queued(batches.lead)
    leaders = _queued(batches.leaders)
    take_over = _queued(batches.take_over)
    leave = _queued(batches.leave, lambda item, result: (POOLS, ()))

    # calls
    await_ticket = _queued(calls.await_ticket)
    stop_awaiting = _queued(calls.stop_awaiting)
    outcome = _queued(calls.outcome)
    outcomes = _queued(calls.outcomes)
    sendable_call = _queued(calls.sendable_call)
    views = _queued(calls.views)
    pools = _queued(batches.pools)
    due = _queued(batches.due)
    next_due = _queued(batches.next_due)
    start_sending = _queued(ledger.start_sending)
    stop_sending = _queued(ledger.stop_sending)
    attempts = _queued(ledger.attempts)
    retain = _queued(calls.retain)
    cancel = _queued(calls.cancel, lambda item, cancelled: (SETTLED, item[:1]) if cancelled else None)

    def admit_all(self, admissions: Sequence[Admission]) -> Awaitable[list[Admitted | CarpoolError]]:
        writing = self.writer.do(admission.admit, admissions, len(admissions))
        if credentials := tuple({asked.call.credential for asked in admissions if asked.lane is Lane.BATCH}):
            if isinstance(writing, asyncio.Future):
                writing.add_done_callback(lambda _: self.notify(POOLS, credentials))
            else:
                self.notify(POOLS, credentials)
        return writing

    async def delivered(self, tickets: Sequence[int], now: float) -> None:
        await self.writer.do(each(calls.delivered), (list(tickets), now), relaxed=True)

    async def settle(self, settlements: Sequence[Settlement], now: float) -> list[bool]:
        settled: list[bool] = await self.writer.do(ledger.settle, (settlements, now), len(settlements))
        tickets = tuple(settlement.ticket for settlement, won in zip(settlements, settled, strict=True) if won)
        if tickets:
            self.notify(SETTLED, tickets)
        if any(settlement.requeue is not None for settlement in settlements):
            self.notify(POOLS, ())
        return settled

    # batches
    intend = _queued(batches.intend)
    still_mine = _queued(batches.still_mine)
    depart = _queued(batches.depart)
    batch = _queued(batches.batch)
    open_calls = _queued(batches.open_calls)
    tidy = _queued(batches.tidy)
    unmentioned = _queued(batches.unmentioned)
    known_provider_ids = _queued(batches.known_provider_ids)
    suspect = _queued(batches.suspect)
    suspects = _queued(batches.suspects)
    release = _queued(batches.release, lambda item, returned: (POOLS, ()) if returned else None)
    batches = _queued(batches.batches)  # the last one: it hides the module from the lines below

    async def lines(self, batch: int) -> AsyncIterator[list[tuple[int, bytes]]]:
        after = -1
        while chunk := await _lines(self, batch, after):
            after = chunk[-1][0]
            yield chunk

    async def move(self, batch: int, target: BatchState, *, owner: str | None = None, **changes: object) -> Batch:
        return await _move(self, batch, target, changes, owner)

    async def annotate(self, batch: int, **changes: object) -> None:
        await _annotate(self, batch, changes)

    async def hint_batch(self, provider: str, provider_id: str) -> bool:
        unfinished = await _unfinished(self, provider, provider_id)
        if unfinished:
            self.notify(BATCHES, unfinished)
        return bool(unfinished)

    # ledger
    totals = _queued(ledger.totals)
    entries = _queued(ledger.entries)

    async def attempt(self, entry: Entry) -> None:
        if not self.attempted(entry):
            await self.writer.do(ledger.record, entry, relaxed=True)

    def attempted(self, entry: Entry) -> bool:
        return False

    def record(self, entry: Entry, *, deferred: bool = False) -> Awaitable[None]:
        return self.writer.do(ledger.record, entry, relaxed=True, deferred=deferred)

    def completed(self, entry: Entry, on_done: OnDone) -> None:
        self.writer.enqueue(ledger.record, entry, on_done)

    # the record of calls
    async def record_shapes(self, recorded: Sequence[CallShape]) -> None:
        await self.writer.do(each(shapes.record_shapes), (list(recorded),), relaxed=True)

    prune_shapes = _queued(shapes.prune_shapes)
    shapes = _queued(shapes.shapes)  # the last one: it hides the module from the lines below

    # the forecast
    forecast = _queued(forecasts.forecast)

    async def save_forecast(self, known: int, state: bytes) -> bool:
        saved: bool = await self.writer.do(each(forecasts.save_forecast), (known, state), relaxed=True)
        return saved

    # tasks
    merge_tasks = _queued(tasks.merge_tasks)
    prune_tasks = _queued(tasks.prune_tasks)
    tasks = _queued(tasks.tasks)  # the last one: it hides the module from the lines below

    # lists, keys and notes
    counts = _queued(calls.counts)
    listed_calls = _queued(calls.listed_calls)
    listed_call = _queued(calls.listed_call)
    listed_batches = _queued(calls.listed_batches)
    keys = _queued(calls.keys)
    write_keys = _queued(calls.write_keys)
    remember = _queued(ledger.remember)
    recall = _queued(ledger.recall)

    async def used_keys(self, uses: Mapping[str, float]) -> None:
        await self.writer.do(each(calls.used_keys), (dict(uses),), relaxed=True)

    @abstractmethod
    async def aclose(self) -> None:
        """Finishes all queued writes, then closes what was opened. May be called twice."""


_lines = _queued(batches.lines)
_move = _queued(batches.move)
_annotate = _queued(batches.annotate)
_unfinished = _queued(batches.unfinished)
