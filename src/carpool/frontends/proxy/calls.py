"""Calls that carpool understands, from their parsed head to a response on `now`, or to their wait for a batch.

One chain for all: `understand`, apply the rules, `Engine.decide`. A call on `now` for which nothing must be awaited has
no task: its `Relay` is the receiver of the provider's response and writes to the client's connection. Response, log
line and ledger entry are the same as for a call that has a task.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from carpool.core.errors import BadCall, CallTooLarge, CarpoolError, Closed, ConnectionBroken, WireError
from carpool.core.model import CachingMode, Call, Headers, Lane, ticket_text
from carpool.core.ports import Ask, Clock, Dialect, HttpRequest, Parsed, RawRequest, StreamedBody
from carpool.dialects.keep_alive import Client, keep_alive_events
from carpool.engine import Engine, Purchase, StreamedResponse, Upstream
from carpool.engine.now.decompress import read_whole
from carpool.frontends.intake import (
    early_headers,
    end_to_end,
    forwarded_headers,
    identify,
    streamed_headers,
    with_fingerprint,
)
from carpool.frontends.proxy.http.connection import ClientResponse, Connection
from carpool.frontends.proxy.http.responses import Disconnected, RequestRefused
from carpool.frontends.proxy.log import CLIENT_LEFT, LogLine, RequestLog, WriteLogEvent, redacted, waiting
from carpool.frontends.proxy.parse_head import HeadFacts, Scope
from carpool.frontends.proxy.request import JSON, DecidedCall, DisconnectGuard, Receive, RequestContext, Send, advice
from carpool.frontends.proxy.waiting import KeepAliveIntervals, WaitingCall, informed
from carpool.planners.access.rules import RuleApplier, understand
from carpool.planners.routing import Decision, must_be_kept

log = logging.getLogger("carpool.proxy")

PASSED = "pass"  # logged instead of a lane: passed through unchanged
RELAY_TIMEOUT_S = 86_400.0  # practically no limit: the client has its timeout
MAX_BODY = 32_000_000  # bytes of a call; pass-through requests may be longer


class ParsedHead(Struct, frozen=True):
    """A `connection.RequestHead` of the proxy: requests with it differ only in the length of their body."""

    calls: CallHandler
    serve: Callable[[RequestContext], Awaitable[None]]
    facts: HeadFacts
    method: str
    query: str
    headers: Headers
    address: str  # of the client; empty if local

    @property
    def relayable(self) -> bool:
        return self.facts.understood and self.facts.hold is None

    def relay(self, body: bytes, connection: Connection, *, keep_alive: bool) -> Relay | RequestContext | None:
        if not self.calls.accepts(self.facts, body):
            return None
        raw = self.request(body)
        answer = self.calls.relay(self, raw, connection, keep_alive=keep_alive)
        if isinstance(answer, Relay):
            return answer
        return RequestContext(self.serve, self.facts, raw, answer, self.address)

    def left(self, refused: RequestRefused | None) -> None:
        facts = self.facts
        provider = "" if facts.upstream is None else facts.upstream.provider
        self.calls.request_log.left(self.method, facts.path, provider, facts.client, self.address, refused)

    def request(self, body: bytes) -> RawRequest:
        length = ("content-length", str(len(body)))
        headers = tuple([pair if pair[0] != "content-length" else length for pair in self.headers])
        return RawRequest(self.method, self.facts.path, self.query, headers, body)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return RequestContext(self.serve, self.facts)(scope, receive, send)

    def __repr__(self) -> str:  # never the secrets
        return f"<{type(self).__name__}>"


@dataclass(eq=False, repr=False)
class CallHandler:
    """Answers calls. `_on_disconnect`: what happens to a batched call whose client disconnects."""

    _engine: Engine
    _clock: Clock
    guard: DisconnectGuard
    request_log: RequestLog
    _on_disconnect: Literal["keep", "cancel"]
    _intervals: KeepAliveIntervals
    _write_event: WriteLogEvent
    _rules: RuleApplier
    _max_body: int

    def accepts(self, head: HeadFacts, body: bytes) -> bool:
        """Whether the head is up to date and the body is not too large."""
        return len(body) <= self._max_body and head.epoch == self._engine.virtual_key_cache.epoch

    def relay(
        self, parsed_head: ParsedHead, raw: RawRequest, connection: Connection, *, keep_alive: bool
    ) -> Relay | DecidedCall | None:
        """Starts to answer a call on `now` without a task if nothing must be awaited; else returns the decision, if
        there is one."""
        head, upstream = parsed_head.facts, parsed_head.facts.upstream
        assert upstream is not None
        if head.key_holder is not None:
            head.key_holder.used = True
        try:
            understood = self._understand(head, raw)
            if understood is None:
                return None
            if understood[0].task_terms is not None and not self._engine.tasks.knows(understood[0]):
                return None  # the store must be asked first
            decided = self._decide(head, *understood)
            if not decided.direct or decided.decision.lane is not Lane.NOW:
                return decided
            call, decision = decided.call, decided.decision
            line = _describe_call(LogLine(at=call.arrived), call, raw, head.client, parsed_head.address, decision)
            headers = early_headers(line.ticket, Lane.NOW, decision.reason)
            relay = Relay(connection, keep_alive, calls=self, dialect=upstream.dialect, own_headers=headers, line=line)
            relay.purchase = self._engine.relay(call, unchanged_request(raw, head.forwarded), decision, relay)
        except CarpoolError:  # raised again in the task
            return None
        if relay.purchase is None:
            return decided
        self.guard.relays.add(relay)
        return relay

    async def call(self, request: RequestContext, head: HeadFacts, raw: RawRequest) -> WaitingCall | None:
        """Answers a call on `now` or `flex`. For a call that must wait, returns what to wait for."""
        decided, request.decided = request.decided or await self._decide_with_task(head, raw), None
        upstream, line = head.upstream, request.line
        assert upstream is not None
        if decided is None:
            line.lane = PASSED
            forwarding = forward_unchanged(request, upstream, raw, raw.body)
            await self.guard.run_while_connected(forwarding, request.leaving, streamed=True)
            return None
        call, decision = decided.call, decided.decision
        _describe_call(line, call, raw, request.client, request.address, decision)
        if decided.direct:
            passed = self._pass(request, call, raw, head, decision)
            diverted = await self.guard.run_while_connected(passed, request.leaving, streamed=True)
            if diverted is None:
                return None
            decision = diverted
        on_disconnect = "keep" if head.hold is not None else call.on_disconnect or self._on_disconnect
        admission = self._engine.tickets.admit_to_disk(call, decision, on_disconnect)
        try:
            pending_call = await self.guard.run_while_connected(admission, request.leaving)
        except (Disconnected, asyncio.CancelledError, CarpoolError) as error:
            self.request_log.call_failed(line, error, request.disconnected)
            raise
        line.ticket, line.lane = ticket_text(pending_call.ticket), str(pending_call.lane)
        line.reason = pending_call.reason
        if not pending_call.answer.done():
            self._write_event(waiting(line, call.deadline))
        if not call.stream or head.hold is not None:
            return WaitingCall(pending_call, upstream.dialect, None, head.hold)
        ticket, arrived = pending_call.ticket, call.arrived
        events = keep_alive_events(
            upstream.dialect.keep_alive, call.endpoint, request.client, call.model, ticket, arrived
        )
        stream_options = upstream.dialect.stream_options(_decompressed(raw, head, self._max_body).body)
        return WaitingCall(pending_call, upstream.dialect, events, None, stream_options)

    async def _decide_with_task(self, head: HeadFacts, raw: RawRequest) -> DecidedCall | None:
        """None if the call can't be parsed. The parsed body is released here, before any long wait."""
        understood = self._understand(head, raw)
        if understood is None:
            return None
        call, parsed = understood
        if call.task_terms is not None:
            await self._engine.tasks.learn(call)
        return self._decide(head, call, parsed)

    def _decide(self, head: HeadFacts, call: Call, parsed: Parsed) -> DecidedCall:
        if call.task_terms is not None:
            call = self._engine.tasks.bound(call)
        if call.flexible and head.key_holder is not None and not head.key_holder.key.profile.allows(Lane.FLEX):
            call = replace(call, flexible=False)
        decision = self._engine.decide(call, flex=head.hold is None)
        direct = head.hold is None and not must_be_kept(call, decision.lane)
        if direct and decision.lane is Lane.NOW:
            return DecidedCall(call, decision, True)
        return DecidedCall(with_fingerprint(call, parsed), decision, direct)

    def _understand(self, head: HeadFacts, raw: RawRequest) -> tuple[Call, Parsed] | None:
        """None if the call can't be parsed and asks nothing of carpool: then the provider reports the error best."""
        upstream, options = head.upstream, head.options
        assert upstream is not None
        try:
            plain = _decompressed(raw, head, self._max_body)
            stable = RawRequest(raw.method, raw.path, raw.query, head.stable_headers, plain.body)
            parsed, arrived = understand(upstream, stable), self._clock.now()
            key = None if head.key_holder is None else head.key_holder.key
            ruled = self._rules.apply(head.cache.options, key, upstream, plain, parsed, options, arrived)
            return identify(self._engine, upstream, parsed, ruled, arrived, head.cache.caller), parsed
        except CallTooLarge:  # its size shows only when decompressed
            raise
        except BadCall:
            if head.key_holder is not None and not head.key_holder.key.profile.allows(Lane.NOW):
                raise  # it can't be batched, and its key allows no other lane
            if options.may_wait or options.key is not None or options.lane not in (None, Lane.NOW):
                raise
            return None

    async def _pass(
        self, request: RequestContext, call: Call, raw: RawRequest, head: HeadFacts, decision: Decision
    ) -> Decision | None:
        """Streams the response of a call on `now` or `flex`, sent as the client's own request. Returns the new decision
        if flex has no capacity and the next lane is not `now`."""
        streamed: StreamedResponse | Decision | None = None
        try:
            forwarded = head.forwarded
            changes = decision.lane is Lane.FLEX or call.caching is CachingMode.PLAN
            if changes and head.compressed:  # the body is changed, so it can't stay compressed
                raw, forwarded = _decompressed(raw, head, self._max_body), None
            with informed(request, self._intervals, call.deadline, self._clock):
                streamed = await self._engine.forward(call, decision=decision, as_is=unchanged_request(raw, forwarded))
            if isinstance(streamed, Decision):
                return streamed
            request.line.lane = str(streamed.lane)
            await send_streamed(request, streamed)
        except (Disconnected, asyncio.CancelledError, CarpoolError) as error:
            begun = streamed if isinstance(streamed, StreamedResponse) else None
            self.request_log.call_failed(request.line, error, request.disconnected, begun)
            raise
        self.request_log.call_ended(request.line, streamed.status, streamed.chunks.entry, streamed.chunks.size)
        return None


