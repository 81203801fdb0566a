"""A result as tables and as a picture, in docs/performance.md."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from drawing import Bar, Contestant, Group, grid
from drawing import picture as drawn
from drawing import publish as place
from summing import disturbed

NAMES = {
    "direct": "no proxy",
    "nginx": "nginx",
    "carpool": "carpool",
    "carpool-before": "carpool before",
    "litellm": "LiteLLM",
    "autobatcher": "autobatcher",
}
COLOURS = {
    "nginx": "#8b949e",
    "carpool": "#1f6feb",
    "carpool-before": "#c2c8cf",
    "litellm": "#d29922",
    "autobatcher": "#a371f7",
}


def heading(result: dict[str, Any], name: str) -> str:
    return f"{NAMES[name]} {result['versions'].get(name, '')}".strip()


def in_order(result: dict[str, Any]) -> list[str]:
    return [name for name in NAMES if name in result["summary"]]


def rates(result: dict[str, Any]) -> str:
    summed, names = result["summary"], in_order(result)
    counts = summed[names[0]]["levels"]
    rows = [[count, *(f"{summed[name]['levels'][count]['per_s']:,.0f}/s" for name in names)] for count in counts]
    return grid(["connections", *(heading(result, name) for name in names)], rows)


def delays(result: dict[str, Any]) -> str:
    summed, names = result["summary"], [name for name in in_order(result) if name != "direct"]
    counts = summed[names[0]]["levels"]
    rows = [[f"p50, p99 at {count}", *(added(summed[name]["levels"][count]) for name in names)] for count in counts]
    rows.append(["first byte of a stream", *(f"{summed[name]['added_first_ms']:,.2f} ms" for name in names)])
    rows.append(["processor a request at 32", *(f"{summed[name]['levels']['32']['cpu_us']:,.0f} µs" for name in names)])
    rows.append(["memory", *(f"{summed[name]['rss'] / 1e6:,.0f} MB" for name in names)])
    return grid(["added", *(NAMES[name] for name in names)], rows)


def added(level: dict[str, Any]) -> str:
    note = f" ({level['failed']} failed)" if level["failed"] else ""
    return f"{milliseconds(level['added_p50_ms'])}, {milliseconds(level['added_p99_ms'])} ms{note}"


def milliseconds(value: float) -> str:
    return f"{value:,.2f}" if abs(value) < 10 else f"{value:,.0f}"


def judgement(result: dict[str, Any]) -> str:
    rows = [[one["what"], f"{one['value']:.3g}", one["wanted"], one["verdict"]] for one in result["verdicts"]]
    return grid(["target", "measured", "wanted", "verdict"], rows, left=True)


def tables(result: dict[str, Any]) -> str:
    return f"Requests per second:\n\n{rates(result)}\nAdded by the proxy:\n\n{delays(result)}"


def picture(result: dict[str, Any]) -> str:
    summed, names = result["summary"], [name for name in in_order(result) if name != "direct"]
    groups = [
        Group(
            f"{count} connection{'s' if count != '1' else ''}",
            [Bar(name, summed[name]["levels"][count]["per_s"]) for name in names],
        )
        for count in summed[names[0]]["levels"]
    ]
    contestants = {name: Contestant(heading(result, name), COLOURS[name]) for name in names}
    return drawn("Requests per second through each proxy", contestants, groups, left=130)


def section(result: dict[str, Any]) -> str:
    facts, plan = result["machine"], result["settings"]
    rules = "" if plan["rules"] else " carpool ran without rules."
    where = (
        f"Measured on {result['date']}: one of {facts['cores']} cores for each contestant ({facts['cpu']}), "
        f"{facts['memory_gib']} GiB, Python {facts['python']}, load {facts['load_at_start']:.1f} to "
        f"{facts['load_at_end']:.1f}, the benchmark's own included. "
        f"Other work took up to {disturbed(result['summary']):.1f} of the two cores. "
        f"Rounds: {len(result['rounds'])}, of {plan['seconds']:.0f} s for each number of connections; medians.{rules}"
    )
    return f"{where}\n\n{tables(result)}\n{judgement(result)}"


def publish(result: dict[str, Any]) -> None:
    place("proxy", section(result), picture(result))


if __name__ == "__main__":
    publish(json.loads(Path(sys.argv[1]).read_text("utf-8")))
