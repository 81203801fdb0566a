"""Worlds: how long a provider takes, what it allows, and what it refuses.

Every draw belongs to a call, not to the moment in which it is drawn: the latency of a call's batch copy is keyed by
seed, session and turn, so every policy, and the bound, meets the same latency for the same call, whatever it sent
before. A batch ends when its slowest member ends. So pooling has its true price here: a batch of many calls is slower
than most of them alone.

The distributions of batch latencies are assumptions; the worlds differ to show how much depends on them. How much that
is: `anthropic` has a median of 5 and a 90th percentile of 60 minutes exactly. Recorded sessions of Claude Code whose
every turn is a batch with a 1h cache then cost 1.16 / 1.46 / 1.72 times what they cost at once with a 5m cache, at
reads of 0.1 / 0.05 / 0.025 of the input's price. With a 90th percentile of 54 minutes (a sigma of 1.85) it is 1.11 /
1.37 / 1.61, because the slowest tenth decides how often an entry has expired. In `economics` it is 0.66 / 0.73 / 0.79.
What was measured on one's own account goes in by `measured`.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import NormalDist
from types import MappingProxyType
from typing import Final, Protocol

from carpool.core.errors import ConfigError
from carpool.sim.money.model import Trace

DAY: Final = 86_400.0
HOUR: Final = 3600.0
FIRST_TOKEN_SHARE: Final = 0.3  # of an answer's time, after which it has begun and what it wrote can be read
_NORMAL: Final = NormalDist()
_LEAST: Final = 1e-9  # keeps a draw inside the open interval that a quantile function takes


class BatchTimes(Protocol):
    """The distribution of a batch's latency."""

    def quantile(self, part: float, p: float) -> float:
        """Seconds, from two independent draws between 0 and 1: which component, and where in it."""
        ...


@dataclass(frozen=True, slots=True)
class LogNormalTimes:
    median: float
    sigma: float
    floor: float = 0.0

    def quantile(self, part: float, p: float) -> float:
        return max(self.floor, self.median * math.exp(self.sigma * _NORMAL.inv_cdf(min(max(p, _LEAST), 1 - _LEAST))))


@dataclass(frozen=True, slots=True)
class MixedTimes:
    """Mostly `usual`, with a share of `tail`."""

    usual: BatchTimes
    tail: BatchTimes
    share: float

    def quantile(self, part: float, p: float) -> float:
        return self.tail.quantile(part, p) if part < self.share else self.usual.quantile(part, p)


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """As measured: each second is as likely as the others."""

    seconds: tuple[float, ...]

    def quantile(self, part: float, p: float) -> float:
        return self.seconds[min(int(p * len(self.seconds)), len(self.seconds) - 1)]


@dataclass(frozen=True, slots=True)
class Slowdown:
    """From `starts` to `ends` (seconds of the run), everything that begins takes `factor` times as long."""

    starts: float
    ends: float
    factor: float

    def at(self, seconds: float) -> float:
        return self.factor if self.starts <= seconds < self.ends else 1.0


