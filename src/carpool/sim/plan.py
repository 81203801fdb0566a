"""Draw a world from a seed: clients, budgets, faults and crashes. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from carpool.core.model import Headers
from carpool.engine.cluster.membership import Lease
from carpool.mock import Constant, Faults, Latency, LogNormal, Mixture, MockConfig, Uniform
from carpool.planners.policy import RoutingPolicy
from carpool.sim import openai
from carpool.sim.hang_ups import HangUp, one_timeout, random_hang_ups

Fleet = Literal["anthropic", "openai", "mixed"]
FLEETS: tuple[Fleet, ...] = ("anthropic",) * 9 + ("openai",) * 3 + ("mixed",) * 8
MESSAGES = "/v1/messages"
SLOW_LEASE = Lease(300.0, 300.0, 100.0)  # fewer heartbeats make days of virtual time faster
FAST_LEASE = Lease(180.0, 45.0, 15.0)
MODELS = ("claude-sonnet-5", "claude-haiku-4-5", "claude-opus-4-8")
VERSIONS = ("2023-06-01", "2026-10-21")
BUDGETS = (None, None, 2.0, 30.0, 90.0, 300.0, 900.0, 3600.0, 6 * 3600.0)
TASK_BUDGETS = (60.0, 600.0, 3600.0, 6 * 3600.0)
# The maximum probability of each fault that is drawn.
FAULTS = {
    "create_cut": 0.3,
    "create_500": 0.3,
    "create_529": 0.2,
    "create_429": 0.3,
    "create_429_bare": 0.2,
    "create_hang": 0.2,
    "create_slow": 0.3,
    "create_accepted_cut": 0.4,
    "create_accepted_500": 0.4,
    "create_accepted_529": 0.2,
    "create_accepted_hang": 0.3,
    "batch_stuck": 0.4,
    "list_lag": 0.5,
    "stranger": 0.6,
    "poll_cut": 0.4,
    "poll_500": 0.4,
    "poll_529": 0.2,
    "poll_429": 0.3,
    "poll_429_bare": 0.2,
    "poll_hang": 0.2,
    "poll_garbage": 0.3,
    "cancel_500": 0.3,
    "cancel_429": 0.3,
    "cancel_accepted_cut": 0.3,
    "cancel_accepted_500": 0.3,
    "cancel_slow": 0.4,
    "results_cut": 0.3,
    "results_500": 0.3,
    "results_429": 0.3,
    "results_hang": 0.2,
    "results_cut_midway": 0.4,
    "line_missing": 0.1,
    "line_duplicate": 0.2,
    "line_unknown": 0.2,
    "line_malformed": 0.1,
    "line_api_error": 0.15,
    "line_overloaded": 0.15,
    "line_expired": 0.1,
}
SYNC_FAULTS = {
    "sync_cut": 0.2,
    "sync_500": 0.3,
    "sync_529": 0.3,
    "sync_429": 0.3,
    "sync_429_bare": 0.2,
    "sync_accepted_cut": 0.2,
    "sync_accepted_hang": 0.1,
}


@dataclass(frozen=True, slots=True)
class AgentPlan:
    name: str
    key: str  # the API key it sends
    bearer: bool
    version: str
    beta: str | None
    starts: float
    turns: tuple[TurnPlan, ...]
    provider: str = "anthropic"
    project: str | None = None  # at OpenAI: who pays
    task_budget: float | None = None  # seconds for all its turns

    @property
    def secret(self) -> Headers:
        bearer = ("authorization", f"Bearer {self.key}")
        if self.project is not None:
            return (bearer, ("openai-project", self.project))
        return (bearer,) if self.bearer else (("x-api-key", self.key),)

    @property
    def headers(self) -> Headers:
        """Its further headers, which are sent with its calls."""
        if self.provider == "openai":
            return (("openai-beta", self.beta),) if self.beta else ()
        beta = (("anthropic-beta", self.beta),) if self.beta else ()
        return (("anthropic-version", self.version), *beta)


@dataclass(frozen=True, slots=True)
class TurnPlan:
    text: str
    model: str
    max_tokens: int
    budget: float | None
    keyed: bool
    pause: float
    hang_ups: tuple[HangUp, ...]  # how its client abandons its first attempts
    away: float  # seconds between two attempts
    endpoint: str = MESSAGES


@dataclass(frozen=True, slots=True)
class Crash:
    at: float
    back_after: float
    clean: bool  # the successor knows at once that the process is dead (file lock); else the lease must expire


@dataclass(frozen=True, slots=True)
class Stop:
    """A process that is suspended for a while and then continues."""

    at: float
    lasts: float


@dataclass(frozen=True, slots=True)
class Plan:
    seed: int
    mocks: Mapping[str, MockConfig]  # one mock for each provider in use
    policy: RoutingPolicy
    agents: tuple[AgentPlan, ...]
    crashes: tuple[Crash, ...]
    engines: int
    clock_offset: float
    refuse: float
    fault_free: bool  # nothing in this world excuses a missed deadline
    stops: tuple[Stop, ...] = ()
    lease: Lease = SLOW_LEASE
    notes: tuple[str, ...] = field(default=())


def draw(seed: int, fleet: Fleet | None = None) -> Plan:
    """Draw a world. The fleet has its own random generator, so that the worlds of old seeds stay the same where the
    fleet is Anthropic's."""
    rng = random.Random(seed)  # noqa: S311  a world must be the same every time
    keys = [f"sk-sim-{number}" for number in range(rng.choice([1, 1, 2, 3]))]
    crashes = _crashes(rng)
    faults, sync_faults = _faults(rng)
    engines, stops, lease = _engines(seed, rng.choice([1, 1, 1, 2]))
    refuse = rng.choice([0.0, 0.0, 0.1])
    mock = _with_denials(_with_rate_limits(_mock(rng, seed, faults, sync_faults, keys)))
    agents = tuple(_agent(rng, number, keys) for number in range(rng.choice([1, 3, 8, 20])))
    offset = rng.choice([0.0, 0.0, -40.0, 35.0, 600.0])
    policy = replace(_policy(rng), caching="plan" if seed % 2 else "observe")
    other = random.Random(f"fleet {seed}")  # noqa: S311
    drawn = other.choice(FLEETS)
    agents, openai_mock = _assign_providers(other, seed, agents, fleet or drawn), _openai_mock(other, seed, keys)
    agents = _with_tasks(seed, _with_hang_ups(seed, agents))
    every: dict[str, MockConfig] = {"anthropic": mock, "openai": openai_mock}
    mocks = {provider: every[provider] for provider in sorted({agent.provider for agent in agents})}
    fault_free = not crashes and not stops and refuse == 0.0 and all(map(_is_fault_free, mocks.values()))
    return Plan(seed, mocks, policy, agents, crashes, engines, offset, refuse, fault_free, stops, lease)


