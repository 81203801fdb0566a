"""The result in a file: the figures of all seeds, in a tenth of the room that flat rows would need.

`times` has what does not depend on prices: a line for each trace, mode, world, deadline and policy. `costs` has one for
each read multiplier besides, and the bound's. Figures of the seeds stand in lists, in the order of `seeds`; other
figures are of all seeds together. Costs are in micro-dollars.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import fields
from statistics import fmean
from typing import Any

from carpool.sim.money.results import (
    BASELINE,
    BOUND,
    TRUE_READS,
    Estimate,
    RunKey,
    RunResult,
    RunSummary,
    Timing,
    summarised,
)

MICRO = 1000  # nano-dollars
READS_OF_TABLE = "0.1"  # what the price table says of the model whose prices count
WHERE = ("trace", "mode", "regime", "deadline_s", "policy")
BY_SEED = ("calls", "misses", "added_wait_s")
TOGETHER = tuple(field.name for field in fields(Timing) if field.name not in BY_SEED)
COSTS = (*WHERE, "read_multiplier", "cost")
TIMES = (*WHERE, *BY_SEED, "cache_share", *TOGETHER)

Line = tuple[Any, ...]


# ------------------------------------------------------------ writing


def packed(results: Sequence[RunResult]) -> dict[str, Any]:
    groups: dict[tuple[RunKey, str], list[RunResult]] = defaultdict(list)
    for result in results:
        groups[result.key, result.policy].append(result)
    costs, times = {}, {}
    for summary in summarised(results):
        key, of_seeds = summary.key, groups[summary.key, summary.policy]
        times[_where(key, summary.policy)] = _times(summary, of_seeds)
        costs[*_where(key, summary.policy), key.read_multiplier] = [round(one.cost / MICRO) for one in of_seeds]
        if summary.bound is not None:
            bounds = [round((one.bound or 0) / MICRO) for one in of_seeds]
            costs[*_where(key, BOUND), key.read_multiplier] = bounds
    return {
        "seeds": sorted({result.seed for result in results}),
        "costs": {"columns": COSTS, "rows": [[*key, cost] for key, cost in costs.items()]},
        "times": {"columns": TIMES, "rows": [[*key, *found] for key, found in times.items()]},
    }


def _where(key: RunKey, policy: str) -> Line:
    return key.trace, key.mode, key.regime, key.deadline_s, policy


def _times(summary: RunSummary, of_seeds: Sequence[RunResult]) -> list[Any]:
    by_seed = [[_short(getattr(one.timing, name)) for one in of_seeds] for name in BY_SEED]
    return [*by_seed, round(summary.cache_share, 4), *(_short(getattr(summary.timing, name)) for name in TOGETHER)]


def _short(value: Any) -> Any:
    return round(value, 1) if isinstance(value, float) else value


def replaced(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """A result with the policies of a newer one in place of its own."""
    policies, merged = {row[4] for row in new["times"]["rows"]}, {**old, "date": new["date"]}
    for table in ("costs", "times"):
        kept = [row for row in old[table]["rows"] if row[4] not in policies]
        merged[table] = {**old[table], "rows": kept + [list(row) for row in new[table]["rows"]]}
    return merged


def as_text(result: dict[str, Any]) -> str:
    """A line for each row, so that changes can be read."""
    parts = []
    for name, value in result.items():
        text = json.dumps(value, separators=(",", ":"))
        if isinstance(value, dict) and "rows" in value:
            rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in value["rows"])
            text = f'{{"columns":{json.dumps(value["columns"])},"rows":[\n{rows}\n]}}'
        parts.append(f'"{name}":{text}')
    return "{" + ",\n".join(parts) + "}\n"


# ------------------------------------------------------------ reading


def rows(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Flat rows, one for each run and read multiplier. That of the price table is among them, and comes again as
    `true`."""
    costs, times = _by_key(result["costs"], 6), _by_key(result["times"], 5)
    for key, [found] in costs.items():
        where, reads = key[:5], key[5]
        if where[4] == BOUND:
            continue
        bounds = costs.get((*where[:4], BOUND, reads), [[None] * len(found)])[0]
        by_seed = zip(result["seeds"], found, bounds, *times[where][:3], strict=True)
        for seed, cost, bound, calls, misses, wait in by_seed:
            figures = {"seed": seed, "cost": cost, "bound": bound, "misses": misses, "calls": calls}
            row = dict(zip(WHERE, where, strict=True)) | {
                "read_multiplier": float(reads),
                **figures,
                "added_wait_s": wait,
            }
            yield row
            if reads == READS_OF_TABLE:
                yield row | {"read_multiplier": TRUE_READS}


def summaries(result: dict[str, Any]) -> list[RunSummary]:
    costs, times = _by_key(result["costs"], 6), _by_key(result["times"], 5)
    return [_summary(key, found, costs, times) for key, [found] in costs.items() if key[4] != BOUND]


def _by_key(table: dict[str, Any], width: int) -> dict[Line, list[Any]]:
    return {tuple(row[:width]): row[width:] for row in table["rows"]}


def _summary(key: Line, found: Sequence[int], costs: dict[Line, list[Any]], times: dict[Line, list[Any]]) -> RunSummary:
    (trace, mode, regime, deadline, policy), reads = key[:5], key[5]
    [baseline] = costs[trace, mode, regime, deadline, BASELINE, reads]
    [bound] = costs.get((trace, mode, regime, deadline, BOUND, reads), [None])
    calls, misses, waits, cache_share, *together = times[key[:5]]
    on_now = times[trace, mode, regime, deadline, BASELINE][1]
    late = any(one > least for one, least in zip(misses, on_now, strict=True))
    counted = {"calls": sum(calls), "misses": sum(misses), "added_wait_s": fmean(waits)}
    return RunSummary(
        key=RunKey(trace, mode, regime, reads, deadline),
        policy=policy,
        seeds=len(found),
        cost=fmean(found) * MICRO,
        to_baseline=_ratio(found, baseline),
        to_bound=(bound and not late and _ratio(found, bound)) or None,
        bound=bound and fmean(bound) * MICRO,
        bound_to_baseline=bound and _ratio(bound, baseline),
        cache_share=cache_share,
        timing=Timing(**counted, **dict(zip(TOGETHER, together, strict=True))),
    )


def _ratio(costs: Sequence[int], others: Sequence[int]) -> Estimate:
    return Estimate.of(costs, others)
