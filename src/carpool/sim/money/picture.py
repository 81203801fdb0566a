"""Cost against deadline as an SVG picture: a curve per policy, with its name at its end.

Both axes are logarithmic: deadlines go from a minute to a day, and a ratio of 2 lies as far above 1 as 0.5 lies below
it. One file serves light and dark pages: it paints its own background and follows `prefers-color-scheme`. Nobody has to
tell colours apart to read it: names stand beside their curves, and the kinds of policy differ in their dashes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 820, 490
LEFT, RIGHT, TOP, BOTTOM = 58, 208, 76, 76
LINE = 15  # pixels between two labels
LATE = 0.01  # with more missed deadlines than this share, a point is hollow

_NOTE = f"Hollow points miss more than {LATE * 100:g} % of the deadlines that now would keep. Shaded: 95 % confidence."

DEADLINE_TICKS = tuple(60.0 * minutes for minutes in (1, 2, 5, 10, 20, 60, 120, 240, 480, 1440))
RATIO_TICKS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0, 10.0, 20.0)


class Ink(NamedTuple):
    """How a curve is drawn: its colour on a light and on a dark page, its dashes, its width."""

    light: str
    dark: str
    dashes: str = ""
    width: float = 1.8


class CurvePoint(NamedTuple):
    deadline_s: float
    ratio: float
    low: float
    high: float
    missed: float = 0.0  # share of the deadlines that `now` would have kept


class Curve(NamedTuple):
    name: str
    points: Sequence[CurvePoint]


# Policies that keep every call on `now` are dashed and the bound is dotted: neither depends much on the deadline.
_ON_NOW, _DOTS = "7 4", "2 4"
INKS: Mapping[str, Ink] = {
    "carpool": Ink("#0a5fc4", "#6cb6ff", width=3.2),
    "bound": Ink("#1f2328", "#f0f3f6", _DOTS, 2.2),
    "now": Ink("#7d6a57", "#b9a48f", _ON_NOW),
    "now+5m": Ink("#59636e", "#a5afba", _ON_NOW),
    "now+1h": Ink("#00764d", "#41c88f", _ON_NOW),
    "now+5m+pings": Ink("#0b7a8a", "#56c8d8", _ON_NOW),
    "batch": Ink("#8f3f2b", "#d98d76"),
    "batch+1h": Ink("#bc4c00", "#ff9b57"),
    "llmfleet": Ink("#a0347e", "#ec94cf"),
    "window": Ink("#7a6200", "#d9bd3f"),
}
_SPARE = (Ink("#6639ba", "#b794f6"), Ink("#4d5d00", "#b6c95a"), Ink("#b3274a", "#ff8fa3"))

_STYLE = (
    "svg{font:12px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}"
    ".page{fill:#fff}.ink{fill:#1f2328}.quiet{fill:#59636e}.grid{stroke:#d8dee4}.axis{stroke:#59636e}"
    ".title{font-size:15px;font-weight:600}.name{font-weight:600}.figure{font-weight:400}.hollow{fill:#fff}"
)
_DARK = ".page,.hollow{fill:#0d1117}.ink{fill:#f0f3f6}.quiet{fill:#a5afba}.grid{stroke:#2b323b}.axis{stroke:#a5afba}"


class Scale(NamedTuple):
    """Maps a value to a pixel, on a logarithmic axis."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return round(self.start + share * (self.end - self.start), 1)


