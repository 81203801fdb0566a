"""The forecast that the router, the rescues and the polls read, and that the engine teaches."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from typing import Final, NamedTuple

from carpool.core.bounded import BoundedMap
from carpool.core.model import PoolKey
from carpool.planners.forecast import histogram, state
from carpool.planners.forecast.curve import PLACES, WEIGHT, HazardCurve, observations
from carpool.planners.forecast.decay import DecayedCounts
from carpool.planners.forecast.prior import STRETCH, Prior

MAX_CLASSES: Final = 1024  # of all kinds; the one that was observed longest ago is forgotten first
SYNC_QUANTILE: Final = 0.998
SYNC_MARGIN: Final = 2.0  # a promise allows this multiple of that quantile: the provider may slow down meanwhile
SYNC_WEIGHT: Final = 1.0  # of the prior, in calls
_LENGTHS: Final = (256, 1024, 4096)  # the most output tokens of each length of responses but the last
CANCEL_QUANTILE: Final = 0.95

# Seconds of observed time in which an observation loses half its weight. Wider classes remember longer.
_HALF_LIVES: Final = {
    "size": 900.0,
    "model": 7_200.0,
    "provider": 43_200.0,
    "sync": 900.0,
    "seconds": 900.0,
    "flex": 600.0,
    "cancel": 21_600.0,
    "billed": 21_600.0,
}
_SIZES: Final = {
    **dict.fromkeys(("size", "model", "provider"), 2 * PLACES),  # the ends of all bins, then the passages
    **dict.fromkeys(("sync", "seconds", "cancel"), histogram.SIZE),
    **dict.fromkeys(("flex", "billed"), 2),  # no, yes
}


class BatchClass(NamedTuple):
    provider: str
    model: str  # empty for batches of several models
    size_class: str

    @classmethod
    def of(cls, key: PoolKey) -> BatchClass:
        return cls(key.provider, key.model, key.size_class)


class _SyncScale(NamedTuple):
    """What multiplies the prior's time of a synchronous call."""

    most: float  # seconds that are promised for the next longer responses
    promised: float
    typical: float


class ClassSeen(NamedTuple):
    """What was observed of a class, older observations with less weight."""

    kind: str  # of what: a key of `_HALF_LIVES`
    provider: str
    model: str
    size_class: str  # of synchronous calls the length of the response; empty for all
    observed: float  # ends of batches, answers, cancels, …
    passed: float  # batches that were in flight, whether or not they ended by themselves; 0 for other kinds


