"""`carpool simulate`: what a trace would have cost under each policy, and who would have waited how long."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from carpool.cli.console import console, print_json
from carpool.cli.flags import ConfigFile, Json, Store, complete_from, option
from carpool.cli.keys import parse_duration
from carpool.cli.setup import gather
from carpool.cli.simulated import by_scene, picture_of, tables
from carpool.core.clock import SystemClock
from carpool.core.errors import ConfigError
from carpool.dialects import DIALECTS
from carpool.planners.policy import parse_budget
from carpool.sim.money.experiment import RECORDED, Experiment, TraceSource, WorldSource, run_experiment
from carpool.sim.money.policies import POLICIES, find_policy
from carpool.sim.money.record_source import RecordSource
from carpool.sim.money.results import RunResult, RunSummary, as_row, summarised, summary_row
from carpool.sim.money.traces import DEFAULT_MODEL, PauseMode
from carpool.sim.money.worlds import WORLDS

DEFAULT_BUDGET_S = 1800.0
DEFAULT_SINCE = "7d"
_ON_NOW = ("now", "now+5m", "now+1h", "now+5m+pings(3)")
ALL_POLICIES = (*_ON_NOW, *(name for name in POLICIES if name not in _ON_NOW))
SWEEP = ("1m", "2m", "5m", "10m", "20m", "1h", "4h", "24h")  # the deadlines of a picture


class Pauses(StrEnum):
    ATTENDED = "attended"
    UNATTENDED = "unattended"


Traces = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TRACE",
        help="Files with recorded traffic: sessions of Claude Code, Mooncake's or Azure's trace, tau-bench's turns. Or "
        "the word `coding`: a synthetic fleet of coding agents.",
    ),
]
WORLD = f"How the provider behaves: {', '.join(WORLDS)}. Repeatable."
World = Annotated[list[str] | None, option("NAME", WORLD, "--world", autocompletion=complete_from(*WORLDS))]
LATENCY = "File with measured batch latencies in seconds, one a line: a world of its own. Repeatable."
Latency = Annotated[list[Path] | None, option("FILE", LATENCY, "--latency")]
SyncRpm = Annotated[
    int | None, option("COUNT", "Calls on `now` a minute that the provider takes; no limit unless set.", min=1)
]
BatchRpm = Annotated[int | None, option("COUNT", "Requests to the batch API a minute; 1000 unless set.", min=1)]
REFUSALS = "Chance that the provider refuses an attempt on `now` with 429, such as 0.1; 0 unless set."
Refusals = Annotated[float | None, option("SHARE", REFUSALS, "--refusals", min=0.0, max=0.9)]
POLICY = f"Policy to compare; all unless set: {', '.join(ALL_POLICIES)}. Repeatable."
Policy = Annotated[list[str] | None, option("NAME", POLICY, "--policy", autocompletion=complete_from(*ALL_POLICIES))]
BUDGET = "How long each call may take, such as 30s, 10m or 2h. Repeatable. 30m unless set."
Budget = Annotated[list[str] | None, option("DURATION", BUDGET, "--budget")]
TaskBudget = Annotated[str | None, option("DURATION", "How long each session may take in all, such as 3h.")]
Mode = Annotated[
    Pauses, option("MODE", "attended: pauses as they were; unattended: at most a minute, as if no person was asked.")
]
READS = "Price of a cache read as a share of the input's, such as 0.1; that of the price table unless set. Repeatable."
Reads = Annotated[list[str] | None, option("SHARE", READS, "--read-multiplier")]
MODEL = (
    f"Model whose prices count for all calls, {DEFAULT_MODEL} unless set; `recorded`: those in the trace, which must "
)
MODEL += "have batch prices."
Model = Annotated[str | None, option("NAME", MODEL)]
FROM_STORE = "Replay the calls that carpool recorded in its store (--store, --config), with their own models."
FromStore = Annotated[bool, option(None, FROM_STORE, "--from-store")]
SINCE = "How far back: calls of the last 12h, 7d or 30d."
Since = Annotated[str, option("DURATION", SINCE)]
FIRST_PROVIDER = next(iter(DIALECTS))
PROVIDER = f"Whose prices, limits and cache rules hold: {' or '.join(DIALECTS)}. Name a --model of it."
ProviderName = Annotated[str, option("NAME", PROVIDER, "--provider", autocompletion=complete_from(*DIALECTS))]
Seeds = Annotated[int, option("COUNT", "How many samples of sessions and latencies.", min=1, max=1000)]
Sessions = Annotated[int, option("COUNT", "How many sessions of a file are sampled; 0: all.", min=0)]
Agents = Annotated[int, option("COUNT", "Agents of the synthetic fleet.", min=1, max=100_000)]
Turns = Annotated[int, option("COUNT", "Turns of each of them.", min=1, max=10_000)]
Jobs = Annotated[int, option("COUNT", "Processes that work at a time; one for each core unless set.", min=0, max=256)]
PICTURE = "Draw cost against deadline as an SVG file; without --budget for deadlines from 1 min to 24 h."
Picture = Annotated[Path | None, option("FILE.svg", PICTURE)]
NoBound = Annotated[bool, option(None, "Leave out the bound, which takes part of the time.", "--no-bound")]


def simulate(
    traces: Traces = None,
    from_store: FromStore = False,
    store: Store = None,
    config: ConfigFile = None,
    since: Since = DEFAULT_SINCE,
    world: World = None,
    latency: Latency = None,
    sync_rpm: SyncRpm = None,
    batch_rpm: BatchRpm = None,
    refusals: Refusals = None,
    policy: Policy = None,
    budget: Budget = None,
    task_budget: TaskBudget = None,
    mode: Mode = Pauses.ATTENDED,
    read_multiplier: Reads = None,
    model: Model = None,
    provider: ProviderName = FIRST_PROVIDER,
    seeds: Seeds = 5,
    sessions: Sessions = 20,
    agents: Agents = 40,
    turns: Turns = 30,
    jobs: Jobs = 0,
    as_json: Json = False,
    picture: Picture = None,
    no_bound: NoBound = False,
) -> None:
    """Replay traffic under virtual time: what would each policy have cost, and who would have waited?

    Nothing is sent or paid. An agent's next turn starts when the last one is answered and its pause is over. Costs are
    compared with calls on `now` and a cache of 5 minutes, which is what a good client does today, and with the bound:
    what somebody who knew all pauses and latencies in advance would have paid. A fleet of 40 coding agents, your own
    sessions as a picture, and what carpool recorded:

    carpool simulate coding --budget 10m

    carpool simulate sessions.jsonl --latency seconds.txt --picture cost.svg

    carpool simulate --from-store --since 7d --budget 20m
    """
    sampling = _Sampling(mode.value, sessions or None, model, provider)
    sources = [sampling.of_file(path, agents, turns) for path in traces or ()]
    recorded = [sampling.of_store(store, config, since)] if from_store else []
    limited = partial(replace, sync_rpm=sync_rpm, batch_rpm=batch_rpm, refusal=refusals)
    worlds = [limited(one) for one in _worlds(world or (), latency or ())]
    names, shares = _policies(policy), _shares(read_multiplier)
    tasks = None if task_budget is None else parse_budget(task_budget)
    deadlines = _deadlines(budget, _checked(picture) is not None, tasks is not None)
    sampled = _sources([*sources, *recorded]), worlds, names, shares, deadlines, range(seeds)
    _run(Experiment(*sampled, task_budget_s=tasks, bound=not no_bound), jobs, as_json, picture)


def _run(experiment: Experiment, jobs: int, as_json: bool, picture: Path | None) -> None:
    with _progress(len(experiment.jobs())) as advance:
        results = run_experiment(experiment, jobs or os.cpu_count() or 1, advance)
    _show(results, as_json, picture)


# ---------------------------------------------------------------- what is asked


class _Sampling(NamedTuple):
    """Which sessions are taken of a source, and whose prices count."""

    mode: PauseMode
    sessions: int | None
    model: str | None
    provider: str

    def of_file(self, path: str, agents: int, turns: int) -> TraceSource:
        return TraceSource(path, self.mode, self.sessions, self.model or DEFAULT_MODEL, agents, turns, self.provider)

    def of_store(self, store: str | None, file: Path | None, since: str) -> RecordSource:
        config, now = gather(file, None, (), store), SystemClock().now()
        names = tuple((one.name, one.dialect) for one in config.providers)
        time = now - parse_duration(since, "--since"), now
        model = None if self.model == RECORDED else self.model
        return RecordSource(config.store, *time, names, self.provider, self.mode, self.sessions, model)


def _sources(found: Sequence[TraceSource | RecordSource]) -> Sequence[TraceSource | RecordSource]:
    """Whatever is wrong with a record is said before anything runs."""
    if not found:
        raise ConfigError(
            "Name a file with a trace, the word `coding`, or --from-store. carpool simulate -h says more."
        )
    for source in found:
        if isinstance(source, RecordSource):
            source.read(0)
    return found


def _checked(picture: Path | None) -> Path | None:
    if picture is not None and picture.suffix != ".svg":
        raise ConfigError(f"--picture {picture} must end in .svg: that is what is drawn.")
    return picture


def _worlds(names: Sequence[str], files: Sequence[Path]) -> list[WorldSource]:
    worlds = [WorldSource(name) for name in names] + [WorldSource(latencies=file) for file in files]
    for world in worlds:
        world.read()  # whatever is wrong with it is said before anything runs
    return worlds or [WorldSource(next(iter(WORLDS)))]


def _policies(names: Sequence[str] | None) -> Sequence[str]:
    for name in names or ():
        find_policy(name)  # says what is wrong with it
    return names or ALL_POLICIES


def _shares(texts: Sequence[str] | None) -> list[Fraction | None]:
    return [_share(text) for text in texts] if texts else [None]


def _share(text: str) -> Fraction:
    try:
        share = Fraction(text)
    except (ValueError, ZeroDivisionError):
        share = Fraction(-1)
    if not 0 <= share <= 1:
        raise ConfigError(f"--read-multiplier {text[:40]!r} must be a number from 0 to 1, such as 0.1.")
    return share


def _deadlines(budgets: Sequence[str] | None, picture: bool, task_budget: bool) -> list[float | None]:
    if budgets:
        return [parse_budget(text) for text in budgets]
    if picture:
        return [parse_budget(text) for text in SWEEP]
    return [None] if task_budget else [DEFAULT_BUDGET_S]


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr while it runs; nothing in a pipe."""
    to = console(stderr=True)
    columns = TextColumn("simulating"), BarColumn(30), MofNCompleteColumn(), TextColumn("runs"), TimeRemainingColumn()
    with Progress(*columns, console=to, transient=True, disable=not to.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)


# ---------------------------------------------------------------- what is shown


def _show(results: Sequence[RunResult], as_json: bool, picture: Path | None) -> None:
    summaries = summarised(results)
    if as_json:
        print_json(
            {
                "rows": [as_row(result) for result in results],
                "summaries": [summary_row(summary) for summary in summaries],
            }
        )
    else:
        for table in tables(summaries):
            console().print(table)
    if picture is not None:
        _draw(picture, summaries)


def _draw(file: Path, summaries: Sequence[RunSummary]) -> None:
    """One picture for each trace, world and read multiplier. If there are several, the file's name tells them apart."""
    groups = by_scene(summaries)
    for scene, group in groups.items():
        named = [str(part) for part in scene] if len(groups) > 1 else []
        path = file.with_stem("-".join([file.stem, *named]))
        try:
            path.write_text(picture_of(scene, group), "utf-8")
        except OSError as error:
            raise ConfigError(f"The picture {path} can't be written: {error.strerror}.") from error
        console(stderr=True).print(f"Drawn: {path}", soft_wrap=True)