def _is_fault_free(mock: MockConfig) -> bool:
    """Whether every synchronous call is accepted and answered."""
    return mock.sync_rpm is None and not any(getattr(mock.faults, name) for name in (*SYNC_FAULTS, "sync_429_burst"))


def _assign_providers(
    rng: random.Random, seed: int, agents: tuple[AgentPlan, ...], fleet: Fleet
) -> tuple[AgentPlan, ...]:
    share = {"anthropic": 0.0, "openai": 1.0, "mixed": 0.5}[fleet]
    menu, together = openai.menu(rng, seed), rng.random() < 0.4
    assigned = [_at_openai(rng, agent, menu) if rng.random() < share else agent for agent in agents]
    return tuple(_simultaneous(agent) if together and agent.provider == "openai" else agent for agent in assigned)


def _at_openai(rng: random.Random, agent: AgentPlan, menu: openai.Menu) -> AgentPlan:
    project = rng.choice([None, None, "proj_sim"])
    turns = tuple(_turn_at_openai(rng, turn, menu) for turn in agent.turns)
    return replace(agent, provider="openai", bearer=True, project=project, turns=turns)


def _turn_at_openai(rng: random.Random, turn: TurnPlan, menu: openai.Menu) -> TurnPlan:
    endpoint, model = rng.choice(menu)
    text = turn.text if endpoint in (openai.CHAT, openai.RESPONSES) else turn.text.partition(" [")[0]
    tokens = rng.choice([200, turn.max_tokens])  # flex is for short responses
    return replace(turn, endpoint=endpoint, model=model, text=text, max_tokens=tokens)


