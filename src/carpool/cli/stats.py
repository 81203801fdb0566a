"""`carpool stats`: what was paid, and what would have been."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from carpool.ledger import Summary, dollars
from carpool.model import Totals
from carpool.stores import peek


def stats(
    store: Annotated[str, typer.Option(help="The store: a path, sqlite:///path or postgresql://…")] = "carpool.db",
) -> None:
    """Show what a store's calls were paid, and what they would have been without carpool."""
    totals, counts = asyncio.run(peek(store))
    console = Console()
    console.print(ledger_table(totals))
    console.print(states_line(counts))


def ledger_table(totals: Sequence[Totals]) -> Table:
    """The ledger by lane and kind, with its sum."""
    table = Table(title="Ledger", title_justify="left", title_style="bold", caption_justify="left", box=SIMPLE_HEAD)
    table.add_column("lane")
    table.add_column("kind")
    for name in ("purchases", "unknown", "paid", "would have paid"):
        table.add_column(name, justify="right")
    for row in totals:
        paid, would = dollars(row.paid), dollars(row.would_have_paid)
        table.add_row(row.lane, row.kind, f"{row.purchases:,}", f"{row.unknown or ''}", paid, would)
    summary = Summary.of(totals)
    table.add_section()
    sums = f"{summary.purchases:,}", f"{summary.unknown or ''}", dollars(summary.paid), dollars(summary.would_have_paid)
    table.add_row("sum", "", *sums, style="bold")
    share = "" if summary.share is None else f" ({summary.share:.0%})"
    table.caption = f"saved {dollars(summary.saved)}{share}" + (
        f", not counting {summary.unknown:,} purchases whose price is unknown" if summary.unknown else ""
    )
    return table


def states_line(counts: Mapping[str, int]) -> str:
    shown = [f"{name.replace('.', ' ')} {count:,}" for name, count in sorted(counts.items()) if count]
    return " · ".join(shown) if shown else "No calls yet."
