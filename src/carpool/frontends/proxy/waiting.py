"""How clients are kept from timing out while their call waits for a batch.

Three ways, chosen by the kind of client and of request (`_pauses`):

- Streaming requests: keep-alive events. After `stream_head_s` the client gets the head of an event stream, and then an
  event at a fixed interval. Until the head is sent, a failure still has its true status; later it is an error event.
  Which event keeps a client alive depends on the client (`keep_alive_events`). Most get the dialect's own: pings, or
  comments. Claude Code gets an early start of the message and empty changes to it. On `/responses`, clients other than
  SDKs get an early response; SDKs get comments, because they check that all events have one response id, which is not
  known yet.
- SDKs that accept any number of 1xx responses (`Client.accepts_1xx`): `102 Processing` every `informational_s`. It
  restarts the read timeout of the Python SDKs and Node's own 300 s limit. The response keeps its true status. It needs
  the ASGI extension of `http.connection`, so HTTP/1.0 clients do not get it.
- All others: white space. They get nothing until `head_s`, then a `200` head, and a space every `space_s`, which JSON
  allows before a value. After the head, a failure can only be shown by breaking the connection.

Some clients tell how long they wait for the next bytes (`Client.limit`). `KeepAliveIntervals.within` then reduces every
interval to at most half of that, but not below `SHORTEST_PAUSE_S`.

A call on `now` or `flex` may have to wait for room at the provider, too, if it has a deadline. `informed` sends its
client `102` until the deadline, if the client accepts that; the provider's head is then passed through as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, fields
from functools import partial

from carpool.core.errors import CallFailed, CarpoolError, MalformedResponse
from carpool.core.model import Headers, ticket_text
from carpool.core.ports import Clock, Dialect
from carpool.dialects.keep_alive import KeepAliveEvents
from carpool.engine import Engine, PendingCall, Reply
from carpool.frontends.intake import NO_RETRY, answer_headers, carpool_headers, early_headers
from carpool.frontends.proxy.http.liveness import ConnectionLost
from carpool.frontends.proxy.http.responses import Disconnected
from carpool.frontends.proxy.log import CLIENT_LEFT, RequestLog
from carpool.frontends.proxy.request import EVENT_STREAM, JSON, RequestContext
from carpool.frontends.proxy.tickets import send_accepted

ACCEPTED = 202
RESPOND_ASYNC = (("preference-applied", "respond-async"),)
KEY_REFUSED = frozenset({401, 403})  # a retry with the same key fails the same way
PROCESSING = 102
STREAM_HEAD = (EVENT_STREAM, ("cache-control", "no-cache"))
SHORTEST_PAUSE_S = 0.25  # a client with a shorter timeout must come back for its response


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAliveIntervals:
    """Intervals of silence that clients tolerate, in seconds."""

    informational_s: float = 50.0  # between two `102 Processing`
    head_s: float = 240.0  # for the head, where white space must follow it
    space_s: float = 15.0  # between two spaces after it
    stream_head_s: float = 2.0  # for the head of a stream: until then a failure has its true status
    ping_s: float = 15.0  # between two keep-alive events in a stream
    early_s: float = 20.0  # the same for those that begin the answer (`KeepAliveEvents.early`)

    def within(self, limit: float) -> KeepAliveIntervals:
        """Shorter intervals for a client that times out after `limit` seconds of silence."""
        most = max(limit / 2, SHORTEST_PAUSE_S)
        return KeepAliveIntervals(**{field.name: min(getattr(self, field.name), most) for field in fields(self)})

    def scaled(self, factor: float) -> KeepAliveIntervals:
        return KeepAliveIntervals(**{field.name: getattr(self, field.name) * factor for field in fields(self)})


@dataclass(frozen=True, slots=True)
class WaitingCall:
    """A call that waits, and what is needed to answer it. The call itself is persisted and not kept in memory."""

    pending_call: PendingCall
    dialect: Dialect
    keep_alive_events: KeepAliveEvents | None  # keep-alive events, if it streams
    hold: float | None  # `respond-async`: how many seconds to wait before the `202`
    stream_options: str = ""  # the client's stream options


class Waiter:
    """Waits with clients for the replies to their calls, and delivers them."""

    def __init__(self, engine: Engine, request_log: RequestLog, intervals: KeepAliveIntervals) -> None:
        self._engine = engine
        self._request_log = request_log
        self._intervals = intervals

    async def wait(self, request: RequestContext, waiting_call: WaitingCall) -> None:
        """Waits for the reply and delivers it. After `hold` seconds sends `202`; the client comes back for it."""
        pending_call, hold = waiting_call.pending_call, waiting_call.hold
        try:
            if hold is None:
                reply: Reply | None = await self._reply(request, waiting_call)
            else:
                reply = await self._engine.tickets.hold(pending_call, request.leaving, hold)
            if reply is None:
                sending = send_accepted(request, pending_call, RESPOND_ASYNC)
                received = await self._send_and_confirm(request, pending_call, sending)
                self._request_log.call_ended(request.line, ACCEPTED if received else CLIENT_LEFT)
                return
        except (Disconnected, asyncio.CancelledError, CarpoolError) as error:
            self._request_log.call_failed(request.line, error, request.disconnected)
            raise
        await self._deliver(request, waiting_call, reply)

    async def _reply(self, request: RequestContext, waiting_call: WaitingCall) -> Reply:
        """Keeps the client alive until the reply is there. Raises `Disconnected` if the client disconnects first."""
        pending_call = waiting_call.pending_call
        headers = early_headers(request.line.ticket, pending_call.lane, pending_call.reason)
        try:
            async with aclosing(_pauses(request, self._intervals, headers, waiting_call.keep_alive_events)) as pauses:
                async for pause in pauses:
                    await _wait_for_either(pending_call.answer, request.leaving, pause)
                    if request.disconnected or pending_call.answer.done():
                        break
        except asyncio.CancelledError:  # even if the reply arrived at the same moment
            self._engine.tickets.leave(pending_call)
            raise
        if request.disconnected:  # the answer stays in the store until it comes back
            self._engine.tickets.leave(pending_call)
            raise Disconnected
        return pending_call.answer.result()

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
        outcome, line, pending_call = reply.outcome, request.line, waiting_call.pending_call
        reply = Reply(reply.ticket, outcome, reply.entry, outcome.reason or pending_call.reason)
        line.batch, line.lane, line.reason = outcome.batch, str(outcome.lane), reply.reason
        received: bool | None = None
        try:
            lost = partial(self._engine.deliveries.take_back, reply.ticket)
            sending = _send_reply(reply, waiting_call, request)
            received = await self._send_and_confirm(request, pending_call, sending, lost)
            if received:
                self._engine.deliveries.add(reply.ticket, pending_call)
        finally:
            left = request.disconnected if received is None else not received
            status = CLIENT_LEFT if left else outcome.status
            self._request_log.call_ended(line, status, reply.entry, len(outcome.body))


@contextmanager
def informed(
    request: RequestContext, intervals: KeepAliveIntervals, deadline: float | None, clock: Clock
) -> Iterator[None]:
    """Sends `102 Processing` while the provider's head is awaited, until the deadline, if the client accepts it."""
    inform = request.inform
    if inform is None or not request.client.accepts_1xx or deadline is None:
        yield
        return
    loop, every = asyncio.get_running_loop(), intervals.within(request.client.limit).informational_s
    timer: asyncio.TimerHandle

    def send_processing() -> None:
        nonlocal timer
        if clock.now() < deadline:
            inform(PROCESSING, ())
            timer = loop.call_later(every, send_processing)

    timer = loop.call_later(every, send_processing)
    try:
        yield
    finally:
        timer.cancel()


