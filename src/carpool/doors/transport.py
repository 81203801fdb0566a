"""The in-process door: an HTTP transport for `httpx` and `httpx2` clients, so that any SDK pools without a proxy."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from carpool.doors.intake import answer_headers, failure, latin, make_call
from carpool.doors.options import PREFIX, Options, from_headers
from carpool.engine import Engine, Passage, Reply, Upstream
from carpool.errors import CarpoolError, Closed, NotConnected, TimedOut, WireError
from carpool.model import Call, Headers, Lane, ticket_text
from carpool.ports import Clock, RawRequest

CARRIED = "carpool.error"  # the extension of a request under which its own error travels
HELLO = "x-carpool-hello"  # a request that only introduces its credential

# Options of the call that is being submitted, where they do not come as headers.
current_options: contextvars.ContextVar[Options | None] = contextvars.ContextVar("carpool_options", default=None)


@dataclass(frozen=True, slots=True)
class Whole:
    """An answer that is complete: JSON, or the events of a finished message."""

    status: int
    headers: Headers
    body: bytes


class Exchange:
    """Request in, answer out, over one engine and one upstream. What every flavour of transport shares."""

    def __init__(self, engine: Engine, upstream: Upstream, clock: Clock) -> None:
        self._engine = engine
        self._upstream = upstream
        self._clock = clock

    def relative(self, path: str) -> str:
        """The path below the provider's base URL."""
        base = "/" + self._upstream.base_url.split("://", 1)[-1].partition("/")[2].strip("/")
        return path if base == "/" else path.removeprefix(base)

    def introduce(self, raw: RawRequest) -> None:
        secret = tuple((name, value) for name, value in raw.headers if name in ("authorization", "x-api-key"))
        if secret:
            self._engine.enrol(self._upstream.provider, secret)

    async def handle(self, raw: RawRequest, options: Options) -> Passage | Whole:
        call = make_call(self._engine, self._upstream, self._clock, raw, options)
        if call.stream:
            passage = await self._engine.forward(replace(call, body=raw.body), default=Lane.BATCH)
            if isinstance(passage, Passage):
                return passage
        return self._whole(await self._submit(call), call.stream)

    def refusal(self, error: CarpoolError, request: Any) -> dict[str, Any]:
        """carpool's own error as an answer, since an SDK would retry an exception; the door finds the error again."""
        request.extensions[CARRIED] = error
        headers = {"content-type": "application/json", "x-should-retry": "false"}
        return {"headers": headers, "content": self._upstream.dialect.error(error.status, error.code, str(error))}

    async def _submit(self, call: Call) -> Reply:
        reply = await self._engine.submit(call, gone="cancel")
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


def raw_request(exchange: Exchange, request: Any, body: bytes) -> tuple[RawRequest, Options]:
    """An httpx request as a door reads it, and the options it carries."""
    headers = tuple((name.lower(), value) for name, value in request.headers.multi_items())
    options = (current_options.get() or Options()).over(from_headers(_without_hello(headers)))
    kept = tuple(pair for pair in headers if not pair[0].startswith(PREFIX))
    path = exchange.relative(request.url.path)
    return RawRequest(request.method, path, request.url.query.decode("ascii"), kept, body), options


def _without_hello(headers: Headers) -> Headers:
    return tuple(pair for pair in headers if pair[0] != HELLO)


