"""The lane `now` in a run: the provider's limit, its refusals, and pings.

Calls beyond the limit of requests a minute wait for their turn, first come, first served: that is what the engine's
gate and an SDK's retries come to. A refused attempt is repeated after the usual backoff until the provider accepts it,
past the deadline if need be: a turn that nobody answers would end its session.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from carpool.core.bounded import backoff
from carpool.core.model import Lane
from carpool.planners.pressure.quota import TokenBucket
from carpool.sim.money.model import PurchaseKind
from carpool.sim.money.run import FleetRun, RunCall
from carpool.sim.money.worlds import FIRST_TOKEN_SHARE

BACKOFF_S: Final = 0.5
BACKOFF_MAX_S: Final = 30.0
PING_TAKES_S: Final = 1.0

Done = Callable[[RunCall], None]


class SyncLane:
    def __init__(self, run: FleetRun) -> None:
        self._run = run
        rpm = run.world.sync_rpm
        self._limit = None if rpm is None else TokenBucket(rpm / 60, float(rpm), float(rpm), run.began)

    def send(self, call: RunCall, kind: PurchaseKind, done: Done) -> None:
        """Buy a call. `done` is called when its answer is complete."""
        at = self._turn()
        if at <= self._run.agenda.now:
            self._attempt(call, kind, done)
        else:
            self._run.agenda.at(at, partial(self._attempt, call, kind, done))

    def ping(self, call: RunCall) -> None:
        now = self._run.agenda.now
        self._run.buy(call, Lane.NOW, "ping", now, now + PING_TAKES_S, now + PING_TAKES_S, output=0)

    def _turn(self) -> float:
        now = self._run.agenda.now
        if self._limit is None:
            return now
        at = self._limit.wait_until(now)
        self._limit = self._limit.take(now)
        return at

    def _attempt(self, call: RunCall, kind: PurchaseKind, done: Done) -> None:
        run, now = self._run, self._run.agenda.now
        call.attempts += 1
        if run.latencies.refused(call.session, call.turn, call.attempts):
            call.refused = True
            pause = backoff(call.attempts, BACKOFF_S, BACKOFF_MAX_S)
            run.agenda.at(now + pause, lambda: self.send(call, kind, done))
            return
        takes = run.latencies.sync_s(call.session, call.turn, now)
        run.agenda.at(now + takes, partial(self._finish, call, kind, now, takes, done))

    def _finish(self, call: RunCall, kind: PurchaseKind, started: float, takes: float, done: Done) -> None:
        run = self._run
        if run.policy.learns:
            output = run.trace.sessions[call.session].turns[call.turn].output_tokens
            run.forecast.call_answered(call.call.provider, call.call.model, output, takes, run.agenda.now)
        bought: PurchaseKind = "duplicate" if call.settled else kind
        self._run.buy(call, Lane.NOW, bought, started, started + takes * FIRST_TOKEN_SHARE, started + takes)
        done(call)
