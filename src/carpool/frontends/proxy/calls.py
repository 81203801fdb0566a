"""Handles a call that carpool understands, from intake to response."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from carpool.core.errors import BadCall, CallFailed, CallTooLarge, CarpoolError, Closed, Garbled
from carpool.core.model import Call, Entry, Lane, ticket_text
from carpool.core.ports import Clock, Dialect, Parsed, RawRequest
from carpool.dialects.keep_alive import Client, Vigil
from carpool.engine import Diverted, Engine, Passage, PendingCall, Reply, Upstream
from carpool.engine.now.decompress import read_whole
from carpool.frontends.intake import (
    answer_headers,
    carpool_headers,
    early_headers,
    identify,
    passing_headers,
    with_fingerprint,
)
from carpool.frontends.proxy.disconnect import DisconnectGuard
from carpool.frontends.proxy.http.asgi import (
    EVENT_STREAM,
    NO_RETRY,
    Disconnected,
    Once,
    send_chunk,
    send_head,
    send_whole,
)
from carpool.frontends.proxy.http.connection import ClientSink
from carpool.frontends.proxy.http.liveness import ConnectionLost
from carpool.frontends.proxy.log import LogLine, Note, Tell, redacted, waiting
from carpool.frontends.proxy.parse_head import HeadFacts
from carpool.frontends.proxy.pass_through import as_it_is, pass_answer, pass_through
from carpool.frontends.proxy.relay import CLIENT_LEFT, Relay
from carpool.frontends.proxy.request_context import RequestContext
from carpool.frontends.proxy.tickets import send_accepted
from carpool.frontends.proxy.waiting import Patience, informed, vigil, wait
from carpool.planners.access import understand
from carpool.planners.access.rules import RuleApplier, RuleBook
from carpool.planners.routing import Decision, must_be_kept

ACCEPTED = 202
PASSED = "pass"  # logged instead of a lane: passed through unchanged
KEY_REFUSED = frozenset({401, 403})  # a retry with the same key fails the same way
MAX_BODY = 32_000_000  # bytes of a call; pass-through requests may be longer


@dataclass(frozen=True, slots=True)
class WaitingCall:
    """A call that waits, and what is needed to answer it. The call itself is persisted and not kept in memory."""

    pending_call: PendingCall
    dialect: Dialect
    line: LogLine
    signs: Vigil | None  # keep-alive events, if it streams
    wait: float | None  # `respond-async`: how many seconds to wait before the `202`
    wish: str = ""  # the client's stream options


class DecidedCall(Struct, frozen=True):
    call: Call
    decision: Decision
    direct: bool  # sent at once, and not persisted


class CallHandler:
    """Answers calls. `on_disconnect`: what happens to a batched call whose client disconnects."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        guard: DisconnectGuard,
        on_disconnect: Literal["keep", "cancel"],
        patience: Patience,
        note: Note,
        tell: Tell,
        book: RuleBook,
        max_body: int = MAX_BODY,
    ) -> None:
        self._max_body = max_body
        self._rules = RuleApplier(book)
        self._engine = engine
        self._clock = clock
        self._guard = guard
        self._on_disconnect: Literal["keep", "cancel"] = on_disconnect
        self._patience = patience
        self._note = note
        self._tell_event = tell

    def relay(self, sink: ClientSink, head: HeadFacts, raw: RawRequest, address: str) -> Relay | DecidedCall | None:
        """Starts to answer a call on `now` without a task if nothing must be awaited; else returns the decision."""
        upstream = head.upstream
        assert upstream is not None
        decided = self._decide(upstream, head, raw)
        if decided is None or not decided.direct or decided.decision.lane is not Lane.NOW:
            return decided
        call, decision = decided.call, decided.decision
        ticket = ticket_text(call.ticket)
        line = _describe_call(LogLine(at=call.arrived), call, raw, head.client, address, decision)
        relay = Relay(sink, upstream.dialect, early_headers(ticket, Lane.NOW, decision.reason), line, self._log)
        purchase = self._engine.relay(call, as_it_is(raw, head.onward), decision, relay)
        if purchase is None:
            return decided
        self._guard.relays.add(relay)
        relay.begin(purchase, self._guard.ended)
        return relay

    async def call(
        self,
        request: RequestContext,
        upstream: Upstream,
        head: HeadFacts,
        raw: RawRequest,
        decided: DecidedCall | None = None,
    ) -> WaitingCall | None:
        """Answers a call on `now` or `flex`. For a call that must wait, returns what to wait for."""
        decided = decided or self._decide(upstream, head, raw)
        if decided is None:
            request.line.lane = PASSED
            passing = pass_through(upstream, raw, raw.body, request.send, request.inform)
            await self._guard.unless_gone(passing, request.leaving, passing=True)
            return None
        call, decision = decided.call, decided.decision
        if decided.direct:
            passed = self._pass(request, call, raw, head, decision)
            diverted = await self._guard.unless_gone(passed, request.leaving, passing=True)
            if diverted is None:
                return None
            decision = diverted
        hold, line = head.hold, _describe_call(request.line, call, raw, request.client, request.address, decision)
        on_disconnect = call.on_disconnect or self._on_disconnect
        admission = self._engine.tickets.board(call, decision, "keep" if hold is not None else on_disconnect)
        try:
            pending_call = await self._guard.unless_gone(admission, request.leaving)
        except (Disconnected, asyncio.CancelledError, CarpoolError) as error:
            self._log_failure(request, line, error)
            raise
        line.ticket, line.lane, line.reason = (
            ticket_text(pending_call.ticket),
            str(pending_call.lane),
            pending_call.reason,
        )
        if not pending_call.answer.done():
            self._tell_event(waiting(line, call.deadline))
        signs = None
        if call.stream and hold is None:
            arrived = call.arrived
            signs = vigil(upstream.dialect, call.endpoint, request.client, call.model, pending_call.ticket, arrived)
        wish = upstream.dialect.wish(_decompressed(raw, head, self._max_body).body) if signs else ""
        return WaitingCall(pending_call, upstream.dialect, line, signs, hold, wish)

    def _decide(self, upstream: Upstream, head: HeadFacts, raw: RawRequest) -> DecidedCall | None:
        """None if the call can't be parsed. The parsed body is released here, before any wait."""
        understood = self._parse(upstream, head, raw)
        if understood is None:
            return None
        call, parsed = understood
        head.memory.payer = call.payer
        if call.flexible and head.guest is not None and not head.guest.key.profile.allows(Lane.FLEX):
            call = replace(call, flexible=False)
        decision = self._engine.decide(call, kept=head.hold is not None)
        direct = head.hold is None and not must_be_kept(call, decision.lane)
        if direct and decision.lane is Lane.NOW:
            return DecidedCall(call, decision, True)
        return DecidedCall(with_fingerprint(call, parsed), decision, direct)

    def _parse(self, upstream: Upstream, head: HeadFacts, raw: RawRequest) -> tuple[Call, Parsed] | None:
        """None if the call can't be parsed and asks nothing of carpool: then the provider reports the error best."""
        options = head.options
        try:
            plain = _decompressed(raw, head, self._max_body)
            stable = RawRequest(raw.method, raw.path, raw.query, head.standing, plain.body)
            parsed, arrived = understand(upstream, stable), self._clock.now()
            key = None if head.guest is None else head.guest.key
            options = self._rules.apply(head.memory.ruled, key, upstream, plain, parsed, options, arrived)
            return identify(self._engine, upstream, parsed, options, arrived, head.memory.payer), parsed
        except CallTooLarge:  # its size shows only when decompressed
            raise
        except BadCall:
            if head.guest is not None and not head.guest.key.profile.allows(Lane.NOW):
                raise  # it can't be batched, and its key allows no other lane
            asked = head.options
            if asked.timed or asked.key is not None or asked.lane not in (None, Lane.NOW):
                raise
            return None

    # ------------------------------------------------------------ on `now`

    async def _pass(
        self, request: RequestContext, call: Call, raw: RawRequest, head: HeadFacts, decision: Decision
    ) -> Decision | None:
        """Streams the response of a call on `now` or `flex`, sent as the client's own request. Returns the new decision
        if flex has no capacity and the next lane is not `now`."""
        line = _describe_call(request.line, call, raw, request.client, request.address, decision)
        try:
            if decision.lane is Lane.FLEX and head.packed:  # the body is changed, so it can't stay compressed
                raw, onward = _decompressed(raw, head, self._max_body), None
            else:
                onward = head.onward
            with informed(request, self._patience, call.deadline, self._clock):
                passage = await self._engine.passage(call, as_it_is(raw, onward), decision)
        except (Disconnected, asyncio.CancelledError, CarpoolError) as error:
            self._log_failure(request, line, error)
            raise
        if isinstance(passage, Diverted):
            return passage.decision
        await self._send_passage(request, line, passage)
        return None

    async def _send_passage(self, request: RequestContext, line: LogLine, passage: Passage) -> None:
        line.lane, chunks = str(passage.lane), passage.chunks
        try:
            await pass_answer(passage, passing_headers(passage), request.send)
        except (Disconnected, asyncio.CancelledError, CarpoolError) as error:
            if isinstance(error, CarpoolError):
                line.error = redacted(str(error))
            status = passage.status if chunks.answered else _failure_status(request, error)
            self._log(line, status, chunks.entry, chunks.size)
            raise
        self._log(line, passage.status, chunks.entry, chunks.size)

    # ------------------------------------------------------------ waiting

    async def wait(self, request: RequestContext, waiting_call: WaitingCall) -> None:
        """Waits for the reply and delivers it."""
        try:
            reply = await (
                self._wait(request, waiting_call)
                if waiting_call.wait is None
                else self._wait_or_accept(request, waiting_call, waiting_call.wait)
            )
        except (Disconnected, asyncio.CancelledError, CarpoolError) as error:
            self._log_failure(request, waiting_call.line, error)
            raise
        if reply is not None:
            await self._deliver(request, waiting_call, reply)

    async def _wait(self, request: RequestContext, waiting_call: WaitingCall) -> Reply:
        pending_call = waiting_call.pending_call
        try:
            headers = early_headers(waiting_call.line.ticket, pending_call.lane, pending_call.reason)
            return await wait(pending_call, request, self._patience, headers, waiting_call.signs)
        except (Disconnected, asyncio.CancelledError):  # even if the reply arrived at the same moment
            self._engine.tickets.leave(pending_call)
            raise

    async def _wait_or_accept(self, request: RequestContext, waiting_call: WaitingCall, hold: float) -> Reply | None:
        """The reply, if it arrives within `hold` seconds. Otherwise sends `202`; the client comes back for it."""
        reply = await self._engine.tickets.hold(waiting_call.pending_call, request.leaving, hold)
        if reply is None:
            received = await self._send_and_confirm(
                request, waiting_call.pending_call, send_accepted(request.send, waiting_call.pending_call)
            )
            self._log(waiting_call.line, ACCEPTED if received else CLIENT_LEFT, None, 0)
        return reply

    async def _send_and_confirm(
        self,
        request: RequestContext,
        pending_call: PendingCall,
        sending: Awaitable[None],
        lost: ConnectionLost = lambda: None,
    ) -> bool:
        """Whether the client received everything. If not, its ticket is released, so that it can come back."""
        received = False
        try:
            await sending
            received = await request.received(lost)
        finally:
            if not received:
                self._engine.tickets.leave(pending_call)
        return received

    async def _deliver(self, request: RequestContext, waiting_call: WaitingCall, reply: Reply) -> None:
        outcome = reply.outcome
        reply = Reply(reply.ticket, outcome, reply.entry, outcome.reason or waiting_call.pending_call.reason)
        waiting_call.line.batch, waiting_call.line.lane, waiting_call.line.reason = (
            outcome.batch,
            str(outcome.lane),
            reply.reason,
        )
        received: bool | None = None
        try:
            lost = partial(self._engine.deliveries.take_back, reply.ticket)
            received = await self._send_and_confirm(
                request, waiting_call.pending_call, _send_reply(reply, waiting_call, request.send), lost
            )
            if received:
                self._engine.deliveries.add(reply.ticket, waiting_call.pending_call)
        finally:
            left = request.gone if received is None else not received
            self._log(waiting_call.line, CLIENT_LEFT if left else outcome.status, reply.entry, len(outcome.body))

    # ------------------------------------------------------------ the log

    def _log_failure(self, request: RequestContext, line: LogLine, error: BaseException) -> None:
        """Logs a call without an outcome: client disconnected, carpool shutting down, or provider unreachable."""
        if isinstance(error, CarpoolError):
            line.error = redacted(str(error))
        self._log(line, _failure_status(request, error), None, 0)

    def _log(self, line: LogLine, status: int, entry: Entry | None, size: int) -> None:
        line.status, line.bytes_out = status, size
        line.duration_s = self._clock.now() - line.at
        self._note(line.bought(entry))