def _decompressed(raw: RawRequest, head: HeadFacts, most: int) -> RawRequest:
    """The request with a decompressed body. On `now` the original is sent."""
    if not head.compressed:
        return raw
    headers = tuple([pair for pair in raw.headers if pair[0] != "content-encoding"])
    return RawRequest(raw.method, raw.path, raw.query, headers, read_whole(raw.body, raw.headers, most))


def _describe_call(
    line: LogLine, call: Call, raw: RawRequest, client: Client, address: str, decision: Decision
) -> LogLine:
    """Fills the log line with the facts of the call."""
    line.at, line.request, line.ticket = call.arrived, "", ticket_text(call.ticket)
    line.provider, line.model = call.provider, call.model
    line.lane, line.reason = str(decision.lane), decision.reason
    line.client, line.address = f"{client.kind} {client.name}".rstrip(), address
    line.bytes_in, line.tags = len(raw.body), call.tags
    return line


# ------------------------------------------------------------ responses without a task


class Relay(ClientResponse, kw_only=True, eq=False):
    """The response to a call on `now`. The purchase pushes the provider's response to it; it writes to the client."""

    calls: CallHandler
    dialect: Dialect
    own_headers: Headers  # carpool's
    line: LogLine
    purchase: Purchase | None = None  # None once it has ended
    status: int = 0

    def answered(self, status: int, headers: Headers) -> None:
        self.status = status
        ClientResponse.answered(self, status, (*forwarded_headers(headers), *self.own_headers))

    def finish(self) -> None:
        self._end(self.status)
        ClientResponse.finish(self)

    def fail(self, error: WireError | Closed) -> None:
        self.line.error = redacted(str(error))
        self._end(error.status)
        if self.status:  # the head is sent: only a broken connection shows the failure
            log.warning("A response breaks off after its head: %s", error)
            self.break_off()
            return
        body = self.dialect.error(error.status, error.code, str(error))
        headers = (JSON, *advice(error), ("content-length", str(len(body))))
        ClientResponse.answered(self, error.status, headers)
        self.add(body)
        ClientResponse.finish(self)

    def pause(self, paused: bool) -> None:
        if self.purchase is not None:
            self.purchase.pause(paused)

    def left(self) -> None:
        if self.purchase is not None:
            self.purchase.give_up()
            self._end(CLIENT_LEFT)

    def cut(self) -> None:
        """carpool is shutting down and can't wait any longer."""
        if self.purchase is not None:
            self.purchase.give_up()
            self.fail(Closed("carpool is stopping. Send this call again in a moment."))

    def _end(self, status: int) -> None:
        """Logs the call. If only the end marker of its body was missing, it counts as answered."""
        purchase, self.purchase = self.purchase, None
        assert purchase is not None
        guard = self.calls.guard
        guard.relays.discard(self)
        guard.relay_ended.set()
        self.calls.request_log.call_ended(
            self.line, self.status if purchase.complete else status, purchase.entry, self.size
        )


