"""`carpool demo`: a small fleet finishes its calls before your eyes, without a key, a network or a bill."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from carpool.core.clock import SystemClock
from carpool.core.errors import ConfigError
from carpool.core.model import EntryKind, Lane, Totals
from carpool.engine import Event
from carpool.engine.events import BatchCollected, BatchEnded, BatchSubmitted, Trouble
from carpool.frontends.library.fleet import FleetDispatcher
from carpool.mock import Constant, MockAnthropic, MockConfig, Uniform
from carpool.mock import serve as serve_mock
from carpool.planners.ledger import LedgerSummary, dollars
from carpool.planners.policy import RoutingPolicy
from carpool.stores import peek

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
                message = {"role": "user", "content": f"{self.task} {number}. {_FILLER * self.length}"}
                yield at, {"model": self.model, "max_tokens": self.max_tokens, "messages": [message]}


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
LANES = {NOW: "at once", BATCH: "by batch", RESCUE: "rescued"}
_STYLES = {"collected": "green", "cancelled": "yellow", "cancelling": "yellow", "stuck": "red"}


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

    @property
    def by_lane(self) -> str:
        return ", ".join(f"{self.lanes[lane]} {how}" for lane, how in LANES.items() if self.lanes.get(lane))


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
            self.tell(f"All {role.count} {role.name} are answered: {line.by_lane}.")

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
            line, canceled = self.batches[event.provider_id], event.results.get("canceled", 0)
            line.state = "cancelled" if canceled else "collected"
            if canceled:
                self.tell(f"{line.short} is cancelled; its {canceled} calls travel on now, before their deadline.")
            else:
                self.tell(f"{line.short} is collected: {event.results.get('succeeded', 0)} answers.")
        elif isinstance(event, Trouble):
            self.tell(f"Trouble while {event.doing}: {event.reason}")

    def tell(self, sentence: str) -> None:
        self._say(f"{self._elapsed():5.1f} s  {sentence}")

    # ------------------------------------------------------------ display

    def __rich__(self) -> RenderableType:
        done = sum(line.answered for line in self.roles.values())
        total = sum(line.role.count for line in self.roles.values())
        clock = Text(f"{self._elapsed():5.1f} s  {done} of {total} calls answered", style="bold")
        table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
        table.add_column("caller")
        table.add_column("may wait", justify="right")
        table.add_column("answered", width=16)
        table.add_column("", justify="right")
        table.add_column("by lane")
        for line in self.roles.values():
            bar = ProgressBar(total=line.role.count, completed=line.answered, width=16)
            share = f"{line.answered}/{line.role.count}"
            waiting = Text(f"{line.asked} waiting" if line.asked else "", style="dim")
            table.add_row(line.role.name, line.role.budget, bar, share, line.by_lane or waiting)
        return Group(clock, Text(), table, Text(), self.batch_table())

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
    rows = []
    for row in after:
        earlier = old.get((row.lane, row.kind), nothing)
        counts = row.purchases - earlier.purchases, row.unknown - earlier.unknown
        money = row.paid - earlier.paid, row.would_have_paid - earlier.would_have_paid
        rows.append(Totals(row.lane, row.kind, *counts, *money))
    return rows


def lane_table(board: Board, totals: Sequence[Totals]) -> Table:
    table = Table(title="Lanes", title_justify="left", title_style="bold", box=SIMPLE_HEAD, collapse_padding=True)
    table.add_column("lane")
    for name in ("calls", "batches", "median\nwait", "longest\nwait", "paid", "would have\npaid", "saved"):
        table.add_column(name, justify="right")
    for lane in LANES:
        rows = [row for row in totals if lane == (RESCUE if row.kind is EntryKind.RESCUE else row.lane)]
        batches, waits = str(len(board.batches)) if lane == BATCH else "", board.waits[lane]
        wait = (f"{median(waits):.1f} s", f"{max(waits):.1f} s") if waits else ("", "")
        table.add_row(lane, str(len(waits)), batches, *wait, *_money(LedgerSummary.of(rows)))
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
    result = Text("They are equal.", "green") if verdict.equal else Text("They differ, and must not.", "bold red")
    console.print(result, Text(), sep="\n")
    table = Table(title="Try next", title_justify="left", title_style="bold", box=None, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold", overflow="fold")
    table.add_row("a stand-in provider", "carpool mock")
    table.add_row("a proxy in front of it", "carpool serve --upstream http://127.0.0.1:8788")
    table.add_row("your agents through it", "ANTHROPIC_BASE_URL=http://127.0.0.1:8787/@budget=10m")
    kept = f"carpool stats --store {store}" if store else "carpool demo --store carpool.db && carpool stats"
    table.add_row("what was paid", kept)
    console.print(table)


TIGHT_MS = 5_000
LONGEST_S = 90.0  # more than twice the longest run so far
WORLD = MockConfig(
    batch_latency=Uniform(3.5, 5.5),
    sync_latency=Uniform(0.4, 1.4),
    cancel_latency=Constant(1.0),
)


def demo(
    store: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep the calls in this file, to look at afterwards; else none is kept."),
    ] = None,
) -> None:
    """Watch a small fleet at work: 60 calls, some in a hurry, some patient, against a stand-in provider.

    Needs no key and no network, and costs nothing. It takes about 20 seconds and ends with what each lane cost, beside
    the provider's own bill.
    """
    terminal = sys.stdout.isatty()
    console = Console(force_terminal=terminal)
    logging.getLogger("uvicorn.error").addFilter(_not_cancelled)
    try:
        from anthropic import AsyncAnthropic
    except ImportError as error:
        raise ConfigError(
            "The demo drives the real SDK, and anthropic is not installed. Install it with pip install anthropic."
        ) from error
    with TemporaryDirectory(prefix="carpool-demo-") as folder:
        path = store or Path(folder) / "carpool.db"
        before = asyncio.run(peek(path))[0] if path.is_file() else []
        try:
            verdict = asyncio.run(_demo(AsyncAnthropic, path, before, console, terminal))
        except (ExceptionGroup, TimeoutError) as error:
            first: BaseException = error
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            console.print(f"The demo did not finish: {first!r}.", style="bold red", markup=False)
            raise typer.Exit(1) from error
    conclude(console, verdict, store)
    if not verdict.equal:
        raise typer.Exit(1)


def _not_cancelled(record: logging.LogRecord) -> bool:
    """Hide tracebacks of the mock provider's open requests, which end on Ctrl-C."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


