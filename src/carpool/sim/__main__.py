"""`python -m carpool.sim 2000` runs seeds 0 to 1,999; `--seed 17` replays one, with its story."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from carpool.clock import SystemClock
from carpool.sim import Fleet, Report, simulate
from carpool.sim.plan import FLEETS

STALL_S = 90.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m carpool.sim", description=__doc__)
    parser.add_argument("seeds", nargs="?", type=int, default=200, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, default=None, help="replay this one, with its story")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at a time")
    parser.add_argument("--first-broken", action="store_true", help="stop at the first that is broken")
    parser.add_argument("--fleet", choices=sorted(set(FLEETS)), help="whom all call, in place of what a seed draws")
    asked = parser.parse_args()
    if asked.seed is not None:
        return _replay(asked.seed, asked.fleet)
    return _many(range(asked.first, asked.first + asked.seeds), asked.fleet, asked.jobs, asked.first_broken)


def _replay(seed: int, fleet: Fleet | None) -> int:
    report = simulate(seed, fleet)
    sys.stdout.write(report.story + "\n\n")
    for problem in report.problems:
        sys.stdout.write(f"WRONG  {problem}\n")
    sys.stdout.write(f"Seed {seed}: {'clean' if not report.problems else 'broken'}.\n")
    return 1 if report.problems else 0


def _reports(seeds: Iterable[int], fleet: Fleet | None, jobs: int) -> Iterable[Report]:
    watched = partial(_watched, fleet=fleet)
    if jobs <= 1:
        yield from map(watched, seeds)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(watched, seeds, chunksize=4)


class _Stall(KeyboardInterrupt):
    """A world that takes so long has lost its way. Nothing less leaves a task: an engine outlives every error."""


def _stall(*_: object) -> None:
    raise _Stall


def _watched(seed: int, fleet: Fleet | None) -> Report:
    """One world, with an end to the patience: a broken engine may plan for ever."""
    signal.signal(signal.SIGVTALRM, _stall)
    signal.setitimer(signal.ITIMER_VIRTUAL, STALL_S)
    try:
        return simulate(seed, fleet)
    except _Stall:
        return Report(seed, (f"It does not end: {STALL_S:g} s of work, and no verdict.",), "", 0, 0, 0.0)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)


def _many(seeds: range, fleet: Fleet | None, jobs: int, first_broken: bool) -> int:
    started = SystemClock().now()
    broken, count = [], len(seeds)
    calls = batches = 0
    for report in _reports(seeds, fleet, jobs):
        calls, batches = calls + report.calls, batches + report.batches
        if report.problems:
            broken.append(report.seed)
            sys.stdout.write(f"Seed {report.seed}: {report.problems[0]}\n")
            sys.stdout.flush()
            if first_broken:
                return 1
    took = SystemClock().now() - started
    sys.stdout.write(
        f"{count} seeds, {calls:,} calls, {batches:,} batches in {took:.1f} s: {count / took:.1f} seeds/s. "
        + (f"{len(broken)} broken, the first is {broken[0]}.\n" if broken else "All clean.\n")
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
