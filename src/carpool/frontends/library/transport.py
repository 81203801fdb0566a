"""`carpool.transport()`: a transport for an SDK's `httpx` or `httpx2` client that batches calls in the process.

It has one engine on one loop, with an upstream for every base URL in the requests of its clients.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Coroutine, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from msgspec.structs import replace

from carpool.core.clock import SystemClock
from carpool.core.errors import BadCall, Closed, NotStarted, TimedOut, WireError, WrongClient
from carpool.core.model import CachingMode, Headers, Lane
from carpool.core.ports import Dialect, HttpClient, HttpRequest, RawRequest
from carpool.core.prices import PriceBook
from carpool.dialects import compatible_provider, configured_dialect, dialect_of_endpoint
from carpool.engine import Engine, Hook, Upstream
from carpool.frontends.intake import NO_RETRY, end_to_end
from carpool.frontends.library.exchange import (
    EngineThread,
    Flow,
    InProcessExchange,
    LibraryFrontend,
    Whole,
    cancel_unfinished,
    httpx_library,
    refusal,
    respond,
    respond_in_thread,
    start_engine,
)
from carpool.frontends.library.fleet import make_options
from carpool.http import Http1Client, HttpxClient, ThreadedHttpxClient
from carpool.planners.access.options import PREFIX, Options, from_headers
from carpool.planners.policy import RoutingPolicy

DAY = 86_400.0

T = TypeVar("T")


def transport(
    *,
    budget: str | float | None = None,
    lane: Lane | str | None = None,
    tags: Mapping[str, str] | None = None,
    task: str | None = None,
    task_budget: str | float | None = None,
    task_deadline: datetime | None = None,
    caching: str | None = None,
    policy: RoutingPolicy | None = None,
    store: str | Path | None = None,
    hooks: tuple[Hook, ...] | list[Hook] = (),
    prices: PriceBook | None = None,
    through: Any = None,
    close_timeout: float = 10.0,
    vendor: str | None = None,
) -> Any:
    """A transport for asyncio and blocking `httpx` and `httpx2` clients that batches the calls of an SDK.

    ``AsyncAnthropic(http_client=httpx2.AsyncClient(transport=carpool.transport(budget="10m")))``, and likewise OpenAI's
    clients, with `httpx`.

    `budget`, `lane`, `tags`, `task`, `task_budget`, `task_deadline` and `caching` are defaults for calls without
    their own `x-carpool-*` headers; without a budget, a task or a lane, a call goes straight through. `through` is the
    HTTP client or transport to send with; the default is carpool's own. `vendor` names the OpenAI-compatible provider,
    if the host does not identify it. The engine starts with the first request, and closes with the client that uses
    the transport.
    """
    methods = ("build_request", "handle_request", "handle_async_request")
    if through is not None and not any(hasattr(through, method) for method in methods):
        raise _no_httpx(through)
    if vendor is not None:
        compatible_provider("", vendor)  # raises if there is no such provider
    defaults = make_options(None, budget, None, lane, tags, None, task, task_budget, task_deadline, caching)
    return Transport(defaults, policy or RoutingPolicy(), store, tuple(hooks), prices, through, close_timeout, vendor)


@dataclass(eq=False, repr=False)
class Transport(LibraryFrontend):
    """Responds with the HTTP library of the request. The engine of an asyncio client runs on that client's loop,
    that of a blocking client in a separate thread; the first request decides."""

    _defaults: Options
    policy: RoutingPolicy
    _store: str | Path | None
    _hooks: tuple[Hook, ...]
    _prices: PriceBook | None
    _through: Any
    _close_timeout: float
    _vendor: str | None

    def __post_init__(self) -> None:
        self._clock = SystemClock()
        self._http_client: HttpClient
        self._upstreams: dict[str, Upstream] = {}
        self._exchanges: dict[tuple[str, str], InProcessExchange] = {}
        self._own_client: Any = None  # the httpx client over a transport of the user
        self._loop: asyncio.AbstractEventLoop | None = None  # of an asyncio client
        self._thread: EngineThread | None = None  # of a blocking client
        self._lock, self._thread_lock = asyncio.Lock(), threading.Lock()
        self._closed = False

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("This transport is closed and takes no more calls. Make a new one.")

    # ------------------------------------------------------------ asyncio

    async def handle_async_request(self, request: Any) -> Any:
        return await respond(request, self._answer_on_this_loop)

    async def _answer_on_this_loop(self, request: Any, body: bytes) -> Flow | Whole:
        """The first request starts the engine."""
        if self._thread is not None or self._loop not in (None, asyncio.get_running_loop()):
            raise NotStarted("This transport runs on another event loop, or in threads. Make one for each.")
        self._loop = asyncio.get_running_loop()
        async with self._lock:
            self._check_open()
            if self._engine is None:
                await self._start(blocking=False)
        return await self._answer(request, body)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Accepts no more calls and waits briefly for open ones. A file store keeps the rest."""
        if self._closed or self._thread is not None or self._loop not in (None, asyncio.get_running_loop()):
            return
        async with self._lock:
            self._closed = True
        await self._stop()

    # ------------------------------------------------------------ threads

    def handle_request(self, request: Any) -> Any:
        return respond_in_thread(request, self._start_in_thread, self._answer)

    def _start_in_thread(self) -> asyncio.AbstractEventLoop:
        """Starts the thread and the engine with the first request."""
        with self._thread_lock:
            self._check_open()
            if self._loop is not None:
                raise NotStarted("This transport serves an asyncio client. Make another one for a blocking client.")
            if self._thread is None:
                self._thread = EngineThread()
            if self._engine is None:
                self._thread.run(self._start(blocking=True))
            return self._thread.loop

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Like `aclose`, for threads."""
        with self._thread_lock:
            if self._closed or self._loop is not None:
                return
            self._closed = True
        if self._thread is not None:
            self._thread.run(self._end())
            self._thread.stop()

    async def _end(self) -> None:
        await self._stop()
        await cancel_unfinished()

    # ------------------------------------------------------------ the engine

    async def _start(self, *, blocking: bool) -> None:
        through = self._through
        if through is None:
            self._http_client = Http1Client()
        else:
            if hasattr(through, "handle_request" if blocking else "handle_async_request"):
                if (lib := httpx_library(through)) is None:
                    raise _no_httpx(through)
                through = self._own_client = (lib.Client if blocking else lib.AsyncClient)(transport=through)
            self._http_client = ThreadedHttpxClient(through) if blocking else HttpxClient(through)
        engine = partial(Engine, clock=self._clock, upstreams=self._upstreams, policy=self.policy)
        self._engine = await start_engine(self._store, partial(engine, prices=self._prices, hooks=self._hooks))

    async def _stop(self) -> None:
        if self._engine is None:
            return
        await self._engine.close(self._close_timeout)
        await self._http_client.aclose()
        if hasattr(self._own_client, "aclose"):
            await self._own_client.aclose()
        elif self._own_client is not None:
            self._own_client.close()

    async def _answer(self, request: Any, body: bytes) -> Flow | Whole:
        """Answers a request. Raises a `WireError` only if the client would get one without carpool, too."""
        headers = tuple((name.lower(), value) for name, value in request.headers.multi_items())
        options = from_headers(headers).over(self._defaults)
        kept = tuple(pair for pair in headers if not pair[0].startswith(PREFIX))
        if request.url.scheme not in ("http", "https"):
            raise BadCall(f"carpool sends over http and https, and not over {request.url.scheme[:20]!r}.")
        path, _, query = request.url.raw_path.decode("ascii").partition("?")
        prefix, _, rest = path.rpartition("/v1/")
        raw = RawRequest(request.method, f"/v1/{rest}", query, kept, body)
        dialect = dialect_of_endpoint(raw.method, raw.path)
        if dialect is None:
            return await _with_read_timeout(self._pass(request, kept, body), request)
        exchange = self._exchange(dialect, f"{request.url.scheme}://{request.url.netloc.decode('ascii')}{prefix}")
        plans = (options.caching or self.policy.caching) == CachingMode.PLAN
        if not options.may_wait and options.key is None and options.lane in (None, Lane.NOW) and not plans:
            # It asks nothing of carpool: then call and errors are as without carpool.
            return await _with_read_timeout(self._send_directly(exchange, raw, options, request), request)
        try:
            answer = await exchange.handle(raw, options)
        except WireError as error:
            return refusal(error, request)
        if answer.status < 400:
            return answer
        return replace(answer, headers=(*answer.headers, NO_RETRY))  # carpool retried within the budget

    def _exchange(self, dialect: Dialect, base_url: str) -> InProcessExchange:
        key = (dialect.name, base_url)
        if key not in self._exchanges:
            configured = configured_dialect(dialect.name, base_url, self._vendor)
            name = configured.vendor or configured.name
            provider = name if base_url == configured.home.removesuffix("/v1") else f"{name}@{base_url}"
            upstream = self._upstreams[provider] = Upstream(provider, base_url, configured, self._http_client)
            assert self._engine is not None
            self._exchanges[key] = InProcessExchange(self._engine, upstream, self._clock, default=Lane.NOW)
        return self._exchanges[key]

    async def _send_directly(
        self, exchange: InProcessExchange, raw: RawRequest, options: Options, request: Any
    ) -> Flow | Whole:
        try:
            call = exchange.understood(raw, options)
        except BadCall:  # it asks nothing of carpool, and the provider reports the error best
            return await self._pass(request, raw.headers, raw.body)
        return await exchange.handle(raw, options, call)

    async def _pass(self, request: Any, headers: Headers, body: bytes) -> Flow:
        """Passes a request through that carpool does not understand."""
        sent, timeout = tuple(end_to_end(headers)), _read_timeout(request) or DAY
        response = await self._http_client.send(HttpRequest(request.method, str(request.url), sent, body, timeout))
        return Flow(response.status, response.headers, response.chunks(), response.aclose)


def _no_httpx(through: Any) -> WrongClient:
    return WrongClient(f"carpool can't send through {type(through).__name__}: give it an httpx client or transport.")


def _read_timeout(request: Any) -> float | None:
    """The client's read timeout. It does not apply to calls with a budget, which wait for their answer."""
    return (request.extensions.get("timeout") or {}).get("read")


async def _with_read_timeout(work: Coroutine[Any, Any, Flow | Whole], request: Any) -> Flow | Whole:
    seconds, host = _read_timeout(request), request.url.host
    answer = await _in_time(work, seconds, host)
    return answer if isinstance(answer, Whole) else replace(answer, chunks=_timed_chunks(answer.chunks, seconds, host))


async def _timed_chunks(chunks: AsyncIterator[bytes], seconds: float | None, host: str) -> AsyncIterator[bytes]:
    while (chunk := await _in_time(anext(chunks, None), seconds, host)) is not None:
        yield chunk


async def _in_time(work: Awaitable[T], seconds: float | None, host: str) -> T:
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError as error:
        raise TimedOut(f"{host} was silent for too long.") from error
