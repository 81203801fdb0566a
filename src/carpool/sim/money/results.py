"""Results of runs: a row for each run and price table, and summaries over seeds with confidence intervals.

A ratio (÷ now+5m, ÷ bound) is the cost of all seeds together over the other cost of all seeds together, as a bill over
a longer time would show it; the mean of the seeds' ratios would count small sessions as much as large ones. Its
interval comes from the ratios with one seed left out each (jackknife), with Student's t at 95 %. Both costs of a seed
come from the same sessions and latencies, so what differs between seeds but not between policies does not widen it. It
says how far the ratio would move with other seeds. It does not say how far the worlds are from the truth; compare
several worlds for that.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import fmean, stdev
from typing import Any, NamedTuple

from carpool.core.model import Lane
from carpool.sim.money.model import RunRecord

BASELINE = "now+5m"
BOUND = "bound"
TRUE_READS = "true"  # the name of the price table as it is

# 97.5 % quantiles of Student's t for 1, 2, … degrees of freedom; beyond these the normal distribution is near enough.
_T: tuple[float, ...] = (
    *(12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_NORMAL = 1.96


@dataclass(frozen=True, slots=True)
class RunKey:
    """What was run: everything but the policy and the seed."""

    trace: str
    mode: str  # attended, unattended
    regime: str  # the name of the world
    read_multiplier: str  # of the price table: its name
    deadline_s: float | None  # of each call
    task_budget_s: float | None = None  # of each session


@dataclass(frozen=True, slots=True)
class Timing:
    """What a run's answers say, whatever they cost. Times are in seconds; a task is a session, think times included."""

    calls: int
    tasks: int
    misses: int
    miss_reasons: Mapping[str, int]
    by_batch: int  # answers that a batch gave
    rescues: int
    batches: int
    api_calls: int
    added_wait_s: float  # per call, beyond what `now` would have taken
    turn_p50_s: float
    turn_p95_s: float
    task_p50_s: float
    task_p95_s: float


@dataclass(frozen=True, slots=True)
class PricedRun:
    """One run at one price table. Money is in nano-dollars. Of the bound, which is no run, only the cost is known."""

    key: RunKey
    policy: str
    seed: int
    cost: int
    cache_share: float = 0.0  # of the input tokens, read from a cache
    timing: Timing | None = None


@dataclass(frozen=True, slots=True)
class RunResult:
    """A run beside what it is compared with, of the same seed."""

    key: RunKey
    policy: str
    seed: int
    cost: int
    bound: int | None
    baseline: int | None  # what now+5m cost
    avoidable: bool  # whether it missed a deadline that `now` kept
    cache_share: float
    timing: Timing


def compared(runs: Iterable[PricedRun]) -> list[RunResult]:
    runs = list(runs)
    by_name = {(run.key, run.seed, run.policy): run for run in runs}
    results = []
    for run in runs:
        if run.timing is None:
            continue
        bound = by_name.get((run.key, run.seed, BOUND))
        baseline = by_name.get((run.key, run.seed, BASELINE))
        on_now = baseline.timing.misses if baseline is not None and baseline.timing is not None else 0
        results.append(
            RunResult(
                key=run.key,
                policy=run.policy,
                seed=run.seed,
                cost=run.cost,
                bound=None if bound is None else bound.cost,
                baseline=None if baseline is None else baseline.cost,
                avoidable=run.timing.misses > on_now,
                cache_share=run.cache_share,
                timing=run.timing,
            )
        )
    return results


