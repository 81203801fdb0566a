"""Trouble is told when it begins, changes and ends, and not with every try."""

from typing import Any

from carpool.core.errors import NotConnected
from carpool.engine.events import FORGOTTEN_S, EventHooks, TroubleBegan, TroubleOver, Troubles
from carpool.engine.events import MOST_TROUBLES as MOST


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
