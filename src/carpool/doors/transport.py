"""What the in-process doors share: HTTP requests of `httpx` and `httpx2` in, answers for the same library out."""

from __future__ import annotations

import asyncio
import contextvars
from types import ModuleType
from typing import Any

from msgspec.structs import replace

from carpool.doors.answers import Flow, Whole, async_response, blocking_response, http_error
from carpool.doors.answers import wait_for as wait_for
from carpool.doors.intake import answer_headers, failure, latin, make_call
from carpool.doors.options import PREFIX, Options, from_headers
from carpool.doors.quick import Draft, Settled
from carpool.engine import Engine, Passage, Reply, Upstream
from carpool.engine.upstream import versioned
from carpool.errors import CarpoolError, WireError
from carpool.model import Call, Headers, Lane, ticket_text
from carpool.ports import Clock, RawRequest

CARRIED = "carpool.error"  # the extension of a request under which its own error travels
HELLO = "x-carpool-hello"  # a request that only introduces its credential


class Submission:
    """A call on its way through the SDK: its options, who learns from its request, and what became of it already."""

    __slots__ = ("draft", "options", "settled")

    def __init__(self, options: Options, draft: Draft | None = None, settled: Settled | None = None) -> None:
        self.options = options
        self.draft = draft
        self.settled = settled


# The call that is being submitted, where its options do not come as headers.
current: contextvars.ContextVar[Submission | None] = contextvars.ContextVar("carpool_submission", default=None)


class Exchange:
    """Request in, answer out, over one engine and one upstream; calls without a budget take the lane `default`."""

    def __init__(self, engine: Engine, upstream: Upstream, clock: Clock, default: Lane = Lane.BATCH) -> None:
        self._engine = engine
        self._upstream = upstream
        self._clock = clock
        self._default = default

    def relative(self, path: str) -> str:
        """The path below the provider's base URL."""
        base = "/" + self._upstream.base_url.split("://", 1)[-1].partition("/")[2].strip("/")
        if base == "/":
            return path
        return f"/v1{path.removeprefix(base)}" if versioned(base) else path.removeprefix(base)

    def introduce(self, raw: RawRequest) -> None:
        secret = self._upstream.dialect.secret(raw.headers)
        if secret:
            self._engine.enrol(self._upstream.provider, secret)

    async def handle(self, raw: RawRequest, options: Options, settled: Settled | None = None) -> Flow | Whole:
        """`settled` is what became of the call where it was bought already, and only its answer is to be made."""
        if isinstance(settled, CarpoolError):
            raise settled
        if settled is not None:
            return self._whole(settled, stream=False)
        call = self.understood(raw, options)
        if call.stream:
            return await self.carry(call, raw.body)
        # As `carry` does it, with one coroutine less for each of so many who may wait here.
        return self._whole(self._given(await self._engine.submit(call, self._default, "cancel")), stream=False)

    async def settled(self, raw: RawRequest, options: Options) -> Settled:
        """The call from arrival to outcome, without an HTTP answer made of it."""
        try:
            return self._given(await self._engine.submit(self.understood(raw, options), self._default, "cancel"))
        except CarpoolError as error:
            return error

    def understood(self, raw: RawRequest, options: Options) -> Call:
        return make_call(self._engine, self._upstream, self._clock, raw, options)

    async def carry(self, call: Call, body: bytes) -> Flow | Whole:
        """`body` is what the client sent, with its wish to stream."""
        if call.stream:
            passage = await self._engine.forward(replace(call, body=body), default=self._default)
            if isinstance(passage, Passage):
                return Flow(passage.status, _passing(passage), passage.chunks, passage.chunks.aclose)
        return self._whole(self._given(await self._engine.submit(call, self._default, "cancel")), call.stream)

    def refusal(self, error: CarpoolError, request: Any) -> dict[str, Any]:
        """carpool's own error as an answer, since an SDK would retry an exception; the door finds the error again."""
        request.extensions[CARRIED] = error
        headers = {"content-type": "application/json", "x-should-retry": "false"}
        return {"headers": headers, "content": self._upstream.dialect.error(error.status, error.code, str(error))}

    def _given(self, reply: Reply) -> Reply:
        """An outcome that is as good as in the caller's hands, or its typed error."""
        self._engine.delivered_soon(reply.ticket)
        if (error := failure(reply)) is not None:
            raise error
        return reply

    def _whole(self, reply: Reply, stream: bool) -> Whole:
        headers, outcome = answer_headers(reply), reply.outcome
        if not stream or outcome.status != 200:
            return Whole(outcome.status, headers, outcome.body)
        events = b"".join(self._upstream.dialect.replay(outcome.body))
        kept = tuple(pair for pair in headers if pair[0] != "content-type")
        return Whole(outcome.status, (*kept, ("content-type", "text/event-stream; charset=utf-8")), events)


