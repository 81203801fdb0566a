"""A process of the simulation: an engine on the shared store, which can be killed between any two of its steps."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from carpool.dialects import get as get_dialect
from carpool.doors.intake import make_call
from carpool.doors.options import Options
from carpool.doors.proxy.hooks import PREFIX, Hooks
from carpool.engine import Engine, Event, Keyring, Reply, Upstream
from carpool.engine.core import LEASE
from carpool.engine.events import BatchAbandoned, Trouble
from carpool.engine.sharing import Lease
from carpool.engine.tasks import Crew
from carpool.errors import CarpoolError
from carpool.model import Batch, Call, Entry, Headers, Intent
from carpool.policy import RoutingPolicy
from carpool.ports import RawRequest, Store
from carpool.prices import PriceBook
from carpool.sim.network import Network, SimWire, address
from carpool.sim.story import Story
from carpool.sim.timeline import VirtualClock

Told = Callable[[BaseException | None], None]


class MortalStore:
    """The store as one process reaches it: every operation takes a moment, and none starts after the process died.

    The moments before and after an operation are where the tasks of a process interleave, and where it may be killed.
    """

    def __init__(self, store: Store, rng: random.Random, slowness: float) -> None:
        self._store = store
        self._rng = rng
        self._slowness = slowness
        self._owed: deque[tuple[Entry, Told]] = deque()
        self.dead = False
        self.running = asyncio.Event()  # not set while it is stopped, as by SIGSTOP
        self.running.set()
        self.usurped: list[str] = []

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._store, name)

        async def reached(*args: Any, **kwargs: Any) -> Any:
            await self._moment()
            result = await operation(*args, **kwargs)
            await self._moment()
            return result

        return reached

    async def lines(self, batch: int) -> AsyncIterator[list[tuple[int, bytes]]]:
        async for chunk in self._store.lines(batch):
            await self._moment()
            yield chunk

    def subscribe(self, listener: Callable[[Sequence[int]], None]) -> Callable[[], None]:
        return self._store.subscribe(listener)

    def watch(self, listener: Callable[[Sequence[str]], None]) -> Callable[[], None]:
        return self._store.watch(listener)

    def heed(self, listener: Callable[[Sequence[int]], None]) -> Callable[[], None]:
        return self._store.heed(listener)

    async def intend(self, intent: Intent) -> Batch | None:
        await self._moment()
        batch = await self._store.intend(intent)
        leaders = await self._store.leaders(intent.at)  # in the same instant: the store itself never suspends here
        if batch is not None and leaders.get(intent.account or "") != intent.owner:
            self.usurped.append(f"Batch {batch.id} was made by {intent.owner}, which does not lead its account.")
        await self._moment()
        return batch

    def attempted(self, entry: Entry) -> bool:
        return False  # its moments can't be waited for

    def completed(self, entry: Entry, told: Told) -> None:
        self._owed.append((entry, told))
        asyncio.get_running_loop().call_later(self._rng.random() * self._slowness, self._write)

    def _write(self) -> None:
        if self._owed and not self.dead:
            self._store.completed(*self._owed.popleft())

    async def aclose(self) -> None:
        while self._owed and not self.dead:
            self._write()  # the disk itself outlives the process

    @property
    def durable(self) -> bool:
        return True

    @property
    def pepper(self) -> bytes:
        return self._store.pepper

    async def _moment(self) -> None:
        await asyncio.sleep(self._rng.random() * self._slowness)
        await self.running.wait()
        if self.dead:
            raise asyncio.CancelledError


class Process:
    def __init__(
        self,
        name: str,
        store: Store,
        network: Network,
        clock: VirtualClock,
        policy: RoutingPolicy,
        prices: PriceBook,
        story: Story,
        rng: random.Random,
        providers: Sequence[str],
        hook_secrets: Mapping[str, str],
        lease: Lease = LEASE,
    ) -> None:
        self.name = name
        self.died: asyncio.Event = asyncio.Event()
        self._story = story
        self._clock = clock
        self._store = MortalStore(store, rng, slowness=rng.choice([0.0, 0.002, 0.05]))
        self._wire = SimWire(network, self._store.running, name, story)
        self._upstreams = {one: Upstream(one, address(one), get_dialect(one), self._wire) for one in providers}
        self.engine = Engine(
            store=cast("Store", self._store),
            clock=clock,
            upstreams=self._upstreams,
            keyring=Keyring(store.pepper),
            policy=policy,
            prices=prices,
            hooks=(self._tell,),
            rng=rng,
            lease=lease,
        )
        self._hooks = Hooks(self.engine, clock, hook_secrets)
        self.abandoned: list[int] = []
        self.illegal: list[str] = []
        self._clients = Crew()

    def _tell(self, event: Event) -> None:
        if isinstance(event, Trouble) and "IllegalMove" in event.reason:
            self.illegal.append(event.reason)
        if isinstance(event, BatchAbandoned):
            self.abandoned.append(event.batch)
        self._story.event(self.name, event)

    async def start(self) -> None:
        await self.engine.start()

    def show(self, secrets: Iterable[tuple[str, Headers]]) -> None:
        """Lets the process know these keys, so that what waits for them goes on."""
        for provider, secret in secrets:
            self.engine.enrol(provider, secret)

    def call(self, provider: str, raw: RawRequest, options: Options) -> Call:
        return make_call(self.engine, self._upstreams[provider], self._clock, raw, options)

    async def hook(self, provider: str, headers: Headers, body: bytes) -> int:
        """A provider's webhook reaches the door."""
        answered: list[int] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            answered.append(message.get("status", 0))

        try:
            await self._hooks.answer("POST", f"{PREFIX}{provider}", headers, receive, send)
        except CarpoolError as error:
            return error.status
        return answered[0]

    async def submit(self, call: Call) -> Reply | None:
        """The reply, or None when the process died first: then the client's connection is simply gone."""
        task = self._clients.lend(self.engine.submit(call), "submit")
        dying = self._clients.lend(self.died.wait(), "dying")
        try:
            await asyncio.wait({task, dying}, return_when=asyncio.FIRST_COMPLETED)
            if self.died.is_set():
                return None
            reply = task.result()
            self.engine.delivered_soon(reply.ticket)
            return reply
        finally:
            dying.cancel()
            task.cancel()

    @property
    def usurped(self) -> list[str]:
        """Batches that it made for accounts which it did not lead."""
        return self._store.usurped

    def stop(self) -> None:
        """SIGSTOP: nothing more is written or sent, until it goes on."""
        self._store.running.clear()

    def go_on(self) -> None:
        self._store.running.set()

    def kill(self) -> None:
        """kill -9: nothing more is written, sent or told."""
        self._store.dead = True
        self.go_on()
        self._wire.dead = True
        self.died.set()
        self.engine.abort()
        self._clients.abort()
