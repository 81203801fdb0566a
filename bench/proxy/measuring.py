"""One turn of one contestant: requests a second and latency under load, and the first byte of streams."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from bodies import HEADERS, request
from contestants import MESSAGES, Contestant
from servers import (
    CONTESTANT_CORE,
    HERE,
    LOAD_CORE,
    Running,
    Trouble,
    free_port,
    last_json,
    pinned,
    provider,
    running,
    streaming_provider,
)

CONNECTIONS = (1, 32, 256)
DIRECT = "direct"


@dataclass(frozen=True)
class Plan:
    seconds: float  # of load for each number of connections
    warm_s: float
    streams: int
    waiting: int  # clients


FULL = Plan(seconds=8, warm_s=2, streams=50, waiting=10_000)
QUICK = Plan(seconds=2, warm_s=1, streams=10, waiting=500)


def check_machine() -> None:
    missing = [name for name in ("nginx", "wrk", "taskset") if shutil.which(name) is None]
    if missing:
        raise Trouble(
            f"Not found here: {', '.join(missing)}. On Debian and Ubuntu: apt-get install nginx wrk util-linux"
        )
    cores = psutil.Process().cpu_affinity() or []
    if not {int(CONTESTANT_CORE), int(LOAD_CORE)} <= set(cores):
        raise Trouble("This needs cores 0 and 1: one for the contestant, one for the load and the provider.")


@dataclass(frozen=True)
class Stage:
    """What stands while it is measured; without a contestant the provider is asked directly."""

    url: str
    path: str
    provider: Running
    contestant: Running | None

    def spent(self) -> tuple[float, float, float]:
        """Processor seconds so far: of the contestant, of everything here, and of both cores as the system counts."""
        own = 0.0 if self.contestant is None else self.contestant.cpu_s()
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        us = own + self.provider.cpu_s() + ended.ru_utime + ended.ru_stime
        cores = psutil.cpu_times(percpu=True)
        return own, us, sum(busy(cores[int(core)]) for core in (CONTESTANT_CORE, LOAD_CORE))


def busy(core: Any) -> float:
    return float(sum(core) - core.idle - core.iowait - core.guest - core.guest_nice)


def turn(contestant: Contestant | None, plan: Plan) -> dict[str, Any]:
    """All figures of one contestant, or, without one, of the provider asked directly."""
    with standing(contestant, streaming=False) as stage:
        load(stage.url, stage.path, 32, plan.warm_s)
        levels: dict[str, Any] = {}
        for count in CONNECTIONS:
            rate = min((found["per_s"] for found in levels.values()), default=float("inf"))
            levels[str(count)] = level(stage, count, long_enough(plan, count, rate))
        rss = None if stage.contestant is None else stage.contestant.rss()
    with standing(contestant, streaming=True) as stage:
        stream = figures([sys.executable, str(HERE / "firstbyte.py"), stage.url, stage.path, str(plan.streams)])
    return {"levels": levels, "rss": rss, "stream": stream}


def long_enough(plan: Plan, connections: int, rate: float) -> float:
    """Seconds in which a slow contestant answers each connection several times, or its latency looks too good."""
    return max(plan.seconds, min(4 * plan.seconds, 6 * connections / rate))


@contextmanager
def standing(contestant: Contestant | None, *, streaming: bool) -> Iterator[Stage]:
    """A fresh provider and, before it, a fresh contestant."""
    port = free_port()
    upstream = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(dir=results_disk()) as place:
        folder, own = Path(place, "provider"), Path(place, "contestant")
        folder.mkdir()
        own.mkdir()
        command = (streaming_provider if streaming else provider)(folder, port)
        with running("the provider", command, upstream, LOAD_CORE, folder, MESSAGES, environment()) as origin:
            if contestant is None:
                yield Stage(upstream, MESSAGES, origin, None)
                return
            port = free_port()
            command, url = contestant.start(own, port, upstream), f"http://127.0.0.1:{port}"
            env = contestant.surroundings
            with running(contestant.name, command, url, CONTESTANT_CORE, own, contestant.path, env) as server:
                yield Stage(url, contestant.path, origin, server)


def environment() -> dict[str, str]:
    return Contestant("provider", MESSAGES, lambda *_: []).surroundings


def results_disk() -> Path:
    """On a disk, where a store would be; not in memory."""
    folder = HERE.parent / ".envs"
    folder.mkdir(exist_ok=True)
    return folder


def level(stage: Stage, connections: int, seconds: float) -> dict[str, Any]:
    before = stage.spent()
    found = load(stage.url, stage.path, connections, seconds)
    own, us, cores = (after - start for start, after in zip(before, stage.spent(), strict=True))
    good = found["requests"] - found["bad_status"]
    if good <= 0:
        words = (stage.contestant or stage.provider).last_words()
        raise Trouble(f"No good answer from {stage.url} at {connections} connections. Its last words:\n{words}")
    found |= {"per_s": round(good / found["seconds"], 1), "strangers": round((cores - us) / found["seconds"], 3)}
    if stage.contestant is not None:
        found |= {"cpu_us": round(own / good * 1e6, 1), "busy": round(own / found["seconds"], 3)}
    return found


def load(url: str, path: str, connections: int, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        body, headers = Path(place, "body"), Path(place, "headers")
        body.write_bytes(request(path))
        headers.write_text("".join(f"{name}: {value}\n" for name, value in HEADERS.items()), "utf-8")
        command = [
            "wrk",
            "-t1",
            f"-c{connections}",
            f"-d{seconds:.0f}s",
            "--timeout",
            "60s",
            "-s",
            str(HERE / "load.lua"),
        ]
        return figures([*command, url + path, "--", str(body), str(headers)])


def figures(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(pinned(LOAD_CORE, command), capture_output=True, text=True, check=False)
    if done.returncode:
        raise Trouble(f"{Path(command[0]).name} failed: {(done.stderr or done.stdout).strip()[-500:]}")
    return last_json(done.stdout)


def waiting(clients: int) -> dict[str, Any]:
    """Memory of a client that waits for its batch. On both cores: it is not about speed."""
    command = [sys.executable, str(HERE / "waiting.py"), "--clients", str(clients)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise Trouble(f"bench/proxy/waiting.py failed: {why}")
    return last_json(done.stdout)
