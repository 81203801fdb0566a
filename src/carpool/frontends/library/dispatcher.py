"""The asyncio library frontend: `FleetDispatcher`. Every lane returns the SDK's own response type."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from carpool.core.clock import SystemClock
from carpool.core.errors import BadCall, BadParams, CarpoolError, Closed, NotStarted, WireError
from carpool.core.model import Lane
from carpool.core.ports import Store
from carpool.core.prices import PriceBook
from carpool.engine import Engine, Hook, Keyring, Probe, Stats, Upstream
from carpool.frontends.library.clients import create_of, http_flavour, inner_http, known_kind, upstream_of
from carpool.frontends.library.exchange import CARRIED, HELLO, InProcessExchange, Submission, async_transport, current
from carpool.frontends.library.fast_path import FastPath
from carpool.http import HttpxClient
from carpool.planners.access.options import Options, parse_key, parse_lane
from carpool.planners.policy import RoutingPolicy, parse_budget
from carpool.stores import open_store


class FleetDispatcher:
    """Buys the calls of a fleet through your own SDK client, each at the lowest price that its deadline allows.

    ``async with FleetDispatcher(AsyncAnthropic(), policy=RoutingPolicy(...), store="fleet.db") as fleet:``

    `client` is an `AsyncAnthropic`, an `AsyncOpenAI` or an `AsyncGroq`. Everything is sent through it, so its TLS,
    proxies, auth and base URL apply. `vendor` names the OpenAI-compatible provider (such as "mistral"), if the base
    URL does not identify it.
    `store`: None keeps the calls in memory; a path keeps them in a file, where they survive a crash.
    `hooks` are called with every event. `close_timeout` bounds the end of the `async with` block, in seconds.
    `probe` is awaited at every named point of a call's processing, so that tests can stop the process there.
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
        probe: Probe | None = None,
        vendor: str | None = None,
    ) -> None:
        self._client = client
        self._vendor = vendor
        self._lib = http_flavour(client, "AsyncClient")
        self._kind = known_kind(client)
        self.policy = policy or RoutingPolicy()
        self._store_url = store
        self._hooks = tuple(hooks)
        self._prices = prices
        self._close_timeout = close_timeout
        self._probe = probe
        self._stats = Stats()
        self._engine: Engine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    # ------------------------------------------------------------ start and close

    async def __aenter__(self) -> Self:
        if self._closed or self._engine is not None:
            raise Closed("This dispatcher was used already. Make a new one.")
        store = await open_store(self._store_url)
        try:
            await self._start(store)
        except BaseException:
            await store.aclose()
            raise
        return self

    async def _start(self, store: Store) -> None:
        clock = SystemClock()
        upstream = upstream_of(self._client, HttpxClient(inner_http(self._client)), self._vendor)
        self._engine = build_engine(store, clock, upstream, self.policy, self._prices, self._hooks, self._probe)
        self._loop = asyncio.get_running_loop()
        await self._engine.start()
        self._exchange = InProcessExchange(self._engine, upstream, clock)
        http = self._lib.AsyncClient(transport=async_transport(self._lib, self._exchange))
        self._without_retries = self._client.copy(http_client=http, max_retries=0, timeout=None)
        self._with_retries = self._client.copy(http_client=http, timeout=None)
        self._quick = FastPath(self._without_retries)
        await introduce(self._without_retries, self._kind.hello)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, timeout: float | None = None) -> None:
        """Accepts no more calls and waits up to `timeout` seconds for open ones. A file store keeps the rest."""
        if self._engine is not None and not self._closed:
            self._closed = True
            await self._engine.close(self._close_timeout if timeout is None else timeout)

    @property
    def stats(self) -> Stats:
        """Calls, batches and costs since this dispatcher started."""
        return self._stats if self._engine is None else self._engine.stats

    def metrics(self) -> dict[str, int]:
        """The statistics as named counters, under the policy's prefix."""
        return self.stats.metrics(self.policy.metrics_prefix, self.policy.track_sync_batch_split)

    # ------------------------------------------------------------ calls

    async def submit(
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
        """Submits one call, with the parameters of the SDK's own `create`. Returns the SDK's own type.

        For an `AsyncAnthropic` that is `messages.create`. For an `AsyncOpenAI` it is `chat.completions.create` if there
        are `messages`, else `responses.create`; `endpoint` names another ("embeddings", "completions").

        One of `latency_budget_ms`, `budget` ("10m") or `deadline` says how long it may take. Without any, it goes into
        a batch and takes as long as the provider needs. `lane` forces a lane. `key` is an idempotency key: calls with
        the same key are one call. `stream=True` uses `now`.
        """
        self._check_open()
        if force_sync or (params.get("stream") and lane is None):
            lane = Lane.NOW
        options = make_options(latency_budget_ms, budget, deadline, lane, tags, key)
        if retries_itself(options):
            return await self._through_sdk(self._with_retries, params, Submission(options), endpoint)
        draft, settled = self._quick.draft(params) if endpoint is None else None, None
        if draft is not None and draft.raw is not None:
            settled = await self._exchange.settled(draft.raw, draft.options(options))
            if (message := draft.message(settled)) is not None:
                return message
        return await self._through_sdk(self._without_retries, params, Submission(options, draft, settled), endpoint)

    async def _through_sdk(
        self, client: Any, params: dict[str, Any], submission: Submission, endpoint: str | None
    ) -> Any:
        create = create_of(client, params, endpoint)
        token = current.set(submission)
        try:
            message = await create(**params)
        except Exception as error:  # noqa: BLE001  translated and raised again
            raise_translated(error)
        finally:
            current.reset(token)
        if submission.draft is not None:
            submission.draft.learn_answer(message)
        return message

    async def submit_sync(self, **params: Any) -> Any:
        """Submits one call on `now`, at full price."""
        return await self.submit(force_sync=True, **params)

    async def submit_batch(self, **params: Any) -> Any:
        """Submits one call by batch, however long that takes. With a budget, it is rescued when time runs out."""
        return await self.submit(**{"lane": Lane.BATCH, **params})

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("This dispatcher is closed and takes no more calls. Make a new one.")
        if self._engine is None:
            raise NotStarted("Use the dispatcher inside `async with FleetDispatcher(client) as fleet:`.")
        if asyncio.get_running_loop() is not self._loop:
            raise NotStarted("This dispatcher runs on another event loop. Use it where it was entered.")


# ---------------------------------------------------------------- shared with the blocking frontend


def build_engine(
    store: Store,
    clock: SystemClock,
    upstream: Upstream,
    policy: RoutingPolicy,
    prices: PriceBook | None,
    hooks: tuple[Hook, ...],
    probe: Probe | None = None,
) -> Engine:
    return Engine(
        store=store,
        clock=clock,
        upstreams={upstream.provider: upstream},
        keyring=Keyring(store.pepper),
        policy=policy,
        prices=prices,
        hooks=hooks,
        probe=probe,
    )


async def introduce(client: Any, hello: str) -> None:
    """Gives the engine the client's credential, so that persisted calls that need it can proceed at once."""
    try:
        await client.post(hello, cast_to=object, body={}, options={"headers": {HELLO: "1"}})
    except TypeError:  # a client without a default key: its first call brings one
        return


def make_options(
    latency_budget_ms: float | None,
    budget: str | float | None,
    deadline: datetime | None,
    lane: Lane | str | None,
    tags: Mapping[str, str] | None,
    key: str | None,
) -> Options:
    if sum(value is not None for value in (latency_budget_ms, budget, deadline)) > 1:
        raise BadCall("Say how long the call may take only once: latency_budget_ms, budget or deadline.")
    return Options(
        budget=_seconds(latency_budget_ms, budget),
        deadline=_timestamp(deadline),
        lane=None if lane is None else parse_lane(lane),
        tags=_tags(tags),
        key=None if key is None else parse_key(key),
    )


def _tags(tags: Mapping[str, str] | None) -> dict[str, str]:
    if not isinstance(tags, Mapping | None):
        raise BadCall(f"Tags are names with values, such as {{'team': 'ci'}}, and not a {type(tags).__name__}.")
    return {str(name): str(value) for name, value in (tags or {}).items()}


def _seconds(latency_budget_ms: float | None, budget: str | float | None) -> float | None:
    if latency_budget_ms is not None:
        return parse_budget(f"{latency_budget_ms}ms")
    return None if budget is None else parse_budget(str(budget))


def _timestamp(deadline: datetime | None) -> float | None:
    if deadline is None:
        return None
    if not isinstance(deadline, datetime) or deadline.tzinfo is None:
        raise BadCall("A deadline is a datetime with a time zone, such as datetime.now(UTC) + timedelta(minutes=10).")
    return deadline.timestamp()


def retries_itself(options: Options) -> bool:
    """Whether the SDK retries: only a call on `now` without a budget, never one that may be batched."""
    return options.lane is Lane.NOW and options.budget is None and options.deadline is None and options.key is None


def raise_translated(error: Exception) -> NoReturn:
    cause = translated(error)
    if isinstance(cause, CarpoolError) and not isinstance(cause, BadParams):
        raise cause from cause.__cause__  # its own cause, not the SDK's wrapper
    raise cause from error.__cause__


def translated(error: Exception) -> Exception:
    """carpool's own error if the SDK wrapped one; other SDK errors unchanged; a TypeError as `BadParams`."""
    request = getattr(getattr(error, "response", None), "request", None)
    if request is not None and isinstance(carried := request.extensions.get(CARRIED), CarpoolError):
        return carried
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, WireError):
            return error  # the SDK has its own types for an unreachable provider
        if isinstance(cause, CarpoolError):
            return cause
        cause = cause.__cause__
    if isinstance(error, UnicodeError):  # its message would show the body
        return BadParams("The SDK can't make a request of these parameters: a text is not valid Unicode.")
    if isinstance(error, TypeError | ValueError | RecursionError):
        return BadParams(f"The SDK can't make a request of these parameters: {error}")
    return error
