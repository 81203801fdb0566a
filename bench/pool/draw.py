"""A result as a table and as a picture, in docs/performance.md."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "performance.md"
PICTURE = DOCS / "images" / "pool.svg"
PART = re.compile(r"(<!-- measured: pool -->\n).*?(<!-- end of pool -->)", re.DOTALL)

NAMES = {
    "carpool": "carpool",
    "carpool-sdk": "carpool with the SDK",
    "llmfleet": "llmfleet 0.1.0",
    "inspect_ai": "inspect_ai's batcher",
}
COLOURS = {"carpool": "#1f6feb", "carpool-sdk": "#79b8ff", "llmfleet": "#d29922", "inspect_ai": "#8b949e"}
WIDTH, BAR, GAP, LEFT, RIGHT = 720, 16, 18, 170, 110


def label(comparison: dict[str, Any]) -> str:
    return f"{comparison['calls']:,}" + (" in one batch" if comparison["one_batch"] else "")


def table(result: dict[str, Any]) -> str:
    names = list(result["comparisons"][0]["medians"])
    head = ["calls", *(NAMES[name] for name in names)]
    rows = [[label(one), *(cell(one["medians"][name]) for name in names)] for one in result["comparisons"]]
    lines = [head, ["---:"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def cell(median: dict[str, Any]) -> str:
    if median["finished"]:
        return f"{median['calls_per_s']:,.0f}/s ({median['seconds']:.1f} s)"
    return f"not done after {median['seconds']:.0f} s" if median["seconds"] else "failed"


def memory(result: dict[str, Any]) -> str:
    names = list(result["comparisons"][0]["medians"])
    lines = [["calls", *(NAMES[name] for name in names)], ["---:"] * (len(names) + 1)]
    lines += [[label(one), *(kilobytes(one["medians"][name]) for name in names)] for one in result["comparisons"]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def kilobytes(median: dict[str, Any]) -> str:
    beyond, peak = median.get("bytes_per_waiting_call"), median.get("rss_peak")
    return "-" if beyond is None or peak is None else f"{beyond / 1000:.1f} KB · {peak / 1e6:,.0f} MB"


def picture(result: dict[str, Any]) -> str:
    """Bars on a logarithmic scale: calls per second."""
    names = list(result["comparisons"][0]["medians"])
    rates = [m["calls_per_s"] for one in result["comparisons"] for m in one["medians"].values() if m["finished"]]
    most = 10 ** math.ceil(math.log10(max(rates)))
    parts, y = [], 44
    for one in result["comparisons"]:
        parts.append(f'<text x="8" y="{y + len(names) * BAR / 2 + 4:.0f}" class="size">{label(one)}</text>')
        for name in names:
            parts.append(bar(name, one["medians"][name], y, most))
            y += BAR
        y += GAP
    legend = "".join(
        f'<rect x="{8 + 175 * place}" y="10" width="10" height="10" fill="{COLOURS[name]}"/>'
        f'<text x="{24 + 175 * place}" y="19">{NAMES[name]}</text>'
        for place, name in enumerate(names)
    )
    style = "text{font:12px sans-serif;fill:#57606a}.size{font-weight:bold}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img" '
        f'aria-label="Calls per second, from submit to answer, on a logarithmic scale"><style>{style}</style>'
        f"{legend}{''.join(parts)}</svg>\n"
    )


def bar(name: str, median: dict[str, Any], y: int, most: float) -> str:
    if not median["finished"]:
        return f'<text x="{LEFT + 4}" y="{y + 12}">{cell(median)}</text>'
    room = WIDTH - LEFT - RIGHT
    width = room * max(0.02, math.log10(median["calls_per_s"] / 10) / math.log10(most / 10))
    return (
        f'<rect x="{LEFT}" y="{y + 2}" width="{width:.0f}" height="{BAR - 4}" fill="{COLOURS[name]}"/>'
        f'<text x="{LEFT + width + 6:.0f}" y="{y + 12}">{median["calls_per_s"]:,.0f}/s</text>'
    )


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
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture(result), "utf-8")
    text = PAGE.read_text("utf-8")
    PAGE.write_text(PART.sub(lambda part: part[1] + section(result) + part[2], text), "utf-8")


if __name__ == "__main__":
    publish(json.loads(Path(sys.argv[1]).read_text("utf-8")))