class Forecast:
    """Changes with every observation, unless it does not learn. One for each engine, and one for each simulated run."""

    def __init__(self, prior: Prior | None = None, *, learns: bool = True) -> None:
        self._learns = learns
        self._additions = self._dumped = self._saved = 0  # how many there were, at the last dump, and at the last save
        self._prior = prior or Prior()
        self._prior_curve = HazardCurve.of_hazard(self._prior.hazard)
        self._counts: BoundedMap[state.Key, DecayedCounts] = BoundedMap(MAX_CLASSES)
        # Derived from the counts, and dropped when these change.
        self._curves: dict[BatchClass, HazardCurve] = {}
        self._sync: dict[tuple[str, str], list[_SyncScale]] = {}
        self._slow: dict[tuple[str, str], float] = {}

    # ------------------------------------------------------------ batches

    def batch_cdf(self, seconds: float, of: BatchClass) -> float:
        """The chance that a batch ends within this many seconds of its purchase."""
        return self._curve(of).cdf(seconds)

    def batch_quantile(self, p: float, of: BatchClass) -> float:
        """The seconds after which a share p of the batches has ended."""
        return self._curve(of).quantile(p)

    def batch_mean(self, most: float, of: BatchClass) -> float:
        """The mean time until a batch has ended, or is given up at the age of `most` seconds."""
        return self._curve(of).mean(most)

    def ends_within(self, seconds: float, age: float, of: BatchClass) -> float:
        """The chance that a batch that is in flight at this age ends within the next `seconds`."""
        return self._curve(of).ends_within(seconds, age)

    def observed(self, of: BatchClass) -> float:
        """The number of ends in exactly this class and in batches of several models, older ones with less weight. A
        forecast that does not learn needs no more of them."""
        if not self._learns:
            return math.inf
        found = (self._counts.get(("size", of.provider, model, of.size_class)) for model in {"", of.model})
        return sum(sum(counts.raw()[:PLACES]) / counts.scale for counts in found if counts is not None)

    def _curve(self, of: BatchClass) -> HazardCurve:
        curve = self._curves.get(of)
        return self._learned_curve(of) if curve is None else curve

    def _learned_curve(self, of: BatchClass) -> HazardCurve:
        provider, model, size_class = of
        curve = self._updated(("provider", provider, "", ""), self._prior_curve)
        if model:
            curve = self._updated(("model", provider, model, ""), curve)
        stretch = STRETCH.get(size_class, 1.0)
        if stretch != 1:
            curve = HazardCurve.of_hazard(curve.hazard, stretch)
        curve = self._updated(("size", provider, "", size_class), curve)  # of batches of several models
        if model:
            curve = self._updated(("size", provider, model, size_class), curve)
        if len(self._curves) >= MAX_CLASSES:
            self._curves.clear()
        self._curves[of] = curve
        return curve

    def _updated(self, key: state.Key, wider: HazardCurve) -> HazardCurve:
        counts = self._counts.get(key)
        if counts is None:
            return wider
        raw = counts.raw()
        return HazardCurve.learned(raw[:PLACES], raw[PLACES:], counts.scale, wider.rates)

    # ------------------------------------------------------------ synchronous calls, cancels, flex

    def sync_seconds(self, provider: str, model: str, output_tokens: int) -> float:
        """What a promise may rely on: a synchronous call with this output limit hardly ever takes longer."""
        scale = self._sync_scales(provider, model)[bisect_left(_LENGTHS, output_tokens)]
        usual = self._prior.sync_seconds(output_tokens)
        return min(scale.most, scale.promised * usual, usual + self._slowest(provider, model))

    def _slowest(self, provider: str, model: str) -> float:
        """What hardly any response of the model took, however long, with the margin of a promise. An output limit is
        seldom reached: short responses that were slow make no promise for long ones hopeless."""
        seconds = self._slow.get((provider, model))
        if seconds is None:
            counts = self._counts.get(("seconds", provider, model, ""))
            seconds = math.inf
            if counts is not None:
                factor = histogram.quantile(counts.raw(), counts.scale, SYNC_QUANTILE, SYNC_WEIGHT)
                seconds = SYNC_MARGIN * factor * self._prior.sync_floor
            self._slow[provider, model] = seconds
        return seconds

    def sync_typical(self, provider: str, model: str, output_tokens: int) -> float:
        """The median of the same."""
        scale = self._sync_scales(provider, model)[bisect_left(_LENGTHS, output_tokens)]
        usual = self._prior.sync_seconds(output_tokens)
        return min(scale.most, scale.typical * usual, usual + self._slowest(provider, model))

    def cancel_seconds(self, provider: str) -> float:
        """A high quantile of the time from a cancel request to the end of the batch."""
        counts = self._counts.get(("cancel", provider, "", ""))
        if counts is None:
            return self._prior.cancel_seconds
        return self._prior.cancel_seconds * histogram.quantile(counts.raw(), counts.scale, CANCEL_QUANTILE, WEIGHT)

    def billed_chance(self, provider: str) -> float:
        """The chance that a line of a cancelled batch is billed nevertheless."""
        return self._chance(("billed", provider, "", ""), self._prior.billed_chance)

    def flex_refusal(self, provider: str, model: str) -> float:
        """The chance that the provider has no room for a call on flex."""
        return self._chance(("flex", provider, model, ""), self._prior.flex_refusal)

    def _sync_scales(self, provider: str, model: str) -> list[_SyncScale]:
        """By length of the response. Where few responses of a length were seen, the prior holds for it, but slow
        responses of any length raise all: the provider is slow. None is promised later than a longer one."""
        scales = self._sync.get((provider, model))
        if scales is not None:
            return scales
        scales, most = [], math.inf
        slowest = self._sync_quantile(provider, model, "", SYNC_QUANTILE)
        for place in range(len(_LENGTHS), -1, -1):
            promised = max(slowest, self._sync_quantile(provider, model, str(place), SYNC_QUANTILE))
            typical = self._sync_quantile(provider, model, str(place), 0.5) / SYNC_MARGIN
            scales.insert(0, _SyncScale(most, promised, min(typical, promised)))
            if place > 0:
                most = min(most, promised * self._prior.sync_seconds(_LENGTHS[place - 1]))
        if len(self._sync) >= MAX_CLASSES:
            self._sync.clear()
        self._sync[provider, model] = scales
        return scales

    def _sync_quantile(self, provider: str, model: str, length: str, p: float) -> float:
        counts = self._counts.get(("sync", provider, model, length))
        return 1.0 if counts is None else histogram.quantile(counts.raw(), counts.scale, p, SYNC_WEIGHT)

    def _chance(self, key: state.Key, prior: float) -> float:
        counts = self._counts.get(key)
        if counts is None:
            return prior
        no, yes = counts.raw()
        weight = WEIGHT * counts.scale
        return (yes + weight * prior) / (no + yes + weight)

    # ------------------------------------------------------------ learning

    def batch_passed(self, of: BatchClass, from_age: float, to_age: float, now: float) -> None:
        """A batch was in flight between these ages. Of one that is cancelled by us or expires, nothing else counts."""
        self._learn(of, from_age, to_age, now, ended=False)

    def batch_ended(self, of: BatchClass, from_age: float, age: float, now: float) -> None:
        """A batch ended by itself at this age. It was in flight before, and counted up to `from_age`."""
        self._learn(of, from_age, age, now, ended=True)

    def _learn(self, of: BatchClass, from_age: float, to_age: float, now: float, *, ended: bool) -> None:
        """Wider classes hold several sizes, so their ages are those of the smallest."""
        provider, model, size_class = of
        added = observations(from_age, to_age, ended=ended)
        self._add(("size", provider, model, size_class), added, now)
        stretch = STRETCH.get(size_class, 1.0)
        if stretch != 1:
            added = observations(from_age / stretch, to_age / stretch, ended=ended)
        if model:
            self._add(("model", provider, model, ""), added, now)
        self._add(("provider", provider, "", ""), added, now)
        self._curves.clear()

    def call_answered(self, provider: str, model: str, output_tokens: int, seconds: float, now: float) -> None:
        """A synchronous call was answered, a rescue included. `output_tokens` is what the response has."""
        relative = SYNC_MARGIN * seconds / self._prior.sync_written(output_tokens)
        added = ((histogram.bin_of(relative), 1.0),)
        self._add(("sync", provider, model, ""), added, now)
        self._add(("sync", provider, model, str(bisect_left(_LENGTHS, output_tokens))), added, now)
        of_all = ((histogram.bin_of(seconds / self._prior.sync_floor), 1.0),)
        self._add(("seconds", provider, model, ""), of_all, now)
        self._sync.pop((provider, model), None)
        self._slow.pop((provider, model), None)

    def cancel_ended(self, provider: str, seconds: float, billed: int, unbilled: int, now: float) -> None:
        """A batch that we cancelled has ended, and this many of its lines are billed. It counts as one observation:
        what becomes of its lines depends on each other."""
        relative = seconds / self._prior.cancel_seconds
        self._add(("cancel", provider, "", ""), ((histogram.bin_of(relative), 1.0),), now)
        if total := billed + unbilled:
            shares = ((0, unbilled / total), (1, billed / total))
            self._add(("billed", provider, "", ""), shares, now)

    def flex_answered(self, provider: str, model: str, refused: bool, now: float) -> None:
        self._add(("flex", provider, model, ""), ((int(refused), 1.0),), now)

    def _add(self, key: state.Key, amounts: Iterable[tuple[int, float]], now: float) -> None:
        if self._learns:
            self._additions += 1
            self._of(key).add(amounts, now)

    # ------------------------------------------------------------ display

    def seen(self) -> list[ClassSeen]:
        return sorted(_seen(key, counts) for key, counts in self._counts.items())

    # ------------------------------------------------------------ persistence

    @property
    def unsaved(self) -> bool:
        """Whether anything was learned that is not stored yet."""
        return self._additions != self._saved

    def dump(self) -> bytes:
        """Everything learned, to be stored. If that succeeds, `saved` is to be called."""
        self._dumped = self._additions
        return state.encode((key, counts.at or 0.0, counts.dump()) for key, counts in self._counts.items())

    def saved(self) -> None:
        self._saved = self._dumped
        for counts in self._counts.values():
            counts.saved()

    def load(self, stored: bytes, now: float) -> None:
        """Takes over what is stored, by this engine or by several, and adds what was learned here since the last save.

        Engines that share a store do this before each save: load, dump, store, and then `saved`. `now` limits the
        times in the state: another machine's clock may be ahead.
        """
        for key, at, counts in state.decode(stored):
            if len(counts) == _SIZES.get(key[0]):
                self._of(key).load(counts, min(at, now))
        self._curves.clear()
        self._sync.clear()
        self._slow.clear()

    def _of(self, key: state.Key) -> DecayedCounts:
        counts = self._counts.get(key)
        if counts is None:
            counts = DecayedCounts(_SIZES[key[0]], _HALF_LIVES[key[0]])
            self._counts[key] = counts
        else:
            self._counts.move_to_end(key)
        return counts


def _seen(key: state.Key, counts: DecayedCounts) -> ClassSeen:
    raw = counts.raw()
    of_batches = len(raw) == 2 * PLACES
    count, passed = (sum(raw[:PLACES]), max(raw[PLACES:])) if of_batches else (sum(raw), 0.0)
    return ClassSeen(*key, count / counts.scale, passed / counts.scale)