def raw_request(exchange: Exchange, request: Any, body: bytes) -> tuple[RawRequest, Options, Settled | None]:
    """An httpx request as a door reads it, the options it carries, and what became of it already."""
    headers = tuple((name.lower(), value) for name, value in request.headers.multi_items())
    said = from_headers(_without_hello(headers))
    kept = tuple(pair for pair in headers if not pair[0].startswith(PREFIX))
    path = exchange.relative(request.url.path)
    raw = RawRequest(request.method, path, request.url.query.decode("ascii"), kept, body)
    submission = current.get()
    if submission is None:
        return raw, said, None
    if submission.draft is not None:
        submission.draft.learn_request(raw, said)
    return raw, submission.options.over(said), submission.settled


def _without_hello(headers: Headers) -> Headers:
    return tuple(pair for pair in headers if pair[0] != HELLO)


def async_transport(lib: ModuleType, exchange: Exchange) -> Any:
    """A transport for `lib.AsyncClient`, where lib is httpx or httpx2."""

    class CarpoolTransport(lib.AsyncBaseTransport):  # type: ignore[misc, name-defined]
        async def handle_async_request(self, request: Any) -> Any:
            raw, options, settled = raw_request(exchange, request, await request.aread())
            if HELLO in request.headers:
                exchange.introduce(raw)
                return lib.Response(200, content=b"{}", headers={"content-type": "application/json"})
            try:
                answer = await exchange.handle(raw, options, settled)
            except WireError as error:
                raise http_error(lib, error, request) from error
            except CarpoolError as error:
                return lib.Response(error.status, **exchange.refusal(error, request))
            return async_response(lib, answer, request)

    return CarpoolTransport()


def blocking_transport(lib: ModuleType, exchange: Exchange, loop: asyncio.AbstractEventLoop) -> Any:
    """A transport for `lib.Client`: the engine runs on `loop` in another thread, the caller's thread waits."""

    class CarpoolTransport(lib.BaseTransport):  # type: ignore[misc, name-defined]
        def handle_request(self, request: Any) -> Any:
            raw, options, settled = raw_request(exchange, request, request.read())
            if HELLO in request.headers:
                loop.call_soon_threadsafe(exchange.introduce, raw)
                return lib.Response(200, content=b"{}", headers={"content-type": "application/json"})
            try:
                answer = wait_for(exchange.handle(raw, options, settled), loop)
            except WireError as error:
                raise http_error(lib, error, request) from error
            except CarpoolError as error:
                return lib.Response(error.status, **exchange.refusal(error, request))
            return blocking_response(lib, answer, request, loop)

    return CarpoolTransport()


def _passing(passage: Passage) -> Headers:
    return (
        *passage.headers,
        ("x-carpool-lane", str(passage.lane)),
        ("x-carpool-ticket", ticket_text(passage.ticket)),
        ("x-carpool-reason", latin(passage.reason)),
    )


def flavour(client: Any, kind: str) -> ModuleType | None:
    """The library, httpx or httpx2, whose `kind` of client this is."""
    for parent in type(client).__mro__:
        root = parent.__module__.partition(".")[0]
        if root in ("httpx", "httpx2") and parent.__name__ == kind:
            return __import__(root)
    return None
