"""Rate limiting of purchases on `now`: calls pass at once while the provider works and has room, and queue otherwise.

Each gate throttles one account and model, because providers limit each model separately. The circuit breaker, the
queue limit and the retry budget belong to the account.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from carpool.core.errors import Closed, ConnectionBroken, NotConnected, ProviderFailing, TooBusy
from carpool.core.ports import Dialect, HttpResponse
from carpool.engine.context import EngineContext
from carpool.engine.events import AccountSlowed, BreakerClosed, BreakerOpened
from carpool.planners.pressure.breaker import Breaker, RetryBudget
from carpool.planners.pressure.fair_queue import FairQueue, Tags, tag_set
from carpool.planners.pressure.throttle import Throttle
from carpool.planners.rescue_room import UNLIMITED, FreeRate

PRESSING_S = 10.0  # a call with less slack than this, beyond its own duration, skips the queue
KEPT_MAX_WAIT_S = 600.0  # how long a call on disk may wait: its outcome is final
LONGEST_S = 30.0  # longest retry-after while the circuit breaker is open
MAX_GATES = 1000  # clients choose model names, so idle gates beyond this are dropped
BYTES_PER_TOKEN = 4
ANSWERING = "answering calls"

REFUSALS = frozenset({429, 529})


@dataclass(frozen=True, slots=True)
class GateDelay:
    """What delays the calls of one account and model, for display."""

    account: str  # a prefix of its name
    provider: str
    model: str
    in_flight: int
    limit: int | None  # None: no limit
    waiting: int
    closed_for_s: float
    breaker_open: bool


@dataclass(slots=True, eq=False)
class Account:
    """What the calls of one account share, whatever their model."""

    name: str
    provider: str
    dialect: Dialect
    retries: RetryBudget
    breaker: Breaker = field(default_factory=Breaker)
    gates: dict[str, Gate] = field(default_factory=dict)

    @property
    def waiting(self) -> int:
        return sum(len(gate.queue) for gate in self.gates.values())

    @property
    def made(self) -> float:
        """Requests sent so far through the gates that still exist."""
        return sum(gate.throttle.requests.spent for gate in self.gates.values())


@dataclass(slots=True, eq=False)
class Gate:
    """The calls of one account to one model."""

    context: EngineContext
    account: Account
    model: str
    throttle: Throttle
    queue: FairQueue[asyncio.Future[Slot]] = field(default_factory=FairQueue)
    wake_event: asyncio.Event = field(default_factory=asyncio.Event)
    granting: bool = False

    def ready_at(self, now: float, tokens: float) -> float:
        return max(self.account.breaker.ready_at(now), self.throttle.ready_at(now, tokens))

    def take(self, now: float, tokens: float, waited: bool = False) -> Slot:
        self.throttle.take(now, tokens, waited=waited)
        return Slot(self, now, self.account.breaker.take(now))

    @property
    def idle(self) -> bool:
        return not (self.queue or self.throttle.in_flight or self.throttle.pressed or self.granting)


class Slot:
    """The permission to send one request. It is released exactly once: answered, failed, or cancelled. What happened
    is learned then: by the throttle of its gate, and by the breaker of its account."""

    __slots__ = ("_gate", "_probe", "_released", "at", "requests", "tokens")

    def __init__(self, gate: Gate, now: float, probe: bool) -> None:
        self._gate = gate
        self._probe = probe
        self._released = False
        self.at = now
        self.requests = gate.throttle.requests.spent
        self.tokens = gate.throttle.tokens.spent

    def answered(self, response: HttpResponse) -> None:
        if self._released:
            return
        self._released = True
        gate, context, status = self._gate, self._gate.context, response.status
        account, throttle, now = gate.account, gate.throttle, gate.context.now()
        if context.troubles:
            context.troubles.worked("", account.provider)
        if throttle.needs_update(now):
            throttle.update(now, account.dialect.allowances(response.headers), self)
        slowed = (429 <= status < 500 or status in (503, 529)) and self._slowed_down(response, now)
        if status < 500 and not slowed:
            throttle.answered(now)
        elif not slowed:
            throttle.left()
        if status >= 500 and status != 529 and not slowed:
            self._record_failure(now, f"it answered {status}")
        elif account.breaker.failing:
            self._record_success(now)
        if self._probe or gate.granting:
            self._wake_queues()

    def _slowed_down(self, response: HttpResponse, now: float) -> bool:
        """Whether the provider asked to slow down. A refusal that waiting can't help counts as an ordinary response."""
        gate, context, status = self._gate, self._gate.context, response.status
        refusal = gate.account.dialect.refusal(status, response.headers, b"")
        asked = status in REFUSALS or (status == 503 and refusal.retry_after is not None)
        if not asked or not refusal.retryable:
            return False
        if gate.throttle.refused(now, self, refusal.retry_after, context.rng.random()):
            context.stats.slowdowns += 1
            account, pause = gate.account, gate.throttle.paused_until - now
            context.event_hooks.emit(AccountSlowed(now, account.name[:8], account.provider, gate.model, status, pause))
        return True

    def failed(self, error: BaseException) -> None:
        """No response came. Only connection errors count against the provider."""
        if self._released:
            return
        self._released = True
        gate = self._gate
        gate.throttle.left()
        if isinstance(error, NotConnected):
            gate.context.troubles.failed(ANSWERING, error, gate.account.provider)
        if isinstance(error, NotConnected | ConnectionBroken):
            self._record_failure(gate.context.now(), str(error))
        else:
            gate.account.breaker.left(self._probe)
        self._wake_queues()

    def _record_failure(self, now: float, why: str) -> None:
        context, account = self._gate.context, self._gate.account
        if not account.breaker.failed(now, self._probe, context.rng.random()):
            return
        context.stats.breaker_openings += 1
        if not context.troubles.unreached(account.provider):
            context.troubles.failed(ANSWERING, why, account.provider, account.name)
        pause = account.breaker.open_until - now
        context.event_hooks.emit(BreakerOpened(now, account.name[:8], account.provider, pause, why))

    def _record_success(self, now: float) -> None:
        context, account = self._gate.context, self._gate.account
        if not account.breaker.answered():
            return
        context.troubles.worked(ANSWERING, account.provider, account.name)
        context.event_hooks.emit(BreakerClosed(now, account.name[:8], account.provider))
        for gate in account.gates.values():
            gate.throttle.reopened(now)
            gate.wake_event.set()

    def _wake_queues(self) -> None:
        """Wakes the queue of this gate; after a probe, the queues of all gates of the account."""
        for woken in self._gate.account.gates.values() if self._probe else (self._gate,):
            woken.wake_event.set()

    def retry_wait(self) -> float:
        """How long the retry budget delays a retry."""
        account = self._gate.account
        return account.retries.wait(self._gate.context.now(), account.made)

    def retried(self) -> None:
        self._gate.context.stats.retries += 1
        self._gate.account.retries.spend()


