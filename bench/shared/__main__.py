"""`make bench-shared`: 1 to 8 processes work on one PostgreSQL, with SQLite, which has one process, beside it.

Each number of processes does the same work: as many calls as the others, divided among the processes, which begin
together. Every run has a fresh database and a fresh mock; the runs take turns. Results go to bench/results, and
from there into docs/performance.md and its picture.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import databases  # noqa: E402
import draw  # noqa: E402
from running import keep, machine, mock, say  # noqa: E402
from worker import Part  # noqa: E402

STAGES = {"store": ("admitted", "settled"), "fleet": ("answered",)}


@contextmanager
def workers(parts: list[Part]) -> Iterator[list[subprocess.Popen[str]]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, str(HERE / "worker.py"), part.text()],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for part in parts
        ]


def told(worker: subprocess.Popen[str]) -> dict[str, Any]:
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if not line:
        raise SystemExit("bench-shared: a process ended before its work was done; its own words stand above.")
    return dict(json.loads(line))


def run(kind: str, store: str, processes: int, calls: int, url: str) -> dict[str, float]:
    """Calls per second of each stage: from the first process that began to the last that ended."""
    each = calls // processes
    parts = [Part(kind, store, number * each, each, url) for number in range(processes)]
    with workers(parts) as started:
        results = [told(worker) for worker in started]
        while "ready" in results[0]:  # every stage begins when all are there
            for worker in started:
                assert worker.stdin is not None
                worker.stdin.write("go\n")
                worker.stdin.flush()
            results = [told(worker) for worker in started]
    return {
        stage: each * processes / (max(one[stage][1] for one in results) - min(one[stage][0] for one in results))
        for stage in STAGES[kind]
    }


def contest(name: str, processes: int, calls: int) -> dict[str, float]:
    """All stages for one store and one number of processes."""
    found: dict[str, float] = {}
    for kind in STAGES:
        with databases.fresh(name) as store, mock() as url:
            found |= run(kind, store, processes, calls, url)
    return found


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-shared", description=__doc__)
    parser.add_argument("--processes", nargs="*", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--calls", type=int, default=20_000, help="in all, divided among the processes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-docs", action="store_true", help="leave docs/performance.md as it is")
    return parser.parse_args()


def measure(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    contestants = [("sqlite", 1), *(("postgres", count) for count in chosen.processes)]
    rounds: dict[tuple[str, int], list[dict[str, float]]] = {one: [] for one in contestants}
    for number in range(chosen.rounds):
        turn = number % len(contestants)
        for name, count in contestants[turn:] + contestants[:turn]:
            found = contest(name, count, chosen.calls)
            rounds[name, count].append(found)
            said = "  ".join(f"{stage} {rate:>7,.0f}/s" for stage, rate in found.items())
            say(f"{name:>8}, {count} process{'es' if count > 1 else ' '}: {said}")
    return [
        {"store": name, "processes": count, "rounds": found, "medians": medians(found)}
        for (name, count), found in rounds.items()
    ]


def medians(found: list[dict[str, float]]) -> dict[str, float]:
    return {stage: round(statistics.median(one[stage] for one in found), 1) for stage in found[0]}


def main() -> None:
    chosen, facts = options(), machine()
    with tempfile.TemporaryDirectory() as folder, databases.server(Path(folder)) as version:
        runs = measure(chosen)
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": facts | {"load_at_end": os.getloadavg()[0]},
        "settings": {"calls": chosen.calls, "rounds": chosen.rounds},
        "postgres": version,
        "runs": runs,
    }
    keep("shared", result)
    say("\n" + draw.table(result))
    if not chosen.no_docs:
        draw.publish(result)


if __name__ == "__main__":
    main()