# ------------------------------------------------------------ pass-through
# Requests that carpool does not understand, and the responses of calls on `now`, unchanged.


def unchanged_request(raw: RawRequest, forwarded: Headers | None) -> Ask:
    """The client's own request: its query, its body, and all end-to-end headers (`forwarded`, if already known)."""
    return Ask(raw.method, _target(raw), tuple(end_to_end(raw.headers)) if forwarded is None else forwarded, raw.body)


async def forward_unchanged(
    request: RequestContext, upstream: Upstream, raw: RawRequest, body: bytes | StreamedBody
) -> None:
    """Sends a request that carpool does not understand, and passes the response to the client."""
    url, headers = upstream.url(_target(raw)), tuple(end_to_end(raw.headers))
    sent = HttpRequest(raw.method, url, headers, body, RELAY_TIMEOUT_S, request.inform)
    try:
        response = await upstream.http_client.send(sent)
    except ConnectionBroken as error:
        if isinstance(error.__cause__, Disconnected):  # the client disconnected during its upload
            raise error.__cause__ from None
        raise
    try:
        await _send_response(request, response.status, forwarded_headers(response.headers), response.chunks())
    finally:
        await response.aclose()


async def send_streamed(request: RequestContext, streamed: StreamedResponse) -> None:
    """Streams the response of a call on `now`, with carpool's headers added."""
    headers = [*forwarded_headers(streamed.headers), *streamed_headers(streamed)]
    try:
        await _send_response(request, streamed.status, headers, streamed.chunks)
    finally:
        await streamed.chunks.aclose()


async def _send_response(
    request: RequestContext, status: int, headers: list[tuple[str, str]], chunks: AsyncIterator[bytes]
) -> None:
    """If the content length is known, the last chunk can be marked as the last."""
    await request.send_head(status, headers)
    length = next((int(value) for name, value in headers if name == "content-length" and value.isdecimal()), None)
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        await request.send_chunk(chunk, more=size != length)
    if size != length or not size:
        await request.send_chunk(b"", more=False)


def _target(raw: RawRequest) -> str:
    return f"{raw.path}?{raw.query}" if raw.query else raw.path