def cost_curves(title: str, about: str, curves: Sequence[Curve]) -> str:
    """The picture. Curves without a point are left out."""
    drawn = [curve for curve in curves if curve.points]
    inks = _inks([curve.name for curve in drawn])
    across, up = _across(drawn), _up(drawn)
    parts = [
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="6"/>',
        f'<text class="ink title" x="{LEFT - 42}" y="26">{escape(title)}</text>',
        f'<text class="quiet" x="{LEFT - 42}" y="45">{escape(about)}</text>',
        *_grid(across, up),
        *_bands(drawn, across, up),
        *(_curve(number, curve, inks[number], across, up) for number, curve in _least_first(drawn)),
        *_labels(drawn, across, up),
        f'<text class="quiet" x="{LEFT - 42}" y="{HEIGHT - 12}">{_NOTE}</text>',
    ]
    label = escape(f"{title}. {about}", {'"': "&quot;"})
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{label}"><style>{_style(inks)}</style>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _least_first(curves: Sequence[Curve]) -> list[tuple[int, Curve]]:
    """What matters most is drawn last, on top: carpool."""
    return sorted(enumerate(curves), key=lambda one: one[1].name == "carpool")


# ---------------------------------------------------------------- colours


def _inks(names: Sequence[str]) -> list[Ink]:
    """`now+5m+pings(3)` is drawn like `now+5m+pings`."""
    kinds = [name.partition("(")[0] for name in names]
    spare = [kind for kind in kinds if kind not in INKS]
    return [INKS[kind] if kind in INKS else _SPARE[spare.index(kind) % len(_SPARE)] for kind in kinds]


def _style(inks: Sequence[Ink]) -> str:
    light = "".join(f".c{number}{{color:{ink.light}}}" for number, ink in enumerate(inks))
    dark = "".join(f".c{number}{{color:{ink.dark}}}" for number, ink in enumerate(inks))
    return f"{_STYLE}{light}@media(prefers-color-scheme:dark){{{_DARK}{dark}}}"


# ---------------------------------------------------------------- axes


def _across(curves: Iterable[Curve]) -> Scale:
    deadlines = [point.deadline_s for curve in curves for point in curve.points]
    low, high = min(deadlines, default=60.0), max(deadlines, default=86400.0)
    if low == high:
        low, high = low / 2, high * 2
    return Scale(low, high, LEFT + 10, WIDTH - RIGHT)


def _up(curves: Iterable[Curve]) -> Scale:
    points = [point for curve in curves for point in curve.points if point.ratio > 0]
    least, most = (
        min((point.ratio for point in points), default=1.0),
        max((point.high for point in points), default=1.0),
    )
    return Scale(min(least, 1.0) / 1.12, max(most, 1.0) * 1.06, HEIGHT - BOTTOM, TOP)


def _grid(across: Scale, up: Scale) -> list[str]:
    parts = [f'<text class="quiet" x="{LEFT - 42}" y="{TOP - 8}">cost ÷ now with a 5-minute cache</text>']
    taken = math.inf
    for ratio in sorted(RATIO_TICKS, key=lambda tick: (tick != 1.0, tick)):  # 1 has its line in any case
        y = up.at(ratio) if up.low <= ratio <= up.high else None
        if y is None or (ratio != 1.0 and (abs(y - up.at(1.0)) < LINE or abs(y - taken) < LINE)):
            continue
        kind = "axis" if ratio == 1.0 else "grid"
        taken = taken if ratio == 1.0 else y
        parts += [
            f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT + 6}" y1="{y}" y2="{y}"/>',
            f'<text class="quiet" x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{ratio:g}</text>',
        ]
    return parts + _deadlines(across)


def _deadlines(across: Scale) -> list[str]:
    y, parts, taken = HEIGHT - BOTTOM, [], -math.inf
    for deadline in DEADLINE_TICKS:
        if across.low <= deadline <= across.high and across.at(deadline) - taken > 40:
            taken = across.at(deadline)
            parts += [
                f'<line class="axis" x1="{taken}" x2="{taken}" y1="{y}" y2="{y + 4}"/>',
                f'<text class="quiet" x="{taken}" y="{y + 18}" text-anchor="middle">{deadline_label(deadline)}</text>',
            ]
    middle = (across.start + across.end) / 2
    return [
        *parts,
        f'<text class="quiet" x="{middle:g}" y="{y + 36}" text-anchor="middle">deadline of each call</text>',
    ]