async def _demo(
    client_class: Any, store: Path, before: Sequence[Totals], console: Console, terminal: bool
) -> DemoVerdict:
    clock = SystemClock()
    start = clock.now()
    log = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    # On a terminal the live board shows the events instead.
    board = Board(FLEET, lambda: clock.now() - start, (lambda sentence: None) if terminal else log)
    async with serve_mock(WORLD) as server, client_class(base_url=server.url, api_key="demo") as client:
        console.print(
            f"{sum(role.count for role in FLEET)} calls go to a stand-in provider on {server.url}. Those who can't "
            "wait are answered at once, at full price; the others share batches, at half price. One batch will get "
            "stuck.\n",
            highlight=False,
        )
        with Live(board, console=console, refresh_per_second=8) if terminal else nullcontext():
            await _drive(client, store, board, server.provider, clock)
        if not terminal:
            console.print(board.batch_table())
        totals = since(before, (await peek(store))[0])
        console.print(lane_table(board, totals))
        return DemoVerdict(totals, server.provider.bill.total(), sum(map(len, board.waits.values())))


async def _drive(client: Any, store: Path, board: Board, provider: MockAnthropic, clock: SystemClock) -> None:
    def hook(event: Event) -> None:
        board.hear(event)
        if isinstance(event, BatchSubmitted):
            first = provider.batch(event.provider_id).requests[0]
            if getattr(first, "snippet", "").startswith(REVIEWERS.task):  # their batch simulates a stuck one
                provider.hold_batch(event.provider_id)
                board.held(event.provider_id)

    policy = RoutingPolicy(sync_max_latency_ms=TIGHT_MS)
    dispatcher = FleetDispatcher(client, policy=policy, store=store, hooks=[hook], close_timeout=1.0)
    async with asyncio.timeout(LONGEST_S), dispatcher as fleet, asyncio.TaskGroup() as watch:
        watcher = watch.create_task(_watch_cancels(board, provider, clock))
        async with asyncio.TaskGroup() as group:
            for role in FLEET:
                for at, params in role.calls():
                    group.create_task(_call(fleet, role, at, params, board, clock))
        watcher.cancel()


async def _call(
    fleet: FleetDispatcher, role: Role, at: float, params: Mapping[str, Any], board: Board, clock: SystemClock
) -> None:
    await clock.sleep(at)
    start = clock.now()
    board.asked(role)
    answer = await fleet.submit(budget=role.budget_s, tags={"role": role.name}, **params)
    lane = NOW if role.budget_s is not None and role.budget_s * 1000 <= TIGHT_MS else RESCUE
    if answer.usage.service_tier == "batch":
        lane = BATCH
    board.answered(role, lane, clock.now() - start)


async def _watch_cancels(board: Board, provider: MockAnthropic, clock: SystemClock) -> None:
    while True:
        for provider_id in board.stuck.intersection(provider.canceled):
            board.cancelling(provider_id)
        await clock.sleep(0.1)
