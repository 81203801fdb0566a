"""Tasks: what a user wants done by a time, and what that means for each of its turns. Pure: the caller passes the time.

A task is named by its client (`x-carpool-task`), else by the tag `run`, by the session id of Claude Code or Codex, or
by its conversation; equal names of two credentials are two tasks. Its deadline is set by the first call that brings a
task budget. Later calls share it, whatever budget they bring; only an explicit new deadline replaces it.

**Slack.** The time of a task belongs to all its turns. A turn may take until the turns that are expected after it would
no longer fit on `now`: `turn_deadline`. The call's deadline is the earlier of that and its own budget. So the first
late batch may use up all slack, but never the time that the rest of the task needs on `now`.

**For good.** When there is no slack for a batch and its rescue any more, the task leaves the cheap lanes: all its later
turns go at once, as if nothing had been asked. Each change of lanes writes the whole context into another cache, so
there is no way back, unless a client sets a new deadline. A task that is late is not given up: its turns go on `now`.

A task that was idle for a while after its deadline is over: the next call of its name begins a new one.

**Elsewhere.** Other processes have calls of the same task, and a restart forgets what is in memory. So what happened
is added to the store (`change`), and what the store then has of the task is taken over (`merged`). The first call that
a task binds waits for that (`knows`); later ones do not.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from carpool.core.bounded import BoundedMap
from carpool.core.model import Call, Entry, Lane
from carpool.core.tasks import TASK_OVER_S, TaskRecord, task_is_over
from carpool.planners.agents import usual_turns_left
from carpool.planners.forecast import Forecast
from carpool.planners.policy import span
from carpool.planners.routing import sync_seconds

MAX_TASKS: Final = 20_000  # known at once; of those that nothing happened to for longest, nothing is known any more
MAX_TICKETS: Final = 50_000  # calls whose purchases can still be added to their task
CONVERSATION: Final = "conversation "  # with which the name of a task begins that has no other name
MARGIN_S: Final = 60.0  # the least time kept free at the end of a task
MARGIN_SHARE: Final = 0.25  # of the time that the coming turns need; forecasts err by more than a constant
USUAL_TURN_S: Final = 20.0

TurnsLeft = Callable[[str, int], float]  # kind of agent, number of the present turn → turns expected after it
TurnSeconds = Callable[[str], float]  # kind of agent → seconds from one answer on `now` to the next


def turn_deadline(deadline: float, now: float, turns_left: float, seconds_per_turn: float, margin: float) -> float:
    """The latest time for the answer to this turn at which the turns after it still fit on `now` before the task's
    deadline; `now` if it has passed already, but never after that deadline."""
    return min(deadline, max(now, deadline - turns_left * seconds_per_turn - margin))


class Task(Struct):
    """A task, and what happened to it so far."""

    credential: str
    name: str
    agent: str  # the kind of client that began it
    began: float
    last: float  # when a call of it was asked or answered last
    deadline: float | None = None
    deadline_set: float = 0.0  # when a client set it itself
    left: bool = False  # it needs the rest of its time on `now`, so its turns don't wait any more
    asked: int = 0
    answered: int = 0
    unknown: int = 0  # purchases whose price is not known
    spent: dict[Lane, int] = field(default_factory=dict)  # nano-dollars
    open: set[int] = field(default_factory=set)  # tickets of calls under way
    stored: TaskRecord | None = None  # what the store had when it was written last
    sent: TaskRecord | None = None  # what this process had when it wrote

    def is_over(self, now: float) -> bool:
        return task_is_over(self.deadline, self.last, now)

    def record(self) -> TaskRecord:
        said = self.credential, self.name, self.agent, self.began, self.last, self.deadline, self.deadline_set
        return TaskRecord(*said, self.left, self.asked, self.answered, self.unknown, dict(self.spent))


class TaskBook:
    """The tasks that are under way. `turns_left` and `turn_seconds` are the forecasts."""

    def __init__(
        self, turns_left: TurnsLeft = usual_turns_left, turn_seconds: TurnSeconds = lambda _agent: USUAL_TURN_S
    ) -> None:
        self._turns_left = turns_left
        self._turn_seconds = turn_seconds
        self._tasks: BoundedMap[tuple[str, str], Task] = BoundedMap(MAX_TASKS)
        self.tickets: BoundedMap[int, Task] = BoundedMap(MAX_TICKETS)
        self._purchases: BoundedMap[tuple[int, int], bool] = BoundedMap(MAX_TICKETS)  # whether the price is known
        self.changed: dict[tuple[str, str], Task] = {}  # to be written

    # ------------------------------------------------------------ deadlines

    def bound(self, call: Call, now: float, forecast: Forecast) -> Call:
        """The call with the deadline that its task leaves it, or with the lane `now` if the task has no slack."""
        terms = call.task_terms
        if terms is None:
            return call
        task = self.opened(call, now)
        if task.deadline is None or call.lane is Lane.NOW:
            return replace(call, task_deadline=task.deadline)
        until = self._turn_deadline(task, task.deadline, now) if call.task else task.deadline
        soonest = now + sync_seconds(call, forecast) + forecast.cancel_seconds(call.provider)
        if not task.left and until <= soonest:
            task.left = True
            self._changed(task)
        if not task.left or (call.lane is not None and call.insists):
            return _with_deadline(call, task.deadline, max(until, soonest))
        call = replace(call, lane=Lane.NOW, insists=False, task_deadline=task.deadline)
        return replace(call, note=f"{call.note} {_why_now(task, task.deadline, now)}".lstrip())

    def opened(self, call: Call, now: float) -> Task:
        """The task that binds a call, with what the call asks for it."""
        task, terms = self._task(call, now), call.task_terms
        if terms is not None and terms.deadline is not None and terms.deadline != task.deadline:
            task.deadline, task.deadline_set, task.left = terms.deadline, now, False
            self._changed(task)
        elif terms is not None and terms.budget is not None and task.deadline is None:
            task.deadline = call.arrived + terms.budget
            self._changed(task)
        return task

    def _turn_deadline(self, task: Task, deadline: float, now: float) -> float:
        turns, seconds = self._turns_left(task.agent, task.asked + 1), self._turn_seconds(task.agent)
        return turn_deadline(deadline, now, turns, seconds, max(MARGIN_S, MARGIN_SHARE * turns * seconds))

    def _task(self, call: Call, now: float) -> Task:
        """The task of a call. One without a name has no other calls, and is not kept."""
        task = self._tasks.get((call.credential, call.task))
        if task is None or task.is_over(now):
            task = Task(call.credential, call.task, call.agent, call.arrived, now)
            if call.task:
                self._tasks[call.credential, call.task] = task
        return task

    # ------------------------------------------------------------ what happens to the calls

    def asked(self, call: Call, now: float, *, again: bool = False) -> None:
        """A call is sent or admitted; `again` if it is one that was asked before."""
        if not call.task:
            return
        task = self._task(call, now)
        task.asked += not again
        task.last = now
        task.open.add(call.ticket)
        self._tasks[task.credential, task.name] = task  # nothing happened to the others for longer
        self._changed(task)
        self.tickets[call.ticket] = task

    def bought(self, entry: Entry) -> None:
        """Something was bought for a call, or the price of that is known now. Each purchase counts once."""
        task, identity = self.tickets.get(entry.ticket), (entry.ticket, entry.purchase)
        known = self._purchases.get(identity)
        if task is None or known:
            return
        self._purchases[identity] = entry.paid is not None
        task.unknown += (entry.paid is None) - (known is False)
        if entry.paid:
            task.spent[entry.lane] = task.spent.get(entry.lane, 0) + entry.paid
        self._changed(task)

    def ended(self, ticket: int, now: float, *, answered: bool = True) -> None:
        """A call has its answer, or will not get one."""
        task = self.tickets.get(ticket)
        if task is None or ticket not in task.open:
            return
        task.open.discard(ticket)
        if answered:
            task.answered += 1
            task.last = now
            self._changed(task)

    # ------------------------------------------------------------ what others know

    def knows(self, call: Call, now: float) -> bool:
        """Whether the store need not be asked for the task that binds a call."""
        if call.task_terms is None or not call.task:
            return True
        task = self._tasks.get((call.credential, call.task))
        return task is not None and task.stored is not None and not task.is_over(now)

    def _changed(self, task: Task) -> None:
        if task.name and (task.deadline is not None or not task.name.startswith(CONVERSATION)):  # others are too many
            self.changed[task.credential, task.name] = task

    def change(self, task: Task) -> TaskRecord:
        """What happened since the last change."""
        self.changed.pop((task.credential, task.name), None)
        task.sent = record = task.record()
        return record if task.stored is None else _difference(record, task.stored)

    def merged(self, task: Task, stored: TaskRecord) -> None:
        """The store has the last change, and that of others."""
        assert task.sent is not None
        since = _difference(task.record(), task.sent)
        if task.deadline == task.sent.deadline:
            task.deadline, task.deadline_set, task.left = stored.deadline, stored.deadline_set, stored.left or task.left
        task.agent, task.began = stored.agent, min(stored.began, task.began)
        task.asked, task.answered = stored.asked + since.asked, stored.answered + since.answered
        task.unknown = stored.unknown + since.unknown
        lanes = stored.spent.keys() | since.spent.keys()
        task.spent = {lane: stored.spent.get(lane, 0) + since.spent.get(lane, 0) for lane in lanes}
        task.stored = stored


def _difference(later: TaskRecord, earlier: TaskRecord) -> TaskRecord:
    return replace(
        later,
        asked=later.asked - earlier.asked,
        answered=later.answered - earlier.answered,
        unknown=later.unknown - earlier.unknown,
        spent={lane: spent - earlier.spent.get(lane, 0) for lane, spent in later.spent.items()},
    )


def _with_deadline(call: Call, of_task: float, until: float) -> Call:
    """The call with the earliest of its deadlines."""
    if call.deadline is not None:
        until = min(until, call.deadline)
    if call.task_terms is not None and call.task_terms.longest is not None:
        until = min(until, call.arrived + call.task_terms.longest)
    shape = None if call.shape is None else replace(call.shape, deadline=until)
    return replace(call, deadline=until, task_deadline=of_task, shape=shape)


def _why_now(task: Task, deadline: float, now: float) -> str:
    name = f"The task {task.name}" if task.name else "Its task"
    if deadline <= now:
        return f"{name} is {span(now - deadline)} past its deadline, so it goes at once."
    return f"{name} needs the {span(deadline - now)} that are left on now."


# ------------------------------------------------------------ what is shown of a task


class TaskState(StrEnum):
    OPEN = "no deadline"
    SLACK = "has slack"
    NOW = "on now"
    LATE = "late"
    OVER = "over"


class TaskSummary(Struct, frozen=True):
    """A task as it is shown. `slack` and `ends` are forecasts; None if there is nothing to expect."""

    record: TaskRecord
    state: TaskState
    slack: float | None  # seconds that can be lost before the rest of the task is needed on `now`
    turns_left: float
    ends: float | None  # when it may be done


def summarised(
    record: TaskRecord, now: float, turns_left: TurnsLeft = usual_turns_left, turn_seconds: float = USUAL_TURN_S
) -> TaskSummary:
    turns = turns_left(record.agent, record.asked)
    state, slack = TaskState.OPEN, None
    if record.deadline is not None:
        slack = record.deadline - now - turns * turn_seconds - max(MARGIN_S, MARGIN_SHARE * turns * turn_seconds)
        state = TaskState.NOW if record.left else TaskState.SLACK
        state = TaskState.LATE if record.deadline < now else state
    if record.is_over(now) or (record.deadline is None and record.last + TASK_OVER_S < now):
        return TaskSummary(record, TaskState.OVER, None, turns, None)
    pace = turn_seconds
    if record.answered > 1 and not record.left:  # as it went so far, its batches included
        pace = max(pace, (record.last - record.began) / record.answered)
    return TaskSummary(record, state, slack, turns, now + turns * pace)


def summary_row(summary: TaskSummary) -> dict[str, object]:
    """A summary for JSON. Times are in epoch seconds, costs in nano-dollars by lane."""
    task = summary.record
    return {
        "task": task.name,
        "client": task.agent,
        "credential": task.credential[:8],
        "state": summary.state.value,
        "began": task.began,
        "last": task.last,
        "deadline": task.deadline,
        "on_now_for_good": task.left,
        "turns": {"asked": task.asked, "answered": task.answered, "expected": summary.turns_left},
        "slack_s": summary.slack,
        "expected_end": summary.ends,
        "spent_nano_usd": dict(task.spent),
        "unknown_purchases": task.unknown,
    }