def _simultaneous(agent: AgentPlan) -> AgentPlan:
    """Make an agent's calls simultaneous and equal in kind, so that batches have many lines."""
    turns = (replace(turn, pause=0.0, max_tokens=200, budget=turn.budget and 3600.0) for turn in agent.turns)
    return replace(agent, starts=0.0, beta=None, project=None, turns=tuple(turns))


def _with_hang_ups(seed: int, agents: tuple[AgentPlan, ...]) -> tuple[AgentPlan, ...]:
    """Let every agent disconnect and return at any moment. A separate generator keeps the rest of a world unchanged."""
    rng = random.Random(f"leaving {seed}")  # noqa: S311
    return tuple(
        replace(
            agent, turns=tuple(replace(turn, hang_ups=turn.hang_ups + random_hang_ups(rng)) for turn in agent.turns)
        )
        for agent in agents
    )


def _with_tasks(seed: int, agents: tuple[AgentPlan, ...]) -> tuple[AgentPlan, ...]:
    """Give some agents a deadline for all their turns, most of which then have none of their own."""
    rng = random.Random(f"tasks {seed}")  # noqa: S311
    return tuple(_with_task(rng, agent) if rng.random() < 0.25 else agent for agent in agents)


def _with_task(rng: random.Random, agent: AgentPlan) -> AgentPlan:
    turns = (replace(turn, budget=rng.choice([None, None, turn.budget])) for turn in agent.turns)
    return replace(agent, turns=tuple(turns), task_budget=rng.choice(TASK_BUDGETS))


def _openai_mock(rng: random.Random, seed: int, keys: list[str]) -> MockConfig:
    return _with_denials(
        openai.with_its_own(rng, _with_rate_limits(_mock(rng, seed + 1_000_000, *_faults(rng), keys)), keys)
    )


def _engines(seed: int, engines: int) -> tuple[int, tuple[Stop, ...], Lease]:
    """With several engines on a store: their number, and suspensions of single ones. Uses a separate generator."""
    if engines == 1:
        return 1, (), SLOW_LEASE
    rng = random.Random(f"sharing {seed}")  # noqa: S311
    at, stops = 0.0, []
    for _ in range(rng.choice([0, 0, 1, 3])):
        at += rng.choice([1.0, 10.0, 60.0, 300.0]) * (0.5 + rng.random())
        stops.append(Stop(at, rng.choice([5.0, 50.0, 250.0, 1000.0])))
        at += stops[-1].lasts
    return rng.choice([2, 2, 3, 4]), tuple(stops), rng.choice([SLOW_LEASE, FAST_LEASE])


def _crashes(rng: random.Random) -> tuple[Crash, ...]:
    count = rng.choice([0, 0, 1, 2, 4])
    at, crashes = 0.0, []
    for _ in range(count):
        at += rng.choice([0.3, 1.0, 2.0, 30.0, 120.0, 600.0]) * (0.5 + rng.random())
        crash = Crash(at, rng.choice([0.0, 1.0, 20.0, 400.0]), rng.random() < 0.7)
        at += crash.back_after
        crashes.append(crash)
    return tuple(crashes)


def _faults(rng: random.Random) -> tuple[dict[str, float], dict[str, float]]:
    level = rng.choice([0, 0.1, 0.3])
    drawn = {name: rng.random() * most for name, most in FAULTS.items() if rng.random() < level}
    sync = {name: rng.random() * most for name, most in SYNC_FAULTS.items() if rng.random() < level / 2}
    return drawn, sync


def _mock(
    rng: random.Random, seed: int, faults: dict[str, float], sync_faults: dict[str, float], keys: list[str]
) -> MockConfig:
    shared = dict.fromkeys(keys, "shared") if rng.random() < 0.3 else {}
    config = MockConfig(
        seed=seed,
        batch_latency=_batch_latency(rng),
        per_request=rng.random() < 0.5,
        batch_execution=Uniform(0.5, 5.0),
        sync_latency=Uniform(0.2, 3.0),
        control_latency=Uniform(0.01, 0.3),
        cancel_latency=Uniform(0.5, 10.0),
        workspaces=shared,
        batch_rpm=rng.choice([5.0, 50.0, 1000.0]),
        sync_rpm=rng.choice([None, None, 20.0]),
        expiry_s=rng.choice([86_400.0, 1800.0]),
        faults=Faults(
            **faults,  # type: ignore[arg-type]
            **sync_faults,  # type: ignore[arg-type]
            hang_s=300.0,
            stuck_s=rng.choice([600.0, float("inf")]),
            list_lag_s=rng.choice([5.0, 45.0]),
            clock_offset_s=rng.choice([0.0, 0.0, 20.0, -45.0]),
        ),
    )
    if config.faults.batch_stuck and config.faults.stuck_s > config.expiry_s:
        return replace(config, expiry_s=min(config.expiry_s, 7200.0))  # days of polling stuck batches test nothing new
    return config


