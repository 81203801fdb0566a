"""`carpool demo`: shows a small fleet at work, without a key, a network or a bill."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from carpool.cli.console import figures, titled
from carpool.core.clock import SystemClock
from carpool.core.errors import ConfigError
from carpool.core.model import EntryKind, Totals
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
            return "any time"
        return f"{self.budget_s:.0f} s" if self.budget_s < 120 else f"{self.budget_s / 60:.0f} min"

    def calls(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """The arrival time and the parameters of each call."""
        arrivals = [at for at, size in self.waves for _ in range(size)]
        for number, at in enumerate(arrivals, 1):
            message = {"role": "user", "content": f"{self.task} {number}. {_FILLER * self.length}"}
            yield at, {"model": self.model, "max_tokens": self.max_tokens, "messages": [message]}


CHATS = Role("chats", 2.0, "claude-sonnet-5", 200, "Answer chat", 2, tuple((0.3 + turn, 1) for turn in range(14)))
GRADERS = Role("graders", 600.0, "claude-sonnet-5", 200, "Grade essay", 30, ((0.2, 20), (7.5, 8)))
NIGHTLY = Role("nightly", None, "claude-haiku-4-5", 400, "Summarise report", 60, ((0.8, 12),))
# carpool cancels a batch of these about 31 s before its deadline: 20 s for the cancel, 9 s for the rescue, 2 s margin.
REVIEWERS = Role("reviewers", 36.0, "claude-sonnet-5", 200, "Review change", 20, ((1.6, 6),))
FLEET = (CHATS, GRADERS, NIGHTLY, REVIEWERS)

LANES = {"now": "now", "batch": "by batch", "rescue": "rescued"}
_STYLES = {"collected": "green", "cancelled": "yellow", "cancelling": "yellow", "stuck": "red"}


@dataclass(slots=True)
class BatchLine:
    id: str
    count: int
    state: str = "in progress"
    took: str = ""


class Board:
    """Collects what happens, prints each event with `say`, and shows the state as a table on a terminal."""

    def __init__(self, elapsed: Callable[[], float], say: Callable[[str], None]) -> None:
        self._elapsed = elapsed
        self._say = say
        self.asked: Counter[str] = Counter()  # calls by role
        self.waits: dict[str, dict[str, list[float]]] = {role.name: {lane: [] for lane in LANES} for role in FLEET}
        self.batches: dict[str, BatchLine] = {}

    # ------------------------------------------------------------ events

    def answered(self, role: Role, lane: str, wait: float) -> None:
        self.waits[role.name][lane].append(wait)
        if self._count(role) == role.count:
            self.print_line(f"All {role.count} {role.name} are answered: {self._by_lane(role)}.")

    def held(self, provider_id: str) -> None:
        """The mock provider holds this batch back on purpose."""
        self.batches[provider_id].state = "stuck"
        self.print_line(f"{_short(provider_id)} gets stuck at the provider.")

    def cancelling(self, provider_id: str) -> None:
        self.batches[provider_id].state = "cancelling"
        self.print_line(f"{_short(provider_id)} would be late, so carpool cancels it before it is billed.")

    def on_event(self, event: Event) -> None:
        if isinstance(event, BatchSubmitted):
            self.batches[event.provider_id] = BatchLine(event.provider_id, event.count)
            self.print_line(f"{_short(event.provider_id)} is bought with {event.count} calls.")
        elif isinstance(event, BatchEnded):
            line = self.batches[event.provider_id]
            line.state, line.took = "ended", f"{event.took_s:.1f} s"
        elif isinstance(event, BatchCollected):
            canceled = event.results.get("canceled", 0)
            self.batches[event.provider_id].state = "cancelled" if canceled else "collected"
            result = f"is collected: {event.results.get('succeeded', 0)} answers."
            if canceled:
                result = f"is cancelled; its {canceled} calls are sent again on now, before their deadline."
            self.print_line(f"{_short(event.provider_id)} {result}")
        elif isinstance(event, Trouble):
            self.print_line(f"Trouble while {event.doing}: {event.reason}")

    def print_line(self, sentence: str) -> None:
        self._say(f"{self._elapsed():5.1f} s  {sentence}")

    # ------------------------------------------------------------ display

    def lane_waits(self, lane: str) -> list[float]:
        return [wait for waits in self.waits.values() for wait in waits[lane]]

    def _count(self, role: Role) -> int:
        return sum(map(len, self.waits[role.name].values()))

    def _by_lane(self, role: Role) -> str:
        return ", ".join(f"{len(waits)} {LANES[lane]}" for lane, waits in self.waits[role.name].items() if waits)

    def __rich__(self) -> RenderableType:
        done, total = sum(map(self._count, FLEET)), sum(role.count for role in FLEET)
        clock = Text(f"{self._elapsed():5.1f} s  {done} of {total} calls answered\n", style="bold")
        columns = *figures("may wait"), Column("answered"), *figures(""), Column("by lane")
        table = Table("caller", *columns, box=None, padding=(0, 2, 0, 0))
        for role in FLEET:
            count, asked = self._count(role), self.asked[role.name]
            bar = ProgressBar(total=role.count, completed=count, width=16)
            waiting = Text(f"{asked} waiting" if asked else "", style="dim")
            table.add_row(role.name, role.budget, bar, f"{count}/{role.count}", self._by_lane(role) or waiting)
        return Group(clock, table, Text(), self.batch_table())

    def batch_table(self) -> Table:
        columns = Column("batch", no_wrap=True), *figures("calls"), Column("state", min_width=11), *figures("took")
        table = titled("Batches", *columns)
        for line in self.batches.values():
            table.add_row(line.id, str(line.count), Text(line.state, style=_STYLES.get(line.state, "")), line.took)
        return table


def _short(provider_id: str) -> str:
    return f"{provider_id[:17]}…"


# ------------------------------------------------------------ demo money
# The end of the demo: the cost of each lane, the ledger and the provider's bill, and what to try next.


@dataclass(frozen=True, slots=True)
class DemoVerdict:
    """carpool's ledger and the provider's bill."""

    totals: Sequence[Totals]
    bill: int
    calls: int

    @property
    def equal(self) -> bool:
        ledger = LedgerSummary.of(self.totals)
        return ledger.paid == self.bill and not ledger.unknown


def since(before: Sequence[Totals], after: Sequence[Totals]) -> list[Totals]:
    """The totals of this run, in a store that may have been used before."""
    old = {(row.lane, row.kind): row for row in before}
    counted = ("purchases", "unknown", "paid", "would_have_paid")
    rows = []
    for row in after:
        earlier = old.get((row.lane, row.kind))
        rows.append(replace(row, **{name: getattr(row, name) - getattr(earlier, name, 0) for name in counted}))
    return rows


def lane_table(board: Board, totals: Sequence[Totals]) -> Table:
    headings = ("calls", "batches", "median\nwait", "longest\nwait", "paid", "would have\npaid", "saved")
    table = titled("Lanes", "lane", *figures(*headings))
    for lane in LANES:
        rows = [row for row in totals if lane == ("rescue" if row.kind is EntryKind.RESCUE else row.lane)]
        batches, waits = str(len(board.batches)) if lane == "batch" else "", board.lane_waits(lane)
        wait = (f"{median(waits):.1f} s", f"{max(waits):.1f} s") if waits else ("", "")
        table.add_row(lane, str(len(waits)), batches, *wait, *_money(LedgerSummary.of(rows)))
    table.add_section()
    calls = str(sum(len(board.lane_waits(lane)) for lane in LANES))
    table.add_row("sum", calls, str(len(board.batches)), "", "", *_money(LedgerSummary.of(totals)), style="bold")
    return table


def _money(summary: LedgerSummary) -> tuple[str, str, str]:
    return dollars(summary.paid), dollars(summary.would_have_paid), dollars(summary.saved)


def conclude(console: Console, verdict: DemoVerdict, store: Path | None) -> None:
    summary = LedgerSummary.of(verdict.totals)
    paid, bill = f"${summary.paid / 1e9:.9f}", f"${verdict.bill / 1e9:.9f}"
    console.print(
        f"{verdict.calls} calls cost {dollars(summary.paid)} instead of {dollars(summary.would_have_paid)}: "
        f"{summary.share or 0:.0%} saved.",
        highlight=False,
    )
    console.print(f"The ledger says {paid}, the provider's own bill {bill}.", highlight=False)
    result = Text("They are equal.", "green") if verdict.equal else Text("They differ, and must not.", "bold red")
    console.print(result, Text(), sep="\n")
    columns = Column(no_wrap=True), Column(no_wrap=True, style="bold", overflow="fold")
    table = Table(*columns, title="Try next", title_justify="left", title_style="bold", box=None, show_header=False)
    table.add_row("a mock provider", "carpool mock")
    table.add_row("a proxy in front of it", "carpool serve --upstream http://127.0.0.1:8788")
    table.add_row("your agents through it", "ANTHROPIC_BASE_URL=http://127.0.0.1:8787/@budget=10m")
    kept = f"carpool stats --store {store}" if store else "carpool demo --store carpool.db && carpool stats"
    table.add_row("what was paid", kept)
    console.print(table)


TIGHT_MS = 5_000
LONGEST_S = 90.0  # more than twice the longest run so far
WORLD = MockConfig(batch_latency=Uniform(3.5, 5.5), sync_latency=Uniform(0.4, 1.4), cancel_latency=Constant(1.0))


def demo(
    store: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep the calls in this file; without it nothing is kept."),
    ] = None,
) -> None:
    """Watch 60 calls of a small fleet, some urgent and some patient, sent to a mock provider.

    Needs no key and no network, and costs nothing. It takes about 20 seconds, and then shows what each lane cost and
    compares carpool's ledger with the provider's own bill.
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
    board = Board(lambda: clock.now() - start, (lambda sentence: None) if terminal else log)
    async with serve_mock(WORLD) as server, client_class(base_url=server.url, api_key="demo") as client:
        console.print(
            f"{sum(role.count for role in FLEET)} calls go to a mock provider on {server.url}. Those that can't "
            "wait are sent now, at full price; the others share batches, at half price. One batch will get "
            "stuck.\n",
            highlight=False,
        )
        with Live(board, console=console, refresh_per_second=8) if terminal else nullcontext():
            await _drive(client, store, board, server.provider, clock)
        if not terminal:
            console.print(board.batch_table())
        totals = since(before, (await peek(store))[0])
        console.print(lane_table(board, totals))
        return DemoVerdict(totals, server.provider.bill.total(), sum(len(board.lane_waits(lane)) for lane in LANES))


async def _drive(client: Any, store: Path, board: Board, provider: MockAnthropic, clock: SystemClock) -> None:
    def hook(event: Event) -> None:
        board.on_event(event)
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
    board.asked[role.name] += 1
    answer = await fleet.submit(budget=role.budget_s, tags={"role": role.name}, **params)
    is_urgent = role.budget_s is not None and role.budget_s * 1000 <= TIGHT_MS
    lane = "batch" if answer.usage.service_tier == "batch" else "now" if is_urgent else "rescue"
    board.answered(role, lane, clock.now() - start)


async def _watch_cancels(board: Board, provider: MockAnthropic, clock: SystemClock) -> None:
    while True:
        for line in board.batches.values():
            if line.state == "stuck" and line.id in provider.canceled:
                board.cancelling(line.id)
        await clock.sleep(0.1)
