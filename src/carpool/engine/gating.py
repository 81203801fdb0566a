"""The gate before every purchase on `now`: nobody waits while a provider is well and has room; otherwise in line.

Limits are the account's, and the model's: providers count each model apart. Whether a provider can be reached is the
account's alone.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass

from carpool.engine.desk import Desk
from carpool.engine.events import AccountSlowed, BreakerClosed, BreakerOpened
from carpool.errors import Closed, NotConnected, Severed, TooBusy, Unwell
from carpool.ports import Dialect, WireResponse
from carpool.pressure import Breaker, Line, Mark, Retries, Tags, Throttle, tag_set

PRESSING_S = 10.0  # beyond what the call itself takes: with less slack than this it goes before its turn
KEPT_PATIENCE_S = 600.0  # of one that is on disk: its outcome is for ever
LONGEST_S = 30.0  # that anybody is told to come back after, when the provider is unwell
MOST_GATES = 1000  # models are named by clients: what is calm and idle beyond this is forgotten
BYTES_PER_TOKEN = 4

REFUSALS = frozenset({429, 529})


@dataclass(frozen=True, slots=True)
class Hurdle:
    """One account and model as people see it: what holds its calls up."""

    account: str  # the beginning of its name
    provider: str
    model: str
    in_flight: int
    limit: int | None  # None: no limit
    waiting: int
    closed_for_s: float
    breaker_open: bool


class Account:
    """What the calls of one account share at one place, whatever their model."""

    __slots__ = ("breaker", "dialect", "gates", "name", "provider", "retries")

    def __init__(self, name: str, provider: str, dialect: Dialect, now: float) -> None:
        self.name = name
        self.provider = provider
        self.dialect = dialect
        self.breaker = Breaker()
        self.retries = Retries(now)
        self.gates: dict[str, Gate] = {}

    @property
    def waiting(self) -> int:
        return sum(len(gate.line) for gate in self.gates.values())

    @property
    def made(self) -> float:
        """How many calls it ever made, as far as is remembered."""
        return sum(gate.throttle.requests.spent for gate in self.gates.values())


class Gate:
    """The calls of one account to one model."""

    __slots__ = ("account", "alarm", "line", "model", "pumping", "throttle")

    def __init__(self, account: Account, model: str, now: float) -> None:
        self.account = account
        self.model = model
        self.throttle = Throttle(now)
        self.line: Line[asyncio.Future[Slot]] = Line()
        self.alarm = asyncio.Event()
        self.pumping = False

    def ready_at(self, now: float, tokens: float) -> float:
        return max(self.account.breaker.ready_at(now), self.throttle.ready_at(now, tokens))

    def take(self, gates: Gates, now: float, tokens: float, waited: bool = False) -> Slot:
        self.throttle.take(now, tokens, waited=waited)
        return Slot(gates, self, now, self.account.breaker.take(now))

    @property
    def idle(self) -> bool:
        return not (self.line or self.throttle.in_flight or self.throttle.pressed or self.pumping)


class Slot:
    """The permission to send one request. It is given back exactly once: answered, failed, or left without news."""

    __slots__ = ("_gate", "_gates", "_over", "_probe", "at", "requests", "tokens")

    def __init__(self, gates: Gates, gate: Gate, now: float, probe: bool) -> None:
        self._gates = gates
        self._gate = gate
        self._probe = probe
        self._over = False
        self.at = now
        self.requests = gate.throttle.requests.spent
        self.tokens = gate.throttle.tokens.spent

    def answered(self, response: WireResponse) -> None:
        if not self._over:
            self._over = True
            self._gates.heard(self._gate, self, self._probe, response)

    def failed(self, error: BaseException) -> None:
        """No answer came. Only what went wrong at the provider's end is held against it."""
        if self._over:
            return
        self._over = True
        if isinstance(error, NotConnected | Severed):
            self._gates.failed(self._gate, self._probe, str(error))
        else:
            self._gates.left(self._gate, self._probe)

    def retry_wait(self) -> float:
        """How long a retry has to wait, beside whatever else it waits for."""
        account = self._gate.account
        return account.retries.wait(self._gates.now(), account.made)

    def retried(self) -> None:
        self._gates.retried(self._gate.account)


