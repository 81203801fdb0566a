"""The options of a task: read from headers, from the path, by rules and profiles; the strongest wins."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.errors import BadCall
from carpool.planners.access.options import MAX_TASK, Options, capped, from_headers, parse_task, split_path

NOW = 1_800_000_000.0


def header(name: str, value: str) -> Options:
    return from_headers(((f"x-carpool-{name}", value),))


def test_headers() -> None:
    assert header("task", " essay 17 ").task == "essay 17"
    assert header("task-budget", "3h").task_budget == 3 * 3600
    assert header("task-deadline", "2027-01-31T07:00:00+01:00").task_deadline == 1_801_375_200.0
    assert header("task-deadline", "2027-01-31T06:00:00Z").task_deadline == 1_801_375_200.0


@pytest.mark.parametrize("word", ["task_budget", "task-budget"])
def test_the_path(word: str) -> None:
    options, path = split_path(f"/@task=essay,{word}=3h/v1/messages")
    assert (options.task, options.task_budget, path) == ("essay", 10_800.0, "/v1/messages")


def test_a_tag_keeps_its_name() -> None:
    assert split_path("/@tags.my_team=a/v1/messages")[0].tags == {"my_team": "a"}


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("task", "", "A task's name has 1 to 200 characters, none of them a control character; this one has 0."),
        ("task", "x" * (MAX_TASK + 1), "this one has 201."),
        ("task-budget", "soon", "'soon' is not a budget: write a number and a unit"),
        ("task-budget", "31d", "is not a budget"),
        ("task-deadline", "tomorrow", "'tomorrow' is not a point in time: write date, time and time zone, as in"),
        ("task-deadline", "2027-01-31T07:00:00", "is not a point in time"),  # where?
        ("tasks", "a", "carpool knows no option 'tasks'. It knows budget, "),
    ],
)
def test_a_bad_value_is_refused_in_a_sentence(name: str, value: str, told: str) -> None:
    with pytest.raises(BadCall) as caught:
        header(name, value)
    assert told in str(caught.value)
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize("name", [17, "a\x00b", "a\nb"])
def test_the_library_refuses_such_names(name: object) -> None:
    with pytest.raises(BadCall, match="A task's name has 1 to 200 characters"):
        parse_task(name)  # type: ignore[arg-type]


def test_the_stronger_options_win() -> None:
    weaker = Options(task="weak", task_budget=60.0)
    assert Options().over(weaker) == weaker
    assert Options(task="strong").over(weaker) == Options(task="strong", task_budget=60.0)
    assert Options(task_budget=5.0).over(weaker).task_budget == 5.0
    both = Options(task_deadline=NOW).over(weaker)
    assert (both.task_deadline, both.task_budget) == (NOW, None)


def test_a_limit_is_for_the_turn_and_not_for_the_task() -> None:
    found = capped(Options(task_budget=3600.0), 60.0, "The rule all", NOW)
    assert (found.task_budget, found.longest, found.budget) == (3600.0, 60.0, None)
    assert capped(Options(task="essay"), 60.0, "The rule all", NOW).longest == 60.0
    assert capped(Options(), 60.0, "The rule all", NOW) == Options()


@given(st.text(max_size=300))
def test_whatever_the_name_it_is_taken_or_refused(name: str) -> None:
    with suppress(BadCall):
        assert 0 < len(parse_task(name)) <= MAX_TASK
