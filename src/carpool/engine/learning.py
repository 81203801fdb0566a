"""What the engine observes goes into its forecast, and the forecast into the store.

All engines on a store share one state: each of them adds what it has learned since its last save, and reads at the same
time what the others have. That happens once a minute while something is learned, and on close, so a crash loses the
last minute: these are statistics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from carpool.core.bounded import BoundedMap
from carpool.core.errors import CarpoolError
from carpool.core.model import Batch, Entry, Lane
from carpool.core.ports import Clock, ForecastStore
from carpool.planners.forecast import BatchClass, Forecast

SAVE_S = 60.0
SAVE_TRIES = 5  # while other engines save at the same time
MAX_BATCHES = 100_000  # open ones whose age is remembered


class Learner:
    def __init__(
        self, forecast: Forecast, store: ForecastStore, clock: Clock, report: Callable[[str, CarpoolError], None]
    ) -> None:
        self._forecast = forecast
        self._store = store
        self._now = clock.now
        self._report = report  # what failed, and why
        self._since = self._now()
        self._counted: BoundedMap[int, float] = BoundedMap(MAX_BATCHES)  # batch → age up to which it is counted
        self._cancelled: BoundedMap[int, float] = BoundedMap(MAX_BATCHES)  # batch → when its cancel was requested
        self._saves_at: float | None = None
        self._saving = asyncio.Lock()

    # ------------------------------------------------------------ batches

    def batch_in_flight(self, batch: Batch) -> None:
        """A poll shows that a batch has not ended."""
        now, age = self._now(), self._age(batch, self._now())
        self._forecast.batch_passed(BatchClass.of(batch.key), self._counted_age(batch, age), age, now)
        self._counted[batch.id] = age

    def batch_cancelled(self, batch: Batch) -> None:
        """This engine has requested that a batch be cancelled. When it would have ended is not known any more."""
        if batch.id not in self._cancelled:
            self.batch_in_flight(batch)
            self._counted.pop(batch.id)
            self._cancelled[batch.id] = self._now()

    def batch_ended(self, batch: Batch, ended_at: float) -> None:
        """A batch has ended, by itself if nobody cancelled it and it did not expire."""
        now = self._now()
        age = self._age(batch, min(now, ended_at))
        counted = self._counted_age(batch, age)
        age = max(age, counted)  # of two clocks, ours has seen it in flight
        self._counted.pop(batch.id, None)
        if batch.id in self._cancelled or batch.note:  # cancelled, or its purchase was in doubt
            return
        if batch.expires_at is not None and ended_at >= batch.expires_at - 1:
            self._forecast.batch_passed(BatchClass.of(batch.key), counted, age, now)
        else:
            self._forecast.batch_ended(BatchClass.of(batch.key), counted, age, now)

    def batch_collected(self, batch: Batch, answered: int, cancelled: int) -> None:
        """The results of a batch were read. If this engine had it cancelled, its answered lines are billed
        nevertheless."""
        requested = self._cancelled.pop(batch.id, None)
        if requested is not None and batch.ended_at is not None:
            took = max(0.0, batch.ended_at - requested)
            self._forecast.cancel_ended(batch.key.provider, took, answered, cancelled, self._now())

    def _age(self, batch: Batch, at: float) -> float:
        return max(0.0, at - (batch.resolved_at or batch.intended_at))

    def _counted_age(self, batch: Batch, age: float) -> float:
        """A batch that is older than this engine was counted up to now by the one that had it before."""
        return self._counted.get(batch.id, 0.0 if batch.intended_at >= self._since else age)

    # ------------------------------------------------------------ synchronous calls

    def call_answered(self, entry: Entry) -> None:
        """A call was answered completely; this is its ledger entry."""
        if entry.lane is Lane.NOW and entry.usage is not None:
            now, tokens = self._now(), entry.usage.output_tokens
            self._forecast.call_answered(entry.provider, entry.model, tokens, now - entry.at, now)

    def flex_answered(self, provider: str, model: str, *, refused: bool) -> None:
        self._forecast.flex_answered(provider, model, refused, self._now())

    # ------------------------------------------------------------ persistence

    async def load(self) -> None:
        _, state = await self._store.forecast()
        self._forecast.load(state, self._now())

    def due(self, now: float) -> float | None:
        """When to save; None if there is nothing to be saved."""
        if not self._forecast.unsaved:
            return None
        if self._saves_at is None:
            self._saves_at = now + SAVE_S
        return self._saves_at

    async def save(self) -> None:
        """Adds what was learned here to what is stored, unless that is done already."""
        self._saves_at = None
        async with self._saving:
            try:
                for _ in range(SAVE_TRIES):
                    if not self._forecast.unsaved or await self._saved():
                        return
            except CarpoolError as error:  # the next save has it all
                self._report("saving the forecast", error)

    async def _saved(self) -> bool:
        """False if another engine has saved meanwhile."""
        version, state = await self._store.forecast()
        self._forecast.load(state, self._now())
        saved = await self._store.save_forecast(version, self._forecast.dump())
        if saved:
            self._forecast.saved()
        return saved