class Gates:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._accounts: dict[str, Account] = {}
        self._gates: dict[tuple[str, str], Gate] = {}  # by account and model: every call asks
        self._account = desk.keyring.account

    # ------------------------------------------------------------ going in

    def enter(self, provider: str, credential: str, model: str, size: int) -> Slot | None:
        """A slot where nothing holds the call up; None where it has to wait."""
        gate = self._gates.get((self._account(credential), model)) or self._gate(provider, credential, model)
        now, tokens = self._desk.now(), size / BYTES_PER_TOKEN
        if gate.pumping or not gate.account.breaker.shut:
            return None
        throttle = gate.throttle
        if throttle.pressed:
            throttle.rest(now)
        if not throttle.may_go(now, tokens):
            return None
        throttle.take(now, tokens)
        return Slot(self, gate, now, probe=False)

    async def wait(
        self,
        provider: str,
        credential: str,
        model: str,
        size: int,
        *,
        tags: Mapping[str, str] | None,
        deadline: float | None,
        kept: bool,
        tried: bool,
    ) -> Slot:
        """Waits in line. Raises `TooBusy` or `Unwell` when that is longer than the call may wait."""
        gate, now = self._gate(provider, credential, model), self._desk.now()
        tokens = size / BYTES_PER_TOKEN
        if deadline is None and not kept and not gate.account.breaker.shut:
            if gate.line or gate.ready_at(now, tokens) > now:
                raise self._unwell(gate.account, now)
            return gate.take(self, now, tokens)
        until = now + (KEPT_PATIENCE_S if kept else self._desk.policy.max_wait_now_s) if deadline is None else deadline
        if kept and not tried:  # rather late than never; told no at once, it would come again at once, for ever
            until = max(until, now + PRESSING_S)
        self._check(gate, now, until, kept)
        press_at = None if deadline is None else deadline - PRESSING_S - self._desk.forecast.sync_seconds(0)
        return await self._in_line(gate, tag_set(tags), press_at, tokens, until)

    def _check(self, gate: Gate, now: float, until: float, kept: bool) -> None:
        """What can't come in time is told so at once; and the line has an end."""
        most = self._desk.policy.max_waiting_now
        if not kept and gate.account.waiting >= most:
            raise self._too_busy(gate, now, f"{most:,} calls of this account wait already")
        if gate.throttle.closed_until >= until and not kept:
            raise self._too_busy(gate, now, "the provider asked for a pause that is longer than this call may wait")

    async def _in_line(self, gate: Gate, tags: Tags, press_at: float | None, tokens: float, until: float) -> Slot:
        turn: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        place = gate.line.join(turn, tags, press_at, tokens)
        self._desk.stats.held_calls += 1
        self._pump(gate)
        try:
            async with asyncio.timeout(max(0.0, until - self._desk.now())):
                return await turn
        except TimeoutError:
            self._give_back(turn)
            now = self._desk.now()
            if not gate.account.breaker.shut:
                raise self._unwell(gate.account, now) from None
            raise self._too_busy(gate, now, "its turn did not come in time") from None
        except BaseException:
            self._give_back(turn)
            raise
        finally:
            gate.line.leave(place)
            gate.alarm.set()

    def _give_back(self, turn: asyncio.Future[Slot]) -> None:
        """Its turn may have come in the very moment in which it left."""
        if turn.done() and not turn.cancelled() and turn.exception() is None:
            turn.result().failed(asyncio.CancelledError())

    def _too_busy(self, gate: Gate, now: float, why: str) -> TooBusy:
        self._desk.stats.turned_away_calls += 1
        after = max(1.0, gate.throttle.closed_until - now, len(gate.line) / gate.throttle.pace(now))
        return TooBusy(f"The account's rate limit is reached: {why}. Send this call again later.", after)

    def _unwell(self, account: Account, now: float) -> Unwell:
        self._desk.stats.turned_away_calls += 1
        after = max(1.0, min(account.breaker.ready_at(now) - now, LONGEST_S))
        return Unwell("The provider fails again and again and is left alone for a moment. Send this call again.", after)

    # ------------------------------------------------------------ whose turn it is

    def _pump(self, gate: Gate) -> None:
        if not gate.pumping:
            gate.pumping = True
            self._desk.crew.spawn(self._call_up(gate), "gate")

    async def _call_up(self, gate: Gate) -> None:
        """Lets in who waits, one by one, until nobody does."""
        try:
            while gate.line:
                gate.alarm.clear()
                now = self._desk.now()
                place = gate.line.next(now)
                if place.item.done():  # its client left in this very moment
                    gate.line.leave(place)
                    continue
                ready = gate.ready_at(now, place.tokens)
                if ready <= now:
                    gate.line.called(place, now)
                    place.item.set_result(gate.take(self, now, place.tokens, waited=True))
                    continue
                await self._pause(gate, ready - now)
        finally:
            gate.pumping = False
            for place in gate.line:  # only where this carpool ends
                if not place.item.done():
                    place.item.set_exception(Closed("This carpool is closed and takes no more calls."))

    async def _pause(self, gate: Gate, seconds: float) -> None:
        try:
            async with asyncio.timeout(min(seconds, 3600.0)):
                await gate.alarm.wait()
        except TimeoutError:
            return

    # ------------------------------------------------------------ coming back

    def heard(self, gate: Gate, mark: Mark, probe: bool, response: WireResponse) -> None:
        desk, account, throttle = self._desk, gate.account, gate.throttle
        now, status = desk.now(), response.status
        if throttle.wants_look(now):
            throttle.looked(now, account.dialect.allowances(response.headers), mark)
        if status < 429:
            throttle.answered(now)
        elif status < 500 or status in (503, 529):
            if self._refused(gate, mark, response, now):
                status = 429
        else:
            throttle.left()
        if status >= 500 and status != 529:
            self._broken(account, probe, f"it answered {status}")
        elif account.breaker.failing:
            self._well(account)
        if probe or gate.pumping:
            self._ring(gate, probe)

    def _refused(self, gate: Gate, mark: Mark, response: WireResponse, now: float) -> bool:
        """Whether the provider asked for less. What no waiting helps, or is no matter of pace, is an answer."""
        desk, status = self._desk, response.status
        refusal = gate.account.dialect.refusal(status, response.headers, b"")
        asked = status in REFUSALS or (status == 503 and refusal.retry_after is not None)
        if not asked or not refusal.retryable:
            gate.throttle.answered(now) if status < 500 else gate.throttle.left()
            return False
        if gate.throttle.refused(now, mark, refusal.retry_after, desk.dice.random()):
            desk.stats.slowdowns += 1
            account, pause = gate.account, gate.throttle.closed_until - now
            desk.bulletin.tell(AccountSlowed(now, account.name[:8], account.provider, gate.model, status, pause))
        return True

    def failed(self, gate: Gate, probe: bool, why: str) -> None:
        gate.throttle.left()
        self._broken(gate.account, probe, why)
        self._ring(gate, probe)

    def left(self, gate: Gate, probe: bool) -> None:
        gate.throttle.left()
        gate.account.breaker.left(probe)
        self._ring(gate, probe)

    def _ring(self, gate: Gate, probe: bool) -> None:
        """Wakes who waits at this gate; after a probe, at all gates of the account."""
        for one in gate.account.gates.values() if probe else (gate,):
            one.alarm.set()

    def _broken(self, account: Account, probe: bool, why: str) -> None:
        desk = self._desk
        if not account.breaker.failed(desk.now(), probe, desk.dice.random()):
            return
        desk.stats.breaker_openings += 1
        now = desk.now()
        desk.bulletin.tell(
            BreakerOpened(now, account.name[:8], account.provider, account.breaker.open_until - now, why)
        )

    def _well(self, account: Account) -> None:
        if not account.breaker.answered():
            return
        now = self._desk.now()
        self._desk.bulletin.tell(BreakerClosed(now, account.name[:8], account.provider))
        for gate in account.gates.values():
            gate.throttle.reopened(now)
            gate.alarm.set()

    def retried(self, account: Account) -> None:
        self._desk.stats.retries += 1
        account.retries.spend()

    # ------------------------------------------------------------ the gates themselves

    def now(self) -> float:
        return self._desk.now()

    def _gate(self, provider: str, credential: str, model: str) -> Gate:
        now, name = self._desk.now(), self._account(credential)
        gate = self._gates.get((name, model))
        if gate is not None:
            return gate
        if len(self._gates) >= MOST_GATES:
            self._forget()
        account = self._accounts.get(name)
        if account is None:
            dialect = self._desk.upstreams[provider].dialect
            account = self._accounts[name] = Account(name, provider, dialect, now)
        gate = self._gates[name, model] = account.gates[model] = Gate(account, model, now)
        return gate

    def _forget(self) -> None:
        """Lets go of what nobody uses, and of nothing that holds somebody up."""
        self._gates = {place: gate for place, gate in self._gates.items() if not gate.idle}
        for name, account in list(self._accounts.items()):
            account.gates = {model: gate for model, gate in account.gates.items() if not gate.idle}
            if not account.gates and account.breaker.shut:
                del self._accounts[name]

    def hurdles(self) -> list[Hurdle]:
        """Every account and model whose calls are held up, now or of late."""
        now = self._desk.now()
        return [
            _hurdle(gate, now)
            for account in self._accounts.values()
            for gate in account.gates.values()
            if gate.line or gate.throttle.pressed or not account.breaker.shut
        ]


def _hurdle(gate: Gate, now: float) -> Hurdle:
    account, throttle = gate.account, gate.throttle
    limit = None if math.isinf(throttle.limit) else math.ceil(throttle.limit)
    closed = max(0.0, throttle.closed_until - now)
    return Hurdle(
        account.name[:8],
        account.provider,
        gate.model,
        throttle.in_flight,
        limit,
        len(gate.line),
        closed,
        not account.breaker.shut,
    )
