"""The proxy door: agents change one base URL. Thin for now: Messages on `now` and `batch`, and a plain way through.

A call without a budget goes straight on. One with a budget (`x-carpool-budget`, or `/@budget=30m/…` in the base URL)
may ride a batch while its client waits: with pings where it streams, silently where it does not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Literal, TypeVar

import msgspec

from carpool.doors.asgi import (
    Disconnected,
    Once,
    Receive,
    Scope,
    Send,
    end_to_end,
    gone,
    passed_on,
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
from carpool.errors import BadCall, CarpoolError, Closed
from carpool.model import Call, Headers, Lane, ticket_text
from carpool.ports import Clock, RawRequest, WireRequest

log = logging.getLogger("carpool.proxy")

MAX_BODY = 32_000_000
PING_S = 15.0
KEYS = frozenset({"authorization", "x-api-key"})
LOCAL_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]", "::1"})
EVENT_STREAM = ("content-type", "text/event-stream; charset=utf-8")
JSON = ("content-type", "application/json")

T = TypeVar("T")
Leaving = asyncio.Task[None]  # done when the client has hung up


class Proxy:
    """A plain ASGI application over one engine and one upstream.

    `on_disconnect` says what becomes of a batched call whose client hangs up.
    """

    def __init__(
        self, engine: Engine, upstream: Upstream, clock: Clock, *, on_disconnect: Literal["keep", "cancel"] = "keep"
    ) -> None:
        self._engine = engine
        self._upstream = upstream
        self._clock = clock
        self._on_disconnect = on_disconnect
        self._crew = Crew()
        self._open: set[asyncio.Task[Any]] = set()
        self._passing: set[asyncio.Task[Any]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        once, task = Once(send), asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self._serve(scope, receive, once)
        except Disconnected:
            return
        except CarpoolError as error:
            if once.begun:
                log.warning("A begun answer breaks off: %s", error)
                raise  # the head is out: only a broken connection tells the client the truth now
            body = self._upstream.dialect.error(error.status, error.code, str(error))
            await send_whole(once, error.status, [JSON], body)
        finally:
            self._open.discard(task)

    async def _serve(self, scope: Scope, receive: Receive, send: Once) -> None:
        headers = request_headers(scope)
        _check_host(headers)
        options, path = split_path(scope["raw_path"].decode("latin-1").partition("?")[0])
        query = scope["query_string"].decode("latin-1")
        if path.startswith("/carpool/"):
            await self._own(path, send)
            return
        options = from_headers(headers).over(options)
        kept = tuple((name, value) for name, value in headers if not name.startswith(PREFIX))
        raw = RawRequest(scope["method"], path, query, kept, await read_body(receive, MAX_BODY))
        leaving = self._crew.lend(gone(receive), "client")
        try:
            if self._understands(raw):
                call = make_call(self._engine, self._upstream, self._clock, raw, options)
                await self._call(call, raw, leaving, send)
            else:
                await self._unless_gone(self._pass(raw, send), leaving, passing=True)
        finally:
            leaving.cancel()

    def _understands(self, raw: RawRequest) -> bool:
        """A call without a key buys nothing on any lane: the provider says so best."""
        return self._upstream.dialect.handles(raw.method, raw.path) and any(name in KEYS for name, _ in raw.headers)

    async def _unless_gone(self, work: Coroutine[Any, Any, T], leaving: Leaving, *, passing: bool = False) -> T:
        """Does the work, unless its client hangs up first: then it is cancelled, and its upstream request with it."""
        task = self._crew.lend(work, "call")
        if passing:
            self._passing.add(task)
        try:
            await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
            return self._result(task)
        finally:
            task.cancel()
            await asyncio.wait((task,))
            self._passing.discard(task)

    def _result(self, task: asyncio.Task[T]) -> T:
        if not task.done():
            raise Disconnected
        if task.cancelled():  # by `drain` or `aclose`
            raise Closed("carpool is stopping. Send this call again in a moment.")
        return task.result()

    # ------------------------------------------------------------ calls

    async def _call(self, call: Call, raw: RawRequest, leaving: Leaving, send: Once) -> None:
        said: Headers | None = None
        if call.stream:
            said = await self._unless_gone(self._forward(call, raw, send), leaving, passing=True)
            if said is None:
                return
        submitted = self._engine.submit(call, default=Lane.NOW, gone=self._on_disconnect)
        work = submitted if said is None else self._pinging(submitted, said, send)
        reply = await self._unless_gone(work, leaving)
        if leaving.done():
            raise Disconnected  # its answer waits in the store for it to come back
        await self._answer(call, reply, send)
        self._engine.delivered_soon(reply.ticket)

    async def _forward(self, call: Call, raw: RawRequest, send: Send) -> Headers | None:
        """Chunk by chunk, where the call travels on `now`; otherwise what can be said of it while it waits."""
        passage = await self._engine.forward(replace(call, body=raw.body), default=Lane.NOW)
        if not isinstance(passage, Passage):
            return ("x-carpool-lane", str(passage.lane)), ("x-carpool-reason", latin(passage.reason))
        said = [
            ("x-carpool-lane", "now"),
            ("x-carpool-ticket", ticket_text(passage.ticket)),
            ("x-carpool-reason", latin(passage.reason)),
        ]
        async with aclosing(passage.chunks) as chunks:
            await send_head(send, passage.status, [*passed_on(passage.headers), *said])
            async for chunk in chunks:
                await send_chunk(send, chunk, more=True)
        await send_chunk(send, b"", more=False)
        return None

    async def _pinging(self, submitted: Coroutine[Any, Any, Reply], said: Headers, send: Send) -> Reply:
        """Headers at once, then a ping now and then, so that the client knows that somebody is there."""
        waiting = self._crew.lend(submitted, "waiting")
        try:
            ready, _ = await asyncio.wait((waiting,), timeout=0.05)
            if not ready:
                await send_head(send, 200, [EVENT_STREAM, ("cache-control", "no-cache"), *said])
            while not ready:
                ready, _ = await asyncio.wait((waiting,), timeout=PING_S)
                if not ready:
                    await send_chunk(send, self._upstream.dialect.keep_alive(), more=True)
            return waiting.result()
        finally:
            waiting.cancel()

    async def _answer(self, call: Call, reply: Reply, send: Once) -> None:
        outcome, dialect = reply.outcome, self._upstream.dialect
        if not call.stream or (outcome.status != 200 and not send.begun):
            await send_whole(send, outcome.status, answer_headers(reply), outcome.body)
            return
        if not send.begun:
            await send_head(send, 200, [EVENT_STREAM, *carpool_headers(reply)])
        if outcome.status != 200:
            await send_chunk(send, dialect.stream_error(outcome.body), more=False)
            return
        for event in dialect.replay(outcome.body):
            await send_chunk(send, event, more=True)
        await send_chunk(send, b"", more=False)

    # ------------------------------------------------------------ everything else

    async def _pass(self, raw: RawRequest, send: Send) -> None:
        """What carpool does not understand travels as it is."""
        url = self._upstream.base_url.rstrip("/") + raw.path + (f"?{raw.query}" if raw.query else "")
        request = WireRequest(raw.method, url, tuple(end_to_end(raw.headers)), raw.body)
        response = await self._upstream.wire.send(request)
        try:
            await send_head(send, response.status, passed_on(response.headers))
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

    # ------------------------------------------------------------ the end

    async def drain(self, timeout: float) -> None:
        """Gives open requests so long, then cuts what passes through. Before the engine closes, to be entered."""
        if self._open:
            await asyncio.wait(list(self._open), timeout=timeout)
        for task in list(self._passing):
            task.cancel()
        if self._passing:
            await asyncio.wait(list(self._passing), timeout=1.0)

    async def aclose(self) -> None:
        """Ends what is left. After the engine has told its own waiters that it closed."""
        await self._crew.rest(timeout=0.1)


def _check_host(headers: Headers) -> None:
    """A web page must not reach the proxy through a name that it made point here."""
    host = next((value for name, value in headers if name == "host"), "")
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if name.lower() not in LOCAL_NAMES:
        raise BadCall(f"carpool answers to its local names only, not to {host[:100]!r}.")
