"""`carpool.transport()`: under any SDK's `httpx` or `httpx2` client, calls pool in the process that makes them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

from carpool.dialects import relative_at
from carpool.doors.answers import async_response, blocking_response, http_error, wait_for
from carpool.doors.hosting import Host, Settings, check_through, refusal
from carpool.doors.library import make_options
from carpool.engine import Hook, Stats
from carpool.errors import CarpoolError, Closed, NotStarted, WireError
from carpool.model import Lane
from carpool.policy import RoutingPolicy
from carpool.prices import PriceBook


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
    relative: str | None = None,
) -> Any:
    """A transport for `httpx` and `httpx2` clients, asyncio and blocking alike, that pools the calls of an SDK.

    ``AsyncAnthropic(http_client=httpx2.AsyncClient(transport=carpool.transport(budget="10m")))``, and likewise OpenAI's
    clients, with `httpx`.

    `budget`, `lane` and `tags` hold for calls that bring none of their own as `x-carpool-*` headers; without a budget
    or a lane a call goes straight through. `through` is the HTTP client, or transport, to send through; otherwise
    carpool's own is used. `relative` names the one of OpenAI's relatives that is asked, where its host does not tell.
    It starts with the first request, and ends with the client that it is given to.
    """
    check_through(through)
    if relative is not None:
        relative_at("", relative)  # says in a sentence when there is none of that name
    defaults, chosen = make_options(None, budget, None, lane, tags, None), policy or RoutingPolicy()
    return Transport(Settings(defaults, chosen, store, tuple(hooks), prices, through, close_timeout, relative))


class Transport:
    """Answers in the library whose request it is given. An asyncio client's engine runs on that client's loop, a
    blocking one's in a thread of its own; the first request decides."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._host: Host | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._turn, self._thread_turn = asyncio.Lock(), threading.Lock()
        self._closed = False

    @property
    def stats(self) -> Stats:
        """Calls, batches and money since the first request."""
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
            answer = await (await self._here()).answer(request, body)
        except WireError as error:
            raise http_error(lib, error, request) from error
        except CarpoolError as error:
            answer = refusal(error, request)
        return async_response(lib, answer, request)

    async def _here(self) -> Host:
        """The engine on this loop; the first request starts it."""
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise NotStarted("This transport runs on another event loop, or in threads. Make one for each.")
        self._loop = loop
        async with self._turn:
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
        """Takes no more calls, gives the open ones a little time, and loses nothing that is in a file."""
        if self._closed or self._loop not in (None, asyncio.get_running_loop()):
            return
        async with self._turn:
            self._closed = True
        if self._host is not None:
            await self._host.stop()

    # ------------------------------------------------------------ threads

    def handle_request(self, request: Any) -> Any:
        lib = _library(request)
        body = request.read()
        try:
            host, loop = self._there()
            answer = wait_for(host.answer(request, body), loop)
        except WireError as error:
            raise http_error(lib, error, request) from error
        except CarpoolError as error:
            answer = refusal(error, request)
        return blocking_response(lib, answer, request, self._loop)

    def _there(self) -> tuple[Host, asyncio.AbstractEventLoop]:
        """The engine in its thread; the first request starts both."""
        with self._thread_turn:
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
        """As `aclose`, for threads."""
        with self._thread_turn:
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
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:  # calls on `now` that took too long: their threads must not wait for ever
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


def _library(request: Any) -> ModuleType:
    return import_module(type(request).__module__.partition(".")[0])