def deadline_label(seconds: float) -> str:
    """`30 s`, `1 min`, `1 h`: an hour is not 60 minutes on an axis."""
    for unit, length in (("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s"


# ---------------------------------------------------------------- curves and their names


def _curve(number: int, curve: Curve, ink: Ink, across: Scale, up: Scale) -> str:
    points = [point for point in curve.points if point.ratio > 0]
    at = [(across.at(point.deadline_s), up.at(point.ratio)) for point in points]
    dashes = f' stroke-dasharray="{ink.dashes}"' if ink.dashes else ""
    line = " ".join(f"{x},{y}" for x, y in at)
    marks = "".join(_mark(x, y, point.missed > LATE) for (x, y), point in zip(at, points, strict=True))
    return (
        f'<g class="c{number}" stroke="currentColor" fill="none">'
        f'<polyline points="{line}" stroke-width="{ink.width}" stroke-linejoin="round"{dashes}/>{marks}</g>'
    )


def _mark(x: float, y: float, late: bool) -> str:
    style = 'class="hollow" r="3.6" stroke-width="1.6"' if late else 'fill="currentColor" r="2.6" stroke="none"'
    return f'<circle cx="{x}" cy="{y}" {style}/>'


def _bands(curves: Sequence[Curve], across: Scale, up: Scale) -> list[str]:
    """The intervals, where they are wider than the line; one for curves that coincide."""
    drawn: dict[str, str] = {}
    for number, curve in enumerate(curves):
        points = [point for point in curve.points if point.ratio > 0]
        upper = [(across.at(point.deadline_s), up.at(point.high)) for point in points]
        lower = [(across.at(point.deadline_s), up.at(max(point.low, up.low))) for point in points]
        if any(below[1] - above[1] >= 2 for above, below in zip(upper, lower, strict=True)):
            edge = " ".join(f"{x},{y}" for x, y in [*upper, *reversed(lower)])
            drawn.setdefault(
                edge, f'<polygon class="c{number}" points="{edge}" fill="currentColor" fill-opacity="0.12"/>'
            )
    return list(drawn.values())


def _labels(curves: Sequence[Curve], across: Scale, up: Scale) -> list[str]:
    ends = [up.at(curve.points[-1].ratio) for curve in curves]
    places = spread(ends, LINE, TOP, HEIGHT - BOTTOM)
    parts = []
    for number, (curve, end, place) in enumerate(zip(curves, ends, places, strict=True)):
        x = across.at(curve.points[-1].deadline_s)
        parts.append(
            f'<g class="c{number}"><path d="M{x + 5} {end} L{x + 20} {place}" stroke="currentColor" fill="none" '
            f'stroke-opacity="0.6"/><text class="name" fill="currentColor" x="{x + 24}" y="{place + 4}">'
            f'{escape(curve.name)}<tspan class="figure" dx="6">{curve.points[-1].ratio:.2f}</tspan></text></g>'
        )
    return parts


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places as near as possible to the wanted ones, in their order, `gap` apart and within the bounds.

    Neighbours that would overlap form a block around the mean of what they want (pool adjacent violators)."""
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    blocks: list[tuple[float, int]] = []  # where a block's middle wants to be, and its size
    for index in order:
        middle, size = wanted[index], 1
        while blocks and blocks[-1][0] + gap * blocks[-1][1] / 2 > middle - gap * size / 2:
            before, count = blocks.pop()
            middle, size = (before * count + middle * size) / (count + size), count + size
        blocks.append((middle, size))
    placed = [middle + gap * (place - (size - 1) / 2) for middle, size in blocks for place in range(size)]
    placed = [max(place, low + gap * rank) for rank, place in enumerate(placed)]
    placed = [min(place, high - gap * (len(placed) - 1 - rank)) for rank, place in enumerate(placed)]
    return [round(placed[order.index(index)], 1) for index in range(len(wanted))]
