"""`carpool report`: what one's own recorded traffic would have cost otherwise, and who would have waited how long."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from rich.table import Column, Table

from carpool.cli.console import console, figures, print_json, titled
from carpool.cli.flags import ConfigFile, Store, complete_from, option
from carpool.cli.keys import parse_duration
from carpool.cli.setup import gather
from carpool.cli.simulate import Since
from carpool.cli.simulated import brief
from carpool.core.clock import SystemClock
from carpool.core.errors import ConfigError
from carpool.planners.ledger import dollars
from carpool.sim.money.own_latency import ENOUGH, own_world
from carpool.sim.money.record_source import Recorded, read_record
from carpool.sim.money.recorded import conversations
from carpool.sim.money.recorded_trace import RecordHabits
from carpool.sim.money.what_if import accounts, parse_what_if, sampled
from carpool.sim.money.what_if_report import WhatIfAnswer, WhatIfGroup, answer, group_of, replayed_share
from carpool.sim.money.worlds import WORLDS, ProviderWorld, find_world, measured

MOST_GROUPS = 20  # of a table; JSON has all
MOST_CALLS = 50_000  # replayed: a few minutes
FAR_OFF = 0.05  # from what was paid
ASSUMED = WORLDS["economics"]
_NUMBERS = ("calls", "paid", "would pay", "saved", "batch", "wait\np50", "wait\np95", "late")


class ReportFormat(StrEnum):
    TABLE = "table"
    JSON = "json"


WHAT_IF = "budget=20m: every call may take so long. caching=plan: cache lifetimes are chosen for each conversation. "
WHAT_IF += "Both with a comma between them. Repeatable."
WhatIfs = Annotated[list[str] | None, option("CHANGE", WHAT_IF, "--what-if")]
BY = "Group the calls by team (the tag), model, client, tag (all tags together), or tag.NAME."
By = Annotated[str | None, option("GROUP", BY, autocompletion=complete_from("team", "model", "client", "tag", "tag."))]
WORLD = f"How long batches take: {', '.join(WORLDS)}. Unless set, as your own took, if the store has {ENOUGH}; "
WORLD += "economics otherwise."
World = Annotated[str | None, option("NAME", WORLD, "--world", autocompletion=complete_from(*WORLDS))]
LATENCY = "File with measured batch latencies in seconds, one a line, in place of --world."
Latency = Annotated[Path | None, option("FILE", LATENCY, "--latency")]
Format = Annotated[ReportFormat, option("FORMAT", "table or json.", "--format")]


def report(
    what_if: WhatIfs = None,
    by: By = None,
    since: Since = "7d",
    world: World = None,
    latency: Latency = None,
    output: Format = ReportFormat.TABLE,
    store: Store = None,
    config: ConfigFile = None,
) -> None:
    """Answer from recorded traffic: what would have been saved, and who would have waited how long?

    Nothing is sent or paid. carpool records sizes and times of every call in its store; they are replayed under virtual
    time by what decides in production, and priced. The proxy may go on using the store meanwhile.

    What would every call have cost with 20 minutes' time, for each team?

    carpool report --what-if budget=20m --by team

    And with cache lifetimes chosen for each conversation, so that nobody waits?

    carpool report --what-if caching=plan --since 30d
    """
    if not what_if:
        raise ConfigError("Say what to report: --what-if budget=20m, or --what-if caching=plan.")
    questions, groups = [parse_what_if(text) for text in what_if], group_of(by)
    settings, now = gather(config, None, (), store), SystemClock().now()
    worlds = _Worlds(world, latency)
    begins = now - parse_duration(since, "--since")
    with console(stderr=True).status("replaying recorded calls"):
        record = read_record(settings.store, begins, now)
        found, one_in = sampled(conversations(record.calls), MOST_CALLS)
        replayed, left_out = accounts(found, {one.name: one.dialect for one in settings.providers}, worlds.of(record))
        habits = RecordHabits(record.calls)
        answers = [answer(replayed, habits, asked, groups) for asked in questions]
        notes = _Notes(since, worlds.used, left_out, one_in, replayed_share(replayed, habits))
    _show(answers, notes, by or "", output)


class _Worlds:
    """Where the latencies of batches come from."""

    def __init__(self, name: str | None, file: Path | None) -> None:
        if name is not None and file is not None:
            raise ConfigError("Name --world or --latency, not both: each says how long batches take.")
        self._given = measured(file) if file is not None else None if name is None else find_world(name)
        self.used: dict[str, str] = {}  # by provider

    def of(self, record: Recorded) -> Callable[[str], ProviderWorld]:
        def choose(provider: str) -> ProviderWorld:
            own = [batch for batch in record.batches if batch.provider == provider]
            found, source = self._given, "as you said"
            if found is None:
                found, source = own_world(own, ASSUMED), f"measured on {len(own):,} batches"
            if found is None:
                found, source = ASSUMED, f"assumed, because the store has {len(own)} batches, and it takes {ENOUGH}"
            self.used[provider] = f"{found.name} ({source})"
            return found

        return choose


@dataclass(frozen=True, slots=True)
class _Notes:
    """What is to be known of the figures."""

    since: str
    latencies: Mapping[str, str]  # by provider
    left_out: Mapping[str, int]
    one_in: int  # conversations
    replayed_share: float | None


# ---------------------------------------------------------------- what is shown


def _show(answers: Sequence[WhatIfAnswer], notes: _Notes, by: str, output: ReportFormat) -> None:
    if output is ReportFormat.JSON:
        print_json(
            {
                "since": notes.since,
                "what_if": [_document(one) for one in answers],
                "batch_latencies": dict(notes.latencies),
                "left_out": dict(notes.left_out),
                "one_in": notes.one_in,
                "replay_to_paid": None if notes.replayed_share is None else round(notes.replayed_share, 4),
            }
        )
        return
    out = console()
    for one in answers:
        out.print(answer_table(one, by))
    for line in _lines(answers, notes):
        out.print(line)


def answer_table(found: WhatIfAnswer, by: str = "") -> Table:
    table = titled(f"What if {found.asked.text}", Column(by, overflow="fold"), *figures(*_NUMBERS))
    table.padding = (0, 0, 0, 1)
    for group in found.groups[:MOST_GROUPS]:
        table.add_row(*_row(group))
    table.add_section()
    table.add_row(*_row(found.total), style="bold")
    hidden = len(found.groups) - MOST_GROUPS
    lines = [f"{hidden:,} more groups: --format json has them."] if hidden > 0 else []
    lines += [f"late: {count:,.0f} {reason}" for reason, count in found.total.late.items()]
    table.caption = "\n".join(lines) or None
    return table


def _row(group: WhatIfGroup) -> tuple[str, ...]:
    saved = "" if group.saved_share is None else f"{round(group.saved_share, 2) + 0.0:.0%}"  # never -0%
    late = sum(group.late.values())
    times = brief(group.wait_p50_s), brief(group.wait_p95_s)
    money = dollars(round(group.paid)), dollars(round(group.would_pay)), saved
    share = f"{group.by_batch / group.calls:.0%}" if group.calls else ""
    return group.name, f"{group.calls:,.0f}", *money, share, *times, f"{late:,.0f}" if late else ""


def _lines(answers: Sequence[WhatIfAnswer], notes: _Notes) -> list[str]:
    lines = [f"Calls of the last {notes.since}, on other lanes or with other marks. Waits are beyond what now takes."]
    if notes.one_in > 1:
        lines.append(f"Estimated from 1 in {notes.one_in} conversations, what was paid, too.")
    if any(one.asked.budget_s is not None for one in answers):
        lines += [f"Batch latencies of {provider}: {world}." for provider, world in notes.latencies.items()]
    if any(one.asked.plans_cache for one in answers):
        lines.append(
            "caching=plan is no part of carpool yet. Here it takes for each conversation what was cheapest for the "
            "others of its client and model: their own marks, 5 minutes, or 1 hour."
        )
    lines += [f"Left out: {count:,} calls, because {reason}." for reason, count in notes.left_out.items()]
    return [*lines, *_trust(notes.replayed_share)]


def _trust(share: float | None) -> list[str]:
    """How well the replay knows what is known."""
    if share is None:
        return []
    off = f"{abs(share - 1):.1%} {'more' if share > 1 else 'less'} than"
    off = "what" if abs(share - 1) < 0.0005 else off
    line = f"As a check: replayed as it was, the same traffic costs {off} was paid."
    far = "The figures above may be as far off: the replay knows something of your traffic wrongly."
    return [line, far] if abs(share - 1) > FAR_OFF else [line]


def _document(found: WhatIfAnswer) -> dict[str, Any]:
    asked = found.asked
    about = {"asked": asked.text, "budget_s": asked.budget_s, "plans_cache": asked.plans_cache}
    return about | {"groups": [_group(one) for one in found.groups], "total": _group(found.total)}


def _group(group: WhatIfGroup) -> dict[str, Any]:
    return {
        "name": group.name,
        "calls": round(group.calls),
        "paid": round(group.paid),
        "would_pay": round(group.would_pay),
        "saved": round(group.saved),
        "by_batch": round(group.by_batch, 1),
        "rescued": round(group.rescued, 1),
        "late": {reason: round(count, 1) for reason, count in group.late.items()},
        "wait_p50_s": round(group.wait_p50_s, 1),
        "wait_p95_s": round(group.wait_p95_s, 1),
    }
