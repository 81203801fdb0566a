"""A result as a table and as a picture, in docs/performance.md."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drawing import Bar, Contestant, Group, grid
from drawing import picture as drawn
from drawing import publish as place

CONTESTANTS = {
    "carpool": Contestant("carpool", "#1f6feb"),
    "carpool-sdk": Contestant("carpool with the SDK", "#79b8ff"),
    "carpool-before": Contestant("carpool before", "#c2c8cf"),
    "llmfleet": Contestant("llmfleet 0.1.0", "#d29922"),
    "inspect_ai": Contestant("inspect_ai's batcher", "#8b949e"),
}


def label(comparison: dict[str, Any]) -> str:
    return f"{comparison['calls']:,}" + (" in one batch" if comparison["one_batch"] else "")


def in_order(result: dict[str, Any]) -> dict[str, Contestant]:
    return {name: CONTESTANTS[name] for name in result["comparisons"][0]["medians"]}


def table(result: dict[str, Any]) -> str:
    return _by_calls(result, cell)


def memory(result: dict[str, Any]) -> str:
    return _by_calls(result, kilobytes)


def _by_calls(result: dict[str, Any], cell_of: Callable[[dict[str, Any]], str]) -> str:
    names = in_order(result)
    rows = [[label(one), *(cell_of(one["medians"][name]) for name in names)] for one in result["comparisons"]]
    return grid(["calls", *(one.said for one in names.values())], rows)


def cell(median: dict[str, Any]) -> str:
    if median["finished"]:
        return f"{median['calls_per_s']:,.0f}/s ({median['seconds']:.1f} s)"
    return f"not done after {median['seconds']:.0f} s" if median["seconds"] else "failed"


def kilobytes(median: dict[str, Any]) -> str:
    beyond, peak = median.get("bytes_per_waiting_call"), median.get("rss_peak")
    return "-" if beyond is None or peak is None else f"{beyond / 1000:.1f} KB · {peak / 1e6:,.0f} MB"


def picture(result: dict[str, Any]) -> str:
    names = in_order(result)
    groups = [Group(label(one), [bar(name, one["medians"][name]) for name in names]) for one in result["comparisons"]]
    return drawn("Calls per second, from submit to answer", names, groups, left=170)


def bar(name: str, median: dict[str, Any]) -> Bar:
    return Bar(name, median["calls_per_s"]) if median["finished"] else Bar(name, None, cell(median))


def section(result: dict[str, Any]) -> str:
    facts = result["machine"]
    where = (
        f"Measured on {result['date']}: {facts['cores']} cores ({facts['cpu']}), {facts['memory_gib']} GiB, "
        f"Python {facts['python']}, load {facts['load_at_start']:.1f} to {facts['load_at_end']:.1f} from other work. "
        "Medians of the rounds."
    )
    return (
        f"{where}\n\nCalls per second, and seconds from the first submit to the last answer:\n\n{table(result)}\n"
        f"Memory per waiting call beyond its body, and the peak of the whole process:\n\n{memory(result)}"
    )


def publish(result: dict[str, Any]) -> None:
    place("pool", section(result), picture(result))


if __name__ == "__main__":
    publish(json.loads(Path(sys.argv[1]).read_text("utf-8")))
