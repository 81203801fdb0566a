"""Several engines on one store before one provider, in virtual time."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec

from carpool.core.model import Call, Lane
from carpool.core.ports import RawRequest
from carpool.core.prices import PriceBook
from carpool.engine.cluster.membership import Lease
from carpool.mock import MockAnthropic, MockConfig, expected_text
from carpool.planners.access.options import Options
from carpool.planners.policy import RoutingPolicy
from carpool.sim.event_log import SimLog
from carpool.sim.network import Network
from carpool.sim.process import Process
from carpool.sim.timeline import Timeline, VirtualClock, run
from carpool.stores import SqliteStore

PRICES = PriceBook()
LEASE = Lease()


def said(number: int) -> dict[str, object]:
    return {"model": "claude-sonnet-5", "max_tokens": 50, "messages": [{"role": "user", "content": f"say {number}"}]}


class House:
    """Engines on one store, before one provider."""

    def __init__(self, timeline: Timeline, store: SqliteStore, config: MockConfig) -> None:
        self.timeline = timeline
        self.store = store
        self.provider = MockAnthropic(config, now=timeline.now)
        self.network = Network({"anthropic": self.provider}, random.Random(1))
        self.log = SimLog(timeline.now)
        self.policy = RoutingPolicy(linger_ms=500)
        self.engines: list[Process] = []

    async def boot(self, count: int, *, offset: float = 0.0, seed: int = 100) -> None:
        for number in range(count):
            clock = VirtualClock(self.timeline, offset)
            rng = random.Random(seed + number)
            shared = self.network, clock, self.policy, PRICES, self.log, rng, ("anthropic",), {}
            process = Process(f"engine {number}", self.store, *shared, LEASE)
            await process.start()
            self.engines.append(process)

    def call(
        self,
        process: Process,
        number: int,
        *,
        key: str = "sk-one",
        budget: float | None = None,
        lane: Lane | None = None,
    ) -> Call:
        headers = (("x-api-key", key), ("anthropic-version", "2023-06-01"))
        raw = RawRequest("POST", "/v1/messages", "", headers, msgspec.json.encode(said(number)))
        return process.call("anthropic", raw, Options(budget=budget, lane=lane))

    async def ask(self, process: Process, number: int, **more: object) -> None:
        reply = await process.submit(self.call(process, number, **more))  # type: ignore[arg-type]
        assert reply is not None
        message = msgspec.json.decode(reply.outcome.body)
        text = "".join(block.get("text", "") for block in message["content"])
        assert text == expected_text(said(number))

    def leader(self) -> Process:
        [led] = {name for name in (process.engine.name for process in self.engines) if name in self.owners()}
        return next(process for process in self.engines if process.engine.name == led)

    def owners(self) -> set[str]:
        rows = self.store._session.connection.execute("SELECT DISTINCT owner FROM batches").fetchall()
        return {row[0] for row in rows}

    @property
    def bought(self) -> Counter[str]:
        return Counter(charge.fingerprint for charge in self.provider.bill.charges)


def in_house(test: Callable[[House], Awaitable[None]], config: MockConfig) -> None:
    timeline = Timeline()

    @asynccontextmanager
    async def house() -> AsyncIterator[House]:
        store = await SqliteStore.open(None, threaded=False, secret=b"sharing")
        made = House(timeline, store, config)
        try:
            yield made
        finally:
            for process in made.engines:
                await process.engine.close(0.0)
            await made.network.close()
            await store.aclose()

    async def go() -> None:
        async with house() as made:
            await test(made)

    run(go(), timeline)
