"""Simulation: the production engine under virtual time. A seed generates a world; the checks verify the guarantees."""

from __future__ import annotations

from dataclasses import dataclass

from carpool.sim.checks import problems
from carpool.sim.plan import Fleet, Plan, draw
from carpool.sim.timeline import Timeline, run
from carpool.sim.world import World, run_world

__all__ = ["Fleet", "Plan", "Report", "World", "draw", "simulate"]


@dataclass(frozen=True, slots=True)
class Report:
    seed: int
    problems: tuple[str, ...]
    log: str
    calls: int
    batches: int
    simulated_s: float


def simulate(seed: int, fleet: Fleet | None = None, store: str | None = None) -> Report:
    """Run and check one world. `fleet` overrides which providers its agents call. `store` is the address of an empty
    store; None keeps it in memory."""
    timeline = Timeline()
    return run(_simulate(draw(seed, fleet), timeline, store), timeline)


async def _simulate(plan: Plan, timeline: Timeline, store: str | None) -> Report:
    world = await run_world(plan, timeline, store)
    try:
        return Report(
            seed=plan.seed,
            problems=tuple(await problems(world)),
            log=world.log.text(),
            calls=len(world.turns),
            batches=sum(len(provider.batches) for provider in world.providers.values()),
            simulated_s=timeline.time(),
        )
    finally:
        await world.store.aclose()
