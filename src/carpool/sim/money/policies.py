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
from typing import Final

from carpool.core.errors import ConfigError
from carpool.core.model import Call, Lane
from carpool.planners.forecast import Forecast
from carpool.planners.policy import RoutingPolicy
from carpool.planners.routing import TIGHT_MS, Decision, WarmConversations, kept_warm, noted, route
from carpool.sim.money.model import Ttl

Router = Callable[[Call, float], Decision]
RouterFactory = Callable[["MoneyPolicy", float], Router]  # the policy, and the batch price relative to `now`

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
    classes: bool = False  # pools by size and deadline, as the planners have them; otherwise one pool
    one_batch: bool = False  # no second batch while one is in flight
    poll_s: float | None = None  # the pace of polls; None: the planners decide


# ------------------------------------------------------------ routers


def _always(lane: Lane) -> RouterFactory:
    decision = Decision(lane, f"Everything goes on {lane}.")
    return lambda _policy, _beta: lambda _call, _now: decision


def _tight_now(_policy: MoneyPolicy, _beta: float) -> Router:
    at_once, pooled = Decision(Lane.NOW, "Its budget is tight."), Decision(Lane.BATCH, "It can wait for a batch.")

    def choose(call: Call, _now: float) -> Decision:
        return at_once if call.budget is not None and call.budget <= TIGHT_MS / 1000 else pooled

    return choose


def planned(policy: MoneyPolicy, beta: float) -> Router:
    """As the engine decides."""
    warmth = WarmConversations()

    def choose(call: Call, now: float) -> Decision:
        decision = route(call, policy.settings, policy.forecast, now, beta=beta)
        return kept_warm(call, noted(call, decision), warmth, now)

    return choose


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
            MoneyPolicy("carpool", planned, now_ttl="5m", batch_ttl="5m", keeps_marks=True, classes=True, rescues=True),
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
