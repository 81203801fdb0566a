"""What the parts of the engine share: the ports, the settings, the memory of one process."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from carpool.budget import Road
from carpool.crashes import named
from carpool.engine.crowd import Crowd
from carpool.engine.events import Bulletin, Trouble
from carpool.engine.keyring import Keyring
from carpool.engine.learning import Learned
from carpool.engine.queues import Queues
from carpool.engine.stats import Stats
from carpool.engine.tasks import Crew
from carpool.engine.upstream import Answer, Upstream, clock_offset
from carpool.engine.waiting import Waiters
from carpool.errors import IllegalMove, StoreError, StoreUnwritable
from carpool.forecast import Forecast
from carpool.lifecycle import BatchState
from carpool.model import NONCE_LETTERS, Batch, Lane, base32
from carpool.policy import RoutingPolicy
from carpool.ports import Clock, Store, WireResponse
from carpool.prices import PriceBook

DEFAULT_RPM = 50
DEFAULT_PACE = 2.0
LOOK_AGAIN_S = 1.0  # while a turn on a batch road is awaited
LONGEST_PAUSE_S = 3600.0  # whatever a `retry-after` says
TICKET_EPOCH_MS = 1_767_225_600_000  # 2026-01-01: keeps tickets inside 63 bits for centuries

T = TypeVar("T")
Probe = Callable[[str], Awaitable[None]]


@dataclass(slots=True)
class Desk:
    store: Store
    clock: Clock
    policy: RoutingPolicy
    forecast: Forecast
    prices: PriceBook
    keyring: Keyring
    upstreams: Mapping[str, Upstream]
    bulletin: Bulletin
    rng: random.Random
    now: Callable[[], float] = field(init=False)  # the clock's own
    dice: random.Random = field(init=False)  # for what is no secret: asking the system each time takes 25 µs
    name: str
    probe: Probe | None = None
    crew: Crew = field(default_factory=Crew)
    waiters: Waiters = field(default_factory=Waiters)
    crowd: Crowd = field(default_factory=Crowd)
    stats: Stats = field(default_factory=Stats)
    roads: dict[str, Road] = field(default_factory=dict)  # by account
    lines: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))  # for a turn on it
    offsets: dict[str, float] = field(default_factory=dict)
    learned: Learned = field(init=False)
    queues: Queues = field(default_factory=Queues)
    byte_caps: dict[str, int] = field(default_factory=dict)  # account → learned from a 413
    batches: list[Batch] = field(default_factory=list)  # unfinished and ours, as of this step
    led: frozenset[str] = frozenset()  # accounts that this engine leads, as far as it knows
    led_credentials: tuple[str, ...] = ()  # of these accounts
    other_credentials: tuple[str, ...] = ()  # whose accounts others lead, or nobody yet
    closing: bool = False
    wake: float = 0.0
    alarm: asyncio.Event = field(default_factory=asyncio.Event)
    _last_ticket: int = 0

    def __post_init__(self) -> None:
        self.now = self.clock.now
        self.dice = random.Random(self.rng.getrandbits(64))  # noqa: S311
        self.learned = Learned(self.store, self.clock)

    # time
    def wake_by(self, at: float | None) -> None:
        """The engine's next step happens at this time, or sooner."""
        if at is not None and at < self.wake:
            self.wake = at
            self.alarm.set()

    def wake_now(self) -> None:
        self.wake_by(0.0)

    # names
    def new_ticket(self) -> int:
        """Rises with time, so that new rows land together; random below, so that processes do not collide."""
        stamp = int(self.now() * 1000) - TICKET_EPOCH_MS
        if stamp > self._last_ticket >> 22:
            self._last_ticket = stamp << 22 | self.dice.getrandbits(22)
        else:  # of the same millisecond: asking the system for randomness is slow
            self._last_ticket += 1
        return self._last_ticket

    def new_nonce(self) -> str:
        return base32(self.rng.getrandbits(5 * NONCE_LETTERS), NONCE_LETTERS)

    # who leads
    def leads(self, credential: str) -> bool:
        """Whether this engine makes the batches of a credential's account, and spends its budget."""
        return self.keyring.account(credential) in self.led

    def lead(self, accounts: Iterable[str]) -> None:
        """Sorted once: every step asks, and there may be many."""
        self.led = frozenset(accounts)
        self.led_credentials = tuple(credential for credential in self.keyring if self.leads(credential))
        self.other_credentials = tuple(credential for credential in self.keyring if not self.leads(credential))

    # the batch road of a credential's account
    def road(self, credential: str) -> Road:
        account = self.keyring.account(credential)
        if account not in self.roads:
            pace = self.policy.poll_interval_s or DEFAULT_PACE
            self.roads[account] = Road.new(self.policy.batch_rpm or DEFAULT_RPM, pace, self.now())
        return self.roads[account]

    def set_road(self, credential: str, road: Road) -> None:
        self.roads[self.keyring.account(credential)] = road

    async def turn(self, credential: str) -> None:
        """Waits until the account's rate allows one more request on the batch road, and takes it: whoever came first
        goes first, or those who look often would hold up those who bring answers home."""
        async with self.lines[self.keyring.account(credential)]:
            while not (road := self.road(credential)).can_ask(self.now()):
                wait = road.ask_ready_at(self.now()) - self.now()
                await self.clock.sleep(min(max(0.01, wait), LOOK_AGAIN_S))  # the rate may rise meanwhile
            self.set_road(credential, self.road(credential).spend(self.now()))

    def pause(self, credential: str, seconds: float) -> None:
        self.set_road(credential, self.road(credential).paused(self.now() + min(seconds, LONGEST_PAUSE_S)))

    def heard(self, upstream: Upstream, credential: str, answer: Answer | WireResponse) -> None:
        """Learns from the headers of a batch endpoint: the provider's clock, and the account's rate."""
        offset = clock_offset(answer, self.now())
        if offset is not None:
            self.offsets[upstream.provider] = offset
        rpm, road = upstream.dialect.requests_per_minute(answer.headers), self.road(credential)
        if rpm is not None:  # what is set explicitly is obeyed as far as the account allows
            self.set_road(credential, road.learned(min(rpm, self.policy.batch_rpm or rpm)))
        elif answer.status == 429:
            self.set_road(credential, road.slowed(self.now()))
        elif 200 <= answer.status < 300:
            self.set_road(credential, road.eased())

    def why_not(self, lane: Lane, credential: str, model: str) -> str | None:
        """Why a credential's account may not take a lane with a model; None where nobody refused it lately."""
        return self.learned.why_not(lane, self.keyring.account(credential), model)

    async def stopping(self, batch: Batch, note: str) -> None:
        """The provider stops a batch: whoever asked for it and whoever looks may notice in the same moment."""
        try:
            await self.store.move(batch.id, BatchState.CANCELLING, note=note)
        except IllegalMove:
            row = await self.store.batch(batch.id)
            if row is None or row.state is BatchState.OPEN:
                raise

    # reporting
    async def reached(self, point: str) -> None:
        """A named point on the way of a call, where a test may stop the process."""
        if self.probe is not None:
            await self.probe(point)

    def trouble(self, doing: str, error: BaseException) -> None:
        self.bulletin.tell(Trouble(self.now(), doing, named(error)))

    async def moved(self, batch: Batch, target: BatchState, **changes: object) -> Batch | None:
        """Moves a batch. None when it is another engine's by now, which decides what becomes of it: this one was taken
        for dead between its look and this."""
        try:
            return await self.store.move(batch.id, target, owner=self.name, **changes)
        except IllegalMove:
            row = await self.store.batch(batch.id)
            if row is None or row.owner == self.name:
                raise
            return None

    async def insist(self, doing: str, write: Callable[[], Awaitable[T]]) -> T:
        """Repeats a write that must not be forgotten until the store takes it."""
        delay = 0.1
        while True:
            try:
                return await write()
            except StoreError as error:
                if not error.retryable and not isinstance(error, StoreUnwritable):  # a full disk is freed some day
                    raise
                self.trouble(doing, error)
                await self.clock.sleep(delay)
                delay = min(delay * 2, 30.0)
