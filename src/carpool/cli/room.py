"""How many connections this process can have open: as many as it was told, and as the system lets it."""

from __future__ import annotations

import resource
from dataclasses import replace

from carpool.config.limits import Limits

KEPT = 100  # files that are no connections


def room(limits: Limits) -> Limits:
    """The limits with what the system allows. A client may need a connection to its provider too, though those who wait
    for a batch, which is why there are ever so many, need none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.max_connections * 2 + KEPT
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return limits
    return replace(limits, max_connections=max(1, min(limits.max_connections, (soft - KEPT) * 3 // 4)))
