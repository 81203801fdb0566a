"""`make bench-money`: what each policy would have paid for the same traffic, in every world and for every deadline.

Nothing is measured here that takes time: agents are replayed under virtual time and their purchases priced. The same
seeds give the same figures on every machine. They go to bench/results/money.json, and from there into docs/savings.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import compact  # noqa: E402
import draw  # noqa: E402
import independent  # noqa: E402
from running import RESULTS, say  # noqa: E402

from carpool.cli.simulate import ALL_POLICIES  # noqa: E402
from carpool.sim.money.billing import MULTIPLIERS  # noqa: E402
from carpool.sim.money.experiment import CODING, Experiment, TraceSource, WorldSource, run_experiment  # noqa: E402
from carpool.sim.money.worlds import WORLDS  # noqa: E402

TRACES = HERE.parents[2] / "shared" / "traces"
DEADLINES = (60.0, 300.0, 1200.0, 3600.0, 14_400.0, 86_400.0)
MAIN = ("economics", "anthropic")  # worlds
INDEPENDENT = ("mooncake_conversation.jsonl", "azure_code.csv")  # calls, each a session of its own
RESULT = RESULTS / "money.json"
TOLD_EVERY = 50  # jobs


def experiments(folder: Path, quick: bool, policies: Sequence[str]) -> list[Experiment]:
    """The bound takes most of the time, so it is left out where policies are compared for other reasons."""
    many, seeds = (2, 3) if quick else (6, 10)
    shared = {"policies": policies, "deadlines": DEADLINES, "seeds": range(seeds)}
    main, others = [WorldSource(name) for name in MAIN], [WorldSource(name) for name in WORLDS if name not in MAIN]
    tenth, cheaper = MULTIPLIERS[:1], MULTIPLIERS[1:]
    fleet = TraceSource(CODING, agents=20 if quick else 200, turns=30)
    if not folder.is_dir():
        say(f"There are no traces in {folder}: the synthetic fleet alone is simulated.")
        small = [TraceSource(CODING, mode, agents=5 * many, turns=30) for mode in ("unattended", "attended")]
        return [
            Experiment(small, main, read_multipliers=MULTIPLIERS, **shared),
            Experiment(small, others, read_multipliers=tenth, bound=False, **shared),
        ]
    claude = [
        TraceSource(str(folder / "claude_code_sessions.jsonl"), mode, many) for mode in ("unattended", "attended")
    ]
    tau = TraceSource(str(folder / "tau_airline_turns.json"), "unattended", 3 * many)  # its tools answer at once
    calls = [TraceSource(str(folder / name), sessions=50 * many) for name in INDEPENDENT]
    return [
        Experiment(claude, main, read_multipliers=MULTIPLIERS, **shared),
        Experiment(claude, others, read_multipliers=tenth, **shared),
        Experiment(claude, others, read_multipliers=cheaper, bound=False, **shared),
        Experiment([tau, *calls], [*main, *others], read_multipliers=tenth, **shared),
        Experiment([fleet], main, read_multipliers=tenth, bound=False, **shared),
    ]


def simulated(chosen: argparse.Namespace) -> dict[str, Any]:
    plans = experiments(Path(chosen.traces), chosen.quick, chosen.policy or ALL_POLICIES)
    if chosen.policy:  # the bound depends on none
        plans = [replace(plan, bound=False) for plan in plans]
    began, total, done = monotonic(), sum(len(plan.jobs()) for plan in plans), 0

    def progress() -> None:
        nonlocal done
        done += 1
        if done % TOLD_EVERY == 0:
            left = (monotonic() - began) * (total - done) / done
            say(f"{done:,} of {total:,} jobs, about {left / 60:.0f} min to go")

    results = [result for plan in plans for result in run_experiment(plan, chosen.processes, progress)]
    say(f"{len(results):,} runs in {(monotonic() - began) / 60:.1f} min.")
    samples = {source.name: sampled(source) for plan in plans for source in plan.sources}
    return {"date": datetime.now(UTC).date().isoformat(), "samples": samples, **compact.packed(results)}


def sampled(source: TraceSource) -> str:
    return f"{source.agents} agents of {source.turns} turns" if source.path == CODING else f"{source.sessions}"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-money", description=__doc__)
    parser.add_argument("--traces", default=os.environ.get("CARPOOL_TRACES", TRACES), help="the folder of the traces")
    parser.add_argument("--quick", action="store_true", help="3 seeds and small samples; writes nothing")
    parser.add_argument("--policy", action="append", help="only this one, beside the last result's others; repeatable")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rows", action="store_true", help="print the rows of the last result, one JSON object a line")
    parser.add_argument("--independent", action="store_true", help="compare with the figures of an independent script")
    parser.add_argument("--redraw", action="store_true", help="draw the page anew from the last result")
    return parser.parse_args()


def main() -> None:
    chosen = options()
    if chosen.rows:
        for row in compact.rows(json.loads(RESULT.read_text("utf-8"))):
            say(json.dumps(row))
        return
    if chosen.independent:
        independent.compare(Path(chosen.traces))
        return
    if chosen.redraw:
        draw.publish(json.loads(RESULT.read_text("utf-8")))
        return
    result = simulated(chosen)
    if chosen.policy and not chosen.quick:
        result = compact.replaced(json.loads(RESULT.read_text("utf-8")), result)
    say("\n" + draw.section(result))
    if not chosen.quick:
        RESULT.write_text(compact.as_text(result), "utf-8")
        say(f"Written: bench/results/{RESULT.name}")
        draw.publish(result)


if __name__ == "__main__":
    main()
