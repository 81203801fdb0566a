"""Shared by the library frontends: takes requests of `httpx` or `httpx2`, and returns responses of the same library.

`respond` and `respond_in_thread` turn the answer to a request, from a `FleetDispatcher` or a `Transport`, into a
response. `InProcessExchange` answers with one engine and one upstream.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from msgspec.structs import replace

from carpool.core.errors import CarpoolError, Closed, NotConnected, TimedOut, WireError
from carpool.core.model import Call, Headers, Lane, Value
from carpool.core.ports import Clock, RawRequest
from carpool.core.upstream import versioned
from carpool.dialects import DEFAULT_DIALECT, dialect_of_endpoint
from carpool.engine import Engine, Keyring, Reply, Stats, StreamedResponse, Upstream
from carpool.frontends.intake import NO_RETRY, answer_headers, failure, make_call, streamed_headers
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


class Flow(Value, frozen=True):
    """A response whose head has arrived and whose body follows in chunks."""

    status: int
    headers: Headers
    chunks: AsyncIterator[bytes]
    end: Callable[[], Coroutine[Any, Any, None]]  # gives the response up, even if no chunk was read


def http_response(answer: Flow | Whole, request: Any, loop: asyncio.AbstractEventLoop | None = None) -> Any:
    """Builds a response. `loop` is the engine's, if the client blocks another thread."""
    headers, lib = list(answer.headers), library(request)
    if isinstance(answer, Whole):
        return lib.Response(answer.status, headers=headers, content=answer.body)
    return lib.Response(answer.status, headers=headers, stream=_stream_class(lib)(answer, request, loop))


def library(request: Any) -> ModuleType:
    return import_module(type(request).__module__.partition(".")[0])


def httpx_library(value: Any, name: str | None = None) -> ModuleType | None:
    """The library, httpx or httpx2, whose class `name`, or any of whose classes, a client or transport has."""
    for parent in type(value).__mro__:
        root = parent.__module__.partition(".")[0]
        if root in ("httpx", "httpx2") and name in (None, parent.__name__):
            return import_module(root)
    return None


async def respond(request: Any, answer: Callable[[Any, bytes], Awaitable[Flow | Whole]]) -> Any:
    """The response to a request of an asyncio client."""
    body = await request.aread()
    try:
        answered = await answer(request, body)
    except CarpoolError as error:
        answered = _refusal_unless_lost(error, request)
    return http_response(answered, request)


def respond_in_thread(
    request: Any,
    start: Callable[[], asyncio.AbstractEventLoop],
    answer: Callable[[Any, bytes], Awaitable[Flow | Whole]],
) -> Any:
    """The response to a request of a blocking client. `start` returns the loop of the engine."""
    body, loop = request.read(), None
    try:
        loop = start()
        answered = wait_for(answer(request, body), loop)
    except CarpoolError as error:
        answered = _refusal_unless_lost(error, request)
    return http_response(answered, request, loop)


def _refusal_unless_lost(error: CarpoolError, request: Any) -> Whole:
    if isinstance(error, WireError):
        raise http_error(error, request) from error
    return refusal(error, request)


def refusal(error: CarpoolError, request: Any) -> Whole:
    """carpool's own error as a response, because an SDK would treat an exception as a broken connection and retry. The
    request carries the error, for a fleet to raise."""
    request.extensions[CARRIED] = error
    dialect = dialect_of_endpoint(request.method, f"/v1/{request.url.path.rpartition('/v1/')[2]}") or DEFAULT_DIALECT
    return Whole(error.status, (JSON, NO_RETRY), dialect.error(error.status, error.code, str(error)))


@cache
def _stream_class(lib: ModuleType) -> Any:
    class Stream(lib.AsyncByteStream, lib.SyncByteStream):  # type: ignore[misc, name-defined]
        """Passes the chunks of a `Flow` on. `loop` is the engine's, if the client blocks another thread."""

        def __init__(self, flow: Flow, request: Any, loop: asyncio.AbstractEventLoop | None) -> None:
            self._flow = flow
            self._request = request
            self._loop = loop

        async def __aiter__(self) -> AsyncIterator[bytes]:
            try:
                async for chunk in self._flow.chunks:
                    yield chunk
            except WireError as error:
                raise http_error(error, self._request) from error

        async def aclose(self) -> None:
            await self._flow.end()

        def __iter__(self) -> Iterator[bytes]:
            try:
                while (chunk := wait_for(_next_chunk(self._flow.chunks), self._loop)) is not None:
                    yield chunk
            except WireError as error:
                raise http_error(error, self._request) from error

        def close(self) -> None:
            wait_for(self._flow.end(), self._loop)

    return Stream


def http_error(error: WireError, request: Any) -> Exception:
    """The exception that the SDK would get without carpool if the provider can't be reached."""
    lib = library(request)
    if isinstance(error, NotConnected):
        kind = lib.ConnectError
    else:
        kind = lib.ReadTimeout if isinstance(error, TimedOut) else lib.ReadError
    exception: Exception = kind(str(error), request=request)
    return exception


