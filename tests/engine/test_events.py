"""Trouble is told when it begins, changes and ends, and not with every try; counters; and hooks that fail."""

import logging
from dataclasses import fields
from typing import Any

import pytest

from carpool.core.errors import NotConnected
from carpool.core.model import Entry, EntryKind, Lane
from carpool.engine.events import FORGOTTEN_S, EventHooks, Stats, Trouble, TroubleBegan, TroubleOver, Troubles
from carpool.engine.events import MAX_TROUBLES as MOST


class Told:
    """Troubles with a clock that is set by hand, and what they told."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.time = 100.0
        self.troubles = Troubles(EventHooks((self.events.append,)), lambda: self.time, lambda credential: credential)

    def failed(self, reason: str, at: float, doing: str = "polling") -> list[Any]:
        """What a failure tells."""
        self.time, before = at, len(self.events)
        self.troubles.failed(doing, reason, "anthropic", "account")
        return self.events[before:]

    def worked(self, at: float, account: str = "account") -> list[Any]:
        self.time, before = at, len(self.events)
        self.troubles.worked("polling", "anthropic", account)
        return self.events[before:]


def test_it_is_told_once_however_often_it_is_tried() -> None:
    told = Told()
    began = TroubleBegan(100.0, "polling", "it answered 503", 100.0, 1, "anthropic", credential="account")
    assert told.failed("it answered 503", 100.0) == [began]
    assert [told.failed("it answered 503", 100.0 + number) for number in range(1, 10)] == [[]] * 9
    assert told.worked(130.0) == [TroubleOver(130.0, "polling", 100.0, 10, "anthropic", credential="account")]
    assert told.worked(131.0) == []
    assert not told.troubles


def test_another_kind_of_failure_is_told_as_such() -> None:
    told = Told()
    told.failed("it answered 503", 100.0)
    [changed] = told.failed("it answered 401", 110.0)
    assert (changed.reason, changed.since, changed.tries) == ("it answered 401", 100.0, 2)


def test_one_accounts_success_ends_nobody_elses_trouble() -> None:
    told = Told()
    told.failed("it answered 401", 100.0)
    assert told.worked(101.0, "another") == []
    assert told.failed("it answered 401", 102.0) == []


def test_what_was_long_ago_begins_anew() -> None:
    told = Told()
    told.failed("it answered 503", 100.0)
    [began] = told.failed("it answered 503", 101.0 + FORGOTTEN_S)
    assert (began.since, began.tries) == (101.0 + FORGOTTEN_S, 1)


def test_an_unreachable_provider_is_one_trouble_and_any_success_ends_it() -> None:
    told = Told()
    told.troubles.failed("polling", NotConnected("No route."), "anthropic", "account")
    told.troubles.failed("creating a batch", NotConnected("No route."), "anthropic", "another")
    [began] = told.events
    assert (began.doing, began.provider, began.credential) == ("", "anthropic", "")
    assert told.troubles.unreached("anthropic")
    [over] = told.worked(120.0)
    assert (over.doing, over.tries) == ("", 2)


def test_it_remembers_so_many_and_no_more() -> None:
    told = Told()
    for number in range(MOST + 5):
        told.failed("it answered 503", 100.0, f"looking at batch {number}")
    assert len(told.troubles._known) == MOST


def _entry(**more: Any) -> Entry:
    standard: dict[str, Any] = {
        "ticket": 1,
        "purchase": 1,
        "at": 0.0,
        "lane": Lane.BATCH,
        "kind": EntryKind.PURCHASE,
        "provider": "anthropic",
        "credential": "c",
        "model": "m",
        "paid": 100,
        "would_have_paid": 200,
    }
    return Entry(**{**standard, **more})


def test_money_is_counted_once_with_its_answer() -> None:
    stats = Stats()
    stats.count(_entry(), used=True)
    assert (stats.paid, stats.would_have_paid, stats.saved) == (100, 200, 100)
    stats.count(_entry(), used=False)  # the batch's copy of a call that was rescued
    assert (stats.paid, stats.would_have_paid, stats.duplicates) == (200, 200, 1)
    stats.count(_entry(lane=Lane.NOW, kind=EntryKind.RESCUE, paid=200), used=False)
    assert (stats.paid, stats.duplicates, stats.saved) == (400, 1, -200)
    assert (stats.paid_usd, stats.would_have_paid_usd, stats.saved_usd) == (4e-7, 2e-7, -2e-7)


def test_the_unknown_is_not_free() -> None:
    stats = Stats()
    stats.count(_entry(paid=None, would_have_paid=None), used=True)
    assert (stats.unknown_purchases, stats.paid, stats.would_have_paid) == (1, 0, 0)
    stats.count(_entry(paid=0, would_have_paid=0), used=True)  # refused: known to be free
    assert stats.unknown_purchases == 1


def test_metrics_name_every_counter() -> None:
    stats = Stats(sync_calls=2, batched_calls=3)
    assert set(stats.metrics("x")) == {f"x.{field.name}" for field in fields(Stats)}
    together = stats.metrics("x", split=False)
    assert together["x.calls"] == 5
    assert not {"x.sync_calls", "x.batched_calls"} & set(together)


def test_a_hook_that_fails_stops_neither_the_next_nor_the_teller(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Any] = []

    def broken(event: Any) -> None:
        raise RuntimeError("no")

    event_hooks = EventHooks((broken,))
    event_hooks.add(heard.append)
    with caplog.at_level(logging.WARNING, "carpool"):
        event_hooks.emit(Trouble(0.0, "testing", "nothing"))
    assert len(heard) == 1
    assert "A hook failed on Trouble: RuntimeError at " in caplog.text
