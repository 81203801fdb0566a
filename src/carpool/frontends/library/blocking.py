"""The blocking library frontend: `Fleet` has the methods of `FleetDispatcher`. Its engine runs in a separate thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from carpool.core.clock import SystemClock
from carpool.core.errors import Closed, NotStarted
from carpool.core.model import Lane
from carpool.core.prices import PriceBook
from carpool.engine import Engine, Hook, Stats
from carpool.frontends.library.clients import create_of, http_flavour, inner_http, known_kind, upstream_of
from carpool.frontends.library.dispatcher import build_engine, make_options, raise_translated, retries_itself
from carpool.frontends.library.exchange import (
    HELLO,
    InProcessExchange,
    Submission,
    blocking_transport,
    current,
    wait_for,
)
from carpool.frontends.library.fast_path import FastPath
from carpool.http import ThreadedHttpxClient
from carpool.planners.policy import RoutingPolicy
from carpool.stores import open_store


class Fleet:
    """`FleetDispatcher` for blocking code: submit from as many threads as you like; they pool together.

    ``with Fleet(Anthropic(), store="fleet.db") as fleet: fleet.submit(budget="10m", model=..., ...)``
    """

    def __init__(
        self,
        client: Any,
        *,
        policy: RoutingPolicy | None = None,
        store: str | Path | None = None,
        hooks: tuple[Hook, ...] | list[Hook] = (),
        prices: PriceBook | None = None,
        close_timeout: float = 10.0,
        vendor: str | None = None,
    ) -> None:
        self._client = client
        self._vendor = vendor
        self._lib = http_flavour(client, "Client")
        self._kind = known_kind(client)
        self.policy = policy or RoutingPolicy()
        self._store_url = store
        self._hooks = tuple(hooks)
        self._prices = prices
        self._close_timeout = close_timeout
        self._engine: Engine | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    # ------------------------------------------------------------ start and close

    def __enter__(self) -> Self:
        if self._closed or self._thread is not None:
            raise Closed("This fleet was used already. Make a new one.")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="carpool", daemon=True)
        self._thread.start()
        try:
            self._exchange = wait_for(self._start(), self._loop)
        except BaseException:
            self._stop_loop()
            raise
        http = self._lib.Client(transport=blocking_transport(self._lib, self._exchange, self._loop))
        self._without_retries = self._client.copy(http_client=http, max_retries=0, timeout=None)
        self._with_retries = self._client.copy(http_client=http, timeout=None)
        self._quick = FastPath(self._without_retries)
        self._introduce()
        return self

    async def _start(self) -> InProcessExchange:
        clock = SystemClock()
        store = await open_store(self._store_url)
        try:
            http_client = ThreadedHttpxClient(inner_http(self._client))
            upstream = upstream_of(self._client, http_client, self._vendor)
            engine = build_engine(store, clock, upstream, self.policy, self._prices, self._hooks)
            await engine.start()
        except BaseException:
            await store.aclose()
            raise
        self._engine, self._http_client = engine, http_client
        return InProcessExchange(engine, upstream, clock)

    def _introduce(self) -> None:
        try:
            self._without_retries.post(self._kind.hello, cast_to=object, body={}, options={"headers": {HELLO: "1"}})
        except TypeError:  # a client without a default key: its first call brings one
            return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self, timeout: float | None = None) -> None:
        """Accepts no more calls and waits up to `timeout` seconds for open ones. A file store keeps the rest."""
        if self._engine is None or self._closed:
            return
        self._closed = True
        wait_for(self._end(self._close_timeout if timeout is None else timeout), self._loop)
        self._stop_loop()

    async def _end(self, timeout: float) -> None:
        assert self._engine is not None
        await self._engine.close(timeout)
        unfinished = asyncio.all_tasks() - {asyncio.current_task()}
        for task in unfinished:  # calls on `now` that took too long: their threads must not wait forever
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)
        await self._http_client.aclose()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        if self._thread is not None:
            self._thread.join()
        self._loop.close()

    @property
    def stats(self) -> Stats:
        return Stats() if self._engine is None else self._engine.stats

    def metrics(self) -> dict[str, int]:
        return self.stats.metrics(self.policy.metrics_prefix, self.policy.track_sync_batch_split)

    # ------------------------------------------------------------ calls

    def submit(
        self,
        *,
        latency_budget_ms: float | None = None,
        budget: str | float | None = None,
        deadline: datetime | None = None,
        lane: Lane | str | None = None,
        tags: Mapping[str, str] | None = None,
        key: str | None = None,
        force_sync: bool = False,
        endpoint: str | None = None,
        **params: Any,
    ) -> Any:
        """Submits one call, like `FleetDispatcher.submit`, and waits for the answer."""
        self._check_open()
        if force_sync or (params.get("stream") and lane is None):
            lane = Lane.NOW
        options = make_options(latency_budget_ms, budget, deadline, lane, tags, key)
        if retries_itself(options):
            return self._through_sdk(self._with_retries, params, Submission(options), endpoint)
        draft, settled = self._quick.draft(params) if endpoint is None else None, None
        if draft is not None and draft.raw is not None:
            settled = wait_for(self._exchange.settled(draft.raw, draft.options(options)), self._loop)
            if (message := draft.message(settled)) is not None:
                return message
        return self._through_sdk(self._without_retries, params, Submission(options, draft, settled), endpoint)

    def _through_sdk(self, client: Any, params: dict[str, Any], submission: Submission, endpoint: str | None) -> Any:
        create = create_of(client, params, endpoint)
        token = current.set(submission)
        try:
            message = create(**params)
        except Exception as error:  # noqa: BLE001  translated and raised again
            raise_translated(error)
        finally:
            current.reset(token)
        if submission.draft is not None:
            submission.draft.learn_answer(message)
        return message

    def submit_sync(self, **params: Any) -> Any:
        """Submits one call on `now`, at full price."""
        return self.submit(force_sync=True, **params)

    def submit_batch(self, **params: Any) -> Any:
        """Submits one call by batch, however long that takes. With a budget, it is rescued when time runs out."""
        return self.submit(**{"lane": Lane.BATCH, **params})

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("This fleet is closed and takes no more calls. Make a new one.")
        if self._engine is None:
            raise NotStarted("Use the fleet inside `with Fleet(client) as fleet:`.")
