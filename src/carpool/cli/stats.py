"""`carpool stats`: what was paid, and what it would have cost without carpool. `carpool stats latency`: what was
learned of times."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import typer
from rich.table import Table

from carpool.cli import flags
from carpool.cli.console import console, figures, titled
from carpool.cli.latency import WIDEST, latency_report
from carpool.cli.setup import gather
from carpool.core.clock import SystemClock
from carpool.core.model import Totals
from carpool.planners.forecast import Forecast
from carpool.planners.ledger import LedgerSummary, dollars
from carpool.stores import peek, peek_forecast

stats = typer.Typer(invoke_without_command=True, rich_markup_mode=None)


@stats.callback()
def summary(context: typer.Context, store: flags.Store = None, config: flags.ConfigFile = None) -> None:
    """Show what a store's calls were paid, and what they would have been without carpool."""
    if context.invoked_subcommand is not None:
        return
    totals, counts = asyncio.run(peek(gather(config, None, (), store).store))
    out = console()
    out.print(ledger_table(totals))
    out.print(states_line(counts), soft_wrap=True)


@stats.command(short_help="Show how long batches and calls take, as far as carpool has learned it.")
def latency(store: flags.Store = None, config: flags.ConfigFile = None) -> None:
    """Draw how long batches take, and what else carpool has learned of times, beside what it assumes without data."""
    forecast = Forecast()
    forecast.load(peek_forecast(gather(config, None, (), store).store), SystemClock().now())
    out = console()
    for part in latency_report(forecast, min(out.width, WIDEST)):
        out.print(part)


def ledger_table(totals: Sequence[Totals]) -> Table:
    """The ledger by lane and kind, with the total. A call may have several purchases, as in a batch and a rescue."""
    table = titled("Purchases", "lane", "kind", *figures("purchases", "unknown", "paid", "would have paid"))
    for row in totals:
        paid, would = dollars(row.paid), dollars(row.would_have_paid)
        table.add_row(row.lane, row.kind, f"{row.purchases:,}", f"{row.unknown or ''}", paid, would)
    summary = LedgerSummary.of(totals)
    table.add_section()
    sums = f"{summary.purchases:,}", f"{summary.unknown or ''}", dollars(summary.paid), dollars(summary.would_have_paid)
    table.add_row("sum", "", *sums, style="bold")
    share = "" if summary.share is None else f" ({summary.share:.0%})"
    left_out = "1 purchase" if summary.unknown == 1 else f"{summary.unknown:,} purchases"
    table.caption = f"saved {dollars(summary.saved)}{share}" + (
        f", not counting {left_out} whose price is unknown" if summary.unknown else ""
    )
    return table


def states_line(counts: Mapping[str, int]) -> str:
    """The number of calls and batches by state. A call counts once, however often it was bought."""
    groups = {"Calls": "tickets.", "Batches": "batches."}
    lines = [f"{title}: {shown}" for title, prefix in groups.items() if (shown := _states(counts, prefix))]
    return "\n".join(lines) if lines else "No calls yet."


def _states(counts: Mapping[str, int], prefix: str) -> str:
    states = {name.removeprefix(prefix): count for name, count in sorted(counts.items()) if name.startswith(prefix)}
    return " · ".join(f"{state} {count:,}" for state, count in states.items() if count)
