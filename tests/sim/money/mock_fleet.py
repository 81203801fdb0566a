"""A fleet before the mock, in virtual time, with the record of its calls in a store on disk.

Agents converse through the real engine: each turn sends the whole conversation, marked for the cache as a good client
does it, once the last answer is there and the agent's pause is over. The mock keeps a bill of its own.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from carpool.core.model import Lane, Outcome
from carpool.core.ports import RawRequest
from carpool.core.prices import PriceBook
from carpool.dialects import get
from carpool.engine import Engine, Keyring, Upstream
from carpool.engine.background import BackgroundTasks
from carpool.frontends.intake import make_call
from carpool.mock import MockAnthropic, MockConfig
from carpool.planners.access.options import Options
from carpool.planners.forecast import Forecast
from carpool.planners.policy import RoutingPolicy
from carpool.sim.event_log import SimLog
from carpool.sim.network import Network, SimHttpClient, address
from carpool.sim.timeline import Timeline, VirtualClock, run
from carpool.stores import open_store

PRICES = PriceBook()
BATCHES_END_S = 6 * 3600.0  # after the last answer: until then, those that were rescued from have ended, too
SONNET, HAIKU = "claude-sonnet-4-6", "claude-haiku-4-5"


@dataclass(frozen=True)
class FleetAgent:
    """One turn for each pause. `words` is the size of what it adds to its conversation each time."""

    name: str
    starts: float
    pauses: Sequence[float]
    system: str
    words: int = 300
    model: str = SONNET
    tags: Mapping[str, str] = field(default_factory=dict)
    key: str = "sk-fleet"
    client: str = "agent/1.0"
    ttl: str | None = "5m"
    marks_system: bool = True
    output: int = 1000  # the most


class MockFleet:
    def __init__(
        self,
        path: Path,
        agents: Sequence[FleetAgent],
        config: MockConfig,
        budget: float | None,
        forecast: Forecast | None = None,
    ) -> None:
        self._path = path
        self._agents = agents
        self._budget = budget
        self._forecast = forecast
        self._timeline = Timeline()
        self.mock = MockAnthropic(config, now=self._timeline.now)
        self.waits: list[float] = []

    def go(self) -> MockFleet:
        run(self._go(), self._timeline)
        return self

    @property
    def bill(self) -> int:
        return self.mock.bill.total()

    async def _go(self) -> None:
        running = asyncio.Event()
        running.set()
        network = Network({"anthropic": self.mock}, random.Random(0), latency=0.0)
        store = await open_store(self._path, secret=b"the secret of a fleet", inline=True)
        client = SimHttpClient(network, running, "engine", SimLog(self._timeline.now))
        self._upstream = Upstream("anthropic", address("anthropic"), get("anthropic"), client)
        self._clock = VirtualClock(self._timeline)
        self._engine = Engine(
            store=store,
            clock=self._clock,
            upstreams={"anthropic": self._upstream},
            keyring=Keyring(store.pepper),
            policy=RoutingPolicy(),
            prices=PRICES,
            forecast=self._forecast,
            rng=random.Random(1),
        )
        await self._engine.start()
        background = BackgroundTasks()
        await asyncio.gather(*(background.spawn_awaited(self._run(agent), "agent") for agent in self._agents))
        await asyncio.sleep(BATCHES_END_S)
        await self._engine.close(0.0)
        await network.close()

    async def _run(self, agent: FleetAgent) -> None:
        await asyncio.sleep(agent.starts)
        messages: list[dict[str, Any]] = []
        for number, pause in enumerate(agent.pauses):
            await asyncio.sleep(pause)
            messages.append({"role": "user", "content": [_text(f"{agent.name} {number} " + "word " * agent.words)]})
            asked = self._timeline.time()
            outcome = await self._ask(agent, _body(agent, messages))
            self.waits.append(self._timeline.time() - asked)
            assert outcome.status == 200, outcome.body
            messages.append({"role": "assistant", "content": msgspec.json.decode(outcome.body)["content"]})

    async def _ask(self, agent: FleetAgent, body: dict[str, Any]) -> Outcome:
        headers = (("x-api-key", agent.key), ("anthropic-version", "2023-06-01"), ("user-agent", agent.client))
        raw = RawRequest("POST", "/v1/messages", "", headers, msgspec.json.encode(body))
        lane = Lane.NOW if self._budget is None else None
        options = Options(budget=self._budget, lane=lane, tags=dict(agent.tags))
        call = make_call(self._engine, self._upstream, self._clock, raw, options)
        reply, pending = await self._engine.submit(call)
        self._engine.deliveries.add(reply.ticket, pending)
        return reply.outcome


def _text(text: str, ttl: str | None = None) -> dict[str, Any]:
    marked = {} if ttl is None else {"cache_control": {"type": "ephemeral", "ttl": ttl}}
    return {"type": "text", "text": text, **marked}


def _body(agent: FleetAgent, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    *before, last = messages
    marked = {**last, "content": [_text(last["content"][0]["text"], agent.ttl)]}
    return {
        "model": agent.model,
        "max_tokens": agent.output,
        "system": [_text(agent.system, agent.ttl if agent.marks_system else None)],
        "messages": [*before, marked],
    }
