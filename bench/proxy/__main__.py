"""`make bench-proxy`: what a proxy costs. nginx, carpool and its peers pass the same calls on, in alternating rounds.

The contestant has core 0 for itself; the load (wrk) and the provider (nginx) share core 1. Every turn has a fresh
provider and a fresh contestant, one contestant at a time. Results go to bench/results, and from there into
docs/performance.md and its picture.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import before  # noqa: E402
import draw  # noqa: E402
from contestants import CONTESTANTS, Contestant, earlier, prepare, versions, without_rules  # noqa: E402
from measuring import DIRECT, FULL, QUICK, Plan, check_machine, turn, waiting  # noqa: E402
from running import keep, machine, say  # noqa: E402
from servers import Trouble  # noqa: E402
from summing import STRANGERS, disturbed, ratio, summary, verdicts  # noqa: E402


def play(contestants: list[Contestant], plan: Plan, rounds: int) -> list[dict[str, Any]]:
    """Every round begins with another contestant; each round has its own look at the provider without a proxy."""
    played = []
    for number in range(rounds):
        first = number % len(contestants)
        found: dict[str, Any] = {}
        for contestant in [None, *contestants[first:], *contestants[:first]]:
            name = contestant.name if contestant else DIRECT
            found[name] = turn(contestant, plan) | {"load": os.getloadavg()[0]}
            say(f"round {number + 1}: {name:12} {worded(found[name])}")
        played.append(found)
    return played


def worded(found: dict[str, Any]) -> str:
    rates = "  ".join(f"{count:>3}: {level['per_s']:>9,.1f}/s" for count, level in found["levels"].items())
    failed = sum(level["bad_status"] + level["broken"] + level["timeouts"] for level in found["levels"].values())
    return f"{rates}  first byte {found['stream']['first_ms']:.2f} ms" + (f"  {failed} failed" if failed else "")


def options() -> argparse.Namespace:
    names = [contestant.name for contestant in CONTESTANTS]
    parser = argparse.ArgumentParser(prog="make bench-proxy", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="short turns and few waiting clients: only to see it run")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these contestants")
    parser.add_argument("--no-rules", action="store_true", help="carpool without the rules of carpool.yaml")
    parser.add_argument("--no-waiting", action="store_true", help="without the memory of waiting clients")
    parser.add_argument("--no-docs", action="store_true", help="leave docs/performance.md as it is; so does --quick")
    parser.add_argument("--before", metavar="COMMIT", help="measure this commit of carpool, too; leaves the docs alone")
    return parser.parse_args()


def chosen_contestants(chosen: argparse.Namespace) -> list[Contestant]:
    contestants = [contestant for contestant in CONTESTANTS if contestant.name in chosen.only]
    if chosen.no_rules:
        contestants = [replace(one, start=without_rules) if one.name == "carpool" else one for one in contestants]
    if chosen.before:
        contestants.append(earlier(before.checkout(chosen.before)))
    for contestant in contestants:
        prepare(contestant, say)
    return contestants


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    check_machine()
    contestants, plan, facts = chosen_contestants(chosen), QUICK if chosen.quick else FULL, machine()
    played = play(contestants, plan, chosen.rounds)
    kept = None if chosen.no_waiting or "carpool" not in chosen.only else waiting(plan.waiting)
    if kept:
        say(f"{kept['clients']:,} waiting clients: {kept['bytes_per_client'] / 1000:.1f} KB each")
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": facts | {"load_at_end": os.getloadavg()[0]},
        "settings": asdict(plan) | {"rules": not chosen.no_rules, "quick": chosen.quick},
        "versions": {contestant.name: versions(contestant) for contestant in contestants},
        "rounds": played,
        "waiting": kept,
    }
    return result | {"summary": summary(played)}


def main() -> None:
    chosen = options()
    try:
        result = measure(chosen)
    except Trouble as trouble:
        raise SystemExit(f"bench-proxy: {trouble}") from None
    result |= {"verdicts": verdicts(result)}
    keep("proxy", result)
    say("\n" + draw.tables(result))
    for verdict in result["verdicts"]:
        say(verdict["text"])
    if (most := disturbed(result["summary"])) > STRANGERS:
        say(f"Other work took up to {most:.1f} of the two cores meanwhile: run this again when the machine is quiet.")
    if chosen.before:
        say(f"carpool, 32 connections: {ratio(result['rounds'], before.BEFORE):.3f} of {chosen.before}")
    if not (chosen.no_docs or chosen.quick or chosen.before):
        draw.publish(result)


if __name__ == "__main__":
    main()
