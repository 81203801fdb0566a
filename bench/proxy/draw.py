"""A result as tables and as a picture, in docs/performance.md."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

from summing import disturbed

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "performance.md"
PICTURE = DOCS / "images" / "proxy.svg"
PART = re.compile(r"(<!-- measured: proxy -->\n).*?(<!-- end of proxy -->)", re.DOTALL)

NAMES = {
    "direct": "no proxy",
    "nginx": "nginx",
    "carpool": "carpool",
    "litellm": "LiteLLM",
    "autobatcher": "autobatcher",
}
COLOURS = {"nginx": "#8b949e", "carpool": "#1f6feb", "litellm": "#d29922", "autobatcher": "#a371f7"}
WIDTH, BAR, GAP, LEFT, RIGHT = 720, 16, 18, 130, 110


def heading(result: dict[str, Any], name: str) -> str:
    return f"{NAMES[name]} {result['versions'].get(name, '')}".strip()


def grid(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---:"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


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
    lines = [["target", "measured", "wanted", "verdict"], ["---", "---:", "---:", "---"], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def tables(result: dict[str, Any]) -> str:
    return f"Requests per second:\n\n{rates(result)}\nAdded by the proxy:\n\n{delays(result)}"


def picture(result: dict[str, Any]) -> str:
    """Bars on a logarithmic scale: requests per second."""
    summed, names = result["summary"], [name for name in in_order(result) if name != "direct"]
    counts = list(summed[names[0]]["levels"])
    most = 10 ** math.ceil(math.log10(max(summed[name]["levels"][c]["per_s"] for name in names for c in counts)))
    parts, y = [], 44
    for count in counts:
        said = f"{count} connection{'s' if count != '1' else ''}"
        parts.append(f'<text x="8" y="{y + len(names) * BAR / 2 + 4:.0f}" class="size">{said}</text>')
        for name in names:
            parts.append(bar(name, summed[name]["levels"][count]["per_s"], y, most))
            y += BAR
        y += GAP
    legend = "".join(
        f'<rect x="{8 + 175 * place}" y="10" width="10" height="10" fill="{COLOURS[name]}"/>'
        f'<text x="{24 + 175 * place}" y="19">{heading(result, name)}</text>'
        for place, name in enumerate(names)
    )
    style = "text{font:12px sans-serif;fill:#57606a}.size{font-weight:bold}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img" '
        f'aria-label="Requests per second through each proxy, on a logarithmic scale"><style>{style}</style>'
        f"{legend}{''.join(parts)}</svg>\n"
    )


def bar(name: str, rate: float, y: int, most: float) -> str:
    width = (WIDTH - LEFT - RIGHT) * max(0.02, math.log10(max(rate, 1)) / math.log10(most))
    return (
        f'<rect x="{LEFT}" y="{y + 2}" width="{width:.0f}" height="{BAR - 4}" fill="{COLOURS[name]}"/>'
        f'<text x="{LEFT + width + 6:.0f}" y="{y + 12}">{rate:,.0f}/s</text>'
    )


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
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture(result), "utf-8")
    text = PAGE.read_text("utf-8")
    PAGE.write_text(PART.sub(lambda part: part[1] + section(result) + part[2], text), "utf-8")


if __name__ == "__main__":
    publish(json.loads(Path(sys.argv[1]).read_text("utf-8")))
