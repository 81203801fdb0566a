"""The state of the demo and its display: live on a terminal, line by line in a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from carpool.core.model import EntryKind, Lane, Totals
from carpool.engine import Event
from carpool.engine.events import BatchCollected, BatchEnded, BatchSubmitted, Trouble
from carpool.planners.ledger import LedgerSummary, dollars

# ------------------------------------------------------------ demo calls
# The clients of the demo, their calls and their budgets.

_FILLER = (
    "The harbour was quiet before dawn, and the boats lay close together so that the tide would not part them. "
    "Whoever wanted to cross could hire one alone and pay for every seat, or wait on the pier until it was full. "
)


@dataclass(frozen=True, slots=True)
class Role:
    """Clients of one kind. `waves` are their arrivals: seconds after the start, and the number of calls."""

    name: str
    budget_s: float | None
    model: str
    max_tokens: int
    task: str
    length: int  # of the prompt, in repetitions of the filler
    waves: tuple[tuple[float, int], ...]

    @property
    def count(self) -> int:
        return sum(size for _, size in self.waves)

    @property
    def budget(self) -> str:
        if self.budget_s is None:
            return "patient"
        return f"{self.budget_s:.0f} s" if self.budget_s < 120 else f"{self.budget_s / 60:.0f} min"

    def calls(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """The arrival time and the parameters of each call."""
        number = 0
        for at, size in self.waves:
            for _ in range(size):
                number += 1
                yield at, self._params(number)

    def _params(self, number: int) -> dict[str, Any]:
        text = f"{self.task} {number}. {_FILLER * self.length}"
        message = {"role": "user", "content": text}
        return {"model": self.model, "max_tokens": self.max_tokens, "messages": [message]}


CHATS = Role(
    name="chats",
    budget_s=2.0,
    model="claude-sonnet-5",
    max_tokens=200,
    task="Answer chat",
    length=2,
    waves=tuple((0.3 + turn, 1) for turn in range(14)),
)
GRADERS = Role(
    name="graders",
    budget_s=600.0,
    model="claude-sonnet-5",
    max_tokens=200,
    task="Grade essay",
    length=30,
    waves=((0.2, 20), (7.5, 8)),
)
NIGHTLY = Role(
    name="nightly",
    budget_s=None,
    model="claude-haiku-4-5",
    max_tokens=400,
    task="Summarise report",
    length=60,
    waves=((0.8, 12),),
)
# carpool cancels a batch of these about 31 s before its deadline: 20 s for the cancel, 9 s for the rescue, 2 s margin.
REVIEWERS = Role(
    name="reviewers",
    budget_s=36.0,
    model="claude-sonnet-5",
    max_tokens=200,
    task="Review change",
    length=20,
    waves=((1.6, 6),),
)
FLEET = (CHATS, GRADERS, NIGHTLY, REVIEWERS)


NOW, BATCH, RESCUE = "now", "batch", "rescue"
LANES = (NOW, BATCH, RESCUE)


@dataclass(slots=True)
class BatchLine:
    id: str
    count: int
    state: str = "in progress"
    took_s: float | None = None

    @property
    def short(self) -> str:
        return f"{self.id[:17]}…"


@dataclass(slots=True)
class RoleLine:
    role: Role
    asked: int = 0
    lanes: dict[str, int] = field(default_factory=dict)  # answered, by lane

    @property
    def answered(self) -> int:
        return sum(self.lanes.values())


class Board:
    """Collects events and reports them."""

    def __init__(self, fleet: Sequence[Role], elapsed: Callable[[], float], say: Callable[[str], None]) -> None:
        self._elapsed = elapsed
        self._say = say
        self.roles = {role.name: RoleLine(role) for role in fleet}
        self.batches: dict[str, BatchLine] = {}
        self.waits: dict[str, list[float]] = {lane: [] for lane in LANES}
        self.stuck: set[str] = set()

    # ------------------------------------------------------------ events

    def asked(self, role: Role) -> None:
        self.roles[role.name].asked += 1

    def answered(self, role: Role, lane: str, wait: float) -> None:
        line = self.roles[role.name]
        line.lanes[lane] = line.lanes.get(lane, 0) + 1
        self.waits[lane].append(wait)
        if line.answered == role.count:
            self.tell(f"All {role.count} {role.name} are answered: {_lanes(line)}.")

    def held(self, provider_id: str) -> None:
        """The mock provider holds this batch back on purpose."""
        self.stuck.add(provider_id)
        self.batches[provider_id].state = "stuck"
        self.tell(f"{self.batches[provider_id].short} gets stuck at the provider.")

    def cancelling(self, provider_id: str) -> None:
        line = self.batches[provider_id]
        if line.state == "stuck":
            line.state = "cancelling"
            self.tell(f"{line.short} would be late, so carpool cancels it before it is billed.")

    def hear(self, event: Event) -> None:
        if isinstance(event, BatchSubmitted):
            self.batches[event.provider_id] = line = BatchLine(event.provider_id, event.count)
            self.tell(f"{line.short} is bought with {event.count} calls.")
        elif isinstance(event, BatchEnded):
            line = self.batches[event.provider_id]
            line.state, line.took_s = "ended", event.took_s
        elif isinstance(event, BatchCollected):
            self._collected(self.batches[event.provider_id], event.results)
        elif isinstance(event, Trouble):
            self.tell(f"Trouble while {event.doing}: {event.reason}")

    def _collected(self, line: BatchLine, results: dict[str, int]) -> None:
        given_back = results.get("canceled", 0)
        if given_back:
            line.state = "cancelled"
            self.tell(f"{line.short} is cancelled; its {given_back} calls travel on now, before their deadline.")
        else:
            line.state = "collected"
            self.tell(f"{line.short} is collected: {results.get('succeeded', 0)} answers.")

    def tell(self, sentence: str) -> None:
        self._say(f"{self._elapsed():5.1f} s  {sentence}")

    # ------------------------------------------------------------ display

    def __rich__(self) -> RenderableType:
        done = sum(line.answered for line in self.roles.values())
        total = sum(line.role.count for line in self.roles.values())
        clock = Text(f"{self._elapsed():5.1f} s  {done} of {total} calls answered", style="bold")
        return Group(clock, Text(), self._progress(), Text(), self.batch_table())

    def _progress(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
        table.add_column("caller")
        table.add_column("may wait", justify="right")
        table.add_column("answered", width=16)
        table.add_column("", justify="right")
        table.add_column("by lane")
        for line in self.roles.values():
            bar = ProgressBar(total=line.role.count, completed=line.answered, width=16)
            share = f"{line.answered}/{line.role.count}"
            table.add_row(line.role.name, line.role.budget, bar, share, _lanes(line) or _waiting(line))
        return table

    def batch_table(self) -> Table:
        table = Table(title="Batches", title_justify="left", title_style="bold", box=SIMPLE_HEAD)
        table.add_column("batch", no_wrap=True)
        table.add_column("calls", justify="right")
        table.add_column("state", min_width=11)
        table.add_column("took", justify="right", min_width=6)
        for line in self.batches.values():
            took = "" if line.took_s is None else f"{line.took_s:.1f} s"
            table.add_row(line.id, str(line.count), Text(line.state, style=_STYLES.get(line.state, "")), took)
        return table

    def wait_of(self, lane: str) -> tuple[str, str]:
        """The median and the longest wait of a lane."""
        waits = self.waits[lane]
        return (f"{median(waits):.1f} s", f"{max(waits):.1f} s") if waits else ("", "")


_STYLES = {"collected": "green", "cancelled": "yellow", "cancelling": "yellow", "stuck": "red"}


def _lanes(line: RoleLine) -> str:
    return ", ".join(f"{line.lanes[lane]} {_BY[lane]}" for lane in LANES if line.lanes.get(lane))


_BY = {NOW: "at once", BATCH: "by batch", RESCUE: "rescued"}


def _waiting(line: RoleLine) -> Text:
    return Text(f"{line.asked} waiting" if line.asked else "", style="dim")


def log_to(console: Console) -> Callable[[str], None]:
    return lambda sentence: console.print(sentence, highlight=False, markup=False, soft_wrap=True)


def say_nothing(sentence: str) -> None:
    """On a terminal the live board shows the events instead."""


# ------------------------------------------------------------ demo money
# The end of the demo: the cost of each lane, the ledger beside the provider's bill, and what to try next.


@dataclass(frozen=True, slots=True)
class DemoVerdict:
    """carpool's ledger beside the provider's bill."""

    totals: Sequence[Totals]
    bill: int
    calls: int

    @property
    def paid(self) -> int:
        return LedgerSummary.of(self.totals).paid

    @property
    def equal(self) -> bool:
        return self.paid == self.bill and not LedgerSummary.of(self.totals).unknown


def since(before: Sequence[Totals], after: Sequence[Totals]) -> list[Totals]:
    """The totals of this run, in a store that may have been used before."""
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
        money = _money(LedgerSummary.of(_rows_of(lane, totals)))
        batches = str(len(board.batches)) if lane == BATCH else ""
        table.add_row(lane, str(len(board.waits[lane])), batches, *board.wait_of(lane), *money)
    table.add_section()
    calls = str(sum(len(waits) for waits in board.waits.values()))
    table.add_row("sum", calls, str(len(board.batches)), "", "", *_money(LedgerSummary.of(totals)), style="bold")
    return table


def _money(summary: LedgerSummary) -> tuple[str, str, str]:
    return dollars(summary.paid), dollars(summary.would_have_paid), dollars(summary.saved)


def conclude(console: Console, verdict: DemoVerdict, store: Path | None) -> None:
    paid, bill = f"${verdict.paid / 1e9:.9f}", f"${verdict.bill / 1e9:.9f}"
    summary = LedgerSummary.of(verdict.totals)
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
