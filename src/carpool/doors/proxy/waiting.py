"""What a client hears while it waits for its batch, each kind as it can bear it.

Streaming clients get their head early and then signs of life. SDKs that understand `102 Processing` get that, and
their true status at the end. The others get silence as long as they bear it, then a `200` and white space, which JSON
allows; after that a failure can only be told by breaking the connection.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, fields

from carpool.dialects.early import EarlyMessage, EarlyResponse, Pings, Vigil
from carpool.doors.asgi import EVENT_STREAM, JSON, Disconnected, Send, send_chunk, send_head
from carpool.doors.proxy.connection import Inform
from carpool.doors.proxy.kinds import Client, Kind
from carpool.doors.proxy.visit import Visit
from carpool.engine import Reply, Seat
from carpool.model import Headers, ticket_text
from carpool.ports import Dialect

PROCESSING = 102
STREAM_HEAD = (EVENT_STREAM, ("cache-control", "no-cache"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long clients wait in silence, in seconds."""

    informational_s: float = 50.0  # between two `102 Processing`
    head_s: float = 240.0  # for the head, where white space must follow it
    space_s: float = 15.0  # between two spaces
    stream_head_s: float = 2.0  # for the head of a stream: a quick failure still has its true status
    ping_s: float = 15.0  # between two signs of life in a stream
    claude_code_s: float = 20.0
    responses_s: float = 20.0
    hasty_s: float = 3.0  # between two signs of any kind, for clients that bear no more than five

    def scaled(self, factor: float) -> Patience:
        return Patience(**{field.name: getattr(self, field.name) * factor for field in fields(self)})


def vigil(dialect: Dialect, endpoint: str, client: Client, model: str, ticket: int, now: float) -> Vigil:
    """The signs of life that this kind of streaming client takes for one."""
    if endpoint.endswith("/responses"):
        return EarlyResponse(model, ticket_text(ticket), now)
    if client.kind is Kind.CLAUDE_CODE and endpoint.endswith("/messages"):
        return EarlyMessage(model, ticket_text(ticket))
    return Pings(dialect.keep_alive())


async def wait(seat: Seat, visit: Visit, patience: Patience, said: Headers, signs: Vigil | None) -> Reply:
    """The answer, when it comes. Raises `Disconnected` when its client leaves before."""
    async with aclosing(_pauses(visit, patience, said, signs)) as pauses:
        async for pause in pauses:
            await _either(seat.answer, visit.leaving, pause)
            if visit.gone:
                raise Disconnected  # its answer waits in the store for it to come back
            if seat.answer.done():
                break
    return seat.answer.result()


async def _either(answer: asyncio.Future[Reply], leaving: asyncio.Future[None], timeout: float) -> None:
    """Until one of them is done or the time is over. `asyncio.wait` would do, at thrice the memory for each client."""
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


def _pauses(visit: Visit, patience: Patience, said: Headers, signs: Vigil | None) -> AsyncGenerator[float, None]:
    """How long to be silent, again and again; between two pauses something is said."""
    most = patience.hasty_s if visit.client.hasty else math.inf
    if signs is not None:
        every = min(_every(signs, patience), most)
        return _streaming(visit.send, said, signs, patience.stream_head_s, every)
    if visit.inform is not None and visit.client.bears_1xx:
        return _informing(visit.inform, min(patience.informational_s, most))
    return _spacing(visit.send, said, patience)


def _every(signs: Vigil, patience: Patience) -> float:
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