def _failure_status(request: RequestContext, error: BaseException) -> int:
    """The logged status of a call without an outcome."""
    if isinstance(error, CarpoolError):
        return error.status
    return CLIENT_LEFT if request.gone else Closed.status


def _decompressed(raw: RawRequest, head: HeadFacts, most: int) -> RawRequest:
    """The request with a decompressed body. On `now` the original is sent."""
    if not head.packed:
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


# ------------------------------------------------------------ responses


async def _send_reply(reply: Reply, waiting_call: WaitingCall, send: Once) -> None:
    if waiting_call.signs is not None:
        await _send_stream(reply, waiting_call.dialect, waiting_call.signs, waiting_call.wish, send)
    elif not send.begun:
        await _send_whole_reply(reply, send)
    elif reply.outcome.status == 200:
        await send_chunk(send, reply.outcome.body, more=False)
    else:  # the 200 is sent, and an error body would be taken for an answer
        text = ticket_text(reply.ticket)
        raise CallFailed(f"Call {text} failed with status {reply.outcome.status} while its client waited.", text)


async def _send_whole_reply(reply: Reply, send: Once) -> None:
    headers, refused = answer_headers(reply), reply.outcome.status in KEY_REFUSED
    advised = (NO_RETRY,) if refused and not any(name == NO_RETRY[0] for name, _ in headers) else ()
    await send_whole(send, reply.outcome.status, (*headers, *advised), reply.outcome.body)


async def _send_stream(reply: Reply, dialect: Dialect, signs: Vigil, wish: str, send: Once) -> None:
    outcome = reply.outcome
    if not send.begun:
        if outcome.status != 200:
            await _send_whole_reply(reply, send)
            return
        events = dialect.replay(outcome.body, wish)
        await send_head(send, 200, [EVENT_STREAM, *carpool_headers(reply)])
    elif outcome.status != 200:
        await send_chunk(send, dialect.stream_error(outcome.body), more=False)
        return
    else:
        try:
            events = signs.rest(dialect.replay(outcome.body, wish))
        except Garbled as error:
            body = dialect.error(error.status, error.code, str(error))
            await send_chunk(send, dialect.stream_error(body), more=False)
            return
    for event in events:
        await send_chunk(send, event, more=True)
    await send_chunk(send, b"", more=False)
