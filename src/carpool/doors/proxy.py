"""The proxy door: agents change one base URL. Thin for now: Messages on `now` and `batch`, and a plain way through.

A call without a budget goes straight on. One with a budget (`x-carpool-budget`, or `/@budget=30m/…` in the base URL)
may ride a batch while its client waits: with pings where it streams, silently where it does not.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

import msgspec

from carpool.doors.asgi import (
    Disconnected,
    Receive,
    Scope,
    Send,
    gone,
    read_body,
    request_headers,
    send_chunk,
    send_head,
    send_whole,
)
from carpool.doors.intake import answer_headers, carpool_headers, latin, make_call
from carpool.doors.options import PREFIX, from_headers, split_path
from carpool.engine import Engine, Passage, Reply, Upstream
from carpool.engine.tasks import Crew
from carpool.errors import BadCall, CarpoolError
from carpool.model import Call, Headers, Lane, ticket_text
from carpool.ports import Clock, RawRequest, WireRequest

log = logging.getLogger("carpool.proxy")

MAX_BODY = 32_000_000
PING_S = 15.0
HOP_BY_HOP = frozenset(
    {"connection", "content-length", "host", "keep-alive", "proxy-authenticate", "proxy-authorization"}
    | {"te", "trailer", "transfer-encoding", "upgrade"}
)
LOCAL_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]", "::1"})
EVENT_STREAM = ("content-type", "text/event-stream; charset=utf-8")
JSON = ("content-type", "application/json")


class Proxy:
    """A plain ASGI application over one engine and one upstream."""

    def __init__(self, engine: Engine, upstream: Upstream, clock: Clock) -> None:
        self._engine = engine
        self._upstream = upstream
        self._clock = clock
        self._crew = Crew()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started = _Once(send)
        try:
            await self._serve(scope, receive, started)
        except Disconnected:
            return
        except CarpoolError as error:
            if started.begun:
                raise  # the head is out: only a broken connection tells the client the truth now
            body = self._upstream.dialect.error(error.status, error.code, str(error))
            await send_whole(started, error.status, [JSON], body)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = request_headers(scope)
        _check_host(headers)
        options, path = split_path(scope["raw_path"].decode("latin-1").partition("?")[0])
        query = scope["query_string"].decode("latin-1")
        if path.startswith("/carpool/"):
            await self._own(path, send)
            return
        options = from_headers(headers).over(options)
        kept = tuple((name, value) for name, value in headers if not name.startswith(PREFIX))
        body = await read_body(receive, MAX_BODY)
        raw = RawRequest(scope["method"], path, query, kept, body)
        if not self._upstream.dialect.handles(raw.method, raw.path):
            await self._pass(raw, send)
            return
        call = make_call(self._engine, self._upstream, self._clock, raw, options)
        await self._call(call, receive, send)

    # ------------------------------------------------------------ calls

    async def _call(self, call: Call, receive: Receive, send: Send) -> None:
        if call.stream:
            passage = await self._engine.forward(call, default=Lane.NOW)
            if isinstance(passage, Passage):
                await self._forward(passage, receive, send)
                return
        waiting = self._crew.lend(self._engine.submit(call, default=Lane.NOW), "call")
        try:
            reply = (
                await self._wait_streaming(waiting, receive, send)
                if call.stream
                else await self._held(waiting, receive)
            )
        finally:
            waiting.cancel()
        await self._answer(call, reply, send)
        self._engine.delivered_soon(reply.ticket)

    async def _wait_streaming(self, waiting: asyncio.Task[Reply], receive: Receive, send: Send) -> Reply:
        """Headers at once, then a ping now and then, so that the client knows that somebody is there."""
        ready, _ = await asyncio.wait([waiting], timeout=0.05)
        if not ready:
            await send_head(send, 200, [EVENT_STREAM, ("cache-control", "no-cache"), ("x-carpool-lane", "batch")])
        leaving = self._crew.lend(gone(receive), "client")
        try:
            while not waiting.done():
                await asyncio.wait((waiting, leaving), timeout=PING_S, return_when=asyncio.FIRST_COMPLETED)
                if leaving.done():
                    raise Disconnected
                if not waiting.done():
                    await send_chunk(send, self._upstream.dialect.keep_alive(), more=True)
        finally:
            leaving.cancel()
        return waiting.result()

    async def _answer(self, call: Call, reply: Reply, send: Send) -> None:
        outcome, dialect = reply.outcome, self._upstream.dialect
        if not call.stream or (outcome.status != 200 and not _begun(send)):
            await send_whole(send, outcome.status, answer_headers(reply), outcome.body)
            return
        if not _begun(send):
            await send_head(send, 200, [EVENT_STREAM, *carpool_headers(reply)])
        if outcome.status != 200:
            await send_chunk(send, dialect.stream_error(outcome.body), more=False)
            return
        for event in dialect.replay(outcome.body):
            await send_chunk(send, event, more=True)
        await send_chunk(send, b"", more=False)

    async def _held(self, waiting: asyncio.Task[Reply], receive: Receive) -> Reply:
        """Waits without a word; a client that hangs up leaves its call behind, to come back to."""
        leaving = self._crew.lend(gone(receive), "client")
        try:
            await asyncio.wait((waiting, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise Disconnected
            return waiting.result()
        finally:
            leaving.cancel()

    async def _forward(self, passage: Passage, receive: Receive, send: Send) -> None:
        """Chunk by chunk. When the client hangs up the upstream request is aborted."""
        leaving = self._crew.lend(gone(receive), "client")
        said = [
            ("x-carpool-lane", "now"),
            ("x-carpool-ticket", ticket_text(passage.ticket)),
            ("x-carpool-reason", latin(passage.reason)),
        ]
        try:
            async with aclosing(passage.chunks) as chunks:
                await send_head(send, passage.status, [*_end_to_end(passage.headers), *said])
                async for chunk in chunks:
                    if leaving.done():
                        raise Disconnected
                    await send_chunk(send, chunk, more=True)
            await send_chunk(send, b"", more=False)
        finally:
            leaving.cancel()

    # ------------------------------------------------------------ everything else

    async def _pass(self, raw: RawRequest, send: Send) -> None:
        """What carpool does not understand travels as it is."""
        headers = tuple(pair for pair in raw.headers if pair[0] not in HOP_BY_HOP)
        url = self._upstream.base_url.rstrip("/") + raw.path + (f"?{raw.query}" if raw.query else "")
        response = await self._upstream.wire.send(WireRequest(raw.method, url, headers, raw.body))
        try:
            await send_head(send, response.status, _end_to_end(response.headers))
            async for chunk in response.chunks():
                await send_chunk(send, chunk, more=True)
            await send_chunk(send, b"", more=False)
        finally:
            await response.aclose()

    async def _own(self, path: str, send: Send) -> None:
        if path == "/carpool/healthz":
            await send_whole(send, 200, [JSON], b'{"status":"ok"}')
        elif path == "/carpool/stats":
            await send_whole(send, 200, [JSON], msgspec.json.encode(self._engine.stats.metrics()))
        else:
            body = self._upstream.dialect.error(404, "not_found_error", f"There is no {path} here.")
            await send_whole(send, 404, [JSON], body)


class _Once:
    """Remembers whether the answer has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

    async def __call__(self, message: Scope) -> None:
        self.begun = True
        await self._send(message)


def _begun(send: Send) -> bool:
    return isinstance(send, _Once) and send.begun


def _end_to_end(headers: Headers) -> list[tuple[str, str]]:
    kept = [pair for pair in headers if pair[0] not in HOP_BY_HOP]
    return kept + [pair for pair in headers if pair[0] == "content-length"]


def _check_host(headers: Headers) -> None:
    """A web page must not reach the proxy through a name that it made point here."""
    host = next((value for name, value in headers if name == "host"), "")
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if name.lower() not in LOCAL_NAMES:
        raise BadCall(f"carpool answers to its local names only, not to {host[:100]!r}.")
