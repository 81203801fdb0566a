"""Thirty agents of two kinds begin within half a second, each with half an hour: they share a handful of batches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from . import environments
from .checks import check_bill, check_turns
from .sdks import ANTHROPIC, Ask, Sdk, last_line, turns_of
from .stage import Stage, environment, expect
from .verdicts import Cell, Verdict

AGENTS, KEY = 30, "sk-fleet"
PACE = "batching: {linger_ms: 3000, poll_interval_s: 0.2}\n"  # thirty processes start slowly on a busy machine
MOST_BATCHES = 6  # two turns each; a straggler may miss its batch


async def try_fleet(stage: Stage) -> list[Verdict]:
    kinds = (ANTHROPIC[0], ANTHROPIC[2])  # both speak the newer of the two dialects
    asks = [asks_of(sdk, number, stage) for number, sdk in enumerate(kinds)]
    told = await together([(sdk, some) for sdk, some in zip(kinds, asks, strict=True)], stage)
    fingerprints = []
    for ask in (ask for some in asks for ask in some):
        heard = told[ask.name]
        expect("error" not in heard, f"{ask.name} failed with {heard.get('error')}")
        fingerprints += check_turns(heard["turns"], ask.turns)
    seen = await stage.seen(KEY)
    check_bill(seen, "batch", fingerprints)
    sizes = sorted(batch["size"] for batch in seen.batches)
    expect(len(sizes) <= MOST_BATCHES, f"{AGENTS} agents made {len(sizes)} batches, of the sizes {sizes}")
    return [Verdict(Cell(f"{AGENTS} agents at once", "batch", "whole", tools=True), note=f"batches of {sizes}")]


def asks_of(sdk: Sdk, number: int, stage: Stage) -> list[Ask]:
    count = AGENTS // 2
    names = [f"agent {number * count + one}" for one in range(count)]
    return [
        Ask(
            name,
            KEY,
            stage.at("@budget=30m"),
            turns_of(name, tools=True),
            tools=True,
            style=sdk.styles[one % len(sdk.styles)],
        )
        for one, name in enumerate(names)
    ]


async def together(groups: Sequence[tuple[Sdk, Sequence[Ask]]], stage: Stage) -> dict[str, Any]:
    """All are ready before anybody begins."""
    ready: list[asyncio.subprocess.Process] = []
    try:
        for sdk, asks in groups:
            ready.append(await waiting(sdk, asks, stage))  # what was started is ended, whatever happens
        answers = await asyncio.gather(*(asyncio.wait_for(process.communicate(b"go\n"), 60) for process in ready))
    finally:
        for process in ready:
            if process.returncode is None:
                process.kill()
                await process.wait()
    return {name: told for out, _ in answers for name, told in json.loads(last_line(out.decode())).items()}


async def waiting(sdk: Sdk, asks: Sequence[Ask], stage: Stage) -> asyncio.subprocess.Process:
    room = stage.room(f"fleet-{sdk.row.replace('/', '-')}")
    (room / "asks.json").write_text(json.dumps([asdict(ask) for ask in asks]))
    pipe = asyncio.subprocess.PIPE
    env = environment(NODE_PATH=str(environments.NODE / "node_modules"))
    command = map(str, [*sdk.command, room / "asks.json"])
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=env, limit=2**24)
    assert process.stdout is not None
    said = (await process.stdout.readline()).strip()
    expect(said == b"ready", f"{sdk.name} said {said!r} when it was to be ready")
    return process