def async_transport(lib: ModuleType, exchange: Exchange) -> Any:
    """A transport for `lib.AsyncClient`, where lib is httpx or httpx2."""

    class Stream(lib.AsyncByteStream):  # type: ignore[misc, name-defined]
        def __init__(self, chunks: AsyncGenerator[bytes, None]) -> None:
            self._chunks = chunks

        async def __aiter__(self) -> AsyncIterator[bytes]:
            async for chunk in self._chunks:
                yield chunk

        async def aclose(self) -> None:
            await self._chunks.aclose()

    class CarpoolTransport(lib.AsyncBaseTransport):  # type: ignore[misc, name-defined]
        async def handle_async_request(self, request: Any) -> Any:
            raw, options = raw_request(exchange, request, await request.aread())
            if HELLO in request.headers:
                exchange.introduce(raw)
                return lib.Response(200, content=b"{}", headers={"content-type": "application/json"})
            try:
                answer = await exchange.handle(raw, options)
            except WireError as error:
                raise http_error(lib, error, request) from error
            except CarpoolError as error:
                return lib.Response(error.status, **exchange.refusal(error, request))
            if isinstance(answer, Passage):
                return lib.Response(answer.status, headers=_passing(answer), stream=Stream(answer.chunks))
            return lib.Response(answer.status, headers=list(answer.headers), content=answer.body)

    return CarpoolTransport()


def blocking_transport(lib: ModuleType, exchange: Exchange, loop: asyncio.AbstractEventLoop) -> Any:
    """A transport for `lib.Client`: the engine runs on `loop` in another thread, the caller's thread waits."""

    class Stream(lib.SyncByteStream):  # type: ignore[misc, name-defined]
        def __init__(self, chunks: AsyncGenerator[bytes, None]) -> None:
            self._chunks = chunks

        def __iter__(self) -> Iterator[bytes]:
            while (chunk := wait_for(_next(self._chunks), loop)) is not None:
                yield chunk

        def close(self) -> None:
            wait_for(self._chunks.aclose(), loop)

    class CarpoolTransport(lib.BaseTransport):  # type: ignore[misc, name-defined]
        def handle_request(self, request: Any) -> Any:
            raw, options = raw_request(exchange, request, request.read())
            if HELLO in request.headers:
                loop.call_soon_threadsafe(exchange.introduce, raw)
                return lib.Response(200, content=b"{}", headers={"content-type": "application/json"})
            try:
                answer = wait_for(exchange.handle(raw, options), loop)
            except WireError as error:
                raise http_error(lib, error, request) from error
            except CarpoolError as error:
                return lib.Response(error.status, **exchange.refusal(error, request))
            if isinstance(answer, Passage):
                return lib.Response(answer.status, headers=_passing(answer), stream=Stream(answer.chunks))
            return lib.Response(answer.status, headers=list(answer.headers), content=answer.body)

    return CarpoolTransport()


def http_error(lib: ModuleType, error: WireError, request: Any) -> Exception:
    """A provider that can't be reached is, to the SDK, what it would be without carpool."""
    if isinstance(error, NotConnected):
        kind = lib.ConnectError
    else:
        kind = lib.ReadTimeout if isinstance(error, TimedOut) else lib.ReadError
    made: Exception = kind(str(error), request=request)
    return made


def wait_for(work: Any, loop: asyncio.AbstractEventLoop) -> Any:
    """Runs a coroutine on the engine's loop from another thread. An interrupt cancels it there."""
    if loop.is_closed():
        work.close()
        raise Closed("This fleet is closed. Make a new one.")
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result()
    except CancelledError:
        raise Closed("carpool closed before this call was answered.") from None
    except BaseException:
        future.cancel()
        raise


async def _next(chunks: AsyncIterator[bytes]) -> bytes | None:
    return await anext(chunks, None)


def _passing(passage: Passage) -> list[tuple[str, str]]:
    said = [
        ("x-carpool-lane", "now"),
        ("x-carpool-ticket", ticket_text(passage.ticket)),
        ("x-carpool-reason", latin(passage.reason)),
    ]
    return [*passage.headers, *said]


def flavour(client: Any, kind: str) -> ModuleType | None:
    """The library, httpx or httpx2, whose `kind` of client this is."""
    for parent in type(client).__mro__:
        root = parent.__module__.partition(".")[0]
        if root in ("httpx", "httpx2") and parent.__name__ == kind:
            return __import__(root)
    return None
