"""A result as a table and as a picture, in docs/performance.md."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from drawing import Bar, Contestant, Group, grid
from drawing import picture as drawn
from drawing import publish as place

STAGES = {
    "admitted": Contestant("admitted", "#1f6feb"),
    "settled": Contestant("settled", "#2da44e"),
    "answered": Contestant("from submit to answer", "#d29922"),
}
STORES = {"sqlite": "SQLite", "postgres": "PostgreSQL"}


def label(run: dict[str, Any]) -> str:
    return f"{STORES[run['store']]}, {run['processes']} process{'es' if run['processes'] > 1 else ''}"


def table(result: dict[str, Any]) -> str:
    rows = [[label(run), *(f"{run['medians'][stage]:,.0f}/s" for stage in STAGES)] for run in result["runs"]]
    return grid(["store", *(one.said for one in STAGES.values())], rows)


def picture(result: dict[str, Any]) -> str:
    groups = [Group(label(run), [Bar(stage, run["medians"][stage]) for stage in STAGES]) for run in result["runs"]]
    return drawn("Calls per second by store and number of processes", STAGES, groups, left=170)


def section(result: dict[str, Any]) -> str:
    facts, settings = result["machine"], result["settings"]
    where = (
        f"Measured on {result['date']}: {facts['cores']} cores ({facts['cpu']}), {facts['memory_gib']} GiB, "
        f"Python {facts['python']}, PostgreSQL {result['postgres']} on the same machine, load "
        f"{facts['load_at_start']:.1f} at the start. {settings['calls']:,} calls divided among the processes; medians "
        f"of {settings['rounds']} rounds."
    )
    return f"{where}\n\n{table(result)}"


def publish(result: dict[str, Any]) -> None:
    place("shared", section(result), picture(result))


if __name__ == "__main__":
    publish(json.loads(Path(sys.argv[1]).read_text("utf-8")))
