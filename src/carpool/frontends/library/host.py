"""The engine behind `carpool.transport()`: one engine on one loop, for all base URLs of its clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from carpool.core.clock import SystemClock
from carpool.core.errors import BadCall, CarpoolError, TimedOut, WireError, WrongClient
from carpool.core.model import Headers, Lane
from carpool.core.ports import Dialect, HttpClient, HttpRequest, RawRequest
from carpool.core.prices import PriceBook
from carpool.dialects import ANTHROPIC, COMPATIBLE_PROVIDERS, DIALECTS, OPENAI, compatible_provider, speaking
from carpool.engine import Engine, Hook, Keyring, Upstream
from carpool.frontends.library.exchange import Flow, InProcessExchange, Whole
from carpool.frontends.proxy.http.asgi import NO_RETRY, end_to_end
from carpool.http import Http1Client, HttpxClient, ThreadedHttpxClient
from carpool.planners.access.options import PREFIX, Options, from_headers
from carpool.planners.policy import RoutingPolicy
from carpool.stores import open_store

HOMES = {ANTHROPIC.name: "https://api.anthropic.com"} | {
    name: provider.home.removesuffix("/v1") for name, provider in COMPATIBLE_PROVIDERS.items()
}
DAY = 86_400.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Settings:
    defaults: Options
    policy: RoutingPolicy
    store: str | Path | None
    hooks: tuple[Hook, ...]
    prices: PriceBook | None
    through: Any
    close_timeout: float
    vendor: str | None = None


class Host:
    """One engine on one loop, with an upstream for every base URL in its requests."""

    def __init__(self, engine: Engine, clock: SystemClock, provider: _HostedProvider, settings: Settings) -> None:
        self.engine = engine
        self._clock = clock
        self._provider = provider
        self._settings = settings
        self._exchanges: dict[tuple[str, str], InProcessExchange] = {}

    @classmethod
    async def start(cls, settings: Settings, *, blocking: bool) -> Host:
        provider = _HostedProvider(settings.through, settings.vendor, blocking=blocking)
        store = await open_store(settings.store)
        clock = SystemClock()
        try:
            engine = Engine(
                store=store,
                clock=clock,
                upstreams=provider.upstreams,
                keyring=Keyring(store.pepper),
                policy=settings.policy,
                prices=settings.prices,
                hooks=settings.hooks,
            )
            await engine.start()
        except BaseException:
            await store.aclose()
            raise
        return cls(engine, clock, provider, settings)

    async def stop(self) -> None:
        await self.engine.close(self._settings.close_timeout)
        await self._provider.aclose()

    async def answer(self, request: Any, body: bytes) -> Flow | Whole:
        """Answers a request. Raises a `WireError` only if the client would get one without carpool, too."""
        headers = tuple((name.lower(), value) for name, value in request.headers.multi_items())
        options = from_headers(headers).over(self._settings.defaults)
        kept = tuple(pair for pair in headers if not pair[0].startswith(PREFIX))
        if request.url.scheme not in ("http", "https"):
            raise BadCall(f"carpool sends over http and https, and not over {request.url.scheme[:20]!r}.")
        path, _, query = request.url.raw_path.decode("ascii").partition("?")
        prefix, _, rest = path.rpartition("/v1/")
        raw = RawRequest(request.method, f"/v1/{rest}", query, kept, body)
        dialect = _dialect_of(raw.method, raw.path)
        if dialect is None:
            return await _with_read_timeout(self._pass(request, kept, body), request)
        exchange = self._exchange(dialect, f"{request.url.scheme}://{request.url.netloc.decode('ascii')}{prefix}")
        if _asks_nothing(options):
            return await _with_read_timeout(self._send_directly(exchange, raw, options, request), request)
        try:
            return _without_retry(await exchange.handle(raw, options))
        except WireError as error:  # carpool retried within the budget: the SDK must not retry
            return refusal(error, request)

    def _exchange(self, dialect: Dialect, base_url: str) -> InProcessExchange:
        key = (dialect.name, base_url)
        if key not in self._exchanges:
            upstream = self._provider.upstream(dialect, base_url)
            self._exchanges[key] = InProcessExchange(self.engine, upstream, self._clock, default=Lane.NOW)
        return self._exchanges[key]

    async def _send_directly(
        self, exchange: InProcessExchange, raw: RawRequest, options: Options, request: Any
    ) -> Flow | Whole:
        try:
            call = exchange.understood(raw, options)
        except BadCall:  # it asks nothing of carpool, and the provider reports the error best
            return await self._pass(request, raw.headers, raw.body)
        return await exchange.carry(call, raw.body)

    async def _pass(self, request: Any, headers: Headers, body: bytes) -> Flow:
        """Passes a request through that carpool does not understand."""
        sent = HttpRequest(
            request.method, str(request.url), tuple(end_to_end(headers)), body, _read_timeout(request) or DAY
        )
        response = await self._provider.http_client.send(sent)
        return Flow(response.status, response.headers, response.chunks(), response.aclose)


class _HostedProvider:
    """The HTTP client, and the upstreams seen so far."""

    def __init__(self, through: Any, vendor: str | None, *, blocking: bool) -> None:
        self.upstreams: dict[str, Upstream] = {}
        self._vendor = vendor
        self._blocking = blocking
        self._own_client: Any = None
        if through is None:
            self.http_client: HttpClient = Http1Client()
            return
        if hasattr(through, "handle_request" if blocking else "handle_async_request"):
            through = self._own_client = _client_over(through, "Client" if blocking else "AsyncClient")
        self.http_client = ThreadedHttpxClient(through) if blocking else HttpxClient(through)

    def upstream(self, dialect: Dialect, base_url: str) -> Upstream:
        name = compatible_provider(base_url, self._vendor).name if dialect is OPENAI else dialect.name
        provider = name if base_url == HOMES[name] else f"{name}@{base_url}"
        configured = speaking(dialect.name, base_url, name if dialect is OPENAI else None)
        return self.upstreams.setdefault(provider, Upstream(provider, base_url, configured, self.http_client))

    async def aclose(self) -> None:
        await self.http_client.aclose()
        if self._own_client is not None and self._blocking:
            self._own_client.close()
        elif self._own_client is not None:
            await self._own_client.aclose()


def check_through(through: Any) -> None:
    methods = ("build_request", "handle_request", "handle_async_request")
    if through is not None and not any(hasattr(through, method) for method in methods):
        raise WrongClient(f"carpool can't send through {type(through).__name__}: give it an httpx client or transport.")


def _client_over(transport: Any, kind: str) -> Any:
    for parent in type(transport).__mro__:
        root = parent.__module__.partition(".")[0]
        if root in ("httpx", "httpx2"):
            return getattr(import_module(root), kind)(transport=transport)
    raise WrongClient(f"carpool can't send through {type(transport).__name__}: give it an httpx client or transport.")


def _asks_nothing(options: Options) -> bool:
    """Whether the call asks nothing of carpool: then call and errors are as without carpool."""
    timed = options.budget is not None or options.deadline is not None
    return not timed and options.key is None and options.lane in (None, Lane.NOW)


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


def _without_retry(answer: Flow | Whole) -> Flow | Whole:
    """Adds `x-should-retry: false` to an error: carpool retried within the budget."""
    if answer.status < 400:
        return answer
    headers = (*answer.headers, NO_RETRY)
    return Whole(answer.status, headers, answer.body) if isinstance(answer, Whole) else replace(answer, headers=headers)


def _dialect_of(method: str, path: str) -> Dialect | None:
    """The dialect of a request, by its path; None if carpool does not understand it."""
    return next((dialect for dialect in DIALECTS.values() if dialect.handles(method, path)), None)


def refusal(error: CarpoolError, request: Any) -> Whole:
    """carpool's own error as a response, because an SDK would treat an exception as a broken connection and retry."""
    dialect = _dialect_of(request.method, f"/v1/{request.url.path.rpartition('/v1/')[2]}") or ANTHROPIC
    body = dialect.error(error.status, error.code, str(error))
    return Whole(error.status, (("content-type", "application/json"), NO_RETRY), body)
