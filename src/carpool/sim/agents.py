"""The clients of a simulated world: they call, lose patience, lose their connection, and come back for their answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from carpool.dialects.headers import retry_after
from carpool.doors.options import Options
from carpool.engine import Reply
from carpool.errors import CarpoolError
from carpool.model import Call, OutcomeKind, ticket_text
from carpool.sim.asking import Body, body_of, request
from carpool.sim.plan import AgentPlan, TurnPlan
from carpool.sim.process import Process
from carpool.sim.story import Story

MOST_TRIES = 40
HASTY_TRIES = 20  # from then on it takes its time: a provider may refuse everybody for a while
SLOW_S = 5.0

Find = Callable[[], Awaitable[Process]]


@dataclass(slots=True)
class Turn:
    """One logical call and everything that was seen of it."""

    agent: AgentPlan
    plan: TurnPlan
    body: Body
    asked_at: float = 0.0
    answered_at: float = 0.0
    reply: Reply | None = None
    calls: list[Call] = field(default_factory=list)  # every try, each with a ticket of its own
    errors: list[str] = field(default_factory=list)
    interrupted: bool = False  # its client left, or its process died


class Agent:
    def __init__(self, plan: AgentPlan, find: Find, now: Callable[[], float], story: Story) -> None:
        self._plan = plan
        self._find = find
        self._now = now
        self._story = story
        self.turns = [Turn(plan, turn, body_of(turn)) for turn in plan.turns]

    async def run(self) -> None:
        await asyncio.sleep(self._plan.starts)
        for turn in self.turns:
            await asyncio.sleep(turn.plan.pause)
            turn.asked_at = self._now()
            await self._until_answered(turn)
            turn.answered_at = self._now()

    async def _until_answered(self, turn: Turn) -> None:
        for number in range(MOST_TRIES):
            reply = await self._try(turn)
            if reply is not None and (turn.plan.keyed or not _worth_another_try(reply)):
                turn.reply = reply
                self._story.tell(self._plan.name, f"has the answer of {ticket_text(reply.ticket)}: {_said(reply)}")
                return
            wanted = 0.0 if reply is None else self._refused(reply)
            pause = turn.plan.away if number < HASTY_TRIES else max(turn.plan.away, SLOW_S)
            await asyncio.sleep(max(pause, wanted))

    def _refused(self, reply: Reply) -> float:
        """Says so in the story, and how long it was asked to wait: SDKs obey that."""
        wanted = retry_after(reply.outcome.headers) or 0.0
        self._story.tell(self._plan.name, f"is refused: {_said(reply)}, try again in {wanted:g} s")
        return wanted

    async def _try(self, turn: Turn) -> Reply | None:
        process = await self._find()
        raw = request(self._plan, turn.plan, turn.body)
        call = process.call(self._plan.provider, raw, self._options(turn))
        turn.calls.append(call)
        asks = f"for {self._plan.provider}'s {turn.plan.model} {turn.plan.endpoint}, {_terms(turn.plan)}"
        self._story.tell(self._plan.name, f"submits {ticket_text(call.ticket)} to {process.name}, {asks}")
        patience = turn.plan.leaves_after if len(turn.calls) == 1 else None
        try:
            async with asyncio.timeout(patience):
                reply = await process.submit(call)
        except TimeoutError:
            turn.interrupted = True
            self._story.tell(self._plan.name, f"hangs up on {ticket_text(call.ticket)}")
            return None
        except CarpoolError as error:
            turn.errors.append(f"{type(error).__name__}: {error}")
            self._story.tell(self._plan.name, f"is told: {turn.errors[-1]}")
            return None
        if reply is None:
            turn.interrupted = True
            self._story.tell(self._plan.name, f"loses its connection with {ticket_text(call.ticket)}")
        return reply

    def _options(self, turn: Turn) -> Options:
        key = f"{self._plan.name}/{turn.plan.text}" if turn.plan.keyed else None
        return Options(budget=turn.plan.budget, key=key, tags={"agent": self._plan.name})


def _worth_another_try(reply: Reply) -> bool:
    """As SDKs do: server errors are tried again, by a call without a key."""
    return reply.outcome.kind is OutcomeKind.ERRORED and reply.outcome.status >= 429 and not reply.outcome.batch


def _said(reply: Reply) -> str:
    outcome = reply.outcome
    return f"{outcome.kind} {outcome.status} on {outcome.lane} ({reply.reason or outcome.reason})"


def _terms(plan: TurnPlan) -> str:
    budget = "patiently" if plan.budget is None else f"within {plan.budget:g} s"
    return budget + (", with a key" if plan.keyed else "")