def _with_rate_limits(config: MockConfig) -> MockConfig:
    """Give some worlds low rate limits or bursts of refusals. A separate generator keeps the worlds of old seeds the
    same.
    """
    rng = random.Random(f"pressure {config.seed}")  # noqa: S311
    if rng.random() < 0.75:
        return config
    bursts = rng.random() * 0.15 if rng.random() < 0.6 else 0.0
    faults = replace(
        config.faults,
        sync_429_burst=bursts,
        burst_s=rng.choice([1.0, 5.0, 20.0]),
        retry_after_s=rng.choice([0, 1, 5]),
    )
    return replace(config, sync_rpm=rng.choice([None, 30.0, 60.0]), sync_burst=rng.choice([None, 2.0]), faults=faults)


def _with_denials(config: MockConfig) -> MockConfig:
    """Let some providers deny bought batches, for a while or for good. Uses a separate generator."""
    rng = random.Random(f"forgetting {config.seed}")  # noqa: S311
    if rng.random() < 0.85:
        return config
    faults = replace(
        config.faults,
        batch_forgotten=rng.choice([0.1, 0.5]),
        forget_after_s=rng.choice([0.0, 5.0, 60.0, 300.0]),
        forgotten_s=rng.choice([20.0, 120.0, 7200.0, float("inf")]),
        poll_404=rng.choice([0.0, 0.3]),
        results_404=rng.choice([0.0, 0.0, 0.5]),
    )
    return replace(config, faults=faults)


def _batch_latency(rng: random.Random) -> Latency:
    usual: Latency = LogNormal(100.0, 0.5)
    tailed: Latency = Mixture(((0.95, usual), (0.05, LogNormal(1800.0, 1.0))))
    return rng.choice([Constant(2.0), usual, tailed])


def _policy(rng: random.Random) -> RoutingPolicy:
    return RoutingPolicy(
        sync_max_latency_ms=rng.choice([None, None, 5000]),
        batch_window_ms=rng.choice([None, None, 5000]),
        batch_min_size=rng.choice([None, None, 3]),
        batch_max_size=rng.choice([None, None, 3, 5]),
        poll_interval_s=rng.choice([None, None, 1.0]),
        batch_rpm=rng.choice([None, 5, 50]),
        linger_ms=rng.choice([0, 500]),
    )


def _agent(rng: random.Random, number: int, keys: list[str]) -> AgentPlan:
    return AgentPlan(
        name=f"agent {number}",
        key=rng.choice(keys),
        bearer=rng.random() < 0.5,
        version=rng.choice(VERSIONS),
        beta=rng.choice([None, None, "output-300k-2026-03-24"]),
        starts=rng.choice([0.0, 0.2, 5.0, 200.0]) * rng.random(),
        turns=tuple(_turn(rng, number, turn) for turn in range(rng.choice([1, 2, 4]))),
    )


def _turn(rng: random.Random, number: int, turn: int) -> TurnPlan:
    special = rng.choice([""] * 12 + [" [error:invalid_request_error]", " [tool]"])
    return TurnPlan(
        text=f"agent {number}, turn {turn}{special}",
        model=rng.choice(MODELS),
        max_tokens=rng.choice([50, 200, 4000, 16000]),
        budget=rng.choice(BUDGETS),
        keyed=rng.random() < 0.4,
        pause=rng.choice([0.0, 1.0, 60.0]) * rng.random(),
        hang_ups=one_timeout(rng.choice([None, None, None, 1.0, 60.0])),
        away=rng.choice([0.1, 5.0, 300.0]),
    )
