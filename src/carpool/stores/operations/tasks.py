"""Tasks: what several processes know of one is merged into one row."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from carpool.core.tasks import TaskRecord
from carpool.stores.operations.session import Session, to_json

_decoder = msgspec.json.Decoder(TaskRecord)


def merge_tasks(session: Session, changes: Sequence[TaskRecord]) -> list[TaskRecord]:
    order = sorted(range(len(changes)), key=lambda number: (changes[number].credential, changes[number].name))
    merged = {number: _merge(session, changes[number]) for number in order}  # in the same order in every process
    return [merged[number] for number in range(len(changes))]


def _merge(session: Session, change: TaskRecord) -> TaskRecord:
    whose = session.credential(change.credential), change.name
    session.run("make_task", (*whose, change.last))
    row = session.row("task", whose)
    stored = _decoder.decode(row[0]) if row is not None and row[0] else None
    record = change if stored is None or stored.is_over(change.last) else added(stored, change)
    session.run("write_task", (record.last, to_json(record), *whose))
    return record


def added(stored: TaskRecord, change: TaskRecord) -> TaskRecord:
    """The stored task after a change."""
    newer = change.deadline_set > stored.deadline_set  # an explicit deadline, which replaces every earlier one
    deadlines = [one.deadline for one in (stored, change) if one.deadline is not None]
    if newer:
        deadlines = [change.deadline] if change.deadline is not None else []
    elif change.deadline_set < stored.deadline_set:
        deadlines = [stored.deadline] if stored.deadline is not None else []
    lanes = stored.spent.keys() | change.spent.keys()
    return replace(
        stored,
        began=min(stored.began, change.began),
        last=max(stored.last, change.last),
        deadline=min(deadlines, default=None),  # two processes may have seen its first budget
        deadline_set=max(stored.deadline_set, change.deadline_set),
        left=change.left if newer else stored.left or change.left,
        asked=stored.asked + change.asked,
        answered=stored.answered + change.answered,
        unknown=stored.unknown + change.unknown,
        spent={lane: stored.spent.get(lane, 0) + change.spent.get(lane, 0) for lane in sorted(lanes)},
    )


def tasks(session: Session, since: float, limit: int, credentials: Sequence[str] | None = None) -> list[TaskRecord]:
    query = {"since": since, "limit": limit, "credentials": session.credential_filter(credentials)}
    return [_decoder.decode(row[0]) for row in session.rows("latest_tasks", query)]


def prune_tasks(session: Session, before: float) -> int:
    return session.run("remove_tasks", (before,)).rowcount
