"""A simulated process: an engine on the shared store that can be killed between any two of its steps."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from carpool.core.errors import CarpoolError
from carpool.core.model import Batch, Call, Entry, Headers, Intent
from carpool.core.ports import RawRequest, Store
from carpool.core.prices import PriceBook
from carpool.dialects import get as get_dialect
from carpool.engine import Engine, Event, Keyring, PendingCall, Reply, Upstream
from carpool.engine.background import BackgroundTasks
from carpool.engine.cluster.membership import Lease
from carpool.engine.engine import LEASE
from carpool.engine.events import Trouble
from carpool.frontends.intake import make_call
from carpool.frontends.proxy.admin import HOOKS, Webhooks
from carpool.planners.access.options import Options
from carpool.planners.policy import RoutingPolicy
from carpool.sim.event_log import SimLog
from carpool.sim.hang_ups import Cut
from carpool.sim.network import Network, SimHttpClient, address
from carpool.sim.timeline import VirtualClock

OnDone = Callable[[BaseException | None], None]
RESET_S = 0.09  # a reset arrives this soon, before a response is persisted as delivered


class ConnectionCut(Exception):
    """A client broke its connection in the middle of its response."""


class KillableStore:
    """The store as seen by one process: every operation takes a moment, and none starts after the process died.

    The delays before and after an operation are where the tasks of a process interleave, and where it may be killed.
    """

    def __init__(self, store: Store, rng: random.Random, slowness: float) -> None:
        self._store = store
        self._rng = rng
        self._slowness = slowness
        self._unwritten: deque[tuple[Entry, OnDone]] = deque()
        self.dead = False
        self.running = asyncio.Event()  # cleared while it is suspended, as by SIGSTOP
        self.running.set()
        self.without_lead: list[str] = []

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._store, name)

        async def reached(*args: Any, **kwargs: Any) -> Any:
            await self._delay()
            result = await operation(*args, **kwargs)
            await self._delay()
            return result

        return reached

    async def lines(self, batch: int) -> AsyncIterator[list[tuple[int, bytes]]]:
        async for chunk in self._store.lines(batch):
            await self._delay()
            yield chunk

    def subscribe(self, listener: Callable[[Sequence[int]], None]) -> Callable[[], None]:
        return self._store.subscribe(listener)

    def on_pool_change(self, listener: Callable[[Sequence[str]], None]) -> Callable[[], None]:
        return self._store.on_pool_change(listener)

    def on_batch_hint(self, listener: Callable[[Sequence[int]], None]) -> Callable[[], None]:
        return self._store.on_batch_hint(listener)

    async def intend(self, intent: Intent) -> Batch | None:
        await self._delay()
        batch = await self._store.intend(intent)
        leaders = await self._store.leaders(intent.at)  # at the same instant: the store itself never suspends here
        if batch is not None and leaders.get(intent.account or "") != intent.owner:
            self.without_lead.append(f"Batch {batch.id} was made by {intent.owner}, which does not lead its account.")
        await self._delay()
        return batch

    def attempted(self, entry: Entry) -> bool:
        return False  # it can't wait for the delays

    def completed(self, entry: Entry, on_done: OnDone) -> None:
        self._unwritten.append((entry, on_done))
        asyncio.get_running_loop().call_later(self._rng.random() * self._slowness, self._write)

    def _write(self) -> None:
        if self._unwritten and not self.dead:
            self._store.completed(*self._unwritten.popleft())

    async def aclose(self) -> None:
        while self._unwritten and not self.dead:
            self._write()  # the disk outlives the process

    @property
    def durable(self) -> bool:
        return True

    @property
    def pepper(self) -> bytes:
        return self._store.pepper

    async def _delay(self) -> None:
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
        log: SimLog,
        rng: random.Random,
        providers: Sequence[str],
        hook_secrets: Mapping[str, str],
        lease: Lease = LEASE,
    ) -> None:
        self.name = name
        self.died: asyncio.Event = asyncio.Event()
        self._log = log
        self._rng = rng
        self._clock = clock
        self._store = KillableStore(store, rng, slowness=rng.choice([0.0, 0.002, 0.05]))
        self._http_client = SimHttpClient(network, self._store.running, name, log)
        self._upstreams = {one: Upstream(one, address(one), get_dialect(one), self._http_client) for one in providers}
        self.engine = Engine(
            store=cast("Store", self._store),
            clock=clock,
            upstreams=self._upstreams,
            keyring=Keyring(store.pepper),
            policy=policy,
            prices=prices,
            hooks=(self._on_event,),
            rng=rng,
            lease=lease,
        )
        self._hooks = Webhooks(self.engine, clock, hook_secrets)
        self.illegal: list[str] = []
        self._clients = BackgroundTasks()

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Trouble) and "IllegalMove" in event.reason:
            self.illegal.append(event.reason)
        self._log.event(self.name, event)

    async def start(self) -> None:
        await self.engine.start()

    def add_secrets(self, secrets: Iterable[tuple[str, Headers]]) -> None:
        """Give these keys to the process, so that work that needs them continues."""
        for provider, secret in secrets:
            self.engine.add_secret(provider, secret)

    def call(self, provider: str, raw: RawRequest, options: Options) -> Call:
        return make_call(self.engine, self._upstreams[provider], self._clock, raw, options)

    async def hook(self, provider: str, headers: Headers, body: bytes) -> int:
        """Receive a provider's webhook."""

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        try:
            await self._hooks.answer("POST", f"{HOOKS}{provider}", headers, receive)
        except CarpoolError as error:
            return error.status
        return 200

    async def submit(self, call: Call, cut: Cut | None = None) -> Reply | None:
        """The reply, or None if the process died first and the connection is gone. With `cut` the client breaks the
        connection in the middle of its response."""
        task = self._clients.spawn_awaited(self.engine.submit(call), "submit")
        dying = self._clients.spawn_awaited(self.died.wait(), "dying")
        try:
            await asyncio.wait({task, dying}, return_when=asyncio.FIRST_COMPLETED)
            if self.died.is_set():
                return None
            return await self._deliver(*task.result(), cut)
        except asyncio.CancelledError:  # the client disconnects, perhaps just when the response is ready
            if task.done() and not task.cancelled() and task.exception() is None:
                self._leave(*task.result())
            raise
        finally:
            dying.cancel()
            task.cancel()

    async def _deliver(self, reply: Reply, pending_call: PendingCall | None, cut: Cut | None) -> Reply:
        """Deliver as the proxy does: a response may be cut off, or turn out a moment later not to have arrived."""
        if cut is not Cut.UNREAD:
            self.engine.deliveries.add(reply.ticket, pending_call)
        if cut is Cut.RESET:
            await asyncio.sleep(self._rng.random() * RESET_S)
        if cut is not None:
            self._leave(reply, pending_call)
            raise ConnectionCut
        return reply

    def _leave(self, reply: Reply, pending_call: PendingCall | None) -> None:
        self.engine.deliveries.take_back(reply.ticket)
        if pending_call is not None:
            self.engine.tickets.leave(pending_call)

    @property
    def without_lead(self) -> list[str]:
        """Batches that it created for accounts that it did not lead."""
        return self._store.without_lead

    def suspend(self) -> None:
        """SIGSTOP: nothing is written or sent until it continues."""
        self._store.running.clear()

    def resume(self) -> None:
        self._store.running.set()

    def kill(self) -> None:
        """kill -9: nothing more is written, sent or logged."""
        self._store.dead = True
        self.resume()
        self._http_client.dead = True
        self.died.set()
        self.engine.abort()
        self._clients.abort()
