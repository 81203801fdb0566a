"""What every store promises about tasks: changes of several processes add up, and all of them see one deadline."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from carpool.core.model import Lane
from carpool.core.ports import Store
from carpool.core.tasks import TASK_OVER_S, TaskRecord
from tests.support.stores import CRED, STRANGER, T0

HOUR = 3600.0


def task(name: str = "essay", *, credential: str = CRED, at: float = T0, **more: Any) -> TaskRecord:
    return TaskRecord(credential, name, "claude-code", at, at, **more)


async def listed(store: Store, since: float = 0.0, limit: int = 100, **more: Any) -> list[str]:
    return [found.name for found in await store.tasks(since, limit, **more)]


async def merge(store: Store, *changes: TaskRecord) -> TaskRecord:
    return (await store.merge_tasks(changes))[-1]


async def test_a_first_change_is_the_task(store: Store) -> None:
    first = task(deadline=T0 + HOUR, asked=1, spent={Lane.BATCH: 2**40})
    assert await store.merge_tasks([first]) == [first]
    assert await store.tasks(0.0, 100) == [first]
    assert await store.merge_tasks([]) == []


async def test_counts_and_costs_add_up(store: Store) -> None:
    await merge(store, task(asked=2, spent={Lane.BATCH: 7}))
    found = await merge(
        store, task(at=T0 + 5, asked=1, answered=2, unknown=1, left=True, spent={Lane.BATCH: 1, Lane.NOW: 3})
    )
    assert (found.asked, found.answered, found.unknown, found.left) == (3, 2, 1, True)
    assert found.spent == {Lane.BATCH: 8, Lane.NOW: 3}
    assert (found.began, found.last) == (T0, T0 + 5)
    assert (await merge(store, task(at=T0 + 1))).last == T0 + 5


@pytest.mark.parametrize(
    ("first", "second", "deadline"),
    [
        ((None, 0.0), (T0 + HOUR, 0.0), T0 + HOUR),
        ((T0 + HOUR, 0.0), (None, 0.0), T0 + HOUR),
        ((T0 + HOUR, 0.0), (T0 + 2 * HOUR, 0.0), T0 + HOUR),
        ((T0 + 2 * HOUR, 0.0), (T0 + HOUR, 0.0), T0 + HOUR),
        ((T0 + HOUR, 0.0), (T0 + 2 * HOUR, T0 + 1), T0 + 2 * HOUR),
        ((T0 + 2 * HOUR, T0 + 1), (T0 + HOUR, 0.0), T0 + 2 * HOUR),
        ((T0 + HOUR, T0 + 2), (T0 + 2 * HOUR, T0 + 1), T0 + HOUR),
    ],
)
async def test_which_deadline_counts(
    store: Store, first: tuple[float | None, float], second: tuple[float | None, float], deadline: float
) -> None:
    await merge(store, task(deadline=first[0], deadline_set=first[1]))
    found = await merge(store, task(deadline=second[0], deadline_set=second[1]))
    assert (found.deadline, found.deadline_set) == (deadline, max(first[1], second[1]))


async def test_only_a_new_deadline_brings_a_task_back(store: Store) -> None:
    await merge(store, task(deadline=T0 + HOUR, left=True))
    assert (await merge(store, task())).left
    assert not (await merge(store, task(deadline=T0 + 9 * HOUR, deadline_set=T0 + 1))).left


async def test_a_task_that_is_over_begins_anew(store: Store) -> None:
    await merge(store, task(deadline=T0 + HOUR, asked=9, left=True))
    before, after = T0 + HOUR + TASK_OVER_S, T0 + 2 * HOUR + 2 * TASK_OVER_S
    assert (await merge(store, task(at=before, asked=1))).asked == 10
    new = task(at=after, deadline=after + HOUR, asked=1)
    assert await merge(store, new) == new


async def test_each_credential_has_its_own(store: Store) -> None:
    mine, other = task(asked=1), task(asked=5, credential=STRANGER)
    assert await store.merge_tasks([mine, other]) == [mine, other]
    assert await store.tasks(0.0, 10, [CRED]) == [mine]
    assert await store.tasks(0.0, 10, [STRANGER, "nobody"]) == [other]
    assert await store.tasks(0.0, 10, []) == []


async def test_the_latest_come_first(store: Store) -> None:
    await store.merge_tasks([task("b", at=T0 + 2), task("c", at=T0 + 3), task("a", at=T0 + 1)])
    assert await listed(store) == ["c", "b", "a"]
    assert await listed(store, limit=2) == ["c", "b"]
    assert await listed(store, since=T0 + 2) == ["c", "b"]


async def test_names_are_kept_as_they_are(store: Store) -> None:
    names = ["it's", "ünï", "a\\b%", "x" * 200, '"']
    found = await store.merge_tasks([task(name) for name in names])
    assert [one.name for one in found] == names
    assert sorted(await listed(store)) == sorted(names)


async def test_old_tasks_are_removed(store: Store) -> None:
    await store.merge_tasks([task("old"), task("new", at=T0 + 10)])
    assert await store.prune_tasks(T0 + 5) == 1
    assert await listed(store) == ["new"]


async def test_changes_at_once_all_count(store: Store) -> None:
    names = [f"task {number % 7}" for number in range(70)]
    groups = [names[start::5] for start in range(5)]
    await asyncio.gather(*(store.merge_tasks([task(name, asked=1) for name in group]) for group in groups))
    assert {found.name: found.asked for found in await store.tasks(0.0, 100)} == dict.fromkeys(names, 10)


async def test_a_change_may_name_a_task_twice(store: Store) -> None:
    found = await store.merge_tasks([task(asked=1), task("other"), task(asked=1)])
    assert found[2].asked == 2
