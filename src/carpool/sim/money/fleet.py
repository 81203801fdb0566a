"""Run a fleet: sessions ask turn after turn, a policy chooses their lanes, and what was bought is recorded.

This is a simulation of events without an event loop, requests or bytes: fast enough for thousands of agents. What
decides is production code. The lane comes from `planners.routing`, batches are sealed by `planners.pooling` within a
`BatchQuota`, polled at the pace of `planners.tracking`, and rescued by its plans; this package only plays the part of
the engine, which claims, creates, polls, collects, cancels and resends. `tests/sim/money/test_parity.py` runs the same
traffic through the engine itself and compares the decisions.

A turn's deadline is the earlier of two: its own budget, and the end of its session's task. Tasks are not planned yet,
so a turn may use all that is left of its task. That is the simplest rule, and a greedy one: early turns take the time
that later ones would need. A turn that is asked after the end of its task goes on `now` and counts as late.

What is left out: time on the network, crashes, several engines, other users of the account, token limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Final

from carpool.core.model import Call, Lane
from carpool.sim.money.batch_lane import BatchLane
from carpool.sim.money.billing import PriceTable
from carpool.sim.money.model import BYTES_PER_TOKEN, Answer, MissReason, RunRecord, Trace, TraceTurn
from carpool.sim.money.planned import Knowledge
from carpool.sim.money.policies import MoneyPolicy
from carpool.sim.money.run import CREDENTIAL, FleetRun, RunCall
from carpool.sim.money.sync_lane import SyncLane
from carpool.sim.money.worlds import ProviderWorld

Progress = Callable[[int, int], None]  # turns answered, turns in all

PROGRESS_EVERY: Final = 1000
PING_EARLY_S: Final = 10.0  # before the end of the entry's life
WARM_UP_S: Final = 3600.0
ON_TIME_S: Final = 1e-6  # sums of times are not exact


def learned(
    trace: Trace,
    world: ProviderWorld,
    policy: MoneyPolicy,
    seed: int,
    *,
    budget_s: float | None = None,
    task_budget_s: float | None = None,
    table: PriceTable | None = None,
) -> Knowledge:
    """What a policy knows after an hour of this traffic."""
    knowledge = Knowledge()
    simulate(
        trace,
        world,
        policy,
        seed,
        budget_s=budget_s,
        task_budget_s=task_budget_s,
        table=table,
        knowledge=knowledge,
        seconds=WARM_UP_S,
        every_poll=False,
    )
    knowledge.until = WARM_UP_S
    return knowledge


def simulate(
    trace: Trace,
    world: ProviderWorld,
    policy: MoneyPolicy,
    seed: int = 0,
    *,
    budget_s: float | None = None,
    task_budget_s: float | None = None,
    progress: Progress | None = None,
    table: PriceTable | None = None,
    knowledge: Knowledge | None = None,
    seconds: float = math.inf,
    every_poll: bool = True,
) -> RunRecord:
    """Run a trace to its end, until every batch that was bought has ended; or for so many seconds."""
    run = FleetRun(trace, world, policy, seed, table or PriceTable(), knowledge, every_poll)
    fleet = _Fleet(run, budget_s, task_budget_s, progress)
    fleet.start()
    run.agenda.run(run.began + seconds)
    run.purchases.sort(key=lambda purchase: purchase.starts)
    return RunRecord(policy.name, seed, run.purchases, fleet.answers, run.batches, run.api_calls)


class _Fleet:
    def __init__(
        self, run: FleetRun, budget_s: float | None, task_budget_s: float | None, progress: Progress | None
    ) -> None:
        self._run = run
        self._budget = math.inf if budget_s is None else budget_s
        self._task_budget = math.inf if task_budget_s is None else task_budget_s
        self._progress = progress
        self._total = run.trace.calls
        self._tickets = count(1)
        self._sync = SyncLane(run)
        self._batch = BatchLane(run, self._sync, self._answered)
        self._last: list[int] = [-1] * len(run.trace.sessions)  # by session: its last turn that was asked
        self._task_ends: list[float] = [math.inf] * len(run.trace.sessions)
        self.answers: list[Answer] = []

    def start(self) -> None:
        for number, session in enumerate(self._run.trace.sessions):
            if session.turns:
                begins = self._run.began + session.starts + session.turns[0].think_s
                self._task_ends[number] = begins + self._task_budget
                self._run.agenda.at(begins, partial(self._ask, number, 0))

    # ------------------------------------------------------------ asking

    def _ask(self, number: int, position: int) -> None:
        run, now = self._run, self._run.agenda.now
        self._last[number] = position
        turn = run.trace.sessions[number].turns[position]
        size = run.trace.nodes[turn.node].tokens * BYTES_PER_TOKEN if turn.body_bytes is None else turn.body_bytes
        call = RunCall(
            number,
            position,
            self._call(number, position, turn),
            size,
            self._budget if turn.budget_s is None else turn.budget_s,
            self._task_ends[number],
        )
        if not run.every_poll:
            self._batch.count_in_flight(now)
        decision, call.now_life, call.batch_life, call.pings = run.router.choose(call, now)
        if decision.lane is Lane.BATCH:
            self._batch.admit(call, decision.rescue_at)
        else:
            self._sync.send(call, "purchase", self._direct)

    def _call(self, number: int, position: int, turn: TraceTurn) -> Call:
        session, now = self._run.trace.sessions[number], self._run.agenda.now
        budget = self._budget if turn.budget_s is None else turn.budget_s
        deadline = min(now + budget, self._task_ends[number])
        return Call(
            ticket=next(self._tickets),
            provider=self._run.trace.provider,
            dialect=self._run.dialect.name,
            endpoint="",
            body=b"",
            headers=(),
            credential=CREDENTIAL,
            model=session.model,
            arrived=now,
            deadline=None if deadline == math.inf else deadline,
            max_output_tokens=session.max_output_tokens,
            lane=turn.lane,
            tags=session.tags,
        )

    # ------------------------------------------------------------ answers

    def _direct(self, call: RunCall) -> None:
        call.settled = True
        self._answered(call, Lane.NOW, rescued=False)

    def _answered(self, call: RunCall, lane: Lane, *, rescued: bool) -> None:
        run, now, asked = self._run, self._run.agenda.now, call.call.arrived
        turns = run.trace.sessions[call.session].turns
        wait = now - asked - turns[call.turn].sync_s
        deadline = call.call.deadline
        miss = self._miss(call, lane, rescued=rescued) if deadline is not None and now > deadline + ON_TIME_S else None
        self.answers.append(Answer(call.session, call.turn, asked, now, deadline, lane, rescued, miss, wait))
        following = call.turn + 1
        if following < len(turns):
            run.agenda.at(now + turns[following].think_s, partial(self._ask, call.session, following))
        run.router.answered(call, turns[call.turn].output_tokens, lane, now)
        if call.pings and lane is Lane.NOW and not rescued:
            self._keep_alive(call, call.pings, asked)
        if self._progress is not None and (len(self.answers) % PROGRESS_EVERY == 0 or len(self.answers) == self._total):
            self._progress(len(self.answers), self._total)

    def _miss(self, call: RunCall, lane: Lane, *, rescued: bool) -> MissReason:
        turn = self._run.trace.sessions[call.session].turns[call.turn]
        asked, deadline = call.call.arrived, call.call.deadline
        assert deadline is not None
        if call.refused:
            return "the provider refused"
        if asked + turn.sync_s > deadline:
            task_ended = deadline == self._task_ends[call.session]
            return "the task ran out of time" if task_ended else "its answer takes longer"
        if rescued:
            return "no time for a rescue"
        return "the batch was late" if lane is Lane.BATCH else "the provider had no room"

    # ------------------------------------------------------------ pings

    def _keep_alive(self, call: RunCall, left: int, used_at: float) -> None:
        """Ping before the entry of this turn ends, unless the session has gone on by then."""
        at = used_at + call.now_life - PING_EARLY_S
        self._run.agenda.at(at, partial(self._ping, call, left))

    def _ping(self, call: RunCall, left: int) -> None:
        if self._last[call.session] != call.turn:
            return
        self._sync.ping(call)
        if left > 1:
            self._keep_alive(call, left - 1, self._run.agenda.now)