_NO_SLOWDOWN: Final = Slowdown(0.0, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class ProviderWorld:
    name: str
    batch: Mapping[str, BatchTimes]  # by model or glob; the first that matches
    drift: Slowdown = _NO_SLOWDOWN  # of batches
    slow_sync: Slowdown = _NO_SLOWDOWN
    stuck: float = 0.0  # share of the calls whose batch stands still until it expires
    batch_rpm: int | None = 1000
    sync_rpm: int | None = None
    refusal: float = 0.0  # the chance that an attempt on `now` is answered with 429
    cancel_s: float = 20.0
    expiry_s: float = DAY

    def times(self, model: str) -> BatchTimes:
        """How long the batches of a model take."""
        found = next((times for glob, times in self.batch.items() if fnmatchcase(model, glob)), None)
        if found is None:
            raise ConfigError(f"The world {self.name} has no batch latency for {model}: add one, or `*`.")
        return found


TAIL: Final = LogNormalTimes(1800.0, 1.0)
ECONOMICS: Final = MixedTimes(LogNormalTimes(100.0, 0.5), TAIL, 0.05)  # one-request batches as mostly reported
PUBLISHED: Final = LogNormalTimes(300.0, math.log(12) / _NORMAL.inv_cdf(0.9), 60.0)  # median 5 min, 90 % in an hour


def _every(times: BatchTimes) -> Mapping[str, BatchTimes]:
    return MappingProxyType({"*": times})


# `drifting` slows down an hour into the run, when a fleet is in full work.
WORLDS: Final[Mapping[str, ProviderWorld]] = MappingProxyType(
    {
        world.name: world
        for world in (
            ProviderWorld("economics", _every(ECONOMICS)),
            ProviderWorld("anthropic", _every(PUBLISHED)),
            ProviderWorld("quick", _every(LogNormalTimes(30.0, 0.4))),
            ProviderWorld("slow", _every(LogNormalTimes(1800.0, 0.8, 60.0))),
            ProviderWorld("drifting", _every(ECONOMICS), drift=Slowdown(HOUR, 3 * HOUR, 8.0)),
            ProviderWorld("stuck", _every(ECONOMICS), stuck=0.02),
        )
    }
)


def find_world(name: str) -> ProviderWorld:
    if name not in WORLDS:
        raise ConfigError(f"{name!r} is not a world: known are {', '.join(WORLDS)}.")
    return WORLDS[name]


def measured(path: str | Path) -> ProviderWorld:
    """A world with measured batch latencies: one number of seconds a line, or a JSON object with a list for each model
    (or glob)."""
    path = Path(path)
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The latencies {path} can't be read: {error}.") from error
    try:
        content = json.loads(text) if text.lstrip().startswith(("{", "[")) else [float(line) for line in text.split()]
    except ValueError as error:
        raise ConfigError(f"{path} holds no latencies: write one number of seconds a line ({error}).") from error
    by_model = content if isinstance(content, dict) else {"*": content}
    return ProviderWorld(path.stem, MappingProxyType({name: _times(path, name, one) for name, one in by_model.items()}))


def _times(path: Path, model: str, seconds: object) -> MeasuredTimes:
    numbers = seconds if isinstance(seconds, list) else []
    if not numbers or not all(isinstance(one, int | float) and 0 <= one < math.inf for one in numbers):
        raise ConfigError(f"{path} holds no latencies for {model}: expected is a list of seconds, none below 0.")
    return MeasuredTimes(tuple(sorted(map(float, numbers))))


# ------------------------------------------------------------ draws

_DRAWS: Final = 3  # for each turn: which component, where in it, whether it is stuck


class Latencies:
    """How long each call of a trace takes in a world, for one seed."""

    def __init__(self, world: ProviderWorld, trace: Trace, seed: int, began: float = 0.0) -> None:
        """A world's slowdowns count from when the run `began`."""
        self._began = began
        self._world = world
        self._trace = trace
        self._seed = seed
        self._drawn: dict[int, list[float]] = {}  # session → draws of all its turns
        self._of_model: dict[str, BatchTimes] = {}

    def batch_s(self, session: int, turn: int, at: float, attempt: int = 0) -> float:
        """From the creation of a batch at this time to the end of this call in it; infinite if it is stuck."""
        part, p, stuck = self._draws(session, turn, attempt)
        if stuck < self._world.stuck:
            return math.inf
        times = self._times(self._trace.sessions[session].model)
        return times.quantile(part, p) * self._world.drift.at(at - self._began)

    def sync_s(self, session: int, turn: int, at: float) -> float:
        """How long its answer takes on `now` when it is sent at this time."""
        return self._trace.sessions[session].turns[turn].sync_s * self._world.slow_sync.at(at - self._began)

    def refused(self, session: int, turn: int, attempt: int) -> bool:
        """Whether this attempt on `now` is answered with 429."""
        if self._world.refusal <= 0:
            return False
        return self._keyed(f"refusal {session} {turn} {attempt}").random() < self._world.refusal

    def _draws(self, session: int, turn: int, attempt: int) -> Sequence[float]:
        if attempt:  # a second batch of the same call is another draw
            rng = self._keyed(f"batch {session} {turn} {attempt}")
            return [rng.random() for _ in range(_DRAWS)]
        drawn = self._drawn.get(session)
        if drawn is None:
            rng = self._keyed(f"batches {session}")
            drawn = [rng.random() for _ in range(_DRAWS * len(self._trace.sessions[session].turns))]
            self._drawn[session] = drawn
        return drawn[_DRAWS * turn : _DRAWS * turn + _DRAWS]

    def _keyed(self, name: str) -> random.Random:
        return random.Random(f"{self._seed} {name}")  # noqa: S311  a draw must be the same every time

    def _times(self, model: str) -> BatchTimes:
        if model not in self._of_model:
            self._of_model[model] = self._world.times(model)
        return self._of_model[model]
