"""What the demo has seen so far, and how it looks: live on a terminal, line by line in a log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from carpool.cli.demo_calls import Role
from carpool.engine import Event
from carpool.engine.events import BatchCollected, BatchEnded, BatchSubmitted, Trouble

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
    """Takes in what happens, and says it."""

    def __init__(self, fleet: Sequence[Role], elapsed: Callable[[], float], say: Callable[[str], None]) -> None:
        self._elapsed = elapsed
        self._say = say
        self.roles = {role.name: RoleLine(role) for role in fleet}
        self.batches: dict[str, BatchLine] = {}
        self.waits: dict[str, list[float]] = {lane: [] for lane in LANES}
        self.stuck: set[str] = set()

    # ------------------------------------------------------------ what happens

    def asked(self, role: Role) -> None:
        self.roles[role.name].asked += 1

    def answered(self, role: Role, lane: str, wait: float) -> None:
        line = self.roles[role.name]
        line.lanes[lane] = line.lanes.get(lane, 0) + 1
        self.waits[lane].append(wait)
        if line.answered == role.count:
            self.tell(f"All {role.count} {role.name} are answered: {_lanes(line)}.")

    def held(self, provider_id: str) -> None:
        """The stand-in got this batch stuck, on purpose."""
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

    # ------------------------------------------------------------ how it looks

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
    """On a terminal the board itself shows what happens."""
