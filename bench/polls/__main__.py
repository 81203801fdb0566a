"""`make bench-polls`: how late answers are after their batches have ended, over real HTTP, in real time.

`carpool mock` and `carpool serve` run as processes of their own; the batches take 9 to 70 s, and every account may send
50 requests a minute to the batch API. The lateness of an answer is the time between the end of its batch, as the
provider states it, and the end of the response at the client.

- `agents`: accounts with one agent each, which asks again when it is answered: one batch at a time.
- `busy`: one account with 20 calls a minute, at random times, so that creates and results take most of its 50 requests.

`waits` is simulated: how long a call waits for its create where 50 creates a minute are allowed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from running import keep, machine, say  # noqa: E402
from waits import waits  # noqa: E402

SCENARIOS = "waits", "agents", "busy"
LATENCY = "uniform:9,70"
BATCH_RPM = 50
CALLS_PER_MINUTE = 20
SLOWEST_S = 200.0  # no answer takes longer, or something hangs
START_S = 60.0
VERSION = {"anthropic-version": "2023-06-01"}


@contextmanager
def command(*arguments: str, log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-m", "carpool", *arguments], stdout=output, stderr=output)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def wait_for(port: int) -> str:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(0.1)
        else:
            return f"http://127.0.0.1:{port}"
    raise SystemExit("bench-polls: a process does not start.")


@contextmanager
def stage(folder: Path, seed: int) -> Iterator[tuple[str, str]]:
    """The addresses of the provider and of carpool before it."""
    provider, proxy = free_port(), free_port()
    limits = "--batch-latency", LATENCY, "--batch-rpm", str(BATCH_RPM), "--seed", str(seed)
    with command("mock", "--port", str(provider), *limits, log=folder / "mock.log"):
        upstream = wait_for(provider)
        store = "--store", str(folder / "calls.db"), "--port", str(proxy)
        with command("serve", "--upstream", upstream, *store, log=folder / "serve.log"):
            yield upstream, wait_for(proxy)


# ------------------------------------------------------------ clients

Answer = tuple[str, float, float]  # name of its batch, when it was asked, when it was there


class Clients:
    def __init__(self, proxy: str, provider: str) -> None:
        limits = httpx2.Limits(max_connections=None)
        self._proxy = httpx2.AsyncClient(base_url=proxy, timeout=SLOWEST_S, limits=limits)
        self._provider = httpx2.AsyncClient(base_url=provider, timeout=SLOWEST_S)
        self.answers: list[Answer] = []

    async def ask(self, key: str, text: str) -> None:
        body = {"model": "claude-haiku-4-5", "max_tokens": 50, "messages": [{"role": "user", "content": text}]}
        headers = VERSION | {"x-api-key": key, "x-carpool-lane": "batch", "x-stainless-lang": "python"}
        asked = time.time()
        response = await self._proxy.post("/v1/messages", json=body, headers=headers)
        response.raise_for_status()
        self.answers.append((response.headers["x-carpool-batch"], asked, time.time()))

    async def agent(self, key: str, until: float) -> None:
        number = 0
        while time.time() < until:
            await self.ask(key, f"{key}, turn {number}")
            number += 1

    async def arrivals(self, key: str, until: float, rng: random.Random) -> None:
        async with asyncio.TaskGroup() as group:
            number = 0
            while time.time() < until:
                group.create_task(self.ask(key, f"call {number}"))
                number += 1
                await asyncio.sleep(rng.expovariate(CALLS_PER_MINUTE / 60))

    async def ends(self, keys: Sequence[str]) -> dict[str, float]:
        """By name of a batch: when it ended."""
        found: dict[str, float] = {}
        for key in keys:
            found |= await self._ends(key)
        return found

    async def _ends(self, key: str) -> dict[str, float]:
        while True:
            response = await self._provider.get(
                "/v1/messages/batches", params={"limit": 1000}, headers=VERSION | {"x-api-key": key}
            )
            if response.status_code == 200:
                rows = response.json()["data"]
                return {row["id"]: datetime.fromisoformat(row["ended_at"]).timestamp() for row in rows}
            await asyncio.sleep(float(response.headers.get("retry-after", 1)))


# ------------------------------------------------------------ scenarios


async def agents(clients: Clients, seconds: float, accounts: int) -> list[str]:
    keys = [f"sk-agent-{number}" for number in range(accounts)]
    until = time.time() + seconds
    await asyncio.gather(*(clients.agent(key, until) for key in keys))
    return keys


async def busy(clients: Clients, seconds: float, seed: int) -> list[str]:
    await clients.arrivals("sk-busy", time.time() + seconds, random.Random(seed))
    return ["sk-busy"]


async def measure(name: str, chosen: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place, stage(Path(place), chosen.seed) as (provider, proxy):
        clients = Clients(proxy, provider)
        seconds = 60.0 * chosen.minutes
        if name == "agents":
            keys = await agents(clients, seconds, chosen.accounts)
        else:
            keys = await busy(clients, seconds, chosen.seed)
        ends = await clients.ends(keys)
    late = sorted(there - ends[batch] for batch, _, there in clients.answers)
    waited = [there - asked for _, asked, there in clients.answers]
    minutes = (max(there for *_, there in clients.answers) - min(asked for _, asked, _ in clients.answers)) / 60
    return {
        "answers": len(late),
        "batches": len(ends),
        "batches_per_minute": round(len(ends) / minutes, 1),
        "late_s": {
            "median": round(statistics.median(late), 2),
            "p90": round(late[int(0.9 * (len(late) - 1))], 2),
            "worst": round(late[-1], 2),
        },
        "waited_s": round(statistics.median(waited), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench-polls", description=__doc__)
    parser.add_argument("--minutes", type=float, default=4.0, help="of new calls in each scenario")
    parser.add_argument("--accounts", type=int, default=8)
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=SCENARIOS)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    facts = machine()
    found: dict[str, Any] = {}
    if "waits" in chosen.only:
        found["waits"] = waits(chosen.seed)
        for row in found["waits"]:
            told = f"{row['wait_s']:.2f} s for a create, in batches of {row['batch_size']:g}"
            say(f"{row['calls_per_s']:g} calls/s wait {told}")
    for name in (name for name in chosen.only if name != "waits"):
        found[name] = asyncio.run(measure(name, chosen))
        late = found[name]["late_s"]
        told = f"{late['median']} s in the median, {late['p90']} s for one in ten, {late['worst']} s at worst"
        say(f"{name}: {found[name]['answers']} answers, late by {told}")
    keep(
        "polls",
        {
            "date": datetime.now(UTC).date().isoformat(),
            "machine": facts | {"load_at_end": os.getloadavg()[0]},
            "settings": {"latency": LATENCY, "batch_rpm": BATCH_RPM} | vars(chosen),
            "scenarios": found,
        },
    )


if __name__ == "__main__":
    main()
