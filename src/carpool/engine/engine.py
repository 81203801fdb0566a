"""The engine: frontends submit calls, `step` advances the batch side, `close` shuts everything down."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec.structs import replace

from carpool.core.errors import CallTooLarge, CarpoolError, Closed, NotStarted
from carpool.core.keys import forms, plain
from carpool.core.lifecycle import TicketState
from carpool.core.model import Call, Entry, EntryKind, Headers, Lane, Totals, ticket_text
from carpool.core.ports import Ask, Capability, Clock, Dialect, HttpResponse, ResponseReceiver, Store, WebhookReader
from carpool.core.prices import PriceBook
from carpool.core.upstream import Upstream
from carpool.engine.batch.admit import Deliveries, OnDisconnect, PendingCall, Tickets
from carpool.engine.batch.api import BatchApi
from carpool.engine.batch.buy import Buyer
from carpool.engine.batch.collect import Collector
from carpool.engine.batch.follow import Follower
from carpool.engine.batch.rescue import Rescuer
from carpool.engine.cluster.membership import Lease, Membership
from carpool.engine.context import EngineContext, Probe, Reply
from carpool.engine.events import EventHooks, Hook, Stats
from carpool.engine.keyring import Keyring
from carpool.engine.lane_quotes import LaneQuotes
from carpool.engine.now.flex import FlexRefused, FlexSender
from carpool.engine.now.gate import GateDelay, Gates
from carpool.engine.now.relay import Purchase, StreamedResponse
from carpool.engine.now.send import Sender, SendRequest
from carpool.engine.recording import CallRecorder
from carpool.engine.virtual_keys import VirtualKeyCache
from carpool.planners.forecast import Forecast
from carpool.planners.policy import RoutingPolicy
from carpool.planners.routing import (
    NO_FLEX,
    NO_GAIN,
    Capabilities,
    Decision,
    must_be_kept,
    noted,
    route,
)

TROUBLE_PAUSE_S = 1.0
NO_ROOM = "So many calls wait for batches that the rate limit on now may not have room for its rescue."
LEASE = Lease()

PROBE_S = 2.0
MAX_OPEN_CALLS = 1000
OPEN_CALLS = (TicketState.QUEUED, TicketState.BOARDED, TicketState.SENDING)


class Engine:
    on_secret: Callable[[str, Headers], None] | None = None  # tells others about a new secret
    _loop: asyncio.Task[None] | None = None
    _unsubscribes: tuple[Callable[[], None], ...] = ()
    _direct = 0  # calls under way on `now` or `flex` that are not on disk

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
        self._context = context = EngineContext(
            store=store,
            clock=clock,
            policy=policy,
            forecast=forecast or Forecast(),
            prices=prices or PriceBook(),
            keyring=keyring,
            upstreams=upstreams,
            event_hooks=EventHooks(hooks),
            rng=rng,
            name=f"engine-{rng.getrandbits(48):012x}",
            probe=probe,
        )
        self.recorder, self.tasks = CallRecorder(context), context.tasks
        self._sender = Sender(context, self.recorder)
        self._flex_sender = FlexSender(context, self._sender)
        self._capabilities = context.prompt_caches.capabilities = capabilities or Capabilities()
        self._api = api = BatchApi(context)
        self._membership = Membership(context, api, lease or LEASE)
        self._buyer = Buyer(context, api)
        self._follower = Follower(context, api, self._buyer, Collector(context, api))
        self._rescuer = Rescuer(context, api, self._sender, self._follower.poll_soon)
        self.overview = Overview(context, self._sender.gates)
        self.virtual_key_cache = VirtualKeyCache(context)
        self.tickets = Tickets(context, self._rescuer, self.recorder)
        self.deliveries = Deliveries(context, self.tickets.leave)
        self.name = context.name  # under which this engine holds its lease
        self.stats: Stats = context.stats
        self.event_hooks: EventHooks = context.event_hooks
        self.new_ticket = context.new_ticket
        self.credential = keyring.credential  # of a known secret: the same for every form of it
        self.poll_soon = self._follower.poll_soon  # polls a batch soon, because it may have ended
        self._quotes = LaneQuotes(context, self._capabilities)

    # ------------------------------------------------------------ lifecycle

    @property
    def alive(self) -> bool:
        """Whether the engine runs and accepts calls."""
        return self._loop is not None and not self._loop.done() and not self._context.closing

    @property
    def failures(self) -> int:
        """Background tasks that ended with an unexpected error; 0 in a healthy engine."""
        return self._context.background.failures

    async def start(self) -> None:
        context = self._context
        context.prices.load()
        await self._membership.start(context.now())
        await context.learned.recall()
        await context.learner.load()
        self._unsubscribes = (
            context.store.subscribe(self._membership.on_settled),
            context.store.on_pool_change(context.on_pool_change),
            context.store.on_batch_hint(self._follower.on_hint),
        )
        self._loop = context.background.spawn(self._run(), "engine")

    def webhooks(self, provider: str) -> WebhookReader | None:
        """What reads a provider's webhooks, if it sends any."""
        return self._context.upstreams[provider].dialect.webhooks

    def add_secret(self, provider: str, secret: Headers) -> str:
        """Adds a client's secret to the keyring, and returns the name of the form in which it was sent. Batches that
        were bought with any form of it continue."""
        keyring, upstream = self._context.keyring, self._context.upstreams[provider]
        known = keyring.known(provider, upstream.base_url, secret)
        if known is not None:
            return known
        if keyring.add(provider, upstream.base_url, _forms(upstream, secret)):
            self._context.lead_again()
            if self.on_secret is not None:
                self.on_secret(provider, secret)
        return keyring.name(provider, upstream.base_url, plain(secret, upstream.dialect.payer_headers))

    def names(self, provider: str, secret: Headers) -> list[str]:
        """The names of all forms of a secret, without adding it to the keyring."""
        keyring, upstream = self._context.keyring, self._context.upstreams[provider]
        return [keyring.name(provider, upstream.base_url, f) for f in _forms(upstream, secret)]

    async def _run(self) -> None:
        context = self._context
        while True:
            context.wake = float("inf")
            context.wake_event.clear()
            try:
                context.wake_by(await self.step(context.now()))
                context.troubles.worked("planning")
            except Exception as error:  # noqa: BLE001  the loop must survive anything, or every caller would hang
                context.background.failures += not isinstance(error, CarpoolError)
                context.trouble("planning", error)
                context.wake_by(context.now() + TROUBLE_PAUSE_S)
            await self._sleep()

    async def _sleep(self) -> None:
        context = self._context
        while (delay := context.wake - context.now()) > 0:
            context.wake_event.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(delay, 3600.0)):  # unlike wait_for, it never swallows a cancellation
                    await context.wake_event.wait()

    async def step(self, now: float) -> float | None:
        """Advances the batch side by one plan. Returns when to plan again."""
        wakes: list[float | None] = [await self._membership.step(now)]
        self._context.batches = await self._context.store.batches(self._context.name)
        wakes.append(await self._rescuer.step(now))
        wakes.append(await self._buyer.step())
        wakes.append(await self._follower.step(now))
        wakes.append(self._save_learned(now))
        return min((wake for wake in wakes if wake is not None), default=None)

    def _save_learned(self, now: float) -> float | None:
        """Saves the forecast in the background when that is due. Returns when it will be."""
        learner = self._context.learner
        due = learner.due(now)
        if due is not None and due <= now:
            self._context.background.spawn(learner.save(), "save the forecast")
            return None
        return due

    # ------------------------------------------------------------ calls

    async def submit(
        self, call: Call, default: Lane = Lane.BATCH, on_disconnect: OnDisconnect = "keep"
    ) -> tuple[Reply, PendingCall | None]:
        """Processes one call to its outcome. A call on disk comes with its `PendingCall`: the caller must report
        delivery, or leave it. `on_disconnect` says what to do with a waiting call if its caller is cancelled."""
        if call.task_terms is not None:
            await self.tasks.learn(call)
            call = self.tasks.bound(call)
        self._direct += 1
        try:
            response = await self._respond(call, self.decide(call, default), default, None)
            if not isinstance(response, Decision):
                return await self._sender.read_reply(*response), None
        finally:
            self._direct -= 1
        pending_call = self.tickets.admit(call, response, on_disconnect)
        try:
            reply = await pending_call.answer  # its outcome may have a more specific reason than the lane
            reason = reply.outcome.reason or pending_call.reason
            return Reply(reply.ticket, reply.outcome, reply.entry, reason), pending_call
        except asyncio.CancelledError:  # even if the answer came in the same moment
            self.tickets.leave(pending_call)
            raise
        finally:
            del pending_call  # breaks a reference cycle: an exception from it holds this frame

    async def forward(
        self, call: Call, default: Lane = Lane.NOW, *, decision: Decision | None = None, as_is: Ask | None = None
    ) -> StreamedResponse | Decision:
        """Streams the response of a call that is sent at once. For a call that must be on disk first, and for one that
        finds no room on `flex` and may not go on `now`, returns the decision instead, and the frontend submits it.
        `as_is` is the client's own request, to be sent unchanged."""
        if call.task_terms is not None and decision is None:
            await self.tasks.learn(call)
            call = self.tasks.bound(call)
        response = await self._respond(call, decision or self.decide(call, default), default, as_is)
        return response if isinstance(response, Decision) else self._sender.stream_response(*response)

    async def _respond(
        self, call: Call, decision: Decision, default: Lane, as_is: Ask | None
    ) -> Decision | tuple[SendRequest, HttpResponse, Entry]:
        """Sends a call on `flex` or `now`; returns the decision if its lane is neither, or if it must be on disk."""
        context, refused = self._context, FlexRefused(tried=0)
        if decision.lane is Lane.FLEX:
            response = await self._flex_sender.respond(call, decision.reason, as_is)
            if not isinstance(response, FlexRefused):
                context.stats.flex_calls += 1
                if call.task:
                    self.tasks.asked(call)
                return response
            refused = response
            if refused.kind is EntryKind.RESCUE:
                decision = Decision(Lane.NOW, "Flex took too long, so the call is sent again on now.")
            else:
                decision = self.decide(call, default, flex=False)
        after_flex = refused.tried and decision.lane is Lane.NOW  # flex was tried, so this is its first attempt
        if must_be_kept(call, decision.lane) and not after_flex:
            return decision
        context.stats.sync_calls += 1
        request = SendRequest(call, decision.reason, refused.kind, as_is=as_is, tried=refused.tried)
        if not call.task:
            return await self._sender.respond(request)
        self.tasks.asked(call)
        try:
            return await self._sender.respond(request)
        except BaseException:
            self.tasks.failed(call.ticket)
            raise

    def relay(self, call: Call, as_is: Ask, decision: Decision, receiver: ResponseReceiver) -> Purchase | None:
        """As `forward`, but pushes the response to `receiver`. Returns None and sends nothing if that is impossible."""
        purchase = self._sender.relay(call, as_is, decision.reason, receiver)
        if purchase is not None:
            self._context.stats.sync_calls += 1
            if call.task:
                self.tasks.asked(call)
        return purchase

    def decide(self, call: Call, default: Lane = Lane.NOW, *, flex: bool = True) -> Decision:
        """The lane that a call would take now, and why. Without `flex`, the best other lane that meets the deadline."""
        context = self._context
        if self._loop is None:
            raise NotStarted("This engine is not running. Start it before submitting calls.")
        if context.closing:
            raise Closed("This carpool is closed and takes no more calls.")
        if not flex:
            call = replace(call, flexible=False, lane=None if call.lane is Lane.FLEX else call.lane)
        dialect = context.upstreams[call.provider].dialect
        if context.policy.max_input_tokens is not None and context.policy.enforce_pre_queue_validation:
            _check_tokens(dialect.estimate_tokens(call.body), context.policy.max_input_tokens)
        capability = self._capabilities.of(call.provider, dialect, call.model)
        may_flex = call.deadline is not None or call.lane is not None or default is Lane.BATCH
        decision = route(
            call,
            context.policy,
            context.forecast,
            context.now(),
            partial(self._quotes.quote, call),
            can_batch=self._why_not(Lane.BATCH, call, dialect, capability),
            can_flex=self._why_not(Lane.FLEX, call, dialect, capability) if may_flex else NO_FLEX,
            default=default,
        )
        if (
            decision.rescue_at is not None
            and call.lane is None
            and not self._rescuer.has_room(call, decision.rescue_at)
        ):
            context.stats.no_room_calls += 1
            decision = Decision(Lane.NOW, NO_ROOM)
        if flex:  # otherwise it is decided for the second time
            lane = None if decision.quotes and decision.quotes[0].probe else decision.lane
            context.prompt_caches.asked(call, dialect.estimate_tokens(call.body), lane, context.now())
        return noted(call, decision)

    def _why_not(self, lane: Lane, call: Call, dialect: Dialect, capability: Capability) -> str | None:
        """Why a call's model or credential may not take a lane; None if it may."""
        if lane is Lane.FLEX and (not call.flexible or call.key is not None):
            return NO_FLEX
        if incapable := self._capabilities.why_not(lane, call.provider, dialect, call.model):
            return incapable
        if lane is Lane.FLEX and capability.flex_price >= 1 and call.lane is not Lane.FLEX:
            return NO_GAIN  # a client that requests flex by name has other reasons
        return self._context.learned.why_not(lane, call.credential, call.model)

    # ------------------------------------------------------------ shutdown

    async def close(self, timeout: float = 10.0) -> None:
        """Rejects new calls, waits up to `timeout` for the open ones, and leaves the rest on disk."""
        context = self._context
        if context.closing or self._loop is None:
            return
        context.closing = True
        context.wake_now()
        until = context.now() + timeout
        while (len(context.waiters) or self._direct) and context.now() < until:
            await context.clock.sleep(min(0.02, max(0.0, until - context.now())))
        self._loop.cancel()
        self.virtual_key_cache.stop()
        for unsubscribe in self._unsubscribes:
            unsubscribe()
        await self.deliveries.close()
        await self.recorder.close()
        await context.learner.save()
        await self.tasks.close()
        await context.background.finish(timeout=min(5.0, timeout + 1.0))
        await self._membership.leave()
        context.waiters.fail_all(self._closed_error)
        context.gc_freezer.shrank(0)
        await context.store.aclose()

    def abort(self) -> None:
        """Stops at once, as a crash would: nothing is written, no client is notified. For simulations."""
        self.deliveries.closed = True
        self._context.background.abort()

    def _closed_error(self, ticket: int) -> Closed:
        text = ticket_text(ticket)
        if self._context.store.durable:
            return Closed(
                f"carpool closed before call {text} was answered. It is kept in the store: submit it again there, "
                "with the same key or body, to collect its answer.",
                text,
            )
        return Closed(f"carpool closed before call {text} was answered, and its store was in memory only.", text)


