"""The clients of a simulated world: they call, time out, lose their connection, and retry."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from carpool.core.errors import CarpoolError
from carpool.core.model import Call, OutcomeKind, ticket_text
from carpool.dialects.headers import retry_after
from carpool.engine import Reply
from carpool.planners.access.options import Options
from carpool.sim.event_log import SimLog
from carpool.sim.hang_ups import AT_ONCE_S, HangUp
from carpool.sim.plan import AgentPlan, TurnPlan
from carpool.sim.process import ConnectionCut, Process
from carpool.sim.requests import Body, body_of, request

MAX_TRIES = 40
FAST_TRIES = 20  # then it retries slowly: a provider may refuse every call for a while
SLOW_S = 5.0
STAYS = HangUp()  # stays until the response is complete

Find = Callable[[], Awaitable[Process]]


@dataclass(slots=True)
class SimTurn:
    """One logical call and everything that its client observed."""

    agent: AgentPlan
    plan: TurnPlan
    body: Body
    asked_at: float = 0.0
    answered_at: float = 0.0
    reply: Reply | None = None
    calls: list[Call] = field(default_factory=list)  # every attempt, each with its own ticket
    errors: list[str] = field(default_factory=list)
    interrupted: bool = False  # its client disconnected, or its process died
    left: HangUp | None = None  # how its client ended the last attempt

    @property
    def client_gave_up(self) -> bool:
        """Whether its client never comes back."""
        return self.left is not None and not self.left.back


class Agent:
    def __init__(self, plan: AgentPlan, find: Find, now: Callable[[], float], log: SimLog) -> None:
        self._plan = plan
        self._find = find
        self._now = now
        self._log = log
        self._process: Process | None = None  # the process of its last request
        self.turns = [SimTurn(plan, turn, body_of(turn)) for turn in plan.turns]

    async def run(self) -> None:
        await asyncio.sleep(self._plan.starts)
        for turn in self.turns:
            await asyncio.sleep(turn.plan.pause)
            turn.asked_at = self._now()
            await self._until_answered(turn)
            turn.answered_at = self._now()

    async def _until_answered(self, turn: SimTurn) -> None:
        for number in range(MAX_TRIES):
            reply = await self._try(turn)
            if reply is not None and (turn.plan.keyed or not _worth_another_try(reply)):
                turn.reply = reply
                self._log.add(self._plan.name, f"has the answer of {ticket_text(reply.ticket)}: {_summary(reply)}")
                return
            if turn.client_gave_up:
                self._log.add(self._plan.name, "does not come back")
                return
            wanted = 0.0 if reply is None else self._refused(reply)
            away = turn.plan.away if turn.left is None or turn.left.away is None else turn.left.away
            await asyncio.sleep(max(away if number < FAST_TRIES else max(away, SLOW_S), wanted))

    def _refused(self, reply: Reply) -> float:
        """Log the refusal. Returns how long to wait: SDKs follow `retry-after`."""
        wanted = retry_after(reply.outcome.headers) or 0.0
        self._log.add(self._plan.name, f"is refused: {_summary(reply)}, try again in {wanted:g} s")
        return wanted

    async def _try(self, turn: SimTurn) -> Reply | None:
        process = self._process = await self._choose_process(turn.left)
        retries = len(turn.calls) if turn.left is not None and turn.left.marked else 0
        raw = request(self._plan, turn.plan, turn.body, retries)
        call = process.call(self._plan.provider, raw, self._options(turn))
        hang_ups, turn.left = turn.plan.hang_ups[len(turn.calls) :], None
        hang_up = hang_ups[0] if hang_ups else STAYS
        turn.calls.append(call)
        asks = f"for {self._plan.provider}'s {turn.plan.model} {turn.plan.endpoint}, {_terms(turn.plan)}"
        self._log.add(self._plan.name, f"submits {ticket_text(call.ticket)} to {process.name}, {asks}")
        try:
            async with asyncio.timeout(hang_up.after):
                reply = await process.submit(call, hang_up.cut)
        except (TimeoutError, ConnectionCut) as error:
            turn.interrupted, turn.left = True, hang_up
            how = "in the middle of its answer" if isinstance(error, ConnectionCut) else "while it waits"
            self._log.add(self._plan.name, f"hangs up on {ticket_text(call.ticket)} {how}")
            return None
        except CarpoolError as error:
            turn.errors.append(f"{type(error).__name__}: {error}")
            self._log.add(self._plan.name, f"is told: {turn.errors[-1]}")
            return None
        if reply is None:
            turn.interrupted = True
            self._log.add(self._plan.name, f"loses its connection with {ticket_text(call.ticket)}")
        return reply

    async def _choose_process(self, left: HangUp | None) -> Process:
        """The process of the next request. Another process learns of the disconnect only a moment later, and allows for
        that only if the request is marked as a retry."""
        last = self._process
        at_once = left is not None and not left.marked and left.away is not None and left.away < AT_ONCE_S
        return last if at_once and last is not None and not last.died.is_set() else await self._find()

    def _options(self, turn: SimTurn) -> Options:
        key = f"{self._plan.name}/{turn.plan.text}" if turn.plan.keyed else None
        name, in_all = self._plan.name, self._plan.task_budget
        task = None if in_all is None else name
        return Options(budget=turn.plan.budget, key=key, task=task, task_budget=in_all, tags={"agent": name})


def _worth_another_try(reply: Reply) -> bool:
    """Whether an SDK would retry: after server errors, for a call without a key."""
    return reply.outcome.kind is OutcomeKind.ERRORED and reply.outcome.status >= 429 and not reply.outcome.batch


def _summary(reply: Reply) -> str:
    outcome = reply.outcome
    return f"{outcome.kind} {outcome.status} on {outcome.lane} ({reply.reason or outcome.reason})"


def _terms(plan: TurnPlan) -> str:
    budget = "patiently" if plan.budget is None else f"within {plan.budget:g} s"
    return budget + (", with a key" if plan.keyed else "")
