"""`python -m carpool.sim 2000` runs seeds 0 to 1,999; `--seed 17` replays one and prints its events."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from carpool.core.clock import SystemClock
from carpool.core.errors import CarpoolError, ConfigError
from carpool.sim import Fleet, Report, simulate
from carpool.sim.plan import FLEETS
from carpool.stores import check_url

if TYPE_CHECKING:
    from carpool.sim.databases import Database

POSTGRES = "postgres"
TIMEOUT_S = 90.0
POSTGRES_TIMEOUT_S = 600.0  # every operation is a round trip to the server
PROGRESS_EVERY = 250  # seeds


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The settings shared by all worlds of a run."""

    fleet: Fleet | None
    database: Database | None = None

    def world(self, seed: int) -> Report:
        return simulate(seed, self.fleet, self.database.empty() if self.database else None)

    @property
    def timeout(self) -> float:
        return POSTGRES_TIMEOUT_S if self.database else TIMEOUT_S


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m carpool.sim", description=__doc__)
    parser.add_argument("seeds", nargs="?", type=int, default=200, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, default=None, help="replay this one, with its log")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at a time")
    parser.add_argument("--first-broken", action="store_true", help="stop at the first that is broken")
    parser.add_argument("--fleet", choices=sorted(set(FLEETS)), help="whom all call, in place of what a seed draws")
    parser.add_argument("--store", help=f"{POSTGRES} for a throwaway server, or the address of one; else in memory")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # clean up on the way out
    try:
        with _settings(asked.fleet, asked.store) as settings:
            if asked.seed is not None:
                return _replay(asked.seed, settings)
            seeds = range(asked.first, asked.first + asked.seeds)
            return _run_seeds(seeds, settings, asked.jobs, asked.first_broken)
    except CarpoolError as error:
        sys.stderr.write(f"{error}\n")
        return 2


@contextmanager
def _settings(fleet: Fleet | None, store: str | None) -> Iterator[RunSettings]:
    if store is None:
        yield RunSettings(fleet)
        return
    url = "postgresql:///postgres" if store == POSTGRES else store
    if not url.startswith("postgresql://"):
        raise ConfigError(f"Worlds run in memory, or with --store {POSTGRES}, or with --store postgresql://….")
    check_url(url)  # before the driver is imported: gives a clear error if it is missing
    from carpool.sim.databases import database

    with database(None if store == POSTGRES else url) as opened:
        yield RunSettings(fleet, opened)


def _replay(seed: int, settings: RunSettings) -> int:
    report = settings.world(seed)
    sys.stdout.write(report.log + "\n\n")
    for problem in report.problems:
        sys.stdout.write(f"WRONG  {problem}\n")
    sys.stdout.write(f"Seed {seed}: {'clean' if not report.problems else 'broken'}.\n")
    return 1 if report.problems else 0


def _reports(seeds: Iterable[int], settings: RunSettings, jobs: int) -> Iterable[Report]:
    run = partial(_run_with_timeout, settings=settings)
    if jobs <= 1:
        yield from map(run, seeds)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(run, seeds, chunksize=4)


class _Timeout(SystemExit):
    """Ends a world that takes too long. It is raised inside some task, and only a `SystemExit` passes through tasks
    without being caught."""


def _on_timeout(*_: object) -> None:
    raise _Timeout


def _run_with_timeout(seed: int, settings: RunSettings) -> Report:
    """Run one world with a timeout: a broken engine may plan forever."""
    logging.disable(logging.WARNING)  # failures in a world are intended
    signal.signal(signal.SIGVTALRM, _on_timeout)
    signal.setitimer(signal.ITIMER_VIRTUAL, settings.timeout)
    try:
        return settings.world(seed)
    except _Timeout:
        return Report(seed, (f"It does not end: {settings.timeout:g} s of work, and no verdict.",), "", 0, 0, 0.0)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        logging.disable(logging.NOTSET)


def _print_progress(done: int, count: int, took: float) -> None:
    left = (count - done) * took / done
    sys.stderr.write(f"{done:,} of {count:,} seeds, {done / took:.1f} seeds/s, about {left / 60:.0f} min to go\n")


def _run_seeds(seeds: range, settings: RunSettings, jobs: int, first_broken: bool) -> int:
    started = SystemClock().now()
    broken, count = [], len(seeds)
    calls = batches = 0
    for done, report in enumerate(_reports(seeds, settings, jobs), 1):
        calls, batches = calls + report.calls, batches + report.batches
        if done % PROGRESS_EVERY == 0 and done < count:
            _print_progress(done, count, SystemClock().now() - started)
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