async def _wait_for_either(answer: asyncio.Future[Reply], leaving: asyncio.Future[None], timeout: float) -> None:
    """Waits for one of them or the timeout. `asyncio.wait` would need three times the memory per client."""
    if answer.done() or leaving.done():
        return
    loop = asyncio.get_running_loop()
    woken: asyncio.Future[None] = loop.create_future()

    def wake(_: object = None) -> None:
        if not woken.done():
            woken.set_result(None)

    answer.add_done_callback(wake)
    leaving.add_done_callback(wake)
    timer = loop.call_later(timeout, wake)
    try:
        await woken
    finally:
        timer.cancel()
        answer.remove_done_callback(wake)
        leaving.remove_done_callback(wake)


async def _pauses(
    request: RequestContext, intervals: KeepAliveIntervals, said: Headers, keep_alive_events: KeepAliveEvents | None
) -> AsyncGenerator[float, None]:
    """Yields how long to wait before the next sign of life, and sends it when resumed."""
    intervals = intervals.within(request.client.limit)
    if keep_alive_events is not None:
        every = intervals.early_s if keep_alive_events.early else intervals.ping_s
        yield intervals.stream_head_s
        await request.send_head(200, [*STREAM_HEAD, *said])
        if first := keep_alive_events.first():
            await request.send_chunk(first, more=True)
        while True:
            yield every
            await request.send_chunk(keep_alive_events.again(), more=True)
    inform = request.inform
    if inform is not None and request.client.accepts_1xx:
        while True:
            yield intervals.informational_s
            inform(PROCESSING, ())
    yield intervals.head_s
    await request.send_head(200, [JSON, *said])
    while True:
        await request.send_chunk(b" ", more=True)
        yield intervals.space_s


# ------------------------------------------------------------ delivery


async def _send_reply(reply: Reply, waiting_call: WaitingCall, request: RequestContext) -> None:
    outcome, dialect, keep_alive_events = reply.outcome, waiting_call.dialect, waiting_call.keep_alive_events
    if not request.begun and (keep_alive_events is None or outcome.status != 200):
        headers = answer_headers(reply)
        if outcome.status in KEY_REFUSED and NO_RETRY[0] not in dict(headers):
            headers = (*headers, NO_RETRY)
        await request.send_whole(outcome.status, headers, outcome.body)
    elif keep_alive_events is None:
        if outcome.status != 200:  # the 200 is sent, and an error body would be taken for an answer
            text = ticket_text(reply.ticket)
            raise CallFailed(f"Call {text} failed with status {outcome.status} while its client waited.", text)
        await request.send_chunk(outcome.body, more=False)
    elif outcome.status != 200:
        await request.send_chunk(dialect.stream_error(outcome.body), more=False)
    else:
        await _send_stream(reply, dialect, keep_alive_events, waiting_call.stream_options, request)


async def _send_stream(
    reply: Reply, dialect: Dialect, keep_alive_events: KeepAliveEvents, stream_options: str, request: RequestContext
) -> None:
    try:
        events = dialect.replay(reply.outcome.body, stream_options)
        if request.begun:
            events = keep_alive_events.remaining(events)
    except MalformedResponse as error:
        if not request.begun:
            raise
        body = dialect.error(error.status, error.code, str(error))
        await request.send_chunk(dialect.stream_error(body), more=False)
        return
    if not request.begun:
        await request.send_head(200, [EVENT_STREAM, *carpool_headers(reply)])
    held = b""  # clients may disconnect right after the last event, so it is sent together with the end of the body
    for event in events:
        if held:
            await request.send_chunk(held, more=True)
        held = event
    await request.send_chunk(held, more=False)
