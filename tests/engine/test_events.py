"""Trouble is told when it begins, changes and ends, and not with every try."""

from carpool.engine.events import FORGOTTEN_S, Troubles
from carpool.engine.events import MOST_TROUBLES as MOST

POLLING = ("anthropic", "account", "polling")


def test_it_is_told_once_however_often_it_is_tried() -> None:
    troubles = Troubles()
    began = troubles.failed(POLLING, "it answered 503", 100.0)
    assert began is not None
    assert (began.provider, began.doing, began.reason, began.since, began.tries) == (
        *("anthropic", "polling", "it answered 503", 100.0, 1),
    )
    assert [troubles.failed(POLLING, "it answered 503", 100.0 + number) for number in range(1, 10)] == [None] * 9
    over = troubles.worked(POLLING, 130.0)
    assert over is not None
    assert (over.since, over.tries, over.at) == (100.0, 10, 130.0)
    assert troubles.worked(POLLING, 131.0) is None
    assert not troubles


def test_another_kind_of_failure_is_told_as_such() -> None:
    troubles = Troubles()
    troubles.failed(POLLING, "it answered 503", 100.0)
    changed = troubles.failed(POLLING, "it answered 401", 110.0)
    assert changed is not None
    assert (changed.reason, changed.since, changed.tries) == ("it answered 401", 100.0, 2)


def test_one_accounts_success_ends_nobody_elses_trouble() -> None:
    troubles = Troubles()
    troubles.failed(POLLING, "it answered 401", 100.0)
    assert troubles.worked(("anthropic", "another", "polling"), 101.0) is None
    assert troubles.failed(POLLING, "it answered 401", 102.0) is None


def test_what_was_long_ago_begins_anew() -> None:
    troubles = Troubles()
    troubles.failed(POLLING, "it answered 503", 100.0)
    began = troubles.failed(POLLING, "it answered 503", 101.0 + FORGOTTEN_S)
    assert began is not None
    assert (began.since, began.tries) == (101.0 + FORGOTTEN_S, 1)


def test_it_remembers_so_many_and_no_more() -> None:
    troubles = Troubles()
    for number in range(MOST + 5):
        troubles.failed(("anthropic", "account", f"looking at batch {number}"), "it answered 503", 100.0)
    assert len(troubles._known) == MOST
