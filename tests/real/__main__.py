"""`make test-real`: real clients, each in its own process and environment, through `carpool serve` to the mock."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from . import agents, environments, evals, fleet, frameworks, sdks, waits
from .stage import Stage, Trouble, staged
from .verdicts import Cell, Verdict, table

WORK = environments.ENVS / ("real-slow" if "--slow" in sys.argv else "real-run")
AT_ONCE = 2
PARTS = {"langchain-openai", "@ai-sdk/anthropic", "@ai-sdk/openai", "zod", "undici"}  # of clients and of tests

Trial = Callable[[Stage], Awaitable[list[Verdict]]]


async def tried(name: str, trial: Trial, stage: Stage, gate: asyncio.Semaphore) -> list[Verdict]:
    async with gate:
        started = time.monotonic()
        try:
            verdicts = await trial(stage)
        except Trouble as trouble:
            verdicts = [Verdict(Cell(name, "", ""), str(trouble))]
        except Exception:  # noqa: BLE001  whatever it is, it is reported and the other clients run
            verdicts = [Verdict(Cell(name, "", ""), traceback.format_exc())]
        bad = [one for one in verdicts if one.trouble]
        took = f"{time.monotonic() - started:.1f} s"
        print(f"  {name}: {len(verdicts) - len(bad)} of {len(verdicts)} in {took}", flush=True)
        for one in verdicts:
            if one.note:
                print(f"    {one.note}", flush=True)
        for one in bad:
            print(f"    FAILED {one.cell}: {one.trouble}", flush=True)
        return verdicts


def matrix() -> list[tuple[str, Trial]]:
    """Every client on every lane that it can take."""
    trials: list[tuple[str, Trial]] = [
        (sdk.name, partial(sdks.try_matrix, sdk)) for sdk in (*sdks.ANTHROPIC, *sdks.OPENAI)
    ]
    trials += [(one.name, partial(frameworks.try_framework, one)) for one in frameworks.FRAMEWORKS]
    trials += [(agents.name_of(agent), partial(agents.try_agent, agent)) for agent in agents.AGENTS]
    trials += [(f"{evals.name()}, {lane}", partial(evals.try_eval, lane)) for lane in evals.OPTIONS]
    return trials


def long_waits(scale: waits.Scale) -> list[tuple[str, Trial]]:
    """Every client against a batch that takes longer than it would wait in silence."""
    kinds = (*sdks.ANTHROPIC, *(sdk for sdk in sdks.OPENAI if sdk.script.endswith(".py")))
    trials: list[tuple[str, Trial]] = [(sdk.name, partial(waits.try_sdk, sdk, scale)) for sdk in kinds]
    for agent in (one for one in agents.AGENTS if one.lanes is agents.BOTH_LANES):
        trials += [(agents.name_of(agent), partial(waits.try_agent, agent, scale))]
        # Agents try again before they give up, which would take hours in real time.
        if agent.ends_on_failure and scale is waits.SCALED:
            trials += [(f"{agents.name_of(agent)}, a late failure", partial(waits.try_agents_failure, agent, scale))]
    return trials


async def trying(trials: Sequence[tuple[str, Trial]], stage: Stage, at_once: int) -> list[Verdict]:
    gate = asyncio.Semaphore(at_once)
    told = await asyncio.gather(*(tried(name, trial, stage, gate) for name, trial in trials))
    return [verdict for verdicts in told for verdict in verdicts]


async def quick(only: str) -> list[Verdict]:
    def wanted(trials: Iterable[tuple[str, Trial]]) -> list[tuple[str, Trial]]:
        return [(name, trial) for name, trial in trials if only in name]

    verdicts = []
    print("Every client on every lane:", flush=True)
    async with staged(WORK / "matrix", vendors=sdks.VENDORS) as stage:
        verdicts += await trying(wanted(matrix()), stage, AT_ONCE)
    print("A fleet:", flush=True)
    async with staged(WORK / "fleet", config=fleet.PACE) as stage:
        verdicts += await trying(wanted([("30 agents at once", fleet.try_fleet)]), stage, 1)
    print("Long waits, scaled:", flush=True)
    vendors = sdks.VENDORS
    async with staged(WORK / "waits", waits.SCALED.settings, waits.SCALED.serve, vendors=vendors) as stage:
        verdicts += long(await trying(wanted(long_waits(waits.SCALED)), stage, at_once=4))  # they mostly wait
    return verdicts


def long(verdicts: Iterable[Verdict]) -> list[Verdict]:
    return [replace(one, cell=replace(one.cell, lane="a long wait")) for one in verdicts]


async def slow() -> list[Verdict]:
    print(f"Long waits, in real time: this takes {waits.REAL.seconds / 60:.0f} minutes.", flush=True)
    async with staged(WORK / "slow", waits.REAL.settings, vendors=sdks.VENDORS) as stage:
        return long(await trying(long_waits(waits.REAL), stage, at_once=100))


def check_all_tried() -> None:
    """Whoever is in the table is tried."""
    tried = {one.row for one in (*sdks.ANTHROPIC, *sdks.OPENAI, *agents.AGENTS)} | {"inspect"}
    tried |= {one.package for one in frameworks.FRAMEWORKS} | PARTS
    rows = environments.TABLE["python"].items()
    named = {name for row, packages in rows for name in ([row] if row in tried else environments.packages(packages))}
    untried = {*named, *environments.TABLE["node"]} - tried
    if untried:
        raise environments.Missing(f"Nothing tries {', '.join(sorted(untried))}, which versions.toml names.")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make test-real")
    parser.add_argument("--slow", action="store_true", help="batches of twenty minutes, in real time, and nothing else")
    parser.add_argument("--only", default="", help="clients whose name contains this")
    asked = parser.parse_args()
    started = time.monotonic()
    print("Real clients: installing what is not here yet ...", flush=True)
    try:
        check_all_tried()
        environments.ensure()
    except environments.Missing as missing:
        print(missing, file=sys.stderr)
        return 2
    shutil.rmtree(WORK, ignore_errors=True)
    verdicts = asyncio.run(slow() if asked.slow else quick(asked.only))
    print(f"\n{table(verdicts)}\n")
    bad = sum(one.trouble is not None for one in verdicts)
    print(f"{len(verdicts) - bad} of {len(verdicts)} passed in {time.monotonic() - started:.0f} s")
    if bad:
        print(f"What the processes said is in {WORK}.")
    return 1 if bad or not verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
