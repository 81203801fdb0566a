"""How clients are kept from timing out while their call waits for a batch.

Three ways, chosen by the kind of client and of request (`_pauses`):

- Streaming requests: keep-alive events. After `stream_head_s` the client gets the head of an event stream, and then an
  event at a fixed interval. Until the head is sent, a failure still has its true status; later it is an error event.
  Which event keeps a client alive depends on the client (`vigil`). Most get the dialect's own keep-alive: pings, or
  comments. Claude Code gets an early start of the message and empty changes to it. On `/responses`, clients other than
  SDKs get an early response; SDKs get comments, because they check that all events have one response id, which is not
  known yet.
- SDKs that accept any number of 1xx responses (`Client.bears_1xx`): `102 Processing` every `informational_s`. It
  restarts the read timeout of the Python SDKs and Node's own 300 s limit. The response keeps its true status. It needs
  the ASGI extension of `http.connection`, so HTTP/1.0 clients do not get it.
- All others: white space. They get nothing until `head_s`, then a `200` head, and a space every `space_s`, which JSON
  allows before a value. After the head, a failure can only be shown by breaking the connection.

Some clients tell how long they wait for the next bytes (`Client.limit`). `Patience.within` then reduces every interval
to at most half of that, but not below `SHORTEST_PAUSE_S`.

A call on `now` or `flex` may have to wait for room at the provider, too, if it has a deadline. `informed` sends its
client `102` until the deadline, if the client accepts that; the provider's head is then passed through as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, fields

from carpool.core.model import Headers, ticket_text
from carpool.core.ports import Clock, Dialect
from carpool.dialects.keep_alive import Client, ClientKind, EarlyMessage, EarlyResponse, Pings, Vigil
from carpool.engine import PendingCall, Reply
from carpool.frontends.proxy.http.asgi import EVENT_STREAM, JSON, Disconnected, Send, send_chunk, send_head
from carpool.frontends.proxy.http.connection import Inform
from carpool.frontends.proxy.request_context import RequestContext

PROCESSING = 102
STREAM_HEAD = (EVENT_STREAM, ("cache-control", "no-cache"))
SHORTEST_PAUSE_S = 0.25  # a client with a shorter timeout must come back for its response


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Intervals of silence that clients tolerate, in seconds."""

    informational_s: float = 50.0  # between two `102 Processing`
    head_s: float = 240.0  # for the head, where white space must follow it
    space_s: float = 15.0  # between two spaces after it
    stream_head_s: float = 2.0  # for the head of a stream: until then a failure has its true status
    ping_s: float = 15.0  # between two keep-alive events in a stream
    claude_code_s: float = 20.0  # the same for `EarlyMessage`
    responses_s: float = 20.0  # the same for `EarlyResponse`

    def within(self, limit: float) -> Patience:
        """Shorter intervals for a client that times out after `limit` seconds of silence."""
        most = max(limit / 2, SHORTEST_PAUSE_S)
        return Patience(**{field.name: min(getattr(self, field.name), most) for field in fields(self)})

    def scaled(self, factor: float) -> Patience:
        return Patience(**{field.name: getattr(self, field.name) * factor for field in fields(self)})


def vigil(dialect: Dialect, endpoint: str, client: Client, model: str, ticket: int, now: float) -> Vigil:
    """The keep-alive events for this kind of streaming client."""
    # SDKs require one response id in all events, and it is not known yet: they get comments, which they ignore.
    if endpoint.endswith("/responses") and client.kind is not ClientKind.SDK:
        return EarlyResponse(model, ticket_text(ticket), now)
    if client.kind is ClientKind.CLAUDE_CODE and endpoint.endswith("/messages"):
        return EarlyMessage(model, ticket_text(ticket))
    return Pings(dialect.keep_alive())


async def wait(
    pending_call: PendingCall, request: RequestContext, patience: Patience, said: Headers, signs: Vigil | None
) -> Reply:
    """Waits for the reply. Raises `Disconnected` if the client disconnects first."""
    async with aclosing(_pauses(request, patience, said, signs)) as pauses:
        async for pause in pauses:
            await _wait_for_either(pending_call.answer, request.leaving, pause)
            if request.gone:
                raise Disconnected  # the answer stays in the store until it comes back
            if pending_call.answer.done():
                break
    return pending_call.answer.result()


@contextmanager
def informed(request: RequestContext, patience: Patience, deadline: float | None, clock: Clock) -> Iterator[None]:
    """Sends `102 Processing` while the provider's head is awaited, until the deadline, if the client accepts it."""
    inform = request.inform
    if inform is None or not request.client.bears_1xx or deadline is None:
        yield
        return
    loop, every = asyncio.get_running_loop(), patience.within(request.client.limit).informational_s
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


def _pauses(
    request: RequestContext, patience: Patience, said: Headers, signs: Vigil | None
) -> AsyncGenerator[float, None]:
    """Yields how long to wait before the next sign of life, and sends it when resumed."""
    patience = patience.within(request.client.limit)
    if signs is not None:
        return _streaming(request.send, said, signs, patience.stream_head_s, _interval(signs, patience))
    if request.inform is not None and request.client.bears_1xx:
        return _informing(request.inform, patience.informational_s)
    return _spacing(request.send, said, patience)


def _interval(signs: Vigil, patience: Patience) -> float:
    if isinstance(signs, EarlyMessage):
        return patience.claude_code_s
    return patience.responses_s if isinstance(signs, EarlyResponse) else patience.ping_s


async def _streaming(send: Send, said: Headers, signs: Vigil, head: float, every: float) -> AsyncGenerator[float, None]:
    yield head
    await send_head(send, 200, [*STREAM_HEAD, *said])
    if first := signs.first():
        await send_chunk(send, first, more=True)
    while True:
        yield every
        await send_chunk(send, signs.again(), more=True)


async def _informing(inform: Inform, every: float) -> AsyncGenerator[float, None]:
    while True:
        yield every
        inform(PROCESSING, ())


async def _spacing(send: Send, said: Headers, patience: Patience) -> AsyncGenerator[float, None]:
    yield patience.head_s
    await send_head(send, 200, [JSON, *said])
    while True:
        await send_chunk(send, b" ", more=True)
        yield patience.space_s
