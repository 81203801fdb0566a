"""Runs a trace through the real engine: real requests over the simulated network to the mock, under the virtual clock.

The network takes no time and nothing fails, so what remains is what the engine decides.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import msgspec

from carpool.core.model import Lane, ticket_number
from carpool.core.ports import RawRequest
from carpool.core.prices import PriceBook
from carpool.dialects import get
from carpool.engine import Engine, Event, Keyring, Upstream
from carpool.engine.background import BackgroundTasks
from carpool.engine.events import CallRescued
from carpool.frontends.intake import make_call
from carpool.mock import Constant, MockAnthropic, MockConfig
from carpool.planners.access.options import Options
from carpool.planners.forecast import Forecast
from carpool.planners.policy import RoutingPolicy
from carpool.sim.event_log import SimLog
from carpool.sim.money.model import Trace, TraceSession
from carpool.sim.money.worlds import ProviderWorld
from carpool.sim.network import Network, SimHttpClient, address
from carpool.sim.timeline import Timeline, VirtualClock, run
from carpool.stores import open_store

from .turn_latencies import Place, TurnLatencies

PRICES = PriceBook()
HEADERS = (("x-api-key", "sk-money"), ("anthropic-version", "2023-06-01"))
EXECUTED = 1  # of the mock's outcomes


@dataclass
class Observed:
    """How one turn went."""

    asked: float
    answered: float
    lane: Lane
    rescued: bool


@dataclass
class EngineRun:
    trace: Trace
    world: ProviderWorld
    seed: int
    settings: RoutingPolicy
    budget_s: float | None
    turns: dict[Place, Observed] = field(default_factory=dict)
    shared: set[frozenset[Place]] = field(default_factory=set)  # calls of a batch that answered any, if executed

    def __post_init__(self) -> None:
        self._latencies = TurnLatencies(self.world, self.trace, self.seed)
        self._tickets: dict[int, Place] = {}
        self._rescued: set[int] = set()
        self._answering: set[str] = set()
        self._timeline = Timeline()

    def go(self) -> None:
        run(self._go(), self._timeline)
        for name in self._answering:
            batch = self._mock.batch(name)
            executed = (one for one, state in zip(batch.custom_ids, batch.outcomes, strict=True) if state == EXECUTED)
            self.shared.add(frozenset(self._tickets[ticket_number(one.partition("-")[2])] for one in executed))

    async def _go(self) -> None:
        self._mock = MockAnthropic(
            MockConfig(
                seed=self.seed,
                request_latencies=self._latencies,
                cancel_latency=Constant(self.world.cancel_s),
                batch_rpm=self.world.batch_rpm,
                expiry_s=self.world.expiry_s,
            ),
            now=self._timeline.now,
        )
        running = asyncio.Event()
        running.set()
        log = self.log = SimLog(self._timeline.now)
        network = Network({"anthropic": self._mock}, random.Random(0), latency=0.0)
        store = await open_store(None, secret=b"money", inline=True)
        client = SimHttpClient(network, running, "engine", log)
        self._upstream = Upstream("anthropic", address("anthropic"), get("anthropic"), client)
        self._clock = VirtualClock(self._timeline)
        engine = self._engine = Engine(
            store=store,
            clock=self._clock,
            upstreams={"anthropic": self._upstream},
            keyring=Keyring(store.pepper),
            policy=self.settings,
            prices=PRICES,
            forecast=Forecast(learns=False),  # as the simulated policy has it
            hooks=(self._tell,),
            rng=random.Random(self.seed),
        )
        await engine.start()
        engine.add_secret("anthropic", HEADERS[:1])
        background = BackgroundTasks()
        sessions = enumerate(self.trace.sessions)
        await asyncio.gather(*(background.spawn_awaited(self._agent(*one), "agent") for one in sessions))
        await engine.close(0.0)
        await network.close()

    def _tell(self, event: Event) -> None:
        if isinstance(event, CallRescued):
            self._rescued.add(ticket_number(event.ticket))

    async def _agent(self, number: int, session: TraceSession) -> None:
        await asyncio.sleep(session.starts)
        for position, turn in enumerate(session.turns):
            await asyncio.sleep(turn.think_s)
            asked = self._timeline.time()
            asks = body(session, position)
            self._latencies.know(asks, (number, position))
            raw = RawRequest("POST", "/v1/messages", "", HEADERS, msgspec.json.encode(asks))
            call = make_call(self._engine, self._upstream, self._clock, raw, Options(budget=self.budget_s))
            self._tickets[call.ticket] = number, position
            reply, pending = await self._engine.submit(call)
            self._engine.deliveries.add(reply.ticket, pending)
            assert reply.outcome.status == 200, reply.outcome.body
            place, lane = (number, position), reply.outcome.lane
            self.turns[place] = Observed(asked, self._timeline.time(), lane, call.ticket in self._rescued)
            if reply.outcome.batch:
                self._answering.add(reply.outcome.batch)


def body(session: TraceSession, position: int) -> dict[str, Any]:
    """A conversation that has come so far, marked for the cache as its client does."""
    said: list[dict[str, Any]] = []
    for turn in range(position + 1):
        said += [{"role": "user", "content": f"turn {turn}"}, {"role": "assistant", "content": f"answer {turn}"}]
    marked = {"type": "text", "text": f"turn {position}", "cache_control": {"type": "ephemeral"}}
    said[-2:] = [{"role": "user", "content": [marked]}]
    return {
        "model": session.model,
        "max_tokens": session.max_output_tokens,
        "system": session.name,
        "messages": said,
    }
