"""A simulated run: the production engine, dialects and store under virtual time, in a world drawn from a seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from carpool.core.lifecycle import UNFINISHED
from carpool.core.ports import Store
from carpool.core.prices import PriceBook
from carpool.engine.background import BackgroundTasks
from carpool.mock import MockAnthropic
from carpool.sim.agents import Agent, SimTurn
from carpool.sim.event_log import SimLog
from carpool.sim.network import Network
from carpool.sim.plan import Crash, Plan
from carpool.sim.process import Process
from carpool.sim.timeline import Timeline, VirtualClock
from carpool.stores import open_store

LONGEST_S = 2 * 86_400.0  # the longest budget is hours, the longest batch a day
WAIT_FOR_BATCHES_S = 4 * 86_400.0  # time for unfinished and abandoned batches to end
PRICES = PriceBook()  # shared by all worlds, because it caches prices


@dataclass(slots=True)
class World:
    """The final state of a run, for the checks."""

    plan: Plan
    providers: Mapping[str, MockAnthropic]
    store: Store
    log: SimLog
    turns: list[SimTurn]
    refused: Mapping[tuple[str, bytes], int]  # path and body → status of the last refusal; the latest is last
    processes: list[Process] = field(default_factory=list)
    stuck: str | None = None


class Run:
    def __init__(self, plan: Plan, timeline: Timeline, store: Store) -> None:
        self._plan = plan
        self._timeline = timeline
        self._rng = random.Random(plan.seed + 1)  # noqa: S311  a world must be the same every time
        self._log = SimLog(timeline.now)
        self._providers = {name: MockAnthropic(mock, now=timeline.now) for name, mock in plan.mocks.items()}
        self._network = Network(self._providers, self._rng, refuse=plan.refuse)
        self._background = BackgroundTasks()
        self._live: list[Process] = []
        self._any_live = asyncio.Event()
        agents = [Agent(agent, self._find, timeline.now, self._log) for agent in plan.agents]
        self._agents = agents
        turns = [turn for agent in agents for turn in agent.turns]
        self.world = World(plan, self._providers, store, self._log, turns, self._network.refused)

    async def go(self) -> World:
        for number in range(self._plan.engines):
            await self._boot(f"engine {number}")
        crashing = self._background.spawn_awaited(self._crash_all(), "crashes")
        for name, provider in self._providers.items():
            self._background.spawn_awaited(provider.carry_hooks(partial(self._post, name)), "webhooks")
        stopping = self._background.spawn_awaited(self._stop_all(), "stops")
        agents = [self._background.spawn_awaited(agent.run(), "agent") for agent in self._agents]
        try:
            async with asyncio.timeout(LONGEST_S):
                await asyncio.gather(*agents)
                await crashing
                await stopping
        except TimeoutError:
            self.world.stuck = "some agents never got an answer"
        await self._wait_for_batches()
        for process in self._live:
            await process.engine.close(0.0)
        await self._background.finish(0.0)
        await self._network.close()
        return self.world

    # processes

    async def _boot(self, name: str) -> None:
        process = Process(
            name,
            self.world.store,
            self._network,
            VirtualClock(self._timeline, self._plan.clock_offset),
            self._plan.policy,
            PRICES,
            self._log,
            random.Random(self._rng.random()),  # noqa: S311
            tuple(self._providers),
            {name: mock.openai.webhook_secret for name, mock in self._plan.mocks.items()},
            self._plan.lease,
        )
        self.world.processes.append(process)
        await process.start()
        self._live.append(process)
        self._any_live.set()
        self._log.add(name, "starts")

    async def _find(self) -> Process:
        while not self._live:
            self._any_live.clear()
            await self._any_live.wait()
        return self._rng.choice(self._live)

    async def _post(self, provider: str, url: str, headers: Mapping[str, str], body: bytes) -> int:
        """Deliver a webhook to any one of the processes, or to none."""
        await asyncio.sleep(self._rng.random())
        if not self._live:
            raise ConnectionRefusedError
        process = self._rng.choice(self._live)
        status = await process.hook(provider, tuple(headers.items()), body)
        self._log.add(process.name, f"is told by {provider}: {body.decode()} -> {status}")
        return status

    async def _crash_all(self) -> None:
        for number, crash in enumerate(self._plan.crashes):
            await asyncio.sleep(max(0.0, crash.at - self._timeline.time()))
            await self._crash(crash, number)

    async def _crash(self, crash: Crash, number: int) -> None:
        victim = self._live.pop(self._rng.randrange(len(self._live)))
        victim.kill()
        self._log.add(victim.name, "is killed")
        if crash.clean:  # the next process that opens the file gets its lock, so the leases are void
            await self.world.store.leave(victim.engine.name)
            await self.world.store.take_over("", (), self._timeline.now() + self._plan.clock_offset)
        await asyncio.sleep(crash.back_after)
        await self._boot(f"engine {number + max(2, self._plan.engines)}")

    async def _stop_all(self) -> None:
        for stop in self._plan.stops:
            await asyncio.sleep(max(0.0, stop.at - self._timeline.time()))
            if self._live:
                await self._stop(self._rng.choice(self._live), stop.lasts)

    async def _stop(self, process: Process, seconds: float) -> None:
        process.suspend()
        self._log.add(process.name, "stands still")
        await asyncio.sleep(seconds)
        process.resume()
        self._log.add(process.name, "goes on")

    # shutdown

    async def _wait_for_batches(self) -> None:
        """Give bought batches time to be collected."""
        for process in self._live:
            process.add_secrets((agent.provider, agent.secret) for agent in self._plan.agents)
        waited = 0.0
        while waited < WAIT_FOR_BATCHES_S and await self._unfinished():
            await asyncio.sleep(1800.0)
            waited += 1800.0

    async def _unfinished(self) -> int:
        counts = await self.world.store.counts()
        tickets = counts["tickets.queued"] + counts["tickets.boarded"] + counts["tickets.sending"]
        return tickets + sum(counts.get(f"batches.{state}", 0) for state in UNFINISHED)


async def run_world(plan: Plan, timeline: Timeline, store: str | None = None) -> World:
    """Run a world. `store` None keeps it in memory; else it must be the address of an empty store."""
    return await Run(plan, timeline, await open_store(store, secret=b"simulation", inline=True)).go()
