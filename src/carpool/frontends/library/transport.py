"""`carpool.transport()`: a transport for an SDK's `httpx` or `httpx2` client that batches calls in the process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

from carpool.core.errors import CarpoolError, Closed, NotStarted, WireError
from carpool.core.model import Lane
from carpool.core.prices import PriceBook
from carpool.dialects import compatible_provider
from carpool.engine import Hook, Stats
from carpool.frontends.library.dispatcher import make_options
from carpool.frontends.library.exchange import async_response, blocking_response, http_error, wait_for
from carpool.frontends.library.host import Host, Settings, check_through, refusal
from carpool.planners.policy import RoutingPolicy


def transport(
    *,
    budget: str | float | None = None,
    lane: Lane | str | None = None,
    tags: Mapping[str, str] | None = None,
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

    `budget`, `lane` and `tags` are defaults for calls without their own `x-carpool-*` headers; without a budget or a
    lane, a call goes straight through. `through` is the HTTP client or transport to send with; the default is carpool's
    own. `vendor` names the OpenAI-compatible provider, if the host does not identify it. The engine starts with the
    first request, and closes with the client that uses the transport.
    """
    check_through(through)
    if vendor is not None:
        compatible_provider("", vendor)  # raises if there is no such provider
    defaults, chosen = make_options(None, budget, None, lane, tags, None), policy or RoutingPolicy()
    return Transport(Settings(defaults, chosen, store, tuple(hooks), prices, through, close_timeout, vendor))


class Transport:
    """Responds with the HTTP library of the request. The engine of an asyncio client runs on that client's loop,
    that of a blocking client in a separate thread; the first request decides."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._host: Host | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock, self._thread_lock = asyncio.Lock(), threading.Lock()
        self._closed = False

    @property
    def stats(self) -> Stats:
        """Calls, batches and costs since the first request."""
        return Stats() if self._host is None else self._host.engine.stats

    def metrics(self) -> dict[str, int]:
        """The statistics as named counters, under the policy's prefix."""
        policy = self._settings.policy
        return self.stats.metrics(policy.metrics_prefix, policy.track_sync_batch_split)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("This transport is closed and takes no more calls. Make a new one.")

    # ------------------------------------------------------------ asyncio

    async def handle_async_request(self, request: Any) -> Any:
        lib = _library(request)
        body = await request.aread()
        try:
            answer = await (await self._host_on_this_loop()).answer(request, body)
        except WireError as error:
            raise http_error(lib, error, request) from error
        except CarpoolError as error:
            answer = refusal(error, request)
        return async_response(lib, answer, request)

    async def _host_on_this_loop(self) -> Host:
        """The engine on this loop. The first request starts it."""
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise NotStarted("This transport runs on another event loop, or in threads. Make one for each.")
        self._loop = loop
        async with self._lock:
            self._check_open()
            if self._host is None:
                self._host = await Host.start(self._settings, blocking=False)
            return self._host

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Accepts no more calls and waits briefly for open ones. A file store keeps the rest."""
        if self._closed or self._loop not in (None, asyncio.get_running_loop()):
            return
        async with self._lock:
            self._closed = True
        if self._host is not None:
            await self._host.stop()

    # ------------------------------------------------------------ threads

    def handle_request(self, request: Any) -> Any:
        lib = _library(request)
        body = request.read()
        try:
            host, loop = self._host_in_thread()
            answer = wait_for(host.answer(request, body), loop)
        except WireError as error:
            raise http_error(lib, error, request) from error
        except CarpoolError as error:
            answer = refusal(error, request)
        return blocking_response(lib, answer, request, self._loop)

    def _host_in_thread(self) -> tuple[Host, asyncio.AbstractEventLoop]:
        """The engine in its thread. The first request starts both."""
        with self._thread_lock:
            self._check_open()
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="carpool", daemon=True)
                self._thread.start()
            if self._thread is None:
                raise NotStarted("This transport serves an asyncio client. Make another one for a blocking client.")
            if self._host is None:
                self._host = wait_for(Host.start(self._settings, blocking=True), self._loop)
            return self._host, self._loop

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Like `aclose`, for threads."""
        with self._thread_lock:
            if self._closed or (self._thread is None and self._loop is not None):
                return
            self._closed = True
        if self._thread is None or self._loop is None:
            return
        wait_for(self._end(), self._loop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        if self._host is not None:
            await self._host.stop()
        unfinished = asyncio.all_tasks() - {asyncio.current_task()}
        for task in unfinished:  # calls on `now` that took too long: their threads must not wait forever
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)


def _library(request: Any) -> ModuleType:
    return import_module(type(request).__module__.partition(".")[0])
