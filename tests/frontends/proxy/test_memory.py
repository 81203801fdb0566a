"""What calls held is given back when they end, however they end: `carpool serve` as a process, and its memory."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from subprocess import DEVNULL, PIPE

import psutil
import pytest

from carpool.mock import Constant, MockConfig, serve
from tests.support.call_endings import LIMITS, WAYS, House, scripted, walk

MB = 1_000_000
MAX_GROWTH = 10 * MB  # two bodies
CALLS = int(os.environ.get("CARPOOL_MEMORY_CALLS", "20"))  # of five megabytes each, in each way
WARM_UP = 20  # fills what is kept on purpose: the cache of the store has 64 MB
ROUNDS = 2  # a heap finds its size once, by as much as was held at a time; what is never given back grows every time
TRIM_EVERY_S = 0.3  # more often than in earnest, so that a memory that has settled is known sooner
STABLE = int(TRIM_EVERY_S * 2 / 0.05)  # looks at the memory
COMMAND = f"from carpool.cli import main, process; process.TRIM_EVERY_S = {TRIM_EVERY_S}; main()"
KEY = {"HOUSE_KEY": "k"}
QUICK = (  # one of each kind: refused, failed, passed through, waited for, left
    "a key that was used for another call",
    "a stream that breaks off",
    "passed through and cut",
    "answered by a batch",
    "left amid the upload",
    "left while it waits for its batch",
    "left amid the answer",
)


@asynccontextmanager
async def serving(folder: Path, mock: str) -> AsyncIterator[tuple[House, psutil.Process]]:
    async with AsyncExitStack() as stack:
        nobody = stack.enter_context(socket.socket())
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        places = {"anthropic": mock, "scripted": await stack.enter_async_context(scripted())}
        places["gone"] = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        config = {
            "providers": {name: {"base_url": url, "dialect": "anthropic"} for name, url in places.items()},
            "batching": {"linger_ms": 20, "poll_interval_s": 0.05, "rpm": 100_000},
            "limits": LIMITS,
        }
        (folder / "carpool.yaml").write_text(json.dumps(config))
        using = ("--store", str(folder / "carpool.db"), "--config", str(folder / "carpool.yaml"))
        adding = await _carpool("keys", "add", "ci", "--env", "HOUSE_KEY", "--lanes", "batch", "--create", *using)
        key = (await adding.communicate())[0].decode().strip()
        process = await _carpool("serve", "--port", "0", "--log-format", "off", "--patience", "0.05", *using)
        try:
            assert process.stdout is not None
            url = (await process.stdout.readline()).decode().split(" listens on ")[1].split()[0]
            waiting = await stack.enter_async_context(AsyncExitStack())
            yield House(url, key, waiting), psutil.Process(process.pid)
        finally:
            process.kill()
            await process.communicate()


async def _carpool(*arguments: str) -> asyncio.subprocess.Process:
    command = (sys.executable, "-c", COMMAND, *arguments)
    return await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=DEVNULL, env=os.environ | KEY)


async def settled(process: psutil.Process, most: int = 0) -> int:
    """Its memory, when that is as little as `most` or has not changed for longer than the time between two trimmings of
    its heap. What ends on its side may end a moment after its client has heard of it."""
    seen: list[int] = []
    while len(seen) < 400:
        seen.append(process.memory_info().rss)
        if seen[-1] <= most or (len(seen) >= STABLE and max(seen[-STABLE:]) - min(seen[-STABLE:]) < MB):
            break
        await asyncio.sleep(0.05)
    return seen[-1]


@pytest.mark.skipif(sys.platform != "linux", reason="Other systems count and give back memory in other ways.")
@pytest.mark.parametrize(
    "names", [pytest.param(QUICK, id="quick"), pytest.param(tuple(WAYS), id="all", marks=pytest.mark.deep)]
)
async def test_however_calls_end_their_bodies_are_given_back(names: tuple[str, ...], tmp_path: Path) -> None:
    growth: dict[str, float] = {}
    async with (
        serve(MockConfig(batch_latency=Constant(0.1))) as mock,
        serving(tmp_path, mock.url) as (house, process),
    ):
        for name in names:
            before_all = WAYS[name].before
            if before_all is not None:
                await before_all(house)
            await walk(house, name, WARM_UP)
            for _ in range(ROUNDS):
                before = await settled(process)
                await walk(house, name, CALLS)
                growth[name] = (await settled(process, before + MAX_GROWTH) - before) / MB
                print(f"{name:45} {before / MB:6.1f} MB {growth[name]:+6.1f}")
                if growth[name] * MB <= MAX_GROWTH:
                    break
    assert {name: by for name, by in growth.items() if by * MB > MAX_GROWTH} == {}
