"""Simulated costs and times as tables and as pictures."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from rich.table import Column, Table

from carpool.cli.console import figures, titled
from carpool.planners.ledger import dollars
from carpool.sim.money.picture import Curve, CurvePoint, cost_curves, deadline_label
from carpool.sim.money.results import BASELINE, BOUND, TRUE_READS, Estimate, RunKey, RunSummary

MOST_COLUMNS = 80
COSTS = ("dollars", "÷ now+5m", "÷ bound", "cached", "late")
TIMES = ("turn\np50", "turn\np95", "task\np50", "task\np95", "added\nwait", "res-\ncued", "bat-\nches", "API\ncalls")


class Scene(NamedTuple):
    """What a table or a picture is about: it compares policies and deadlines."""

    trace: str
    mode: str
    regime: str
    read_multiplier: str

    @classmethod
    def of(cls, key: RunKey) -> Scene:
        return cls(key.trace, key.mode, key.regime, key.read_multiplier)

    def __str__(self) -> str:
        return f"{self.trace}, {self.mode}, world {self.regime}{self.reads}"

    @property
    def reads(self) -> str:
        """Nothing where cache reads have the price of the table."""
        return "" if self.read_multiplier == TRUE_READS else f", cache reads at {self.read_multiplier}"


def by_scene(summaries: Sequence[RunSummary]) -> Mapping[Scene, list[RunSummary]]:
    groups: dict[Scene, list[RunSummary]] = defaultdict(list)
    for summary in summaries:
        groups[Scene.of(summary.key)].append(summary)
    return groups


def _by_deadline(summaries: Sequence[RunSummary]) -> Mapping[RunKey, list[RunSummary]]:
    groups: dict[RunKey, list[RunSummary]] = defaultdict(list)
    for summary in summaries:
        groups[summary.key].append(summary)
    return groups


# ---------------------------------------------------------------- tables


def tables(summaries: Sequence[RunSummary]) -> Iterator[Table]:
    """For each scene what it costs, and how long it takes; both fit 80 columns."""
    for scene, group in by_scene(summaries).items():
        yield _costs(str(scene), group)
        yield _times(group)


def _costs(title: str, summaries: Sequence[RunSummary]) -> Table:
    table = titled(title, Column("what it costs", no_wrap=True), *figures(*COSTS))
    table.min_width = min(len(title), MOST_COLUMNS)
    for key, group in _by_deadline(summaries).items():
        table.add_section()
        table.add_row(_asked(key), style="dim")
        for summary in group:
            late = _share(summary.timing.misses, summary.timing.calls)
            cost = dollars(round(summary.cost)), _estimate(summary.to_baseline), _estimate(summary.to_bound)
            table.add_row(summary.policy, *cost, f"{summary.cache_share:.0%}", late)
        if group[0].bound is not None:
            table.add_row(BOUND, dollars(round(group[0].bound)), _estimate(group[0].bound_to_baseline), "1.00")
    calls, seeds = max(summary.timing.calls for summary in summaries), summaries[0].seeds
    sampled = f"a seed, {seeds} seeds; ± is the 95 % confidence interval" if seeds > 1 else "with one seed"
    table.caption = f"{calls / seeds:,.0f} calls {sampled}."
    return table


def _times(summaries: Sequence[RunSummary]) -> Table:
    table = titled("", Column("how long it takes", no_wrap=True), *figures(*TIMES))
    table.padding = (0, 0, 0, 1)  # nine columns in 80
    for key, group in _by_deadline(summaries).items():
        table.add_section()
        table.add_row(_asked(key), style="dim")
        for summary in group:
            seen, seeds = summary.timing, summary.seeds
            turn, task = (seen.turn_p50_s, seen.turn_p95_s), (seen.task_p50_s, seen.task_p95_s)
            counts = _share(seen.rescues, seen.calls), *(f"{n / seeds:,.0f}" for n in (seen.batches, seen.api_calls))
            table.add_row(summary.policy, *map(brief, (*turn, *task, seen.added_wait_s)), *counts)
    table.caption = _reasons(summaries)
    return table


def _asked(key: RunKey) -> str:
    calls = "no deadline" if key.deadline_s is None else f"{deadline_label(key.deadline_s)} a call"
    return calls if key.task_budget_s is None else f"{calls}, {deadline_label(key.task_budget_s)} a task"


def _reasons(summaries: Sequence[RunSummary]) -> str:
    """Why calls were late, a line per policy that has late ones."""
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for summary in summaries:
        reasons[summary.policy].update(summary.timing.miss_reasons)
    lines = [
        f"{policy}: " + ", ".join(f"{count:,} {reason}" for reason, count in counts.most_common())
        for policy, counts in reasons.items()
        if counts
    ]
    return "\n".join(["Why calls were late, all seeds together:", *lines]) if lines else "No call was late."


def _estimate(estimate: Estimate | None) -> str:
    return "" if estimate is None else str(estimate)


def _share(part: int, whole: int) -> str:
    if not part:
        return ""
    share = 100 * part / whole
    return f"{share:.0f} %" if share >= 9.95 else f"{share:.1f} %" if share >= 0.05 else "< 0.1 %"


def brief(seconds: float) -> str:
    """`42 s`, `7.5 m`, `3.2 h`: a time that fits a narrow column."""
    for unit, length in (("h", 3600.0), ("m", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g}{unit}"
    return "0s" if seconds < 0.05 else f"{seconds:.2g}s" if seconds < 9.95 else f"{seconds:.0f}s"


# ---------------------------------------------------------------- pictures


def picture_of(scene: Scene, summaries: Sequence[RunSummary], trace: str = "") -> str:
    """`trace` is what people call it, in place of its file's name."""
    seeds = summaries[0].seeds
    about = f"World {scene.regime}{scene.reads}, {seeds} seed{'s' if seeds > 1 else ''}"
    return cost_curves(f"{trace or scene.trace}, {scene.mode}", about, curves(summaries))


def curves(summaries: Sequence[RunSummary]) -> list[Curve]:
    """A curve per policy, and the bound's. Calls without a deadline have no place on the axis."""
    points: dict[str, list[CurvePoint]] = defaultdict(list)
    on_now = {summary.key: summary.timing.misses for summary in summaries if summary.policy == BASELINE}
    for summary in sorted(summaries, key=lambda each: each.key.deadline_s or 0.0):
        if summary.key.deadline_s is None:
            continue
        missed = max(0, summary.timing.misses - on_now.get(summary.key, 0)) / max(1, summary.timing.calls)
        _add(points[summary.policy], summary.key.deadline_s, summary.to_baseline, missed)
        if not points[BOUND] or points[BOUND][-1].deadline_s < summary.key.deadline_s:
            _add(points[BOUND], summary.key.deadline_s, summary.bound_to_baseline, 0.0)
    return [Curve(name, curve) for name, curve in points.items()]


def _add(points: list[CurvePoint], deadline_s: float, ratio: Estimate | None, missed: float) -> None:
    if ratio is not None:
        low, high = (ratio.ratio if end is None else end for end in (ratio.low, ratio.high))
        points.append(CurvePoint(deadline_s, ratio.ratio, low, high, missed))
