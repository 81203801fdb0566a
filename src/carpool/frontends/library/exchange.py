"""Shared by the library frontends: takes requests of `httpx` or `httpx2`, and returns responses of the same library."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from msgspec.structs import replace

from carpool.core.errors import CarpoolError, Closed, NotConnected, TimedOut, WireError
from carpool.core.model import Call, Headers, Lane, Value
from carpool.core.ports import Clock, RawRequest
from carpool.core.prices import PriceBook
from carpool.core.upstream import versioned
from carpool.engine import Engine, Hook, Keyring, Passage, PendingCall, Probe, Reply, Upstream
from carpool.frontends.intake import answer_headers, failure, make_call, passing_headers
from carpool.frontends.library.fast_path import Draft, Settled
from carpool.planners.access.options import PREFIX, Options, from_headers
from carpool.planners.policy import RoutingPolicy
from carpool.stores import open_store

# ------------------------------------------------------------ responses
# Built with the library of the request: `httpx` or `httpx2`.


class Whole(Value, frozen=True, gc=False):
    """A complete response: JSON, or the events of a finished message."""

    status: int
    headers: Headers
    body: bytes


@dataclass(frozen=True, slots=True)
class Flow:
    """A response whose head has arrived and whose body follows in chunks."""

    status: int
    headers: Headers = field(repr=False)
    chunks: AsyncIterator[bytes]
    end: Callable[[], Coroutine[Any, Any, None]]  # gives the response up, even if no chunk was read


def http_response(
    lib: ModuleType, answer: Flow | Whole, request: Any, loop: asyncio.AbstractEventLoop | None = None
) -> Any:
    """Builds a response of `lib`. `loop` is the engine's, if the client blocks another thread."""
    headers = list(answer.headers)
    if isinstance(answer, Whole):
        return lib.Response(answer.status, headers=headers, content=answer.body)
    stream = _async_stream(lib)(answer, request) if loop is None else _blocking_stream(lib)(answer, request, loop)
    return lib.Response(answer.status, headers=headers, stream=stream)


@cache
def _async_stream(lib: ModuleType) -> Any:
    class Stream(lib.AsyncByteStream):  # type: ignore[misc, name-defined]
        def __init__(self, flow: Flow, request: Any) -> None:
            self._flow = flow
            self._request = request

        async def __aiter__(self) -> AsyncIterator[bytes]:
            try:
                async for chunk in self._flow.chunks:
                    yield chunk
            except WireError as error:
                raise http_error(lib, error, self._request) from error

        async def aclose(self) -> None:
            await self._flow.end()

    return Stream


@cache
def _blocking_stream(lib: ModuleType) -> Any:
    class Stream(lib.SyncByteStream):  # type: ignore[misc, name-defined]
        def __init__(self, flow: Flow, request: Any, loop: asyncio.AbstractEventLoop) -> None:
            self._flow = flow
            self._request = request
            self._loop = loop

        def __iter__(self) -> Iterator[bytes]:
            try:
                while (chunk := wait_for(_next_chunk(self._flow.chunks), self._loop)) is not None:
                    yield chunk
            except WireError as error:
                raise http_error(lib, error, self._request) from error

        def close(self) -> None:
            wait_for(self._flow.end(), self._loop)

    return Stream


def http_error(lib: ModuleType, error: WireError, request: Any) -> Exception:
    """The exception that the SDK would get without carpool if the provider can't be reached."""
    if isinstance(error, NotConnected):
        kind = lib.ConnectError
    else:
        kind = lib.ReadTimeout if isinstance(error, TimedOut) else lib.ReadError
    exception: Exception = kind(str(error), request=request)
    return exception


def wait_for(work: Any, loop: asyncio.AbstractEventLoop) -> Any:
    """Runs a coroutine on the engine's loop from another thread. An interrupt of the thread cancels it."""
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


async def _next_chunk(chunks: AsyncIterator[bytes]) -> bytes | None:
    return await anext(chunks, None)


# ------------------------------------------------------------ engines


async def start_engine(
    store_url: str | Path | None,
    clock: Clock,
    upstreams: Mapping[str, Upstream],
    policy: RoutingPolicy,
    prices: PriceBook | None,
    hooks: tuple[Hook, ...],
    probe: Probe | None = None,
) -> Engine:
    store = await open_store(store_url)
    try:
        engine = Engine(
            store=store,
            clock=clock,
            upstreams=upstreams,
            keyring=Keyring(store.pepper),
            policy=policy,
            prices=prices,
            hooks=hooks,
            probe=probe,
        )
        await engine.start()
    except BaseException:
        await store.aclose()
        raise
    return engine


