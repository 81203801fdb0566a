"""`make bench-money ARGS=--independent`: the figures of an independent script beside those of the simulation.

The script priced all of Claude Code's sessions without deadlines, ÷ now+5m, by the price of a cache read. Where it
differs from the simulation by more than 0.05, two columns show why:

- *system warm*: the same purchases, but tools and system prompt can always be read, as if another session of the same
  workspace had just used them. They are a seventh of the context, and written anew after every pause beyond an hour.
- *p90 54 min*: batches of which 90 % end within 54 minutes in place of 60. The slowest tenth decides how often an entry
  has expired.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from running import say

from carpool import dialects
from carpool.sim.money.billing import MULTIPLIERS, PriceTable, usages
from carpool.sim.money.experiment import TraceSource
from carpool.sim.money.fleet import simulate
from carpool.sim.money.model import ROOT, RunPurchase, Trace
from carpool.sim.money.policies import find_policy
from carpool.sim.money.traces import PauseMode
from carpool.sim.money.worlds import WORLDS, LogNormalTimes, ProviderWorld

TABLES = [PriceTable(multiplier) for multiplier in MULTIPLIERS]
SHORTER_TAIL = replace(WORLDS["anthropic"], batch={"*": LogNormalTimes(300.0, 1.85, 60.0)})
MOMENT_S = 1e-3


class Figure(NamedTuple):
    policy: str
    mode: PauseMode
    world: str
    script: str


FIGURES = (
    Figure("now+1h", "attended", "economics", "0.84 / 0.78 / 0.74"),
    Figure("batch+1h", "unattended", "economics", "0.65 / 0.71 / 0.78"),
    Figure("batch+1h", "unattended", "anthropic", "1.09 / 1.37 / 1.63"),
    Figure("batch", "unattended", "economics", "3.2 to 6.0"),
)


def compare(folder: Path) -> None:
    """Print the comparison as a table."""
    say("| policy | pauses | world | script | simulation | system warm | p90 54 min |\n|---|---|---|---|---|---|---|")
    traces = {one.mode: _trace(folder, one.mode) for one in FIGURES}
    for one in FIGURES:
        trace, world = traces[one.mode], WORLDS[one.world]
        ours, warm = (_ratios(trace, world, one.policy, warm=warm) for warm in (False, True))
        shorter = _ratios(trace, SHORTER_TAIL, one.policy, warm=False) if one.world == "anthropic" else ""
        say(f"| `{one.policy}` | {one.mode} | `{one.world}` | {one.script} | {ours} | {warm} | {shorter} |")


def _trace(folder: Path, mode: PauseMode) -> Trace:
    return TraceSource(str(folder / "claude_code_sessions.jsonl"), mode).read(0)


def _ratios(trace: Trace, world: ProviderWorld, policy: str, *, warm: bool) -> str:
    """Cost ÷ now+5m, by the price of a read."""
    mine, other = (_costs(trace, world, name, warm=warm) for name in (policy, "now+5m"))
    return " / ".join(f"{cost / baseline:.2f}" for cost, baseline in zip(mine, other, strict=True))


def _costs(trace: Trace, world: ProviderWorld, policy: str, *, warm: bool) -> list[int]:
    bought = simulate(trace, world, find_policy(policy), 0).purchases
    if warm:
        bought = sorted((one for each in bought for one in _with_warm_system(each)), key=lambda one: one.starts)
    paid = [
        (trace.sessions[one.session].model, usage, one.lane)
        for one, usage in zip(bought, usages(trace, bought), strict=True)
        if one.kind != "leader"
    ]
    dialect = dialects.get(trace.provider)
    return [sum(table.cost(dialect, model, usage, lane) for model, usage, lane in paid) for table in TABLES]


def _with_warm_system(purchase: RunPurchase) -> Iterator[RunPurchase]:
    """After a request of somebody else, whose bill does not count here."""
    if purchase.system != ROOT:
        before = purchase.starts - MOMENT_S
        yield replace(
            purchase, kind="leader", starts=before, begins=before, node=purchase.system, system=ROOT, system_ttl=None
        )
    yield purchase
