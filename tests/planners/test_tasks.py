"""Tasks: one deadline for all turns, slack that is shared, and no way back from `now`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from carpool.core.model import Call, CallShape, Entry, EntryKind, Lane, TaskTerms
from carpool.core.tasks import TASK_OVER_S
from carpool.planners.agents import FEWEST_USUAL, usual_turns_left
from carpool.planners.forecast import Forecast
from carpool.planners.tasks import (
    MARGIN_S,
    MAX_TASKS,
    USUAL_TURN_S,
    Task,
    TaskBook,
    turn_deadline,
)

NOW = 1_800_000_000.0
HOUR = 3600.0
FORECAST = Forecast()
RESCUE_S = FORECAST.sync_seconds("anthropic", "", 0) + FORECAST.cancel_seconds("anthropic")

seconds = st.floats(0, 1e6)
turns = st.floats(0, 1e4)


def call(
    ticket: int = 1, *, at: float = NOW, task: str = "essay", terms: TaskTerms | None = None, **more: object
) -> Call:
    wire = ("anthropic", "anthropic", "/v1/messages", b"{}", (), "cred", "claude-haiku-4-5")
    return Call(ticket, *wire, at, task=task, task_terms=terms, agent="claude-code", **more)  # type: ignore[arg-type]


def budgeted(ticket: int = 1, budget: float = HOUR, **more: object) -> Call:
    return call(ticket, terms=TaskTerms(budget=budget), **more)  # type: ignore[arg-type]


def bound(book: TaskBook, asked: Call, now: float | None = None) -> Call:
    return book.bound(asked, asked.arrived if now is None else now, FORECAST)


def entry(ticket: int, lane: Lane, paid: int | None, purchase: int = -1) -> Entry:
    return Entry(ticket, purchase, NOW, lane, EntryKind.PURCHASE, "anthropic", "cred", "claude-haiku-4-5", paid=paid)


def the_task(book: TaskBook) -> Task:
    [task] = book._tasks.values()
    return task


# ---------------------------------------------------------------- the deadline of a turn


@given(left=st.floats(-1e6, 1e6), after=turns, each=seconds, margin=seconds)
def test_a_turn_is_never_due_after_its_task_nor_without_need_before_now(
    left: float, after: float, each: float, margin: float
) -> None:
    until = turn_deadline(NOW + left, NOW, after, each, margin)
    assert until <= NOW + left
    assert until >= min(NOW, NOW + left)


@given(left=seconds, more=seconds, after=turns, each=seconds, margin=seconds)
def test_more_slack_never_makes_a_turn_due_earlier(
    left: float, more: float, after: float, each: float, margin: float
) -> None:
    usual = turn_deadline(NOW + left, NOW, after, each, margin)
    assert turn_deadline(NOW + left + more, NOW, after, each, margin) >= usual
    assert turn_deadline(NOW + left, NOW, after + more, each, margin) <= usual
    assert turn_deadline(NOW + left, NOW, after, each + more, margin) <= usual
    assert turn_deadline(NOW + left, NOW, after, each, margin + more) <= usual


@given(left=seconds, after=turns, each=seconds, margin=seconds)
def test_the_turns_after_it_fit_on_now(left: float, after: float, each: float, margin: float) -> None:
    until = turn_deadline(NOW + left, NOW, after, each, margin)
    assert until == NOW or until + after * each + margin <= NOW + left + 1e-3


@given(turn=st.integers(1, 10_000))
def test_the_longer_a_task_runs_the_longer_it_will_go_on(turn: int) -> None:
    assert usual_turns_left("", turn) <= usual_turns_left("", turn + 1)


# ---------------------------------------------------------------- the deadline of a task


def test_without_terms_nothing_changes() -> None:
    book = TaskBook()
    asked = call()
    assert bound(book, asked) is asked


def test_the_first_budget_sets_the_deadline_and_later_calls_share_it() -> None:
    book = TaskBook()
    first = bound(book, budgeted(1))
    later = bound(book, budgeted(2, 9 * HOUR, at=NOW + 600))
    named = bound(book, call(3, at=NOW + 700, terms=TaskTerms()))
    assert {first.task_deadline, later.task_deadline, named.task_deadline} == {NOW + HOUR}
    assert first.deadline == later.deadline == NOW + HOUR - FEWEST_USUAL * USUAL_TURN_S - MARGIN_S


def test_only_a_deadline_moves_the_deadline() -> None:
    book = TaskBook()
    bound(book, budgeted(1))
    moved = bound(book, call(2, at=NOW + 5, terms=TaskTerms(deadline=NOW + 5 * HOUR)))
    assert moved.task_deadline == NOW + 5 * HOUR
    assert bound(book, budgeted(3, at=NOW + 6)).task_deadline == NOW + 5 * HOUR


def test_a_task_that_is_only_named_binds_nobody() -> None:
    asked = call(terms=TaskTerms())
    assert bound(TaskBook(), asked) == asked


def test_the_earlier_deadline_counts() -> None:
    book = TaskBook()
    assert bound(book, budgeted(1, deadline=NOW + 60)).deadline == NOW + 60
    limited = replace(budgeted(2), task_terms=TaskTerms(budget=HOUR, longest=300.0))
    assert bound(book, limited).deadline == NOW + 300


def test_a_call_on_now_gets_no_deadline() -> None:
    """With one it would be retried and held, as nobody asked for it."""
    found = bound(TaskBook(), budgeted(lane=Lane.NOW))
    assert (found.deadline, found.lane, found.task_deadline) == (None, Lane.NOW, NOW + HOUR)


def test_a_call_without_a_name_has_its_task_for_itself() -> None:
    book = TaskBook()
    assert bound(book, budgeted(1, task="")).deadline == NOW + HOUR
    assert bound(book, budgeted(2, task="", at=NOW + 50)).deadline == NOW + 50 + HOUR


def test_equal_names_of_two_credentials_are_two_tasks() -> None:
    book = TaskBook()
    bound(book, budgeted(1))
    stranger = replace(budgeted(2, at=NOW + 600), credential="other")
    assert bound(book, stranger).task_deadline == NOW + 600 + HOUR


def test_a_name_begins_anew_when_its_task_is_over() -> None:
    book = TaskBook()
    bound(book, budgeted(1))
    before, after = NOW + HOUR + TASK_OVER_S - 1, NOW + HOUR + TASK_OVER_S + 1
    assert bound(book, budgeted(2, at=before)).task_deadline == NOW + HOUR
    assert bound(book, budgeted(3, at=after)).task_deadline == after + HOUR


def test_the_record_has_the_deadline_too() -> None:
    shape = CallShape(1, NOW, "claude-code", False, False, None, 100, 2)
    found = bound(TaskBook(), budgeted(shape=shape))
    assert found.shape is not None
    assert found.shape.deadline == found.deadline


# ---------------------------------------------------------------- for good


def test_a_task_without_slack_goes_on_now_for_good() -> None:
    """Even if it seems later as if there were time."""
    expected = [FEWEST_USUAL]
    book = TaskBook(turns_left=lambda agent, turn: expected[0])
    assert bound(book, budgeted(1)).lane is None
    tight = bound(book, budgeted(2, at=NOW + HOUR - 230 + 1))
    assert (tight.lane, tight.insists, tight.deadline) == (Lane.NOW, False, None)
    assert tight.note == "The task essay needs the 3.82 min that are left on now."
    expected[0] = 0.0
    assert bound(book, budgeted(3, at=NOW + HOUR - 220)).lane is Lane.NOW


def test_a_new_deadline_brings_it_back() -> None:
    book = TaskBook()
    bound(book, budgeted(1, 100.0))
    found = bound(book, call(2, at=NOW + 5, terms=TaskTerms(deadline=NOW + 5 * HOUR)))
    assert found.lane is None
    assert found.deadline is not None


def test_a_task_that_is_late_is_still_answered() -> None:
    book = TaskBook()
    bound(book, budgeted(1))
    late = bound(book, budgeted(2, at=NOW + HOUR + 600))
    assert (late.lane, late.deadline) == (Lane.NOW, None)
    assert late.note == "The task essay is 10 min past its deadline, so it goes at once."


def test_who_insists_on_a_batch_gets_one_and_time_for_the_rescue() -> None:
    found = bound(TaskBook(), budgeted(1, 100.0, lane=Lane.BATCH))
    assert (found.lane, found.deadline) == (
        Lane.BATCH,
        NOW + FORECAST.sync_seconds("anthropic", "", 0) + FORECAST.cancel_seconds("anthropic"),
    )


def test_the_lane_of_a_rule_gives_way() -> None:
    found = bound(TaskBook(), budgeted(1, 100.0, lane=Lane.BATCH, insists=False, note="A rule says so."))
    assert found.lane is Lane.NOW
    assert found.note == "A rule says so. The task essay needs the 100 s that are left on now."


@given(budget=st.floats(1, 1e5), at=st.lists(st.floats(0, 5e4), max_size=20))
def test_whatever_comes_no_turn_is_due_after_its_task(budget: float, at: list[float]) -> None:
    book, left = TaskBook(), False
    for number, then in enumerate(sorted(at)):
        asked = budgeted(number + 1, budget, at=NOW + then)
        found = bound(book, asked)
        book.asked(asked, asked.arrived)
        assert found.task_deadline is not None
        assert (found.deadline is None) is (found.lane is Lane.NOW)
        assert found.deadline is None or asked.arrived < found.deadline <= found.task_deadline
        new = found.task_deadline == asked.arrived + budget
        assert found.lane is Lane.NOW or not left or new
        left = found.lane is Lane.NOW


# ---------------------------------------------------------------- what happens


def test_calls_and_money_are_counted() -> None:
    book = TaskBook()
    for ticket in (1, 2):
        book.asked(call(ticket), NOW)
    book.bought(entry(1, Lane.BATCH, None, 12))
    book.bought(entry(1, Lane.BATCH, 7, 12))
    book.bought(entry(1, Lane.BATCH, 7, 12))  # told twice
    book.ended(1, NOW + 5)
    book.ended(1, NOW + 6)  # a second result changes nothing
    book.bought(entry(1, Lane.NOW, 5))  # a rescue was bought, too
    book.bought(entry(2, Lane.NOW, None))
    book.bought(entry(2, Lane.NOW, None))
    book.bought(entry(9, Lane.NOW, 100))  # somebody else's
    task = the_task(book)
    assert (task.asked, task.answered, task.open, task.unknown) == (2, 1, {2}, 1)
    assert task.spent == {Lane.BATCH: 7, Lane.NOW: 5}
    assert (task.began, task.last) == (NOW, NOW + 5)


def test_a_call_that_comes_back_is_no_new_turn() -> None:
    book = TaskBook()
    book.asked(call(1), NOW)
    book.asked(call(1), NOW + 1, again=True)
    assert the_task(book).asked == 1
    book.ended(1, NOW + 2, answered=False)
    assert (the_task(book).answered, the_task(book).open) == (0, set())


def test_without_a_name_nothing_is_counted() -> None:
    book = TaskBook()
    book.asked(call(1, task=""), NOW)
    book.bought(entry(1, Lane.NOW, 5))
    book.ended(1, NOW)
    assert not book._tasks


def test_the_pace_that_is_given_counts() -> None:
    book = TaskBook(turn_seconds=lambda _agent: 100.0)
    needed = FEWEST_USUAL * 100.0
    later = bound(book, budgeted(1, 100 * HOUR))
    assert later.deadline == pytest.approx(NOW + 100 * HOUR - needed - max(MARGIN_S, needed / 4))


def test_the_book_is_bounded_and_drops_the_one_that_was_idle_longest() -> None:
    book = TaskBook()
    bound(book, budgeted(1, task="first"))
    for number in range(MAX_TASKS):
        if number == 10:
            book.asked(call(5, task="first"), NOW)
        book.asked(call(number, task=f"task {number}"), NOW)
    assert len(book._tasks) == MAX_TASKS
    assert ("cred", "first") in book._tasks
    assert ("cred", "task 0") not in book._tasks


# ---------------------------------------------------------------- what others know


def test_a_change_is_what_happened_since_the_one_before() -> None:
    book = TaskBook()
    book.asked(call(1), NOW)
    task = the_task(book)
    book.merged(task, book.change(task))
    assert not book.changed
    book.asked(call(2), NOW + 1)
    book.bought(entry(2, Lane.NOW, 5))
    change = book.change(task)
    assert (change.asked, change.spent) == (1, {Lane.NOW: 5})


def test_what_happens_while_it_is_written_is_in_the_next_change() -> None:
    book = TaskBook()
    book.asked(call(1), NOW)
    task = the_task(book)
    stored = book.change(task)
    book.asked(call(2), NOW + 1)
    book.merged(task, replace(stored, asked=11, answered=10))  # somebody else's, too
    assert (task.asked, task.answered) == (12, 10)
    assert (book.change(task).asked, book.change(task).answered) == (1, 0)


def test_the_deadline_of_the_store_counts_unless_it_was_just_replaced() -> None:
    book = TaskBook()
    bound(book, budgeted(1))
    task = the_task(book)
    stored = replace(book.change(task), deadline=NOW + 500)
    book.merged(task, stored)
    assert task.deadline == NOW + 500
    book.change(task)
    bound(book, call(2, at=NOW + 5, terms=TaskTerms(deadline=NOW + 5 * HOUR)))
    book.merged(task, stored)
    assert task.deadline == NOW + 5 * HOUR
    assert book.change(task).deadline_set == NOW + 5


def test_a_task_without_a_name_is_not_written() -> None:
    book = TaskBook()
    bound(book, budgeted(task=""))
    assert not book.changed


def test_the_store_is_asked_once_and_again_when_the_task_is_over() -> None:
    book = TaskBook()
    assert book.knows(call(), NOW)
    assert not book.knows(budgeted(), NOW)
    assert book.knows(budgeted(task=""), NOW)
    task = book.opened(budgeted(), NOW)
    book.merged(task, replace(book.change(task), deadline=NOW + 60))
    assert book.knows(budgeted(), NOW)
    assert not book.knows(budgeted(), NOW + 60 + TASK_OVER_S + 1)


def test_conversations_without_a_deadline_are_not_written() -> None:
    book = TaskBook()
    book.asked(call(task="conversation 1a"), NOW)
    assert not book.changed
    bound(book, budgeted(task="conversation 1a"))
    assert list(book.changed) == [("cred", "conversation 1a")]