class EngineThread:
    """An event loop in a thread of its own, for the engine of a blocking frontend."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="carpool", daemon=True)
        self._thread.start()

    def run(self, work: Any) -> Any:
        return wait_for(work, self.loop)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def cancel_unfinished() -> None:
    """Cancels calls on `now` that took too long: their threads must not wait forever."""
    unfinished = asyncio.all_tasks() - {asyncio.current_task()}
    for task in unfinished:
        task.cancel()
    await asyncio.gather(*unfinished, return_exceptions=True)


# ------------------------------------------------------------ calls

CARRIED = "carpool.error"  # request extension that holds carpool's own error
HELLO = "x-carpool-hello"  # header of a request that only registers its credential


class Submission:
    """A call that goes through the SDK: its options, the draft that learns from it, and its result if it has one."""

    __slots__ = ("draft", "options", "settled")

    def __init__(self, options: Options, draft: Draft | None = None, settled: Settled | None = None) -> None:
        self.options = options
        self.draft = draft
        self.settled = settled


# The call being submitted, if its options are not sent as headers.
current: contextvars.ContextVar[Submission | None] = contextvars.ContextVar("carpool_submission", default=None)


class InProcessExchange:
    """Answers requests with one engine and one upstream. Calls without a budget use the lane `default`."""

    def __init__(self, engine: Engine, upstream: Upstream, clock: Clock, default: Lane = Lane.BATCH) -> None:
        self._engine = engine
        self._upstream = upstream
        self._clock = clock
        self._default = default

    def convert(self, request: Any, body: bytes) -> tuple[RawRequest, Options, Settled | None]:
        """Converts an httpx request. Returns it with its options, and its result if it has one."""
        headers = tuple((name.lower(), value) for name, value in request.headers.multi_items())
        header_options = from_headers(tuple(pair for pair in headers if pair[0] != HELLO))
        kept = tuple(pair for pair in headers if not pair[0].startswith(PREFIX))
        path = request.url.path
        base = "/" + self._upstream.base_url.split("://", 1)[-1].partition("/")[2].strip("/")
        if base != "/":
            path = ("/v1" if versioned(base) else "") + path.removeprefix(base)
        raw = RawRequest(request.method, path, request.url.query.decode("ascii"), kept, body)
        submission = current.get()
        if submission is None:
            return raw, header_options, None
        if submission.draft is not None:
            submission.draft.learn_request(raw, header_options)
        return raw, submission.options.over(header_options), submission.settled

    def introduce(self, raw: RawRequest) -> None:
        secret = self._upstream.dialect.secret(raw.headers)
        if secret:
            self._engine.enrol(self._upstream.provider, secret)

    async def handle(self, raw: RawRequest, options: Options, settled: Settled | None = None) -> Flow | Whole:
        """Answers a request. If `settled` is given, the call has its result, and only the response is built."""
        if isinstance(settled, CarpoolError):
            raise settled
        if settled is not None:
            return self._whole(settled, stream=False)
        call = self.understood(raw, options)
        if call.stream:
            return await self.carry(call, raw.body)
        # The same as `carry`, but with one coroutine less for each waiting call.
        return self._whole(
            self._delivered(await self._engine.submit_pending(call, self._default, "cancel")), stream=False
        )

    async def settled(self, raw: RawRequest, options: Options) -> Settled:
        """Submits a call and returns its result without building an HTTP response."""
        try:
            return self._delivered(
                await self._engine.submit_pending(self.understood(raw, options), self._default, "cancel")
            )
        except CarpoolError as error:
            return error

    def understood(self, raw: RawRequest, options: Options) -> Call:
        return make_call(self._engine, self._upstream, self._clock, raw, options)

    async def carry(self, call: Call, body: bytes) -> Flow | Whole:
        """Submits a call. `body` is the client's own, including its `stream` option."""
        if call.stream:
            passage = await self._engine.forward(replace(call, body=body), default=self._default)
            if isinstance(passage, Passage):
                headers = (*passage.headers, *passing_headers(passage))
                return Flow(passage.status, headers, passage.chunks, passage.chunks.aclose)
        return self._whole(
            self._delivered(await self._engine.submit_pending(call, self._default, "cancel")), call.stream
        )

    def refusal(self, error: CarpoolError, request: Any) -> dict[str, Any]:
        """carpool's own error as a response, because an SDK would retry an exception. `translated` undoes it."""
        request.extensions[CARRIED] = error
        headers = {"content-type": "application/json", "x-should-retry": "false"}
        return {"headers": headers, "content": self._upstream.dialect.error(error.status, error.code, str(error))}

    def _delivered(self, result: tuple[Reply, PendingCall | None]) -> Reply:
        """Marks the outcome as delivered, and returns it or raises its typed error."""
        reply, pending_call = result
        self._engine.deliveries.add(reply.ticket, pending_call)
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


def async_transport(lib: ModuleType, exchange: InProcessExchange) -> Any:
    """A transport for `lib.AsyncClient`, where lib is httpx or httpx2."""

    class CarpoolTransport(lib.AsyncBaseTransport):  # type: ignore[misc, name-defined]
        async def handle_async_request(self, request: Any) -> Any:
            raw, options, settled = exchange.convert(request, await request.aread())
            if HELLO in request.headers:
                exchange.introduce(raw)
                return lib.Response(200, content=b"{}", headers={"content-type": "application/json"})
            try:
                answer = await exchange.handle(raw, options, settled)
            except WireError as error:
                raise http_error(lib, error, request) from error
            except CarpoolError as error:
                return lib.Response(error.status, **exchange.refusal(error, request))
            return http_response(lib, answer, request)

    return CarpoolTransport()


def blocking_transport(lib: ModuleType, exchange: InProcessExchange, loop: asyncio.AbstractEventLoop) -> Any:
    """A transport for `lib.Client`. The engine runs on `loop` in another thread; the caller's thread waits."""

    class CarpoolTransport(lib.BaseTransport):  # type: ignore[misc, name-defined]
        def handle_request(self, request: Any) -> Any:
            raw, options, settled = exchange.convert(request, request.read())
            if HELLO in request.headers:
                loop.call_soon_threadsafe(exchange.introduce, raw)
                return lib.Response(200, content=b"{}", headers={"content-type": "application/json"})
            try:
                answer = wait_for(exchange.handle(raw, options, settled), loop)
            except WireError as error:
                raise http_error(lib, error, request) from error
            except CarpoolError as error:
                return lib.Response(error.status, **exchange.refusal(error, request))
            return http_response(lib, answer, request, loop)

    return CarpoolTransport()
