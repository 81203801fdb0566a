"""`make bench-recording`: what the record of calls costs on `now`: rate, processor time, and bytes on disk.

Two proxies stand side by side, one with the record and one without, and take turns under the same load: in every round
each has one turn, and the order changes. The proxies have core 0, the load and the provider core 1. The ratios of the
rounds are compared by their median. Needs neither wrk nor nginx.
"""

from __future__ import annotations

import argparse
import os
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from load import last_line  # noqa: E402
from running import keep, machine, say  # noqa: E402

PROXY_CORE, LOAD_CORE = "0", "1"
START_S = 60.0
BODIES = ("call", "agent")
SWITCH = {"on": "true", "off": "false"}


@contextmanager
def proxies(folder: Path, upstream: str) -> Iterator[dict[str, tuple[str, psutil.Process]]]:
    """Address and process of both."""
    found: dict[str, tuple[str, psutil.Process]] = {}
    running: list[subprocess.Popen[bytes]] = []
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    program = [str(Path(sys.executable).with_name("carpool")), "serve", "--upstream", upstream]
    try:
        for name, switch in SWITCH.items():
            port = free_port()
            command = [*pinned(PROXY_CORE), *program, "--store", str(folder / f"{name}.db"), "--port", str(port)]
            env = kept | {"CARPOOL_RECORDING__ENABLED": switch}
            with (folder / f"{name}.log").open("wb") as log:
                one = subprocess.Popen(command, stdout=log, stderr=log, env=env)
            running.append(one)
            wait_for(port)
            found[name] = f"http://127.0.0.1:{port}", psutil.Process(one.pid)
        yield found
    finally:
        for one in running:
            one.terminate()
        for one in running:
            one.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def wait_for(port: int) -> None:
    until = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
        else:
            return


def pinned(core: str) -> list[str]:
    return ["taskset", "-c", core]


@contextmanager
def provider() -> Iterator[str]:
    command = [*pinned(LOAD_CORE), sys.executable, str(HERE / "load.py"), "provider"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def turn(url: str, process: psutil.Process, body: str, seconds: float) -> dict[str, float]:
    before = sum(process.cpu_times()[:2])
    command = [*pinned(LOAD_CORE), sys.executable, str(HERE / "load.py"), "load", url, body, str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    calls, took = last_line(done.stdout)
    spent = sum(process.cpu_times()[:2]) - before
    return {"calls": calls, "per_s": round(calls / took, 1), "cpu_us": round(spent / calls * 1e6, 2)}


def play(standing: dict[str, tuple[str, psutil.Process]], body: str, rounds: int, seconds: float) -> dict[str, Any]:
    for url, process in standing.values():
        turn(url, process, body, 1.0)
    played = []
    for number in range(rounds):
        order = list(standing) if number % 2 else list(reversed(standing))
        found = {name: turn(*standing[name], body, seconds) for name in order}
        played.append(found)
        told = "  ".join(f"{name}: {found[name]['per_s']:,.0f}/s {found[name]['cpu_us']:.1f} µs" for name in SWITCH)
        say(f"{body}, round {number + 1}: {told}")
    ratios = {figure: [one["on"][figure] / one["off"][figure] for one in played] for figure in ("per_s", "cpu_us")}
    rate, time_spent = (spread(ratios[figure]) for figure in ("per_s", "cpu_us"))
    say(f"{body}: with the record {rate} of the rate, {time_spent} of the processor time")
    middle = {figure: round(statistics.median(found), 4) for figure, found in ratios.items()}
    return {"ratio": middle, "rounds": played}


def spread(ratios: list[float]) -> str:
    """The median, and the quartiles of the rounds."""
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def on_disk(path: Path) -> dict[str, float]:
    """What the record takes of the file, pages and all."""
    with closing(sqlite3.connect(path)) as database:
        [size] = database.execute("SELECT coalesce(sum(pgsize), 0) FROM dbstat WHERE name = 'shapes'").fetchone()
        [calls] = database.execute("SELECT coalesce(sum(calls), 0) FROM shapes").fetchone()
    return {"calls": calls, "bytes": size, "bytes_per_call": round(size / calls, 1) if calls else 0.0}


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench-recording", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=5.0, help="of load for each turn")
    parser.add_argument("--bodies", nargs="+", choices=BODIES, default=BODIES)
    chosen = parser.parse_args()
    facts, bodies, disk = machine(), {}, {}
    with tempfile.TemporaryDirectory() as place, provider() as upstream:
        for body in chosen.bodies:
            folder = Path(place, body)
            folder.mkdir()
            with proxies(folder, upstream) as standing:
                bodies[body] = play(standing, body, chosen.rounds, chosen.seconds)
            disk[body] = on_disk(folder / "on.db")
            without = on_disk(folder / "off.db")["bytes"]
            say(f"{body}: {disk[body]['bytes_per_call']} bytes a call on disk; {without:g} in all without the record")
    keep(
        "recording",
        {
            "date": datetime.now(UTC).date().isoformat(),
            "machine": facts | {"load_at_end": os.getloadavg()[0]},
            "settings": {"rounds": chosen.rounds, "seconds": chosen.seconds},
            "bodies": bodies,
            "disk": disk,
        },
    )


if __name__ == "__main__":
    main()
