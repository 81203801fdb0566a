"""What every benchmark's page needs: tables, bars on a logarithmic scale, and its place in docs/."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).resolve().parents[1] / "docs"
WIDTH, BAR, GAP, RIGHT = 720, 16, 18, 110
LEAST = 10  # where the scale begins
STYLE = "text{font:12px sans-serif;fill:#57606a}.size{font-weight:bold}"


class Bar(NamedTuple):
    name: str
    rate: float | None  # None: there is only something to say
    said: str = ""


class Group(NamedTuple):
    label: str
    bars: Sequence[Bar]


class Contestant(NamedTuple):
    said: str
    colour: str


def grid(head: Sequence[str], rows: Sequence[Sequence[str]], left: bool = False) -> str:
    """A table in Markdown: figures to the right, or, with `left`, words to the left."""
    lines = [head, ["---" if left else "---:"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def picture(about: str, contestants: Mapping[str, Contestant], groups: Sequence[Group], left: int) -> str:
    """One bar for each contestant in each group, longer for higher rates."""
    most = 10 ** math.ceil(math.log10(max(bar.rate or 0 for group in groups for bar in group.bars)))
    parts, y = [], 44
    for group in groups:
        parts.append(f'<text x="8" y="{y + len(group.bars) * BAR / 2 + 4:.0f}" class="size">{group.label}</text>')
        for bar in group.bars:
            parts.append(_bar(bar, contestants[bar.name].colour, left, y, most))
            y += BAR
        y += GAP
    legend = "".join(
        f'<rect x="{8 + 175 * place}" y="10" width="10" height="10" fill="{one.colour}"/>'
        f'<text x="{24 + 175 * place}" y="19">{one.said}</text>'
        for place, one in enumerate(contestants.values())
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img" '
        f'aria-label="{about}, on a logarithmic scale"><style>{STYLE}</style>{legend}{"".join(parts)}</svg>\n'
    )


def _bar(bar: Bar, colour: str, left: int, y: int, most: float) -> str:
    if bar.rate is None:
        return f'<text x="{left + 4}" y="{y + 12}">{bar.said}</text>'
    share = math.log10(max(bar.rate, LEAST) / LEAST) / math.log10(most / LEAST)
    width = (WIDTH - left - RIGHT) * max(0.02, share)
    return (
        f'<rect x="{left}" y="{y + 2}" width="{width:.0f}" height="{BAR - 4}" fill="{colour}"/>'
        f'<text x="{left + width + 6:.0f}" y="{y + 12}">{bar.rate:,.0f}/s</text>'
    )


def publish(name: str, section: str, drawn: str) -> None:
    """Replaces the benchmark's measured part of docs/performance.md, and its picture."""
    place_image(name, drawn)
    place_section("performance.md", name, section)


def place_image(name: str, drawn: str) -> None:
    image = DOCS / "images" / f"{name}.svg"
    image.parent.mkdir(exist_ok=True)
    image.write_text(drawn, "utf-8")


def place_section(page: str, name: str, section: str) -> None:
    part = re.compile(rf"(<!-- measured: {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    text = (DOCS / page).read_text("utf-8")
    (DOCS / page).write_text(part.sub(lambda found: found[1] + section + found[2], text), "utf-8")
