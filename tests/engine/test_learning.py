from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from carpool.core.errors import CarpoolError, StoreUnwritable
from carpool.core.lifecycle import BatchState
from carpool.core.model import Batch, Entry, EntryKind, Lane, PoolKey, Usage
from carpool.engine.learning import SAVE_S, SAVE_TRIES, Learner
from carpool.planners.forecast import BatchClass, Forecast
from tests.support.engine_context import START, HandClock

KEY = PoolKey("anthropic", "anthropic", "c", "/v1/messages", (), "model", "s", "patient")
OF = BatchClass.of(KEY)


class StateStore:
    """Keeps the state of the forecast. Implements `ports.ForecastStore`."""

    def __init__(self) -> None:
        self.version, self.state = 0, b""
        self.errors: list[CarpoolError] = []
        self.saves = self.refused = 0

    async def forecast(self) -> tuple[int, bytes]:
        if self.errors:
            raise self.errors.pop()
        return self.version, self.state

    async def save_forecast(self, known: int, state: bytes) -> bool:
        self.saves += 1
        if self.refused or known != self.version:
            self.refused -= 1
            return False
        self.version, self.state = known + 1, state
        return True


class Recorded(Forecast):
    """Remembers what it is taught."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []

    def batch_passed(self, of: BatchClass, from_age: float, to_age: float, now: float) -> None:
        self.seen.append(("passed", from_age, to_age))

    def batch_ended(self, of: BatchClass, from_age: float, age: float, now: float) -> None:
        self.seen.append(("ended", from_age, age))

    def cancel_ended(self, provider: str, seconds: float, billed: int, unbilled: int, now: float) -> None:
        self.seen.append(("cancelled", seconds, billed, unbilled))


def learning(forecast: Forecast | None = None) -> tuple[Learner, Forecast, StateStore, HandClock]:
    forecast, store, clock = forecast or Forecast(), StateStore(), HandClock()
    problems: list[str] = []
    learner = Learner(forecast, store, clock, lambda doing, _error: problems.append(doing))  # type: ignore[arg-type]
    return learner, forecast, store, clock


def bought(number: int = 1, at: float = START, **fields: Any) -> Batch:
    return Batch(number, 1, KEY, "nonce", BatchState.OPEN, "engine", 3, 100, at - 1, resolved_at=at, **fields)


# ------------------------------------------------------------ batches


def test_a_batch_counts_from_its_purchase_to_its_end() -> None:
    learner, forecast, _, clock = learning(Recorded())
    assert isinstance(forecast, Recorded)
    batch = bought(at=START + 1)
    for age in (5, 20):
        clock.time = START + 1 + age
        learner.batch_in_flight(batch)
    clock.time += 20
    learner.batch_ended(batch, clock.time - 7)
    assert forecast.seen == [("passed", 0.0, 5.0), ("passed", 5.0, 20.0), ("ended", 20.0, 33.0)]


@pytest.mark.parametrize(("ended", "age"), [(-100.0, 10.0), (1e6, 30.0)])
def test_the_providers_clock_is_not_believed_beyond_what_was_seen(ended: float, age: float) -> None:
    learner, forecast, _, clock = learning(Recorded())
    assert isinstance(forecast, Recorded)
    batch = bought(at=START + 1)
    clock.time = START + 11
    learner.batch_in_flight(batch)
    clock.time = START + 31
    learner.batch_ended(batch, START + ended)
    assert forecast.seen[-1] == ("ended", 10.0, age)


def test_a_batch_of_an_engine_before_this_one_counts_from_now_on() -> None:
    learner, forecast, _, clock = learning(Recorded())
    assert isinstance(forecast, Recorded)
    batch = bought(at=START - 500)
    learner.batch_in_flight(batch)
    clock.time += 50
    learner.batch_ended(batch, clock.time)
    assert forecast.seen == [("passed", 500.0, 500.0), ("ended", 500.0, 550.0)]


def test_a_cancelled_batch_counts_up_to_the_request() -> None:
    learner, forecast, _, clock = learning(Recorded())
    assert isinstance(forecast, Recorded)
    batch = bought(at=START + 1)
    clock.time = START + 41
    learner.batch_cancelled(batch)
    clock.time += 2
    learner.batch_cancelled(batch)  # requested again
    clock.time += 10
    learner.batch_ended(batch, clock.time)
    for _ in range(2):
        learner.batch_collected(bought(ended_at=clock.time), 2, 1)
    assert forecast.seen == [("passed", 0.0, 40.0), ("cancelled", 12.0, 2, 1)]


def test_a_batch_that_somebody_else_cancelled_or_that_expired_has_no_end() -> None:
    learner, forecast, _, clock = learning(Recorded())
    assert isinstance(forecast, Recorded)
    clock.time += 100
    learner.batch_ended(bought(1, note="cancelled by somebody at the provider"), clock.time)
    learner.batch_ended(bought(2, START + 10, expires_at=clock.time), clock.time)
    learner.batch_collected(bought(2, ended_at=clock.time), 0, 3)
    assert forecast.seen == [("passed", 0.0, 90.0)]


# ------------------------------------------------------------ synchronous calls


def test_only_complete_answers_on_now_are_timed() -> None:
    learner, forecast, _, clock = learning()
    clock.time += 50
    entry = Entry(1, -1, START, Lane.NOW, EntryKind.RESCUE, "p", "c", "m", Usage(10, 20), 1, 1)
    learner.call_answered(replace(entry, usage=None))
    learner.call_answered(replace(entry, lane=Lane.FLEX))
    assert not forecast.unsaved
    learner.call_answered(entry)
    assert forecast.sync_seconds("p", "m", 20) == pytest.approx(100, rel=0.1)


def test_flex_is_counted() -> None:
    learner, forecast, _, _ = learning()
    before = forecast.flex_refusal("p", "m")
    learner.flex_answered("p", "m", refused=True)
    assert forecast.flex_refusal("p", "m") > before


# ------------------------------------------------------------ persistence


async def test_it_is_saved_a_minute_after_something_was_learned() -> None:
    learner, _, store, clock = learning()
    assert learner.due(clock.time) is None
    learner.flex_answered("p", "m", refused=True)
    assert learner.due(clock.time) == START + SAVE_S
    assert learner.due(clock.time + 5) == START + SAVE_S
    await learner.save()
    assert store.version == 1
    assert learner.due(clock.time) is None
    await learner.save()
    assert store.saves == 1  # nothing was learned since


async def test_engines_share_what_they_learn() -> None:
    learner, forecast, store, clock = learning()
    other = Forecast()
    sharing = Learner(other, store, clock, lambda *_: None)
    for number in range(3):
        learner.batch_ended(bought(number), START + 60)
        sharing.batch_ended(bought(10 + number), START + 60)
    await learner.save()
    await sharing.save()
    assert other.observed(OF) == pytest.approx(6)
    await learner.load()
    assert forecast.observed(OF) == pytest.approx(6)


async def test_a_save_that_comes_second_is_repeated() -> None:
    learner, forecast, store, _ = learning()
    learner.flex_answered("p", "m", refused=True)
    store.refused = 2
    await learner.save()
    assert (store.saves, store.version) == (3, 1)
    learner.flex_answered("p", "m", refused=True)
    store.refused = 1000
    await learner.save()
    assert store.saves == 3 + SAVE_TRIES
    assert forecast.unsaved


async def test_a_save_that_fails_loses_nothing() -> None:
    learner, forecast, store, _ = learning()
    learner.flex_answered("p", "m", refused=True)
    store.errors.append(StoreUnwritable("The disk is full."))
    await learner.save()
    assert forecast.unsaved
    await learner.save()
    assert not forecast.unsaved
    restarted = Forecast()
    restarted.load(store.state, START)
    assert restarted.flex_refusal("p", "m") == pytest.approx(forecast.flex_refusal("p", "m"))
