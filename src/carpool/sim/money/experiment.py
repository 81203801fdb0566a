"""Run policies side by side: every trace in every world, for every deadline and seed.

All policies meet the same sessions and, for each call, the same latencies, because both are drawn from the seed. So
their costs can be compared within a seed. Jobs are independent, and run in processes of their own; what comes out
depends on the seeds, not on how many processes there are.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

from carpool.core.model import Lane
from carpool.planners.routing import TIGHT_MS
from carpool.sim.money.billing import PriceTable, bill
from carpool.sim.money.bound import Hindsight
from carpool.sim.money.coding import coding_fleet
from carpool.sim.money.fleet import ON_TIME_S, learned, simulate
from carpool.sim.money.model import Answer, MissReason, RunRecord, Trace
from carpool.sim.money.policies import find_policy
from carpool.sim.money.record_source import RecordSource
from carpool.sim.money.results import BASELINE, BOUND, PricedRun, RunKey, RunResult, compared, timing
from carpool.sim.money.traces import DEFAULT_MODEL, PauseMode, read_trace
from carpool.sim.money.worlds import Latencies, ProviderWorld, find_world, measured

CODING = "coding"  # the synthetic fleet
WARM_UP_SEED = 1_000_000  # added to the seed of a run: other sessions, from which a policy learns before it
RECORDED = "recorded"  # the models that a trace names, some of which have no price any more


@dataclass(frozen=True, slots=True)
class TraceSource:
    """Where sessions come from: a file, or the synthetic fleet. Small, so that it can travel to another process."""

    path: str  # or CODING
    mode: PauseMode = "attended"
    sessions: int | None = None  # a sample of so many, another one for each seed; None: all
    model: str = DEFAULT_MODEL  # in place of the recorded ones, or RECORDED
    agents: int = 200
    turns: int = 30
    provider: str = "anthropic"  # whose prices, limits and cache rules hold

    @property
    def name(self) -> str:
        return Path(self.path).stem

    def read(self, seed: int) -> Trace:
        model = None if self.model == RECORDED else self.model
        if self.path == CODING:
            fleet = coding_fleet(self.agents, self.turns, seed, mode=self.mode, model=model or DEFAULT_MODEL)
            return replace(fleet, provider=self.provider)
        return read_trace(
            self.path, mode=self.mode, sessions=self.sessions, seed=seed, model=model, provider=self.provider
        )


@dataclass(frozen=True, slots=True)
class WorldSource:
    """A known world by its name, or a file with measured latencies."""

    name: str = ""
    latencies: Path | None = None
    batch_rpm: int | None = None  # None: as the world has it
    sync_rpm: int | None = None
    refusal: float | None = None

    def read(self) -> ProviderWorld:
        world = find_world(self.name) if self.latencies is None else measured(self.latencies)
        limits = {"batch_rpm": self.batch_rpm, "sync_rpm": self.sync_rpm, "refusal": self.refusal}
        given = {name: limit for name, limit in limits.items() if limit is not None}
        told = "".join(f" {name}={limit:g}" for name, limit in given.items())
        return replace(world, name=world.name + told, **given)  # type: ignore[arg-type]  # by name


@dataclass(frozen=True, slots=True)
class ReplayJob:
    """What one process does at a time: one policy (or the bound) on one trace in one world, for all deadlines."""

    source: TraceSource | RecordSource
    world: WorldSource
    seed: int
    policy: str


@dataclass(frozen=True, slots=True)
class Experiment:
    """Everything that is compared. `deadlines` has None for calls that may take as long as they like, and
    `read_multipliers` for the price of cache reads that the price table has."""

    sources: Sequence[TraceSource | RecordSource]
    worlds: Sequence[WorldSource]
    policies: Sequence[str]
    read_multipliers: Sequence[Fraction | None]
    deadlines: Sequence[float | None]
    seeds: Sequence[int]
    task_budget_s: float | None = None
    bound: bool = True

    def jobs(self) -> list[ReplayJob]:
        """What all policies are compared with is run in any case. The jobs of one trace and seed follow each other, so
        that a process seldom reads a trace anew."""
        compared_with = [BASELINE] * (BASELINE not in self.policies) + [BOUND] * self.bound
        return [
            ReplayJob(source, world, seed, policy)
            for source in self.sources
            for seed in self.seeds
            for world in self.worlds
            for policy in (*self.policies, *compared_with)
        ]

    def key(self, job: ReplayJob, table: str, deadline: float | None) -> RunKey:
        source, world = job.source, _world(job.world).name
        return RunKey(source.name, source.mode, world, table, deadline, self.task_budget_s)


def run_experiment(
    experiment: Experiment, processes: int, progress: Callable[[], object] = lambda: None
) -> list[RunResult]:
    """Run everything, and put each run beside what it is compared with. `progress` is called after every job."""
    runs: list[PricedRun] = []
    for of_a_job in _run_jobs(experiment, processes):
        runs += of_a_job
        progress()
    return [result for result in compared(runs) if result.policy in experiment.policies]


def _run_jobs(experiment: Experiment, processes: int) -> Iterator[list[PricedRun]]:
    """In the order of the jobs."""
    jobs = experiment.jobs()
    if processes == 1:
        yield from (run_job(experiment, job) for job in jobs)
        return
    with _processes(min(processes, len(jobs))) as pool:
        futures = [pool.submit(run_job, experiment, job) for job in jobs]
        yield from (future.result() for future in futures)


@contextmanager
def _processes(count: int) -> Iterator[Executor]:
    """Children are started afresh: a progress bar's thread may hold a lock while this process forks. Ctrl-C reaches
    them too, but ends this process only, which then drops what has not begun."""
    pool = ProcessPoolExecutor(count, get_context("spawn"), signal.signal, (signal.SIGINT, signal.SIG_IGN))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


@lru_cache(maxsize=4)
def _trace(source: TraceSource | RecordSource, seed: int) -> Trace:
    return source.read(seed)


@lru_cache
def _world(source: WorldSource) -> ProviderWorld:
    return source.read()


@lru_cache
def _table(read_multiplier: Fraction | None) -> PriceTable:
    return PriceTable(read_multiplier)


def run_job(experiment: Experiment, job: ReplayJob) -> list[PricedRun]:
    if job.policy == BOUND:
        return _bounds(experiment, job)
    trace, tables = _trace(job.source, job.seed), [_table(multiplier) for multiplier in experiment.read_multipliers]
    runs = []
    for together in [[table] for table in tables] if find_policy(job.policy).learns else [tables]:
        for deadline, record in _records(experiment, job, trace, together[0]):
            seen = timing(record)
            for one in bill(trace, record.purchases, together):
                run = experiment.key(job, one.table, deadline)
                runs.append(PricedRun(run, job.policy, job.seed, one.cost, one.cache_share, seen))
    return runs


def _bounds(experiment: Experiment, job: ReplayJob) -> list[PricedRun]:
    """What the same sessions would have cost at least, with their deadlines kept."""
    trace, world = _trace(job.source, job.seed), _world(job.world)
    latencies = Latencies(world, trace, job.seed)
    runs = []
    for multiplier in experiment.read_multipliers:
        table = _table(multiplier)
        hindsight = Hindsight(trace, latencies, table, slowest=world.slow_sync.factor)
        for deadline in experiment.deadlines:
            cost = hindsight.bound(deadline, experiment.task_budget_s).cost
            runs.append(PricedRun(experiment.key(job, table.name, deadline), BOUND, job.seed, cost))
    return runs


def _records(
    experiment: Experiment, job: ReplayJob, trace: Trace, table: PriceTable
) -> Iterator[tuple[float | None, RunRecord]]:
    """A run for each deadline. Where a policy does not look at it, one run serves them all. `table` has the prices by
    which a policy decides, if it compares prices."""
    world, policy, task_budget = _world(job.world), find_policy(job.policy), experiment.task_budget_s

    def run(deadline: float | None) -> RunRecord:
        knowledge = None
        if policy.learns and isinstance(job.source, TraceSource):
            seed = job.seed + WARM_UP_SEED
            earlier = _trace(job.source, seed)
            knowledge = learned(earlier, world, policy, seed, budget_s=deadline, task_budget_s=task_budget, table=table)
        return simulate(
            trace,
            world,
            policy,
            job.seed,
            budget_s=deadline,
            task_budget_s=task_budget,
            table=table,
            knowledge=knowledge,
            every_poll=False,
        )

    shared: RunRecord | None = None
    for deadline in experiment.deadlines:
        tight = deadline is not None and deadline * 1000 <= TIGHT_MS
        if policy.rescues or tight or world.refusal or task_budget is not None:
            yield deadline, run(deadline)
        else:
            shared = shared or run(None)
            yield deadline, shared if deadline is None else judged(shared, trace, deadline)


def judged(record: RunRecord, trace: Trace, deadline_s: float) -> RunRecord:
    """The record of a run whose policy did not look at deadlines, as if its calls had had this one."""

    def judge(answer: Answer) -> Answer:
        deadline, sync_s = answer.asked + deadline_s, trace.sessions[answer.session].turns[answer.turn].sync_s
        if answer.answered <= deadline + ON_TIME_S:
            return replace(answer, deadline=deadline)
        late: MissReason = "the batch was late" if answer.lane is Lane.BATCH else "the provider had no room"
        return replace(answer, deadline=deadline, miss="its answer takes longer" if sync_s > deadline_s else late)

    return replace(record, answers=[judge(answer) for answer in record.answers])
