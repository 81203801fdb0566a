"""How long a call waits for its create: the planner of pools under random arrivals, in virtual time."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

from carpool.core.model import PoolKey, PoolView
from carpool.core.ports import BatchLimits
from carpool.planners.policy import RoutingPolicy
from carpool.planners.pooling import plan
from carpool.planners.pressure.quota import BatchQuota

RPM = 130  # of which polls every 2 s leave 50 to creates
RATES = (0.1, 1.0, 10.0, 100.0, 1000.0)  # calls per second
START = 1_800_000_000.0
KEY = PoolKey("anthropic", "anthropic", "bench", "/v1/messages", (), "", "s", "patient")
LIMITS = BatchLimits(max_count=100_000, max_bytes=256_000_000, window=86_400, retention=29 * 86_400)


def waits(seed: int) -> list[dict[str, Any]]:
    return [waits_at(per_s, random.Random(f"{seed} {per_s}")) for per_s in RATES]


def waits_at(per_s: float, rng: random.Random) -> dict[str, Any]:
    policy, quota = RoutingPolicy(), BatchQuota.new(RPM, 2.0, START)
    waited: list[float] = []
    sizes: list[int] = []
    pool: list[float] = []
    arrivals = _arrivals(per_s, rng)
    now = START
    while arrivals or pool:
        wake = math.inf
        if pool:
            view = PoolView(1, KEY, len(pool), 1000 * len(pool), pool[0], pool[-1], None)
            plans = plan([view], {"bench": quota}, policy, LIMITS, {}, now, overhead=100)
            for flush in plans.flushes:
                quota = quota.spend_create(now, flush.turns)
                waited += [now - at for at in pool[: flush.max_count]]
                sizes.append(min(len(pool), flush.max_count))
                del pool[: flush.max_count]
            wake = math.inf if plans.wake is None else plans.wake
        if arrivals and arrivals[-1] <= wake:
            now = arrivals.pop()
            pool.append(now)
        else:
            now = wake
    size = statistics.fmean(sizes)
    return {"calls_per_s": per_s, "wait_s": round(statistics.fmean(waited), 2), "batch_size": round(size, 1)}


def _arrivals(per_s: float, rng: random.Random) -> list[float]:
    """The last first."""
    at, found = START, []
    for _ in range(int(min(60_000, max(2_000, 300 * per_s)))):
        at += rng.expovariate(per_s)
        found.append(at)
    return found[::-1]
