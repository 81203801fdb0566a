"""Policies: what decides in a run about the lane of each turn, and what its cache marks say.

A policy is data and one function that routes a call. The function is made anew for each run, because it may remember
what it saw. A later router replaces that function, and nothing else.

| policy | what it does |
|---|---|
| `now` | everything at once, nothing marked for the cache |
| `now+5m` | everything at once, prompts marked for 5 minutes: what a good client does today |
| `now+1h` | the same with 1 hour |
| `now+5m+pings(k)` | while a conversation pauses, up to k requests keep its prefix alive |
| `llmfleet` | budgets up to 5 s at once, all else in batches of 30 s or 100 calls, one at a time; no rescue, no marks |
| `window` | the same budgets; 30 s or 100 calls from the first; any number of batches in flight |
| `batch` | every turn is a batch of its own, nothing marked |
| `batch+1h` | the same with 1 hour |
| `carpool` | the production planners: routing, pooling, poll pace, rescue; the client's marks of 5 minutes are kept |

llmfleet 0.1.0 starts its window when it begins to collect, not with the first call, so a burst after a quiet time is
split into one call and the rest. That is modelled. Its missing `await` of the results is not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from carpool.core.errors import ConfigError
from carpool.core.model import Lane
from carpool.planners.forecast import Forecast
from carpool.planners.policy import RoutingPolicy
from carpool.planners.routing import TIGHT_MS, Decision
from carpool.sim.money.model import LIVES, RunPurchase, Ttl
from carpool.sim.money.planned import Caching, Knowledge, PlannedRouter, RoutedTurn, RunRouter

if TYPE_CHECKING:
    from carpool.sim.money.run import FleetRun, RunCall

RouterFactory = Callable[["FleetRun"], RunRouter]

POLL_S: Final = 2.0
WINDOW_S: Final = 30.0
WINDOW_CALLS: Final = 100
_SETTINGS: Final = RoutingPolicy()
_FORECAST: Final = Forecast()


@dataclass(frozen=True, slots=True)
class MoneyPolicy:
    name: str
    router: RouterFactory
    settings: RoutingPolicy = _SETTINGS  # of the pools, and of routes that heed them
    forecast: Forecast = _FORECAST
    now_ttl: Ttl | None = None
    batch_ttl: Ttl | None = None
    keeps_marks: bool = False  # the marks that clients set, where they were recorded, replace the lifetimes above
    pings: int = 0  # the most in one pause
    rescues: bool = False
    learns: bool = False  # and compares prices
    patient: Lane = Lane.BATCH  # where calls without a deadline go; `now`: nobody gives budgets at all
    classes: bool = False  # pools by size and deadline, as the planners have them; otherwise one pool
    one_batch: bool = False  # no second batch while one is in flight
    poll_s: float | None = None  # the pace of polls; None: the planners decide


# ------------------------------------------------------------ routers


class FixedRouter:
    """Decides by the call alone, and marks all prompts alike."""

    def __init__(self, run: FleetRun, decide: Callable[[RunCall], Lane]) -> None:
        self._run = run
        self._decide = decide

    def choose(self, call: RunCall, now: float) -> RoutedTurn:
        turn = self._run.trace.sessions[call.session].turns[call.turn]
        policy, lane = self._run.policy, self._decide(call)
        decision = Decision(lane, f"It goes on {lane}.")
        if not self._run.worth_marking(turn.node):
            return RoutedTurn(decision)
        return RoutedTurn(decision, LIVES[policy.now_ttl], LIVES[policy.batch_ttl], policy.pings)

    def bought(self, purchase: RunPurchase, sent: float) -> None:
        pass

    def answered(self, call: RunCall, output_tokens: int, lane: Lane, now: float) -> None:
        pass


def _always(lane: Lane) -> RouterFactory:
    return lambda run: FixedRouter(run, lambda _call: lane)


def _tight_now(run: FleetRun) -> RunRouter:
    return FixedRouter(run, lambda call: Lane.NOW if call.budget <= TIGHT_MS / 1000 else Lane.BATCH)


def _planned(caching: Caching, *, pings: bool = False) -> RouterFactory:
    def made(run: FleetRun) -> RunRouter:
        return PlannedRouter(run, run.knowledge or Knowledge(), caching, pings=pings)

    return made


# ------------------------------------------------------------ the table

_SINGLE: Final = RoutingPolicy(batch_max_size=1, linger_ms=0)
_WINDOWED: Final = RoutingPolicy(batch_window_ms=WINDOW_S * 1000, batch_max_size=WINDOW_CALLS)
_NOW: Final = MoneyPolicy("now", _always(Lane.NOW))
_BATCH: Final = MoneyPolicy("batch", _always(Lane.BATCH), _SINGLE, poll_s=POLL_S)

POLICIES: Final[Mapping[str, MoneyPolicy]] = MappingProxyType(
    {
        policy.name: policy
        for policy in (
            _NOW,
            replace(_NOW, name="now+5m", now_ttl="5m"),
            replace(_NOW, name="now+1h", now_ttl="1h"),
            MoneyPolicy("llmfleet", _tight_now, _WINDOWED, one_batch=True, poll_s=POLL_S),
            MoneyPolicy("window", _tight_now, _WINDOWED, poll_s=POLL_S),
            _BATCH,
            replace(_BATCH, name="batch+1h", batch_ttl="1h"),
            MoneyPolicy("carpool", _planned("observe"), keeps_marks=True, classes=True, rescues=True, learns=True),
            MoneyPolicy("carpool+plan", _planned("plan"), classes=True, rescues=True, learns=True),
            MoneyPolicy("now+plan", _planned("plan"), learns=True, patient=Lane.NOW),
            MoneyPolicy("now+plan+pings", _planned("plan", pings=True), learns=True, patient=Lane.NOW),
        )
    }
)

_PINGS = re.compile(r"now\+5m\+pings\((\d{1,3})\)")


def find_policy(name: str) -> MoneyPolicy:
    if (pings := _PINGS.fullmatch(name)) is not None:
        return replace(POLICIES["now+5m"], name=name, pings=int(pings[1]))
    if name not in POLICIES:
        raise ConfigError(f"{name!r} is not a policy: known are {', '.join(POLICIES)} and now+5m+pings(3).")
    return POLICIES[name]