class Gates:
    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._accounts: dict[str, Account] = {}
        self._gates: dict[tuple[str, str], Gate] = {}  # by account and model: a fast lookup for every call
        self._account = context.keyring.account
        self._now = context.now

    # ------------------------------------------------------------ acquiring a slot

    def enter(self, provider: str, credential: str, model: str, size: int) -> Slot | None:
        """Returns a slot if the call may be sent at once; None if it has to wait."""
        gate = self._gates.get((self._account(credential), model)) or self._gate(provider, credential, model)
        now, tokens = self._now(), size / BYTES_PER_TOKEN
        if gate.granting or not gate.account.breaker.closed:
            return None
        throttle = gate.throttle
        if throttle.pressed:
            throttle.reset_if_idle(now)
        if not throttle.can_send(now, tokens):
            return None
        throttle.take(now, tokens)
        return Slot(gate, now, probe=False)

    async def wait(
        self,
        provider: str,
        credential: str,
        model: str,
        size: int,
        tags: Mapping[str, str],
        deadline: float | None,
        *,
        kept: bool,
        tried: bool,
    ) -> Slot:
        """Waits for a slot. Raises `TooBusy` or `ProviderFailing` if that takes longer than the call may wait."""
        gate, now = self._gate(provider, credential, model), self._now()
        tokens = size / BYTES_PER_TOKEN
        if deadline is None and not kept and not gate.account.breaker.closed:
            if gate.queue or gate.ready_at(now, tokens) > now:
                raise self._provider_failing(gate.account, now)
            return gate.take(now, tokens)
        patience = KEPT_MAX_WAIT_S if kept else self._context.policy.max_wait_now_s
        until = now + patience if deadline is None else deadline
        if kept and not tried:  # better late than never: rejected at once, it would be retried at once, for ever
            until = max(until, now + PRESSING_S)
        self._check_queue(gate, now, until, kept)
        press_at = (
            None
            if deadline is None
            else deadline - PRESSING_S - self._context.forecast.sync_seconds(provider, model, 0)
        )
        return await self._wait_in_queue(gate, tag_set(tags), press_at, tokens, until)

    def _check_queue(self, gate: Gate, now: float, until: float, kept: bool) -> None:
        """Rejects calls that can't get a slot in time, and those beyond the queue limit."""
        most = self._context.policy.max_waiting_now
        if not kept and gate.account.waiting >= most:
            raise self._too_busy(gate, now, f"{most:,} calls of this account wait already")
        if gate.throttle.paused_until >= until and not kept:
            raise self._too_busy(gate, now, "the provider asked for a pause that is longer than this call may wait")

    async def _wait_in_queue(self, gate: Gate, tags: Tags, press_at: float | None, tokens: float, until: float) -> Slot:
        turn: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        place = gate.queue.join(turn, tags, press_at, tokens)
        self._context.stats.held_calls += 1
        if not gate.granting:
            gate.granting = True
            self._context.background.spawn(self._grant_slots(gate), "gate")
        try:
            async with asyncio.timeout(max(0.0, until - self._now())):
                return await turn
        except TimeoutError:
            self._release_unused(turn)
            now = self._now()
            if not gate.account.breaker.closed:
                raise self._provider_failing(gate.account, now) from None
            raise self._too_busy(gate, now, "its turn did not come in time") from None
        except BaseException:
            self._release_unused(turn)
            raise
        finally:
            gate.queue.leave(place)
            gate.wake_event.set()

    def _release_unused(self, turn: asyncio.Future[Slot]) -> None:
        """Releases a slot that was granted just when its call stopped waiting."""
        if turn.done() and not turn.cancelled() and turn.exception() is None:
            turn.result().failed(asyncio.CancelledError())

    def _too_busy(self, gate: Gate, now: float, why: str) -> TooBusy:
        self._context.stats.turned_away_calls += 1
        after = max(1.0, gate.throttle.paused_until - now, len(gate.queue) / gate.throttle.pace(now))
        return TooBusy(f"The account's rate limit is reached: {why}. Send this call again later.", after)

    def _provider_failing(self, account: Account, now: float) -> ProviderFailing:
        self._context.stats.turned_away_calls += 1
        after = max(1.0, min(account.breaker.ready_at(now) - now, LONGEST_S))
        return ProviderFailing(
            "The provider fails again and again and is left alone for a moment. Send this call again.", after
        )

    # ------------------------------------------------------------ the queue

    async def _grant_slots(self, gate: Gate) -> None:
        """Grants slots to queued calls, one by one, until the queue is empty."""
        try:
            while gate.queue:
                gate.wake_event.clear()
                now = self._now()
                place = gate.queue.next(now)
                if place.item.done():  # its client has just disconnected
                    gate.queue.leave(place)
                    continue
                ready = gate.ready_at(now, place.tokens)
                if ready <= now:
                    gate.queue.called(place, now)
                    place.item.set_result(gate.take(now, place.tokens, waited=True))
                    continue
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(ready - now, 3600.0)):
                        await gate.wake_event.wait()
        finally:
            gate.granting = False
            for place in gate.queue:  # only when the engine closes
                if not place.item.done():
                    place.item.set_exception(Closed("This carpool is closed and takes no more calls."))

    # ------------------------------------------------------------ the gates themselves

    def _gate(self, provider: str, credential: str, model: str) -> Gate:
        now, name = self._now(), self._account(credential)
        gate = self._gates.get((name, model))
        if gate is not None:
            return gate
        if len(self._gates) >= MAX_GATES:
            self._drop_idle()
        if (account := self._accounts.get(name)) is None:
            dialect = self._context.upstreams[provider].dialect
            account = self._accounts[name] = Account(name, provider, dialect, RetryBudget(now))
        gate = self._gates[name, model] = account.gates[model] = Gate(self._context, account, model, Throttle(now))
        return gate

    def _drop_idle(self) -> None:
        """Drops idle gates and accounts, but none that still delays calls."""
        self._gates = {place: gate for place, gate in self._gates.items() if not gate.idle}
        for name, account in list(self._accounts.items()):
            account.gates = {model: gate for model, gate in account.gates.items() if not gate.idle}
            if not account.gates and account.breaker.closed:
                del self._accounts[name]

    def free_rate(self, account: str, model: str) -> FreeRate:
        """What rescues may use of the rate limit of an account and model, as far as it is known."""
        gate = self._gates.get((account, model))
        return UNLIMITED if gate is None else gate.throttle.free_rate(self._now())

    def gate_delays(self) -> list[GateDelay]:
        """Every account and model whose calls are delayed, or were until recently."""
        now, gate_delays = self._now(), []
        for account in self._accounts.values():
            name, open_breaker = account.name[:8], not account.breaker.closed
            for gate in account.gates.values():
                throttle, waiting = gate.throttle, len(gate.queue)
                if not (waiting or throttle.pressed or open_breaker):
                    continue
                limit = None if math.isinf(throttle.limit) else math.ceil(throttle.limit)
                closed, calls = max(0.0, throttle.paused_until - now), (throttle.in_flight, limit, waiting)
                gate_delays.append(GateDelay(name, account.provider, gate.model, *calls, closed, open_breaker))
        return gate_delays
