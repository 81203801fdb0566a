"""What stands behind `carpool.transport()`: one engine on one loop, for every base URL that its clients name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from carpool.clock import SystemClock
from carpool.dialects import ANTHROPIC, DIALECTS, OPENAI, RELATIVES, relative_at, speaking
from carpool.doors.answers import Flow, Whole
from carpool.doors.asgi import end_to_end
from carpool.doors.options import PREFIX, Options, from_headers
from carpool.doors.transport import Exchange
from carpool.engine import Engine, Hook, Keyring, Upstream
from carpool.errors import BadCall, CarpoolError, TimedOut, WireError, WrongClient
from carpool.model import Headers, Lane
from carpool.policy import RoutingPolicy
from carpool.ports import Dialect, RawRequest, Wire, WireRequest
from carpool.prices import PriceBook
from carpool.stores import open_store
from carpool.wires import HttpxWire, ReqwestWire, ThreadedHttpxWire

HOMES = {ANTHROPIC.name: "https://api.anthropic.com"} | {
    name: one.home.removesuffix("/v1") for name, one in RELATIVES.items()
}
DAY = 86_400.0
NO_RETRY = ("x-should-retry", "false")

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
    relative: str | None = None


class Host:
    """One engine on one loop, with an upstream for every base URL that requests name."""

    def __init__(self, engine: Engine, clock: SystemClock, road: _Road, settings: Settings) -> None:
        self.engine = engine
        self._clock = clock
        self._road = road
        self._settings = settings
        self._exchanges: dict[tuple[str, str], Exchange] = {}

    @classmethod
    async def start(cls, settings: Settings, *, blocking: bool) -> Host:
        road = _Road(settings.through, settings.relative, blocking=blocking)
        store = await open_store(settings.store)
        clock = SystemClock()
        try:
            engine = Engine(
                store=store,
                clock=clock,
                upstreams=road.upstreams,
                keyring=Keyring(store.pepper),
                policy=settings.policy,
                prices=settings.prices,
                hooks=settings.hooks,
            )
            await engine.start()
        except BaseException:
            await store.aclose()
            raise
        return cls(engine, clock, road, settings)

    async def stop(self) -> None:
        await self.engine.close(self._settings.close_timeout)
        await self._road.aclose()

    async def answer(self, request: Any, body: bytes) -> Flow | Whole:
        """Raises a `WireError` only where the client would meet it without carpool."""
        headers = tuple((name.lower(), value) for name, value in request.headers.multi_items())
        options = from_headers(headers).over(self._settings.defaults)
        kept = tuple(pair for pair in headers if not pair[0].startswith(PREFIX))
        if request.url.scheme not in ("http", "https"):
            raise BadCall(f"carpool sends over http and https, and not over {request.url.scheme[:20]!r}.")
        path, _, query = request.url.raw_path.decode("ascii").partition("?")
        prefix, _, rest = path.rpartition("/v1/")
        raw = RawRequest(request.method, f"/v1/{rest}", query, kept, body)
        dialect = _spoken(raw.method, raw.path)
        if dialect is None:
            return await _patient(self._pass(request, kept, body), request)
        exchange = self._exchange(dialect, f"{request.url.scheme}://{request.url.netloc.decode('ascii')}{prefix}")
        if _straight(options):
            return await _patient(self._straight_on(exchange, raw, options, request), request)
        try:
            return _final(await exchange.handle(raw, options))
        except WireError as error:  # it was tried as often as its budget allows: the SDK must not buy it again
            return refusal(error, request)

    def _exchange(self, dialect: Dialect, base_url: str) -> Exchange:
        place = (dialect.name, base_url)
        if place not in self._exchanges:
            upstream = self._road.upstream(dialect, base_url)
            self._exchanges[place] = Exchange(self.engine, upstream, self._clock, default=Lane.NOW)
        return self._exchanges[place]

    async def _straight_on(self, exchange: Exchange, raw: RawRequest, options: Options, request: Any) -> Flow | Whole:
        try:
            call = exchange.understood(raw, options)
        except BadCall:  # nothing is asked of carpool here: the provider says best what is wrong
            return await self._pass(request, raw.headers, raw.body)
        return await exchange.carry(call, raw.body)

    async def _pass(self, request: Any, headers: Headers, body: bytes) -> Flow:
        """What carpool does not understand travels as it is."""
        sent = WireRequest(request.method, str(request.url), tuple(end_to_end(headers)), body, _silence(request) or DAY)
        response = await self._road.wire.send(sent)
        return Flow(response.status, response.headers, response.chunks(), response.aclose)


class _Road:
    """What everything is sent through, and the upstreams that were met so far."""

    def __init__(self, through: Any, relative: str | None, *, blocking: bool) -> None:
        self.upstreams: dict[str, Upstream] = {}
        self._relative = relative
        self._blocking = blocking
        self._own: Any = None
        if through is None:
            self.wire: Wire = ReqwestWire()
            return
        if hasattr(through, "handle_request" if blocking else "handle_async_request"):
            through = self._own = _client_over(through, "Client" if blocking else "AsyncClient")
        self.wire = ThreadedHttpxWire(through) if blocking else HttpxWire(through)

    def upstream(self, dialect: Dialect, base_url: str) -> Upstream:
        name = relative_at(base_url, self._relative).name if dialect is OPENAI else dialect.name
        provider = name if base_url == HOMES[name] else f"{name}@{base_url}"
        spoken = speaking(dialect.name, base_url, name if dialect is OPENAI else None)
        return self.upstreams.setdefault(provider, Upstream(provider, base_url, spoken, self.wire))

    async def aclose(self) -> None:
        await self.wire.aclose()
        if self._own is not None and self._blocking:
            self._own.close()
        elif self._own is not None:
            await self._own.aclose()


def check_through(through: Any) -> None:
    ways = ("build_request", "handle_request", "handle_async_request")
    if through is not None and not any(hasattr(through, way) for way in ways):
        raise WrongClient(f"carpool can't send through {type(through).__name__}: give it an httpx client or transport.")


def _client_over(transport: Any, kind: str) -> Any:
    for parent in type(transport).__mro__:
        root = parent.__module__.partition(".")[0]
        if root in ("httpx", "httpx2"):
            return getattr(import_module(root), kind)(transport=transport)
    raise WrongClient(f"carpool can't send through {type(transport).__name__}: give it an httpx client or transport.")


def _straight(options: Options) -> bool:
    """Nothing is asked of carpool: the call goes as it would without, and so do its troubles."""
    timed = options.budget is not None or options.deadline is not None
    return not timed and options.key is None and options.lane in (None, Lane.NOW)


def _silence(request: Any) -> float | None:
    """How long the client bears silence. A call with a budget waits for its answer instead, however long."""
    return (request.extensions.get("timeout") or {}).get("read")


async def _patient(work: Coroutine[Any, Any, Flow | Whole], request: Any) -> Flow | Whole:
    seconds, host = _silence(request), request.url.host
    answer = await _in_time(work, seconds, host)
    return answer if isinstance(answer, Whole) else replace(answer, chunks=_timed(answer.chunks, seconds, host))


async def _timed(chunks: AsyncIterator[bytes], seconds: float | None, host: str) -> AsyncIterator[bytes]:
    while (chunk := await _in_time(anext(chunks, None), seconds, host)) is not None:
        yield chunk


async def _in_time(work: Awaitable[T], seconds: float | None, host: str) -> T:
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError as error:
        raise TimedOut(f"{host} was silent for too long.") from error


def _final(answer: Flow | Whole) -> Flow | Whole:
    """A refusal that stands: carpool tried again as often as the budget allows."""
    if answer.status < 400:
        return answer
    headers = (*answer.headers, NO_RETRY)
    return Whole(answer.status, headers, answer.body) if isinstance(answer, Whole) else replace(answer, headers=headers)


def _spoken(method: str, path: str) -> Dialect | None:
    """Whose wire a request is, by its path; None where carpool does not understand it."""
    return next((dialect for dialect in DIALECTS.values() if dialect.handles(method, path)), None)


def refusal(error: CarpoolError, request: Any) -> Whole:
    """carpool's own error as an answer, since an SDK would take an exception for a broken connection, and retry."""
    dialect = _spoken(request.method, f"/v1/{request.url.path.rpartition('/v1/')[2]}") or ANTHROPIC
    body = dialect.error(error.status, error.code, str(error))
    return Whole(error.status, (("content-type", "application/json"), NO_RETRY), body)
