"""Whether the calls that may need a rescue fit through the synchronous rate limit, and when to start if it gets tight.

Ten thousand calls of a stuck batch do not fit through 1,000 requests a minute in the last second. So for every rescue
time d, the open calls with a rescue time up to d must be at most what may be sent from now until d:

    calls(d) <= free rate * (d - now) + what may be sent at once,        and the same for tokens.

Where that gets tight, the earliest are sent on `now` before their rescue time (`early`). Where a further call would
break it, that call is not batched (`room_for`). Calls are counted over all batches and pools of an account and model,
because they share the rate limit; and all together where the policy limits rescues (`sync_rpm`).

Only a part of the free rate is counted on: it is an estimate, and the provider may slow down meanwhile. Calls are
batched up to a smaller part of it (`BATCHED`) than that at which rescues start early (`USABLE`): otherwise, calls that
just fit would be sent at once, and their batches would have no time.
Rescue times are rounded down to steps of `GRAIN`, so that the cost of a plan does not grow with the number of calls.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Final, NamedTuple

from carpool.core.bounded import BoundedMap

BATCHED: Final = 0.8  # of the free rate may be needed for calls that ride batches
USABLE: Final = 0.95  # of it is counted on when it gets tight
GRAIN: Final = 5.0  # seconds
SNAPSHOT_S: Final = 0.25  # calls that arrive within this time are decided by one count, and by what was added since
MAX_SNAPSHOTS: Final = 1000

Limited = tuple[str, str]  # account, model: what a rate limit belongs to
EVERYTHING: Final[Limited] = "", ""  # what the policy's limit belongs to


@dataclass(frozen=True, slots=True)
class FreeRate:
    """What rescues may use of a rate limit. Infinite where no limit is known."""

    requests_per_s: float = math.inf
    tokens_per_s: float = math.inf
    requests: float = 1.0  # at once
    tokens: float = math.inf
    opens_at: float = 0.0  # nothing may be sent before

    def part(self, share: float) -> FreeRate:
        return replace(self, requests_per_s=self.requests_per_s * share, tokens_per_s=self.tokens_per_s * share)

    def seconds(self, calls: float, tokens: float) -> float:
        """How long it takes to send these."""
        by_requests = max(0.0, calls - self.requests) / max(1e-9, self.requests_per_s)
        return max(by_requests, max(0.0, tokens - self.tokens) / max(1e-9, self.tokens_per_s))

    def seconds_more(self, calls: float, tokens: float) -> float:
        """How much longer it takes at most to send these as well."""
        return max(calls / max(1e-9, self.requests_per_s), tokens / max(1e-9, self.tokens_per_s))


UNLIMITED: Final = FreeRate()


class RescueLoad(NamedTuple):
    """Calls with about the same rescue time."""

    at: float
    calls: int
    tokens: float


class RescueRoom:
    """How the calls fit at one moment, and how many more would."""

    def __init__(self, loads: Iterable[RescueLoad], free: FreeRate) -> None:
        self._free = free
        self._times: list[float] = []
        self._sums: list[tuple[int, float]] = [(0, 0.0)]  # calls and tokens before each time, and in all
        starts: list[float] = []
        for load in loads:
            calls, tokens = self._sums[-1]
            self._times.append(load.at)
            self._sums.append((calls + load.calls, tokens + load.tokens))
            starts.append(load.at - free.seconds(*self._sums[-1]))
        # From each time on: the latest time to begin so that all are sent in time, the earliest first.
        self._starts = [*accumulate(reversed(starts), min, initial=math.inf)][::-1]

    @property
    def latest_start(self) -> float:
        """When to begin at the latest, so that all are sent in time. Infinite without calls."""
        return self._starts[0]

    def fits(self, rescue_at: float, calls: int, tokens: float, now: float) -> bool:
        """Whether so many more calls fit that have this rescue time or a later one. Calls that are due before it are
        not their concern."""
        place = bisect_right(self._times, rescue_at)
        before, before_tokens = self._sums[place]
        own = rescue_at - self._free.seconds(before + calls, before_tokens + tokens)
        later = self._starts[place] - self._free.seconds_more(calls, tokens)
        return min(own, later) >= max(now, self._free.opens_at)


@dataclass(slots=True)
class _Calendar:
    """The calls of one limit by rescue time."""

    steps: list[int] = field(default_factory=list)  # sorted
    calls: dict[int, int] = field(default_factory=dict)
    tokens: dict[int, float] = field(default_factory=dict)

    def add(self, step: int, tokens: float) -> None:
        if step not in self.calls:
            insort(self.steps, step)
            self.calls[step], self.tokens[step] = 0, 0.0
        self.calls[step] += 1
        self.tokens[step] += tokens

    def remove(self, step: int, tokens: float) -> None:
        self.calls[step] -= 1
        self.tokens[step] -= tokens
        if not self.calls[step]:
            del self.calls[step], self.tokens[step], self.steps[bisect_left(self.steps, step)]

    def loads(self) -> Iterator[RescueLoad]:
        return (RescueLoad(step * GRAIN, self.calls[step], self.tokens[step]) for step in self.steps)


@dataclass(slots=True)
class _Snapshot:
    at: float
    room: RescueRoom
    calls: int = 0  # added since
    tokens: float = 0.0


class OpenRescues:
    """The open calls of this process that have a rescue time and were not sent on `now` yet."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[Limited, int, float]] = {}  # ticket → limit, step, tokens
        self._calendars: dict[Limited, _Calendar] = {EVERYTHING: _Calendar()}
        self._snapshots: BoundedMap[Limited, _Snapshot] = BoundedMap(MAX_SNAPSHOTS)

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, ticket: int, limited: Limited, rescue_at: float, tokens: float) -> None:
        self.remove(ticket)
        step = math.floor(rescue_at / GRAIN)
        self._calls[ticket] = limited, step, tokens
        for one in (limited, EVERYTHING):
            self._calendars.setdefault(one, _Calendar()).add(step, tokens)
            if (snapshot := self._snapshots.get(one)) is not None:
                snapshot.calls += 1
                snapshot.tokens += tokens

    def remove(self, ticket: int) -> None:
        found = self._calls.pop(ticket, None)
        if found is None:
            return
        limited, step, tokens = found
        self._calendars[EVERYTHING].remove(step, tokens)
        calendar = self._calendars[limited]
        calendar.remove(step, tokens)
        if not calendar.steps:
            del self._calendars[limited]

    def limited_by(self, ticket: int) -> Limited:
        """What limits the rescue of a call besides the policy; `EVERYTHING` if it is not known here."""
        found = self._calls.get(ticket)
        return EVERYTHING if found is None else found[0]

    def limits(self) -> list[Limited]:
        return [limited for limited in self._calendars if limited != EVERYTHING]

    def room_for(self, limited: Limited, rescue_at: float, tokens: float, free: FreeRate, now: float) -> bool:
        """Whether there is room for the rescue of one more call."""
        if free.requests_per_s == math.inf and free.tokens_per_s == math.inf:
            return True
        snapshot = self._snapshots.get(limited)
        if snapshot is None or not 0 <= now - snapshot.at < SNAPSHOT_S:
            snapshot = self._snapshots[limited] = _Snapshot(now, RescueRoom(self._loads(limited), free.part(BATCHED)))
        return snapshot.room.fits(rescue_at, snapshot.calls + 1, snapshot.tokens + tokens, now)

    def early(self, limited: Limited, free: FreeRate, now: float) -> float:
        """How many seconds before its rescue time the first of these calls has to be sent now; 0 if there is time."""
        start = self.starts_at(limited, free)
        return (self._calendars[limited].steps[0] + 1) * GRAIN - start if start <= now else 0.0

    def starts_at(self, limited: Limited, free: FreeRate) -> float:
        """When the first of these calls has to be sent so that all are in time. Infinite if its rescue time will do."""
        calendar = self._calendars.get(limited)
        if calendar is None or not calendar.steps:
            return math.inf
        start = RescueRoom(calendar.loads(), free.part(USABLE)).latest_start
        return start if start < calendar.steps[0] * GRAIN else math.inf

    def _loads(self, limited: Limited) -> Iterator[RescueLoad]:
        calendar = self._calendars.get(limited)
        return iter(()) if calendar is None else calendar.loads()
