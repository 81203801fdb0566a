"""State shared by the parts of the engine: ports, settings, the clients that wait, and the one way to settle a call."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from carpool.core.bounded import backoff
from carpool.core.errors import StoreError, StoreUnwritable, error_name
from carpool.core.model import (
    NONCE_LETTERS,
    Batch,
    Entry,
    Outcome,
    OutcomeKind,
    Settled,
    Settlement,
    Value,
    base32,
    ticket_text,
)
from carpool.core.ports import Clock, Store
from carpool.core.prices import PriceBook
from carpool.core.upstream import Upstream
from carpool.engine.background import BackgroundTasks
from carpool.engine.events import CallSettled, Event, EventHooks, Stats, Trouble, Troubles
from carpool.engine.keyring import Keyring, LaneRefusals
from carpool.engine.learning import Learner
from carpool.engine.prompt_caches import PromptCaches
from carpool.engine.tasks import Tasks
from carpool.planners.forecast import Forecast
from carpool.planners.policy import RoutingPolicy
from carpool.planners.rescue_room import OpenRescues
from carpool.planners.tasks import TaskBook

T = TypeVar("T")

WRITE_RETRY_S, WRITE_RETRY_MAX_S = 0.1, 30.0  # backoff of a write that must succeed
TICKET_EPOCH_MS = 1_767_225_600_000  # 2026-01-01: keeps tickets within 63 bits for centuries
LEAD_AGAIN_S = 1.0  # minimum time between two leadership checks
HURRY_S = 0.1  # admitted calls wake the planner no more often than this

PRESSED = "its calls are pressed for time"  # the note of a batch that was cancelled for its calls' deadlines
LATE = "its batch would have been late"  # the reason of a rescue

Probe = Callable[[str], Awaitable[None]]


# ------------------------------------------------------------ clients that wait


class Reply(Value, frozen=True, gc=False):
    """What a frontend gets back: the ticket, the outcome of the call, and the ledger entry if it is known."""

    ticket: int
    outcome: Outcome
    entry: Entry | None = None
    reason: str = ""  # why the call took this lane

    @classmethod
    def of(cls, settled: Settled) -> Reply:
        """Built from the store, whichever engine settled the call."""
        return cls(settled.ticket, settled.outcome, settled.entry)


class Waiters:
    """Nearly every ticket has one waiter. The few with more keep the others in a list."""

    def __init__(self) -> None:
        self._first: dict[int, asyncio.Future[Reply]] = {}
        self._more: dict[int, list[asyncio.Future[Reply]]] = {}
        self._credentials: dict[int, str] = {}  # ticket → credential, if its calls are limited; some not on disk yet
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._first)

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._first

    def __iter__(self) -> Iterator[int]:
        return iter(self._first)

    def of(self, credential: str) -> int:
        """Number of counted calls of a credential."""
        return self._counts.get(credential, 0)

    def count(self, ticket: int, credential: str) -> None:
        """Counts a ticket for this credential until nobody waits for it."""
        if ticket not in self._credentials:
            self._credentials[ticket] = credential
            self._counts[credential] = self._counts.get(credential, 0) + 1

    def add(self, ticket: int) -> asyncio.Future[Reply]:
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.put(ticket, future)
        return future

    def put(self, ticket: int, future: asyncio.Future[Reply]) -> None:
        if self._first.setdefault(ticket, future) is not future:
            self._more.setdefault(ticket, []).append(future)

    def drop(self, ticket: int, future: asyncio.Future[Reply]) -> bool:
        """Removes a waiter. Returns whether the ticket has none left."""
        remaining = [waiter for waiter in self._all(ticket) if waiter is not future]
        credential = self._credentials.get(ticket)
        self._forget(ticket)
        for waiter in remaining:
            self.put(ticket, waiter)
        if remaining and credential is not None:
            self.count(ticket, credential)
        return not remaining

    def resolve(self, reply: Reply) -> None:
        ticket = reply.ticket
        if self._more or self._credentials:
            futures = self._all(ticket)
            self._forget(ticket)
        else:  # the usual case
            first = self._first.pop(ticket, None)
            futures = [] if first is None else [first]
        for future in futures:
            if not future.done():  # a cancelled waiter must not stop the others
                future.set_result(reply)

    def fail_all(self, why: Callable[[int], Exception]) -> None:
        for ticket in list(self._first):
            for future in self._all(ticket):
                if not future.done():
                    future.set_exception(why(ticket))
            self._forget(ticket)

    def _all(self, ticket: int) -> list[asyncio.Future[Reply]]:
        first = self._first.get(ticket)
        return [] if first is None else [first, *self._more.get(ticket, ())]

    def _forget(self, ticket: int) -> None:
        self._first.pop(ticket, None)
        self._more.pop(ticket, None)
        self.uncount(ticket)

    def uncount(self, ticket: int) -> None:
        if self._credentials and (credential := self._credentials.pop(ticket, None)) is not None:
            self._counts[credential] -= 1
            if not self._counts[credential]:
                del self._counts[credential]


# ------------------------------------------------------------ garbage collection
# Each waiting call is a dozen objects. A full collection traverses all of them, finds no garbage, and does so again
# whenever there are a quarter more objects. So the waiting calls are exempted in steps, with `gc.freeze`. Objects
# created later are not exempt, and when nearly all calls are done, everything is collected again.

FREEZE_STEP = 4096  # calls per step; a full collection of fewer takes only a few milliseconds
FREEZE_LEFT = 16  # unfreezes when only one in 16 still waits


class GcFreezer:
    def __init__(self) -> None:
        self._known = 0  # waiting calls at the last check
        self._frozen = False

    def grew(self, waiting: int) -> None:
        if waiting - self._known < FREEZE_STEP:
            return
        # Does not interfere with a process that freezes objects itself or disabled the collector.
        if self._frozen or (gc.isenabled() and not gc.get_freeze_count()):
            gc.collect(1)  # so that young garbage is not frozen; old garbage may be, until `shrank`
            gc.freeze()
            self._frozen = True
        self._known = waiting

    def shrank(self, waiting: int) -> None:
        if waiting * FREEZE_LEFT >= self._known:
            return
        if self._frozen:
            gc.unfreeze()
            self._frozen = False
        self._known = 0


@dataclass(slots=True)
class EngineContext:
    store: Store
    clock: Clock
    policy: RoutingPolicy
    forecast: Forecast
    prices: PriceBook
    keyring: Keyring
    upstreams: Mapping[str, Upstream]
    event_hooks: EventHooks
    rng: random.Random
    now: Callable[[], float] = field(init=False)  # the clock's method
    dice: random.Random = field(init=False)  # for values that are no secret: the system's randomness takes 25 µs
    name: str
    probe: Probe | None = None
    background: BackgroundTasks = field(default_factory=BackgroundTasks)
    waiters: Waiters = field(default_factory=Waiters)
    gc_freezer: GcFreezer = field(default_factory=GcFreezer)
    stats: Stats = field(default_factory=Stats)
    troubles: Troubles = field(init=False)
    learned: LaneRefusals = field(init=False)
    open_rescues: OpenRescues = field(default_factory=OpenRescues)
    prompt_caches: PromptCaches = field(init=False)
    tasks: Tasks = field(init=False)
    learner: Learner = field(init=False)
    batches: list[Batch] = field(default_factory=list)  # unfinished batches of this engine, as of this step
    led: frozenset[str] = frozenset()  # accounts that this engine leads, as of the last check
    led_credentials: tuple[str, ...] = ()  # of the accounts it leads
    other_credentials: tuple[str, ...] = ()  # of accounts that others lead, or nobody yet
    led_at: float = 0.0  # when leadership was checked last
    lead_at: float = 0.0  # when to check it again
    closing: bool = False
    wake: float = 0.0
    wake_event: asyncio.Event = field(default_factory=asyncio.Event)
    _last_ticket: int = 0

    def __post_init__(self) -> None:
        self.now = self.clock.now
        self.dice = random.Random(self.rng.getrandbits(64))  # noqa: S311
        self.troubles = Troubles(self.event_hooks, self.now, self.keyring.account)
        self.learned = LaneRefusals(self.store, self.clock, self.keyring)
        self.prompt_caches = PromptCaches(self.upstreams, self.stats)
        key = self.keyring.derived("conversations")
        book = TaskBook(self.prompt_caches.agents.turns_left, self.prompt_caches.agents.turn_seconds)
        self.tasks = Tasks(self.store, self.clock, key, self.forecast, book, self.background, self.trouble)
        self.learner = Learner(self.forecast, self.store, self.clock, self.trouble)

    # ------------------------------------------------------------ time

    def wake_by(self, at: float | None) -> None:
        """Schedules the next step of the engine for this time or earlier."""
        if at is not None and at < self.wake:
            self.wake = at
            self.wake_event.set()

    def wake_now(self) -> None:
        self.wake_by(0.0)

    # ------------------------------------------------------------ identifiers

    def new_ticket(self) -> int:
        """Grows with time, so that new rows are stored together; random low bits keep processes from colliding."""
        stamp = int(self.now() * 1000) - TICKET_EPOCH_MS
        if stamp > self._last_ticket >> 22:
            self._last_ticket = stamp << 22 | self.dice.getrandbits(22)
        else:  # within the same millisecond, counting is faster than new random bits
            self._last_ticket += 1
        return self._last_ticket

    def new_nonce(self) -> str:
        return base32(self.rng.getrandbits(5 * NONCE_LETTERS), NONCE_LETTERS)

    # ------------------------------------------------------------ leadership

    def leads(self, credential: str) -> bool:
        """Whether this engine creates the batches of a credential's account, and spends its quota."""
        return self.keyring.account(credential) in self.led

    def lead(self, accounts: Iterable[str]) -> None:
        """Sets the accounts that this engine leads. Their credentials are listed here once, not in every step."""
        self.led = frozenset(accounts)
        self.led_credentials = tuple(credential for credential in self.keyring if self.leads(credential))
        self.other_credentials = tuple(credential for credential in self.keyring if not self.leads(credential))

    def lead_again(self, pause: float = 0.0) -> None:
        """Checks leadership soon: there is a new credential, or another engine may be gone."""
        self.lead_at = min(self.lead_at, self.led_at + pause)
        self.wake_now()

    def on_pool_change(self, credentials: Iterable[str]) -> None:
        """Calls were admitted by this engine or another; without credentials, anything may have changed."""
        if not credentials:
            self.lead_again(LEAD_AGAIN_S)
        elif any(self.leads(credential) for credential in credentials):
            self.wake_by(self.now() + min(self.policy.linger_ms / 1000, HURRY_S))

    def credential_of(self, batch: Batch) -> str:
        """The credential of a batch's calls, whichever form of the key buys it."""
        return self.keyring.credential(batch.key.credential)

    # ------------------------------------------------------------ settling

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """The only way a call ends: outcome and ledger entry in one transaction, then its waiters are woken."""
        if not settlements:
            return
        used = await self.retry_write("settling", lambda: self.store.settle(settlements, self.now()))
        for settlement, won in zip(settlements, used, strict=True):
            outcome, entry = settlement.outcome, settlement.entry
            if entry is not None:
                self.stats.count(entry, won)
            if settlement.ticket in self.tasks.tickets:
                self.tasks.settled(settlement.ticket, outcome if won else None, entry)
            self.stats.requeued_calls += settlement.requeue is not None
            if not won or outcome is None:
                continue
            self.stats.settled_calls += 1
            self.stats.failed_calls += outcome.kind is not OutcomeKind.SUCCEEDED
            if self.event_hooks.has_listeners:
                text, whose = ticket_text(settlement.ticket), "" if entry is None else entry.credential
                settled = CallSettled(self.now(), text, outcome.lane, outcome.kind, outcome.status, credential=whose)
                self.event_hooks.emit(settled)
            self.open_rescues.remove(settlement.ticket)
            self.waiters.resolve(Reply(settlement.ticket, outcome, entry))
        self.gc_freezer.shrank(len(self.waiters))

    async def fetch_outcomes(self, tickets: Sequence[int]) -> int:
        """Wakes the waiters of those tickets that another engine has settled. Returns how many of them it has."""
        outcomes = await self.store.outcomes(tickets)
        for settled in outcomes:
            if settled.ticket in self.tasks.tickets:
                self.tasks.settled(settled.ticket, settled.outcome, settled.entry)
            self.open_rescues.remove(settled.ticket)
            self.waiters.resolve(Reply.of(settled))
        return len(outcomes)

    # ------------------------------------------------------------ reporting

    def emit_batch_event(self, kind: Callable[..., Event], batch: Batch, *facts: object) -> None:
        """Reports an event of a batch."""
        self.event_hooks.emit(kind(self.now(), batch.id, *facts, credential=self.credential_of(batch)))

    async def reached(self, point: str) -> None:
        """A named point in the processing of a call, where a test may stop the process."""
        if self.probe is not None:
            await self.probe(point)

    def trouble(self, doing: str, error: BaseException, provider: str = "", credential: str = "") -> None:
        """Reports one failed attempt, and the trouble behind it at the provider or the credential's account."""
        whose = self.keyring.credential(credential)
        self.event_hooks.emit(Trouble(self.now(), doing, error_name(error), credential=whose))
        self.troubles.failed(doing, error, provider, credential)

    async def retry_write(self, doing: str, write: Callable[[], Awaitable[T]]) -> T:
        """Retries a write that must not be lost until the store accepts it."""
        failures = 0
        while True:
            try:
                written = await write()
            except StoreError as error:
                if not error.retryable and not isinstance(error, StoreUnwritable):  # disk space may be freed later
                    raise
                self.trouble(doing, error)
                failures += 1
                await self.clock.sleep(backoff(failures, WRITE_RETRY_S, WRITE_RETRY_MAX_S))
            else:
                self.troubles.worked(doing)
                return written
