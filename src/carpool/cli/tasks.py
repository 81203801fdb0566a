"""`carpool tasks`: the tasks of a store, with their turns, slack and costs, and when each of them may be done."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from rich.table import Column, Table
from rich.text import Text

from carpool.cli import flags
from carpool.cli.console import console, figures, print_json, titled
from carpool.cli.setup import gather
from carpool.core.clock import SystemClock
from carpool.planners.ledger import dollars
from carpool.planners.policy import DAY, parse_budget, span
from carpool.planners.tasks import TaskState, TaskSummary, summarised, summary_row
from carpool.stores import open_record

_COLOURS = {TaskState.SLACK: "green", TaskState.NOW: "yellow", TaskState.LATE: "red", TaskState.OVER: "dim"}


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"


Since = Annotated[str, flags.option("DURATION", "Show tasks that were active in this time, such as 30m or 24h.")]
Limit = Annotated[int, flags.option("COUNT", "Show so many tasks at most.", min=1, max=10_000)]
AsFormat = Annotated[Format, flags.option("FORMAT", "table, or json for scripts.", "--format")]


def tasks(
    since: Since = "24h",
    limit: Limit = 50,
    as_format: AsFormat = Format.TABLE,
    store: flags.Store = None,
    config: flags.ConfigFile = None,
) -> None:
    """Show the tasks of a store, the latest first: turns, slack, costs, and when each of them may be done.

    A running carpool serve writes what happens every few seconds.
    """
    now = SystemClock().now()
    with open_record(gather(config, None, (), store).store) as record:
        rows = [summarised(row, now) for row in record.tasks(now - parse_budget(since), limit)]
    if as_format is Format.JSON:
        print_json({"tasks": [summary_row(row) for row in rows]})
        return
    out = console()
    out.print(task_table(rows, now) if rows else f"No task was active in the last {since}.")


def task_table(rows: list[TaskSummary], now: float) -> Table:
    numbers = figures("turns", "slack", "paid", "done in")
    table = titled("Tasks", Column("task", min_width=20, overflow="fold"), Column("state", no_wrap=True), *numbers)
    for row in rows:
        task, open_turns = row.record, row.record.asked - row.record.answered
        said = f"\n{task.agent}, {_signed(now - task.last)} ago"
        due = "" if task.deadline is None else f"\ndue in {_signed(task.deadline - now)}"
        table.add_row(
            Text.assemble(task.name, (said, "dim")),
            Text.assemble((row.state.value, _COLOURS.get(row.state, "")), (due, "dim")),
            f"{task.answered}" + (f" +{open_turns}" if open_turns > 0 else ""),
            _signed(row.slack) if row.slack is not None and row.state is TaskState.SLACK else "",
            dollars(sum(task.spent.values())) + (f" +{task.unknown}?" if task.unknown else ""),
            "" if row.ends is None else _signed(row.ends - now),
        )
    table.caption = "turns: answered +open · slack: what can be lost before the rest is needed on now\n?: price unknown"
    return table


def _signed(seconds: float) -> str:
    text = f"{abs(seconds) / DAY:.3g} d" if abs(seconds) >= 2 * DAY else span(abs(seconds))
    return text if seconds >= 0 else f"-{text}"
