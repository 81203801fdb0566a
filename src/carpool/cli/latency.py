"""What a forecast has learned, drawn for a terminal: a curve for each class of batches, and tables of all other times.

A curve shows which share of the batches has ended by an age, on a logarithmic axis. Dots show what is assumed without
any observation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from carpool.cli.console import figures, titled
from carpool.planners.forecast import BatchClass, ClassSeen, Forecast
from carpool.planners.policy import span

WIDEST: Final = 88  # columns
ROWS: Final = 8
_FIRST_S, _LAST_S = 10.0, 86_400.0
_MARGIN: Final = 6  # columns left of the axis
_TICKS: Final = (10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14_400.0, 43_200.0, 86_400.0)
_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_SIZES: Final = {"s": "short answers", "m": "middling answers", "l": "long answers"}
_TOKENS: Final = 500  # of the call whose time is shown


def latency_report(forecast: Forecast, width: int) -> Iterator[RenderableType]:
    seen, prior = forecast.seen(), Forecast()
    batches = [row for row in seen if row.kind == "size"]
    for row in batches:
        yield batch_curve(row, forecast, prior, width)
    if batches:
        yield Text("█ learned, · assumed without data: the share of the batches that have ended by that age\n", "dim")
    tables = [
        _sync_table([row for row in _of("sync", seen) if not row.size_class], forecast, prior),
        _cancel_table(_of("cancel", seen), forecast, prior),
        _flex_table(_of("flex", seen), forecast, prior),
    ]
    yield from (table for table in tables if table.row_count)
    if not seen:
        yield "Nothing is learned yet. It is written once a minute while carpool runs, and when it stops."


def batch_curve(row: ClassSeen, forecast: Forecast, prior: Forecast, width: int) -> Text:
    of = BatchClass(row.provider, row.model, row.size_class)
    columns = max(20, width - _MARGIN - 1)
    ages = [_FIRST_S * (_LAST_S / _FIRST_S) ** (column / (columns - 1)) for column in range(columns)]
    learned, assumed = ([one.batch_cdf(age, of) for age in ages] for one in (forecast, prior))
    drawn = Text()
    drawn.append(f"{row.provider} {row.model or 'several models'}, {_SIZES.get(row.size_class, '')}\n", "bold")
    drawn.append(f"{_number(row.passed)} batches watched, {_number(row.observed)} ended by themselves\n")
    half, most = (_both(*(one.batch_quantile(share, of) for one in (forecast, prior))) for share in (0.5, 0.9))
    drawn.append(f"50 % end in {half}, 90 % in {most}\n")
    for level in range(ROWS - 1, -1, -1):
        label = f"{(level + 1) / ROWS:.0%}" if level % 2 else ""
        drawn.append(f"{label:>{_MARGIN - 1}} ", "dim")
        for share, before in zip(learned, assumed, strict=True):
            drawn.append(*_cell(share * ROWS - level, before * ROWS - level))
        drawn.append("\n")
    drawn.append(" " * _MARGIN + _axis(ages) + "\n", "dim")
    return drawn


def _cell(learned: float, assumed: float) -> tuple[str, str]:
    """One character, and its style, from the heights of both curves above the bottom of its row."""
    if 0 <= assumed < 1:  # the prior's curve passes here
        return "·", "yellow on blue" if learned >= 1 else "yellow"
    return _BLOCKS[round(8 * min(1.0, max(0.0, learned)))], "blue"


def _axis(ages: Sequence[float]) -> str:
    line = [" "] * len(ages)
    free = 0
    for tick in _TICKS:
        place = min(range(len(ages)), key=lambda column: abs(ages[column] / tick - 1))
        label = span(tick)
        if place >= free and place + len(label) <= len(ages):
            line[place : place + len(label)] = label
            free = place + len(label) + 2
    return "".join(line)


def _sync_table(rows: Sequence[ClassSeen], forecast: Forecast, prior: Forecast) -> Table:
    headings = figures("answers", "in the median", "allowed for a promise", "without data")
    table = titled(f"Synchronous calls of {_TOKENS} output tokens", "provider", "model", *headings)
    for row in rows:
        call = row.provider, row.model, _TOKENS
        times = forecast.sync_typical(*call), forecast.sync_seconds(*call), prior.sync_seconds(*call)
        table.add_row(Text(row.provider), Text(row.model), _number(row.observed), *map(_seconds, times))
    return table


def _cancel_table(rows: Sequence[ClassSeen], forecast: Forecast, prior: Forecast) -> Table:
    headings = figures("cancels", "95 % end in", "lines billed", "without data")
    table = titled("Cancelled batches", "provider", *headings)
    for row in rows:
        end, billed = forecast.cancel_seconds(row.provider), forecast.billed_chance(row.provider)
        before = f"{_seconds(prior.cancel_seconds(row.provider))}, {prior.billed_chance(row.provider):.0%}"
        table.add_row(Text(row.provider), _number(row.observed), _seconds(end), f"{billed:.0%}", before)
    return table


def _flex_table(rows: Sequence[ClassSeen], forecast: Forecast, prior: Forecast) -> Table:
    table = titled("Calls on flex", "provider", "model", *figures("calls", "refused", "without data"))
    for row in rows:
        refused, before = (one.flex_refusal(row.provider, row.model) for one in (forecast, prior))
        table.add_row(Text(row.provider), Text(row.model), _number(row.observed), f"{refused:.0%}", f"{before:.0%}")
    return table


def _of(kind: str, seen: Sequence[ClassSeen]) -> list[ClassSeen]:
    return [row for row in seen if row.kind == kind]


def _both(learned: float, assumed: float) -> str:
    return f"{_seconds(learned)} (assumed {_seconds(assumed)})"


def _seconds(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 600 else span(round(seconds / 60) * 60.0)


def _number(count: float) -> str:
    """Old observations count less, so numbers are rarely whole."""
    return f"{count:,.0f}" if count >= 9.95 else f"{count:.1f}"
