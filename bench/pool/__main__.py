"""`make bench-pool`: carpool and its peers do the same job against the same mock, in alternating rounds.

Every run has a fresh mock and a fresh process, one contestant at a time. Results go to bench/results, and from
there into docs/performance.md and its picture.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import before  # noqa: E402
import draw  # noqa: E402
from job import Job  # noqa: E402
from running import keep, machine, mock, say  # noqa: E402

ENVS = HERE.parent / ".envs"
LINGER_S, POLL_S = 0.5, 0.1
PACKAGES = ("carpool", "anthropic", "httpx", "httpx2", "uvloop", "llmfleet", "inspect_ai")


@dataclass(frozen=True)
class Contestant:
    name: str
    script: str
    packages: tuple[str, ...] = ()  # none: carpool's own environment
    cap_s: float = 120.0
    folder: Path | None = None  # of an earlier commit

    @property
    def python(self) -> str:
        if self.folder is not None:
            return str(before.python(self.folder))
        return str(ENVS / self.name / "bin" / "python") if self.packages else sys.executable

    @property
    def path(self) -> Path:
        """An earlier commit is measured through its own adapter: its inner names may differ."""
        return (HERE if self.folder is None else self.folder / "bench" / "pool") / self.script


CONTESTANTS = (
    Contestant("carpool", "ours.py", cap_s=300.0),
    Contestant("carpool-sdk", "ours.py", cap_s=300.0),
    Contestant("llmfleet", "llmfleet_peer.py", ("llmfleet==0.1.0", "anthropic")),
    Contestant("inspect_ai", "inspect_peer.py", ("inspect_ai==0.3.285", "anthropic")),
)


def prepare(contestant: Contestant) -> None:
    """An environment of its own, from the package index."""
    if not contestant.packages or Path(contestant.python).exists():
        return
    say(f"Setting up {contestant.name} ...")
    venv.create(ENVS / contestant.name, with_pip=True)
    pip = [contestant.python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    subprocess.run([*pip, *contestant.packages], check=True)


def run(contestant: Contestant, job: Job) -> dict[str, Any]:
    """One run. What did not finish in time says so, with the time that it was given."""
    ENVS.mkdir(exist_ok=True)
    with mock() as url, tempfile.TemporaryDirectory(dir=ENVS) as folder:  # on disk, and gone also after a time-out
        command = [contestant.python, str(contestant.path), replace(job, url=url).text()]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=contestant.cap_s,
                check=False,
                env=os.environ | {"TMPDIR": folder},
            )
        except subprocess.TimeoutExpired:
            return {"finished": False, "seconds": contestant.cap_s, "why": "did not finish in time"}
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode or not last.startswith("{"):
        return {"finished": False, "seconds": None, "why": (done.stderr.strip().splitlines() or ["no answer"])[-1]}
    return {"finished": True, **json.loads(last)}


def compare(contestants: list[Contestant], calls: int, one_batch: bool, rounds: int) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {contestant.name: [] for contestant in contestants}
    for number in range(rounds):
        for contestant in contestants[number % len(contestants) :] + contestants[: number % len(contestants)]:
            job = Job(contestant.name.removesuffix("-before"), calls, "", LINGER_S, POLL_S, one_batch)
            result = run(contestant, job) | {"load": os.getloadavg()[0]}
            runs[contestant.name].append(result)
            say(f"{calls:>7,} calls{', one batch' if one_batch else ''}: {contestant.name:12} {worded(result)}")
    medians = {name: median(found) for name, found in runs.items()}
    return {"calls": calls, "one_batch": one_batch, "rounds": runs, "medians": medians}


def worded(result: dict[str, Any]) -> str:
    if not result["finished"]:
        return f"{result['why']} ({result['seconds']} s)"
    return f"{result['calls_per_s']:>8,.0f} calls/s  {result['seconds']:>7.2f} s  batches {result['batches']}"


def median(results: list[dict[str, Any]]) -> dict[str, Any]:
    finished = [result for result in results if result["finished"]]
    if not finished:
        return results[0]
    names = [name for name, value in finished[0].items() if isinstance(value, int | float) and name != "finished"]
    found = {
        name: statistics.median(values)
        for name in names
        if (values := [result[name] for result in finished if result.get(name) is not None])
    }
    return {"finished": True, **found}


def versions(contestant: Contestant) -> dict[str, str]:
    code = (
        "import importlib.metadata as m, json, sys; print(json.dumps({d.metadata['Name']: d.version "
        f"for d in m.distributions() if d.metadata['Name'] in {PACKAGES!r}}}))"
    )
    out = subprocess.run([contestant.python, "-c", code], capture_output=True, text=True, check=True).stdout
    return dict(json.loads(out))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-pool", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="for 1,000 and 10,000 calls")
    parser.add_argument("--large-rounds", type=int, default=1, help="for 100,000 calls")
    parser.add_argument("--only", nargs="*", default=[c.name for c in CONTESTANTS], help="these contestants")
    parser.add_argument("--plans", nargs="*", default=["1000", "10000", "100000", "100000-one"])
    parser.add_argument("--no-docs", action="store_true", help="leave docs/performance.md as it is")
    parser.add_argument("--before", metavar="COMMIT", help="measure this commit of carpool, too; leaves the docs alone")
    return parser.parse_args()


def main() -> None:
    chosen = options()
    contestants = [contestant for contestant in CONTESTANTS if contestant.name in chosen.only]
    if chosen.before:
        contestants.append(Contestant(before.BEFORE, "ours.py", cap_s=300.0, folder=before.checkout(chosen.before)))
    for contestant in contestants:
        prepare(contestant)
    facts, comparisons = machine(), []
    for plan in chosen.plans:
        calls, _, one = plan.partition("-")
        rounds = chosen.large_rounds if int(calls) >= 100_000 else chosen.rounds
        comparisons.append(compare(contestants, int(calls), one == "one", rounds))
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": facts | {"load_at_end": os.getloadavg()[0]},
        "settings": {"linger_s": LINGER_S, "poll_s": POLL_S, "store": "SQLite file, synchronous=FULL"},
        "versions": {contestant.name: versions(contestant) for contestant in contestants},
        "comparisons": comparisons,
    }
    keep("pool", result)
    say(draw.table(result))
    for comparison in comparisons if chosen.before else ():
        ratios = [
            own["calls_per_s"] / earlier["calls_per_s"]
            for own, earlier in zip(comparison["rounds"]["carpool"], comparison["rounds"][before.BEFORE], strict=True)
        ]
        say(f"{comparison['calls']:>7,} calls: {statistics.median(ratios):.3f} of {chosen.before}")
    if not (chosen.no_docs or chosen.before):
        draw.publish(result)


if __name__ == "__main__":
    main()