def timing(record: RunRecord) -> Timing:
    """Sums up the answers of a run."""
    answers = record.answers
    tasks: dict[int, tuple[float, float]] = {}
    for answer in answers:
        begun, done = tasks.get(answer.session, (answer.asked, answer.answered))
        tasks[answer.session] = min(begun, answer.asked), max(done, answer.answered)
    reasons = Counter(str(answer.miss) for answer in answers if answer.miss)
    waits = [max(0.0, answer.wait_s) for answer in answers]  # sums of times are not exact
    turn_times = sorted(answer.answered - answer.asked for answer in answers)
    task_times = sorted(done - begun for begun, done in tasks.values())
    return Timing(
        calls=len(answers),
        tasks=len(tasks),
        misses=sum(reasons.values()),
        miss_reasons=dict(reasons.most_common()),
        by_batch=sum(answer.lane is Lane.BATCH for answer in answers),
        rescues=sum(answer.rescued for answer in answers),
        batches=record.batches,
        api_calls=record.api_calls,
        added_wait_s=fmean(waits) if waits else 0.0,
        turn_p50_s=quantile(turn_times, 0.5),
        turn_p95_s=quantile(turn_times, 0.95),
        task_p50_s=quantile(task_times, 0.5),
        task_p95_s=quantile(task_times, 0.95),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed; 0 without any."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


# ---------------------------------------------------------------- over seeds


class Estimate(NamedTuple):
    """A ratio over all seeds, and its 95 % confidence interval; without one if there is a single seed."""

    ratio: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, costs: Sequence[float], others: Sequence[float]) -> Estimate:
        """The costs of the seeds over the others of the same seeds."""
        total, other = sum(costs), sum(others)
        count = len(costs)
        if count == 1:
            return cls(total / other)
        left_out = [(total - one) / (other - that) for one, that in zip(costs, others, strict=True)]
        error = (count - 1) / math.sqrt(count) * stdev(left_out)
        half = error * (_T[count - 2] if count - 1 <= len(_T) else _NORMAL)
        return cls(total / other, total / other - half, total / other + half)

    def __str__(self) -> str:
        half = "" if self.high is None else f"{self.high - self.ratio:.2f}"
        return f"{self.ratio:.2f}" + (f" ±{half}" if half not in ("", "0.00") else "")


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A policy's runs over all seeds: counts are sums, `cost` and times are means of the seeds'."""

    key: RunKey
    policy: str
    seeds: int
    cost: float
    to_baseline: Estimate | None
    to_bound: Estimate | None  # None also where it missed deadlines that `now` would have kept, as the bound does
    bound: float | None  # mean of the seeds'
    bound_to_baseline: Estimate | None
    cache_share: float
    timing: Timing


def summarised(results: Iterable[RunResult]) -> list[RunSummary]:
    """One summary per key and policy, in the order in which these first come."""
    groups: dict[tuple[RunKey, str], list[RunResult]] = defaultdict(list)
    for result in results:
        groups[result.key, result.policy].append(result)
    return [_summary(key, policy, group) for (key, policy), group in groups.items()]


def _summary(key: RunKey, policy: str, group: Sequence[RunResult]) -> RunSummary:
    bounds = [result.bound for result in group if result.bound is not None]
    return RunSummary(
        key=key,
        policy=policy,
        seeds=len(group),
        cost=fmean(result.cost for result in group),
        to_baseline=_ratio([(result.cost, result.baseline) for result in group]),
        to_bound=_ratio([(result.cost, None if result.avoidable else result.bound) for result in group]),
        bound=fmean(bounds) if len(bounds) == len(group) else None,
        bound_to_baseline=_ratio([(result.bound, result.baseline) for result in group]),
        cache_share=fmean(result.cache_share for result in group),
        timing=_together([result.timing for result in group]),
    )


def _ratio(pairs: Sequence[tuple[int | None, int | None]]) -> Estimate | None:
    """None where a seed has nothing to compare with: unknown is left blank."""
    known = [(cost, other) for cost, other in pairs if cost is not None and other]
    return Estimate.of(*zip(*known, strict=True)) if len(known) == len(pairs) else None


def _together(timings: Sequence[Timing]) -> Timing:
    reasons: Counter[str] = Counter()
    for one in timings:
        reasons.update(one.miss_reasons)
    merged: dict[str, Any] = {"miss_reasons": dict(reasons.most_common())}
    for field in fields(Timing):
        if field.name not in merged:
            values = [getattr(one, field.name) for one in timings]
            merged[field.name] = fmean(values) if field.name.endswith("_s") else sum(values)
    return Timing(**merged)


# ---------------------------------------------------------------- JSON


def as_row(result: RunResult) -> dict[str, Any]:
    """A flat row for `money.json` and `--json`."""
    row = _key(result.key) | {"policy": result.policy, "seed": result.seed, "cost": result.cost}
    row |= {"bound": result.bound, BASELINE: result.baseline, "cache_share": round(result.cache_share, 4)}
    return row | {name: _rounded(value) for name, value in asdict(result.timing).items()}


def _key(key: RunKey) -> dict[str, Any]:
    named = key.read_multiplier == TRUE_READS
    return asdict(key) | {"read_multiplier": TRUE_READS if named else float(key.read_multiplier)}


def _rounded(value: Any) -> Any:
    return round(value, 2) if isinstance(value, float) else value


def summary_row(summary: RunSummary) -> dict[str, Any]:
    row = _key(summary.key) | {"policy": summary.policy, "seeds": summary.seeds, "cost": round(summary.cost)}
    for name, estimate in (("to_baseline", summary.to_baseline), ("to_bound", summary.to_bound)):
        row[name] = None if estimate is None else [None if one is None else round(one, 4) for one in estimate]
    row["cache_share"] = round(summary.cache_share, 4)
    return row | {name: _rounded(value) for name, value in asdict(summary.timing).items()}