def _forms(upstream: Upstream, secret: Headers) -> list[Headers]:
    return forms(secret, upstream.dialect.key_headers, upstream.dialect.payer_headers)


def _check_tokens(tokens: int, limit: int) -> None:
    if tokens > limit:
        raise CallTooLarge(
            f"This call has about {tokens:,} input tokens, over the limit of {limit:,}. "
            "Shorten it, or raise max_input_tokens_per_request."
        )


# ------------------------------------------------------------ overview
# What people and health checks want to know: the calls, their costs, and whether the engine works.


@dataclass(frozen=True, slots=True)
class EngineSummary:
    waiting: int  # calls whose clients wait at this engine
    counts: Mapping[str, int]
    totals: list[Totals]
    pressure: list[GateDelay]  # accounts whose calls on `now` are delayed
    leads: int  # accounts whose batches this engine creates, for all engines on the store


class Overview:
    def __init__(self, context: EngineContext, gates: Gates) -> None:
        self._context = context
        self._gates = gates
        self.calls = context.store.listed_calls
        self.batches = context.store.listed_batches
        self.totals = context.store.totals

    async def purchases(self, ticket: int) -> list[dict[str, Any]]:
        """Everything that was bought for a call, or may have been, in chronological order."""
        rows: list[dict[str, Any]] = []
        for entry in await self._context.store.entries(ticket):
            batch = await self._context.store.batch(entry.purchase) if entry.purchase > 0 else None
            at, name, state = (batch.intended_at, batch.provider_id, batch.state) if batch else (entry.at, None, None)
            row = {"at": at, "lane": entry.lane, "kind": entry.kind, "batch": name, "batch_state": state}
            price = {"paid": entry.paid, "would_have_paid": entry.would_have_paid}  # None: unknown
            rows.append(row | price | {"reason": entry.reason})
        return sorted(rows, key=lambda row: row["at"])

    async def summary(self) -> EngineSummary:
        context, counts, totals = self._context, await self._context.store.counts(), await self._context.store.totals()
        return EngineSummary(len(context.waiters), counts, totals, self._gates.gate_delays(), len(context.led))

    async def keyless(self) -> int:
        """Number of open calls whose key is not in the keyring, among the newest calls only."""
        rows = [row for state in OPEN_CALLS for row in await self.calls(None, state, MAX_OPEN_CALLS)]
        return sum(row.credential not in self._context.keyring for row in rows)

    async def trouble(self) -> str | None:
        """Why the store can't be written, or None if it can. Writes a value to find out."""
        context = self._context
        try:
            async with asyncio.timeout(PROBE_S):
                await context.store.remember("probe", "ready", context.name, context.now())
        except TimeoutError:
            return "The store does not answer."
        except CarpoolError as error:
            return str(error)
        return None