def wait_for(work: Any, loop: asyncio.AbstractEventLoop | None) -> Any:
    """Runs a coroutine on the engine's loop from another thread. An interrupt of the thread cancels it."""
    if loop is None or loop.is_closed():
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


class LibraryFrontend:
    """What a frontend shows of its engine."""

    policy: RoutingPolicy
    _engine: Engine | None = None

    @property
    def stats(self) -> Stats:
        """Calls, batches and costs since the start."""
        return Stats() if self._engine is None else self._engine.stats

    def metrics(self) -> dict[str, int]:
        """The statistics as named counters, under the policy's prefix."""
        return self.stats.metrics(self.policy.metrics_prefix, self.policy.track_sync_batch_split)


async def start_engine(store_url: str | Path | None, engine: Callable[..., Engine]) -> Engine:
    """Opens the store and starts an engine on it. `engine` makes one for a store and its keyring."""
    store = await open_store(store_url)
    try:
        started = engine(store=store, keyring=Keyring(store.pepper))
        await started.start()
    except BaseException:
        await store.aclose()
        raise
    return started


class EngineThread:
    """An event loop in a separate thread, for the engine of a blocking frontend."""

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
JSON = ("content-type", "application/json")


@dataclass(slots=True)
class Submission:
    """A call that goes through the SDK: its options, the draft that learns from it, and its result if it has one."""

    options: Options
    draft: Draft | None = None
    settled: Settled | None = None


# The call being submitted, if its options are not sent as headers.
current: contextvars.ContextVar[Submission | None] = contextvars.ContextVar("carpool_submission", default=None)


class InProcessExchange:
    """Answers requests with one engine and one upstream. Calls without a budget use the lane `default`."""

    def __init__(self, engine: Engine, upstream: Upstream, clock: Clock, default: Lane = Lane.BATCH) -> None:
        self._engine = engine
        self._upstream = upstream
        self._clock = clock
        self._default = default

    async def answer(self, request: Any, body: bytes) -> Flow | Whole:
        """Answers an httpx request, with its submission, if it has one."""
        headers = tuple((name.lower(), value) for name, value in request.headers.multi_items())
        options = from_headers(tuple(pair for pair in headers if pair[0] != HELLO))
        kept = tuple(pair for pair in headers if not pair[0].startswith(PREFIX))
        path = request.url.path
        base = "/" + self._upstream.base_url.split("://", 1)[-1].partition("/")[2].strip("/")
        if base != "/":
            path = ("/v1" if versioned(base) else "") + path.removeprefix(base)
        raw, submission = RawRequest(request.method, path, request.url.query.decode("ascii"), kept, body), current.get()
        if HELLO in request.headers:
            if secret := self._upstream.dialect.secret(kept):
                self._engine.add_secret(self._upstream.provider, secret)
            return Whole(200, (JSON,), b"{}")
        if submission is not None:
            if submission.draft is not None:
                submission.draft.learn_request(raw, options)
            options = submission.options.over(options)
            if isinstance(submission.settled, CarpoolError):
                raise submission.settled
            if submission.settled is not None:  # only the response is missing
                return self._whole(submission.settled, stream=False)
        return await self.handle(raw, options)

    async def settled(self, raw: RawRequest, options: Options) -> Settled:
        """Submits a call and returns its result without building an HTTP response."""
        try:
            return await self._submitted(self.understood(raw, options))
        except CarpoolError as error:
            return error

    def understood(self, raw: RawRequest, options: Options) -> Call:
        return make_call(self._engine, self._upstream, self._clock, raw, options)

    async def handle(self, raw: RawRequest, options: Options, call: Call | None = None) -> Flow | Whole:
        """Submits a request, whose call may be known already."""
        call = call or self.understood(raw, options)
        if call.stream:  # the body is the client's own, including its `stream` option
            streamed = await self._engine.forward(replace(call, body=raw.body), default=self._default)
            if isinstance(streamed, StreamedResponse):
                headers = (*streamed.headers, *streamed_headers(streamed))
                return Flow(streamed.status, headers, streamed.chunks, streamed.chunks.aclose)
        return self._whole(await self._submitted(call), call.stream)

    async def _submitted(self, call: Call) -> Reply:
        """Marks the outcome as delivered, and returns it or raises its typed error."""
        reply, pending_call = await self._engine.submit(call, self._default, "cancel")
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


class ExchangeTransport:
    """The transport of an SDK client's copy. The engine of a blocking client runs on `loop`, in another thread."""

    def __init__(self, exchange: InProcessExchange, loop: Any = None) -> None:
        self._answer = exchange.answer
        self._loop = loop

    async def handle_async_request(self, request: Any) -> Any:
        return await respond(request, self._answer)

    def handle_request(self, request: Any) -> Any:
        return respond_in_thread(request, lambda: self._loop, self._answer)
