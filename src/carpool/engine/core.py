"""The engine itself: doors hand calls in, `step` advances the batch side, `close` leaves nothing dangling."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from carpool.capabilities import Capabilities, Capability
from carpool.engine.buying import Buyer
from carpool.engine.collecting import Collector
from carpool.engine.desk import Desk, Probe
from carpool.engine.entering import Gone
from carpool.engine.events import Bulletin, Hook
from carpool.engine.flexing import Flexer, Refused
from carpool.engine.following import Follower
from carpool.engine.guests import Guests
from carpool.engine.housekeeping import Housekeeper
from carpool.engine.keyring import Keyring
from carpool.engine.overview import Overview
from carpool.engine.passing import Passage
from carpool.engine.reconciling import Reconciler
from carpool.engine.relaying import Outlet, Purchase
from carpool.engine.rescuing import Rescuer
from carpool.engine.sending import Errand, Sender
from carpool.engine.sharing import Lease, Sharing
from carpool.engine.stats import Stats
from carpool.engine.tickets import Tickets
from carpool.engine.upstream import Upstream
from carpool.engine.waiting import Reply
from carpool.errors import CallTooLarge, CarpoolError, Closed, NotStarted
from carpool.forecast import Forecast
from carpool.model import Call, EntryKind, Headers, Lane, Value, ticket_text
from carpool.policy import RoutingPolicy
from carpool.ports import Ask, Clock, News, Store
from carpool.prices import PriceBook
from carpool.routing import NO_FLEX, NO_GAIN, Decision, noted, route
from carpool.warmth import Warmth, kept_warm

TROUBLE_PAUSE_S = 1.0
DELIVERED_S = 0.1
LEASE = Lease()


class Diverted(Value, frozen=True, gc=False):
    """A call that found no room on flex, and now waits for another lane."""

    decision: Decision


class Engine:
    def __init__(
        self,
        *,
        store: Store,
        clock: Clock,
        upstreams: Mapping[str, Upstream],
        keyring: Keyring,
        policy: RoutingPolicy,
        prices: PriceBook | None = None,
        forecast: Forecast | None = None,
        hooks: tuple[Hook, ...] = (),
        rng: random.Random | None = None,
        probe: Probe | None = None,
        capabilities: Capabilities | None = None,
        lease: Lease | None = None,
    ) -> None:
        rng = rng or random.SystemRandom()
        self._desk = desk = Desk(
            store=store,
            clock=clock,
            policy=policy,
            forecast=forecast or Forecast(),
            prices=prices or PriceBook(),
            keyring=keyring,
            upstreams=upstreams,
            bulletin=Bulletin(hooks),
            rng=rng,
            name=f"engine-{rng.getrandbits(48):012x}",
            probe=probe,
        )
        self._sender = Sender(desk)
        self._flexer = Flexer(desk, self._sender)
        self._capabilities = capabilities or Capabilities()
        collector = Collector(desk)
        self._housekeeper = Housekeeper(desk)
        self._sharing = Sharing(desk, lease or LEASE)
        self._buyer = Buyer(desk)
        self._follower = Follower(desk, collector, Reconciler(desk, collector))
        self._rescuer = Rescuer(desk, self._sender, self._follower.look_soon)
        self.overview = Overview(desk, self._sender.gates)
        self.guests = Guests(desk, self._enrolled)
        self.tickets = Tickets(desk, self._rescuer)
        self._loop: asyncio.Task[None] | None = None
        self._delivered: list[int] = []
        self._delivering: asyncio.Task[None] | None = None
        self._warmth = Warmth()
        self.on_secret: Callable[[str, Headers], None] = lambda provider, secret: None  # where others need it too
        self._direct = 0  # calls on `now` or `flex` under way that are not on disk

    # ------------------------------------------------------------ life

    @property
    def name(self) -> str:
        """The name under which this engine holds its lease."""
        return self._desk.name

    @property
    def stats(self) -> Stats:
        return self._desk.stats

    @property
    def bulletin(self) -> Bulletin:
        return self._desk.bulletin

    @property
    def alive(self) -> bool:
        """Whether it plans and takes calls."""
        return self._loop is not None and not self._loop.done() and not self._desk.closing

    @property
    def failures(self) -> int:
        """Background tasks that died of something unforeseen; 0 in a healthy engine."""
        return self._desk.crew.failures

    async def start(self) -> None:
        self._desk.prices.load()
        await self._sharing.start(self._desk.now())
        await self._desk.learned.recall()
        self._follower.start()
        self._loop = self._desk.crew.spawn(self._run(), "engine")

    def news(self, provider: str, secret: str, headers: Headers, body: bytes, now: float) -> News:
        """What a provider's webhook says, once it is sure that it is the provider's."""
        return self._desk.upstreams[provider].dialect.news(secret, headers, body, now)

    def look_soon(self, provider: str, batch: str) -> None:
        """A batch of ours may have ended."""
        self._follower.look_soon(provider, batch)

    def enrol(self, provider: str, secret: Headers) -> str:
        """Takes a client's secret in and names its credential. Batches that waited for it go on."""
        credential, new = self._desk.keyring.add(provider, self._desk.upstreams[provider].base_url, secret)
        if new:
            self._enrolled(credential)
            self.on_secret(provider, secret)
        return credential

    def _enrolled(self, credential: str) -> None:
        self._sharing.enrolled()

    def credential(self, provider: str, secret: Headers) -> str:
        """The name of a secret, without taking it in."""
        return self._desk.keyring.credential(provider, self._desk.upstreams[provider].base_url, secret)

    def new_ticket(self) -> int:
        return self._desk.new_ticket()

    async def _run(self) -> None:
        desk = self._desk
        while True:
            desk.wake = float("inf")
            desk.alarm.clear()
            try:
                desk.wake_by(await self.step(desk.now()))
            except Exception as error:  # noqa: BLE001  the loop must outlive anything, or every caller would hang
                desk.crew.failures += not isinstance(error, CarpoolError)
                desk.trouble("planning", error)
                desk.wake_by(desk.now() + TROUBLE_PAUSE_S)
            await self._sleep()

    async def _sleep(self) -> None:
        desk = self._desk
        while (delay := desk.wake - desk.now()) > 0:
            desk.alarm.clear()
            try:
                async with asyncio.timeout(min(delay, 3600.0)):  # unlike wait_for, it never swallows a cancel
                    await desk.alarm.wait()
            except TimeoutError:
                continue

    async def step(self, now: float) -> float | None:
        """Advances the batch side by one plan. Says when the next plan could be another one."""
        wakes: list[float | None] = [await self._sharing.step(now), await self._housekeeper.step(now)]
        self._desk.batches = await self._desk.store.batches(self._desk.name)
        wakes.append(await self._rescuer.step(now))
        wakes.append(await self._buyer.step())
        wakes.append(await self._follower.step(now))
        return min((wake for wake in wakes if wake is not None), default=None)

    # ------------------------------------------------------------ calls

    async def submit(self, call: Call, default: Lane = Lane.BATCH, gone: Gone = "keep") -> Reply:
        """One call from arrival to outcome. `gone` says what becomes of a waiting call whose caller is cancelled."""
        decision, refused = self._route(call, default), Refused(tried=0)
        self._direct += 1
        try:
            if decision.lane is Lane.FLEX:
                tried = await self._flexer.direct(call, decision.reason)
                if isinstance(tried, Reply):
                    self._desk.stats.flex_calls += 1
                    return tried
                decision, refused = self._after_flex(call, default, tried), tried
            if decision.lane is Lane.NOW and call.key is None:
                self._desk.stats.sync_calls += 1
                return await self._sender.direct(refused.onward(Errand.of(call, decision.reason)))
        finally:
            self._direct -= 1
        seat = self.tickets.take(call, decision, gone)
        try:
            return _reasoned(await seat.answer, seat.reason)
        finally:
            if seat.answer.cancelled() or not seat.answer.done():
                self.tickets.leave(seat)

    async def forward(self, call: Call, *, default: Lane = Lane.NOW) -> Passage | Decision:
        """A streamed answer where the call travels at once; otherwise the decision, and the door submits it."""
        decision = self._route(call, default)
        if decision.lane is Lane.BATCH or call.key is not None:
            return decision
        passage = await self.passage(call, None, decision, default)
        return passage if isinstance(passage, Passage) else passage.decision

    async def passage(
        self, call: Call, as_is: Ask | None, decision: Decision, default: Lane = Lane.NOW
    ) -> Passage | Diverted:
        """The answer of a call for which `now` or `flex` was decided, as it comes; where flex has no room and `now` is
        not next, that decision. `as_is` is the client's own request, which then buys it."""
        refused = Refused(tried=0)
        if decision.lane is Lane.FLEX:
            tried = await self._flexer.forward(call, decision.reason, as_is)
            if isinstance(tried, Passage):
                self._desk.stats.flex_calls += 1
                return tried
            decision, refused = self._after_flex(call, default, tried), tried
            if decision.lane is not Lane.NOW:
                return Diverted(decision)
        self._desk.stats.sync_calls += 1
        return await self._sender.forward(refused.onward(Errand.of(call, decision.reason, as_is=as_is)))

    def relay(self, call: Call, as_is: Ask, decision: Decision, outlet: Outlet) -> Purchase | None:
        """As `passage`, but nobody waits: the outlet is told. None where that can't be done; then nothing was sent."""
        purchase = self._sender.relay(call, as_is, decision.reason, outlet)
        self._desk.stats.sync_calls += purchase is not None
        return purchase

    def decide(self, call: Call, default: Lane = Lane.NOW, *, kept: bool = False) -> Decision:
        """The lane that a call would take now, and why; `kept`: its client comes back for it."""
        return self.without_flex(call, default) if kept else self._route(call, default)

    def _after_flex(self, call: Call, default: Lane, refused: Refused) -> Decision:
        if refused.kind is EntryKind.RESCUE:
            return Decision(Lane.NOW, "Flex took too long, so it is asked for again at once.")
        return self.without_flex(call, default)

    def without_flex(self, call: Call, default: Lane) -> Decision:
        """The next lane that is on time where flex is none."""
        return self._route(replace(call, flexible=False, lane=None if call.lane is Lane.FLEX else call.lane), default)

    def delivered_soon(self, ticket: int) -> None:
        """The client has its whole answer. That is written down a moment later, for many at once: their rows lie all
        over the store. Until then the ticket is awaited here, and nobody else can take it."""
        self._delivered.append(ticket)
        if len(self._delivered) == 1:
            self._delivering = self._desk.crew.spawn(self._deliver_later(), "delivered")

    async def _deliver_later(self) -> None:
        await self._desk.clock.sleep(DELIVERED_S)
        await self._write_delivered()

    async def _write_delivered(self) -> None:
        if self._delivered:
            tickets, self._delivered = self._delivered, []
            await self._desk.store.delivered(tickets, self._desk.now())

    def _route(self, call: Call, default: Lane) -> Decision:
        desk = self._desk
        if self._loop is None:
            raise NotStarted("This engine is not running. Start it before submitting calls.")
        if desk.closing:
            raise Closed("This carpool is closed and takes no more calls.")
        self._check_tokens(call)
        may_flex = call.deadline is not None or call.lane is not None or default is Lane.BATCH
        decision = route(
            call,
            desk.policy,
            desk.forecast,
            desk.now(),
            can_batch=self._why_not(Lane.BATCH, call),
            can_flex=self._why_not(Lane.FLEX, call) if may_flex else NO_FLEX,
            default=default,
            beta=self._able(call).batch_price,
        )
        return kept_warm(call, noted(call, decision), self._warmth, desk.now())

    def _why_not(self, lane: Lane, call: Call) -> str | None:
        """Why a call's model, or whoever pays for it, may not take a lane."""
        desk = self._desk
        if lane is Lane.FLEX and (not call.flexible or call.key is not None):
            return NO_FLEX
        seller = desk.upstreams[call.provider].dialect.seller
        if unable := self._capabilities.against(lane, call.provider, seller, call.model):
            return unable
        if lane is Lane.FLEX and self._able(call).flex_price >= 1 and call.lane is not Lane.FLEX:
            return NO_GAIN  # whoever asks for it by name has other reasons
        return desk.why_not(lane, call.credential, call.model)

    def _able(self, call: Call) -> Capability:
        seller = self._desk.upstreams[call.provider].dialect.seller
        return self._capabilities.of(call.provider, seller, call.model)

    def _check_tokens(self, call: Call) -> None:
        policy = self._desk.policy
        if policy.max_input_tokens is None:
            return
        tokens = self._desk.upstreams[call.provider].dialect.estimate_tokens(call.body)
        if tokens > policy.max_input_tokens and policy.enforce_pre_queue_validation:
            raise CallTooLarge(
                f"This call has about {tokens:,} input tokens, over the limit of {policy.max_input_tokens:,}. "
                "Shorten it, or raise max_input_tokens_per_request."
            )

    # ------------------------------------------------------------ the end

    async def close(self, timeout: float = 10.0) -> None:
        """Takes no more calls, gives the open ones so long, and leaves the rest where they are safe."""
        desk = self._desk
        if desk.closing or self._loop is None:
            return
        desk.closing = True
        desk.wake_now()
        until = desk.now() + timeout
        while (len(desk.waiters) or self._direct) and desk.now() < until:
            await desk.clock.sleep(min(0.02, max(0.0, until - desk.now())))
        self._loop.cancel()
        self.guests.stop()
        self._sharing.stop()
        self._follower.stop()
        if self._delivering is not None:
            self._delivering.cancel()
            await self._write_delivered()
        await desk.crew.rest(timeout=min(5.0, timeout + 1.0))
        await self._housekeeper.stop()
        desk.waiters.fail_all(self._parting)
        desk.crowd.shrank(0)
        await desk.store.aclose()

    def abort(self) -> None:
        """Stops where it stands, as a crash would: nothing is written, nobody is told. For simulations."""
        self._desk.crew.abort()

    def _parting(self, ticket: int) -> Closed:
        text = ticket_text(ticket)
        if self._desk.store.durable:
            return Closed(
                f"carpool closed before call {text} was answered. It is kept in the store: submit it again there, "
                "with the same key or body, to collect its answer.",
                text,
            )
        return Closed(f"carpool closed before call {text} was answered, and its store was in memory only.", text)


def _reasoned(reply: Reply, reason: str) -> Reply:
    """Where nothing unforeseen happened, the reason is why the call took this lane."""
    return Reply(reply.ticket, reply.outcome, reply.entry, reply.outcome.reason or reason)
