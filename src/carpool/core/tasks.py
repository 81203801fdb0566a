"""What is stored of a task, and when its name is free for a new one."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import field

from carpool.core.model import Lane, Value

TASK_OVER_S = 1_800.0


def task_is_over(deadline: float | None, last: float, now: float) -> bool:
    """Whether a task was idle for so long after its deadline that a call of its name begins a new one. `last`: when it
    was active last."""
    return deadline is not None and max(deadline, last) + TASK_OVER_S < now


class TaskRecord(Value, frozen=True, gc=False):
    """A task as it is stored. As a change, what was counted since the change before."""

    credential: str
    name: str
    agent: str  # the kind of client that began it
    began: float
    last: float  # when a call of it was asked or answered last
    deadline: float | None = None
    deadline_set: float = 0.0  # when a client set the deadline itself; 0: it follows from a budget
    left: bool = False  # it goes on `now` for good
    asked: int = 0
    answered: int = 0
    unknown: int = 0  # purchases whose price is not known
    spent: Mapping[Lane, int] = field(default_factory=dict)  # nano-dollars

    def is_over(self, now: float) -> bool:
        return task_is_over(self.deadline, self.last, now)
