"""How the demo ends: what each lane cost, the two books side by side, and what to try next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from carpool.cli.demo_board import BATCH, LANES, RESCUE, Board
from carpool.ledger import Summary, dollars
from carpool.model import EntryKind, Lane, Totals


@dataclass(frozen=True, slots=True)
class Verdict:
    """The two books side by side: what carpool wrote down, and what the provider charges."""

    totals: Sequence[Totals]
    bill: int
    calls: int

    @property
    def paid(self) -> int:
        return Summary.of(self.totals).paid

    @property
    def equal(self) -> bool:
        return self.paid == self.bill and not Summary.of(self.totals).unknown


def since(before: Sequence[Totals], after: Sequence[Totals]) -> list[Totals]:
    """What this run added to a store that may have been used before."""
    old = {(row.lane, row.kind): row for row in before}
    nothing = Totals(Lane.NOW, EntryKind.PURCHASE, 0, 0, 0, 0)
    return [_minus(row, old.get((row.lane, row.kind), nothing)) for row in after]


def _minus(row: Totals, old: Totals) -> Totals:
    return Totals(
        row.lane,
        row.kind,
        row.purchases - old.purchases,
        row.unknown - old.unknown,
        row.paid - old.paid,
        row.would_have_paid - old.would_have_paid,
    )


def _rows_of(lane: str, totals: Sequence[Totals]) -> list[Totals]:
    if lane == RESCUE:
        return [row for row in totals if row.kind is EntryKind.RESCUE]
    return [row for row in totals if row.lane == lane and row.kind is not EntryKind.RESCUE]


def lane_table(board: Board, totals: Sequence[Totals]) -> Table:
    table = Table(title="Lanes", title_justify="left", title_style="bold", box=SIMPLE_HEAD, collapse_padding=True)
    table.add_column("lane")
    for name in ("calls", "batches", "median\nwait", "longest\nwait", "paid", "would have\npaid", "saved"):
        table.add_column(name, justify="right")
    for lane in LANES:
        money = _money(Summary.of(_rows_of(lane, totals)))
        batches = str(len(board.batches)) if lane == BATCH else ""
        table.add_row(lane, str(len(board.waits[lane])), batches, *board.wait_of(lane), *money)
    table.add_section()
    calls = str(sum(len(waits) for waits in board.waits.values()))
    table.add_row("sum", calls, str(len(board.batches)), "", "", *_money(Summary.of(totals)), style="bold")
    return table


def _money(summary: Summary) -> tuple[str, str, str]:
    return dollars(summary.paid), dollars(summary.would_have_paid), dollars(summary.saved)


def conclude(console: Console, verdict: Verdict, store: Path | None) -> None:
    paid, bill = f"${verdict.paid / 1e9:.9f}", f"${verdict.bill / 1e9:.9f}"
    summary = Summary.of(verdict.totals)
    console.print(
        f"{verdict.calls} calls cost {dollars(summary.paid)} instead of {dollars(summary.would_have_paid)}: "
        f"{summary.share or 0:.0%} saved.",
        highlight=False,
    )
    console.print(f"The ledger says {paid}, the provider's own bill {bill}.", highlight=False)
    said = ("They are equal.", "green") if verdict.equal else ("They differ, and must not.", "bold red")
    console.print(Text(*said), Text(), sep="\n")
    console.print(_next_steps(store))


def _next_steps(store: Path | None) -> Table:
    table = Table(title="Try next", title_justify="left", title_style="bold", box=None, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold", overflow="fold")
    table.add_row("a stand-in provider", "carpool mock")
    table.add_row("a proxy in front of it", "carpool serve --upstream http://127.0.0.1:8788")
    table.add_row("your agents through it", "ANTHROPIC_BASE_URL=http://127.0.0.1:8787/@budget=10m")
    kept = f"carpool stats --store {store}" if store else "carpool demo --store carpool.db && carpool stats"
    table.add_row("what was paid", kept)
    return table
