"""The library frontend: `FleetDispatcher` for asyncio, and `Fleet`, the same for threads. Every lane returns the SDK's
own response type."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Self

from carpool.core.clock import SystemClock
from carpool.core.errors import BadCall, BadParams, CarpoolError, Closed, NotStarted, WireError, WrongClient
from carpool.core.model import Lane
from carpool.core.ports import HttpClient
from carpool.core.prices import PriceBook
from carpool.dialects import VENDOR_DIALECT, configured_dialect
from carpool.engine import Engine, Hook, Probe, Upstream
from carpool.frontends.library.exchange import (
    CARRIED,
    HELLO,
    EngineThread,
    ExchangeTransport,
    InProcessExchange,
    LibraryFrontend,
    Submission,
    cancel_unfinished,
    current,
    httpx_library,
    start_engine,
)
from carpool.frontends.library.fast_path import FastPath
from carpool.http import HttpxClient, ThreadedHttpxClient
from carpool.planners.access.options import Options, parse_caching, parse_key, parse_lane, parse_task
from carpool.planners.policy import RoutingPolicy, parse_budget


class _FleetBase(LibraryFrontend):
    _CLIENT_CLASS: ClassVar[str]  # of httpx

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
        self._lib, self._kind = known_client(client, self._CLIENT_CLASS)
        self.policy = policy or RoutingPolicy()
        self._store_url = store
        self._hooks = tuple(hooks)
        self._prices = prices
        self._close_timeout = close_timeout
        self._probe = probe
        self._vendor = vendor
        self._closed = False

    async def _start_engine(self, http_client: HttpClient) -> None:
        self._http_client, clock = http_client, SystemClock()
        upstream = self._kind.upstream(self._client, http_client, self._vendor)
        engine = partial(Engine, clock=clock, upstreams={upstream.provider: upstream}, policy=self.policy)
        engine = partial(engine, prices=self._prices, hooks=self._hooks, probe=self._probe)
        self._engine = await start_engine(self._store_url, engine)
        self._exchange = InProcessExchange(self._engine, upstream, clock)

    def _send_through(self, http: Any) -> None:
        """Makes copies of the SDK client that send through the engine."""
        self._without_retries = self._client.copy(http_client=http, max_retries=0, timeout=None)
        self._with_retries = self._client.copy(http_client=http, timeout=None)
        self._quick = FastPath(self._without_retries)
        # The first request gives the engine the client's credential, so that persisted calls can proceed at once.
        self._hello = {"cast_to": object, "body": {}, "options": {"headers": {HELLO: "1"}}}

    def _prepare(self, params: Mapping[str, Any], endpoint: str | None, options: Options) -> tuple[Any, Submission]:
        """The copy of the client to send with, and the call to submit."""
        if options.lane is Lane.NOW and options.budget is None and options.deadline is None and options.key is None:
            return self._with_retries, Submission(options)  # a call that may be batched is never retried by the SDK
        return self._without_retries, Submission(options, self._quick.draft(params) if endpoint is None else None)


class FleetDispatcher(_FleetBase):
    """Buys the calls of a fleet through your own SDK client, each at the lowest price that its deadline allows.

    ``async with FleetDispatcher(AsyncAnthropic(), policy=RoutingPolicy(...), store="fleet.db") as fleet:``

    `client` is an `AsyncAnthropic`, an `AsyncOpenAI` or an `AsyncGroq`. Everything is sent through it, so its TLS,
    proxies, auth and base URL apply. `vendor` names the OpenAI-compatible provider (such as "mistral"), if the base
    URL does not identify it.
    `store`: None keeps the calls in memory; a path keeps them in a file, where they survive a crash.
    `hooks` are called with every event. `close_timeout` bounds the end of the `async with` block, in seconds.
    `probe` is awaited at every named point of a call's processing, so that tests can stop the process there.
    """

    _CLIENT_CLASS = "AsyncClient"

    async def __aenter__(self) -> Self:
        if self._closed or self._engine is not None:
            raise Closed("This dispatcher was used already. Make a new one.")
        self._loop = asyncio.get_running_loop()
        await self._start_engine(HttpxClient(inner_http(self._client)))
        self._send_through(self._lib.AsyncClient(transport=ExchangeTransport(self._exchange)))
        with suppress(TypeError):  # a client without a default key: its first call brings one
            await self._without_retries.post(self._kind.hello, **self._hello)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self, timeout: float | None = None) -> None:
        """Accepts no more calls and waits up to `timeout` seconds for open ones. A file store keeps the rest."""
        if self._engine is not None and not self._closed:
            self._closed = True
            await self._engine.close(self._close_timeout if timeout is None else timeout)

    async def submit(
        self,
        *,
        latency_budget_ms: float | None = None,
        budget: str | float | None = None,
        deadline: datetime | None = None,
        lane: Lane | str | None = None,
        tags: Mapping[str, str] | None = None,
        key: str | None = None,
        task: str | None = None,
        task_budget: str | float | None = None,
        task_deadline: datetime | None = None,
        caching: str | None = None,
        force_sync: bool = False,
        endpoint: str | None = None,
        **params: Any,
    ) -> Any:
        """Submits one call, with the parameters of the SDK's own `create`. Returns the SDK's own type.

        For an `AsyncAnthropic` that is `messages.create`. For an `AsyncOpenAI` it is `chat.completions.create` if there
        are `messages`, else `responses.create`; `endpoint` names another ("embeddings", "completions").

        One of `latency_budget_ms`, `budget` ("10m") or `deadline` says how long it may take. `task` names the task that
        it belongs to, and `task_budget` ("3h", from its first call on) or `task_deadline` says when all of that must
        be done. Without any of them, it goes into a batch and takes as long as the provider needs. `lane` forces a
        lane. `key` is an idempotency key: calls with the same key are one call. `caching` says what may be done for
        the prompt cache: "off", "observe" or "plan". `stream=True` uses `now`.
        """
        if self._closed:
            raise Closed("This dispatcher is closed and takes no more calls. Make a new one.")
        if self._engine is None:
            raise NotStarted("Use the dispatcher inside `async with FleetDispatcher(client) as fleet:`.")
        if asyncio.get_running_loop() is not self._loop:
            raise NotStarted("This dispatcher runs on another event loop. Use it where it was entered.")
        if force_sync or (params.get("stream") and lane is None):
            lane = Lane.NOW
        tasked = task, task_budget, task_deadline
        options = make_options(latency_budget_ms, budget, deadline, lane, tags, key, *tasked, caching)
        client, submission = self._prepare(params, endpoint, options)
        draft = submission.draft
        if draft is not None and draft.raw is not None:
            submission.settled = await self._exchange.settled(draft.raw, draft.options(submission.options))
            if (message := draft.message(submission.settled)) is not None:
                return message
        create = self._kind.create(client, params, endpoint)
        with _submitting(submission):
            message = await create(**params)
        if draft is not None:
            draft.learn_answer(message)
        return message

    async def submit_sync(self, **params: Any) -> Any:
        """Submits one call on `now`, at full price."""
        return await self.submit(force_sync=True, **params)

    async def submit_batch(self, **params: Any) -> Any:
        """Submits one call by batch, however long that takes. With a budget, it is rescued when time runs out."""
        return await self.submit(**{"lane": Lane.BATCH, **params})


class Fleet(_FleetBase):
    """`FleetDispatcher` for blocking code: submit from as many threads as you like; they pool together. The engine runs
    in a separate thread.

    ``with Fleet(Anthropic(), store="fleet.db") as fleet: fleet.submit(budget="10m", model=..., ...)``
    """

    _CLIENT_CLASS = "Client"
    _thread: EngineThread | None = None

    def __enter__(self) -> Self:
        if self._closed or self._thread is not None:
            raise Closed("This fleet was used already. Make a new one.")
        self._thread = EngineThread()
        try:
            self._thread.run(self._start_engine(ThreadedHttpxClient(inner_http(self._client))))
        except BaseException:
            self._thread.stop()
            raise
        self._send_through(self._lib.Client(transport=ExchangeTransport(self._exchange, self._thread.loop)))
        with suppress(TypeError):  # a client without a default key: its first call brings one
            self._without_retries.post(self._kind.hello, **self._hello)
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self, timeout: float | None = None) -> None:
        """Accepts no more calls and waits up to `timeout` seconds for open ones. A file store keeps the rest."""
        if self._engine is None or self._thread is None or self._closed:
            return
        self._closed = True
        self._thread.run(self._end(self._engine, self._close_timeout if timeout is None else timeout))
        self._thread.stop()

    async def _end(self, engine: Engine, timeout: float) -> None:
        await engine.close(timeout)
        await cancel_unfinished()
        await self._http_client.aclose()

    def submit(
        self,
        *,
        latency_budget_ms: float | None = None,
        budget: str | float | None = None,
        deadline: datetime | None = None,
        lane: Lane | str | None = None,
        tags: Mapping[str, str] | None = None,
        key: str | None = None,
        task: str | None = None,
        task_budget: str | float | None = None,
        task_deadline: datetime | None = None,
        caching: str | None = None,
        force_sync: bool = False,
        endpoint: str | None = None,
        **params: Any,
    ) -> Any:
        """Submits one call, like `FleetDispatcher.submit`, and waits for the answer."""
        if self._closed:
            raise Closed("This fleet is closed and takes no more calls. Make a new one.")
        if self._engine is None or self._thread is None:
            raise NotStarted("Use the fleet inside `with Fleet(client) as fleet:`.")
        if force_sync or (params.get("stream") and lane is None):
            lane = Lane.NOW
        tasked = task, task_budget, task_deadline
        options = make_options(latency_budget_ms, budget, deadline, lane, tags, key, *tasked, caching)
        client, submission = self._prepare(params, endpoint, options)
        draft = submission.draft
        if draft is not None and draft.raw is not None:
            settled = self._exchange.settled(draft.raw, draft.options(submission.options))
            submission.settled = self._thread.run(settled)
            if (message := draft.message(submission.settled)) is not None:
                return message
        create = self._kind.create(client, params, endpoint)
        with _submitting(submission):
            message = create(**params)
        if draft is not None:
            draft.learn_answer(message)
        return message

    def submit_sync(self, **params: Any) -> Any:
        """Submits one call on `now`, at full price."""
        return self.submit(force_sync=True, **params)

    def submit_batch(self, **params: Any) -> Any:
        """Submits one call by batch, however long that takes. With a budget, it is rescued when time runs out."""
        return self.submit(**{"lane": Lane.BATCH, **params})


# ---------------------------------------------------------------- SDK clients


@dataclass(frozen=True, slots=True)
class SdkKind:
    """One SDK: how to recognise its clients, and which of their methods takes a call. `hello` is the path of the
    request that reads a client's credential."""

    dialect: str
    asyncio: str
    blocking: str
    sign: str  # an attribute that only its clients have
    hello: str
    endpoints: tuple[str, ...]  # attributes of the client that have a `create` method for calls
    default: Callable[[Mapping[str, Any]], str]
    vendor: str | None = None  # the OpenAI-compatible provider it is made for
    package: str | None = None  # its package, if other SDKs have that attribute too
    path: str = ""  # to append to the client's base URL

    def fits(self, client: Any) -> bool:
        packages = {parent.__module__.partition(".")[0] for parent in type(client).__mro__}
        return hasattr(client, self.sign) and hasattr(client, "copy") and self.package in (None, *packages)

    def upstream(self, client: Any, http_client: HttpClient, vendor: str | None) -> Upstream:
        """The provider of a client. `vendor` names an OpenAI-compatible one that neither client nor host
        identifies."""
        base_url = str(client.base_url).rstrip("/") + self.path
        if vendor is not None and self.dialect != VENDOR_DIALECT.name:
            raise WrongClient(f"`vendor` is for OpenAI's API, and an {self.asyncio} uses another: leave it out.")
        dialect = configured_dialect(self.dialect, base_url, vendor or self.vendor)
        return Upstream(dialect.vendor or dialect.name, base_url, dialect, http_client)

    def create(self, client: Any, params: Mapping[str, Any], endpoint: str | None) -> Any:
        """The SDK method for these parameters: that of the named endpoint, or the one that they fit."""
        if endpoint is not None and endpoint not in self.endpoints:
            raise BadParams(f"{str(endpoint)[:60]!r} is no endpoint here: name one of {', '.join(self.endpoints)}.")
        resource = client
        for part in (endpoint or self.default(params)).split("."):
            resource = getattr(resource, part)
        return resource.create


KINDS = (
    SdkKind(
        *("anthropic", "AsyncAnthropic", "Anthropic", "messages", "/v1/messages", ("messages", "beta.messages")),
        lambda params: "beta.messages" if "betas" in params else "messages",  # only the beta namespace accepts betas
    ),
    SdkKind(
        *("openai", "AsyncOpenAI", "OpenAI", "responses", "/chat/completions"),
        ("chat.completions", "responses", "embeddings", "completions", "moderations"),
        lambda params: "chat.completions" if "messages" in params else "responses",
    ),
    SdkKind(
        *("openai", "AsyncGroq", "Groq", "chat", "/openai/v1/chat/completions", ("chat.completions", "embeddings")),
        lambda params: "chat.completions",
        vendor="groq",
        package="groq",
        path="/openai/v1",
    ),
)


def known_client(client: Any, way: str) -> tuple[ModuleType, SdkKind]:
    """The HTTP library of an SDK client, httpx or httpx2, and its kind. Raises `WrongClient` unless it is a supported
    client whose HTTP client has the class `way`."""
    inner, kind = inner_http(client), next((kind for kind in KINDS if kind.fits(client)), None)
    lib = httpx_library(inner, way)
    if lib is not None and kind is not None:
        return lib, kind
    name = f"{type(client).__module__.partition('.')[0]}.{type(client).__name__}"
    wanted = [sdk.asyncio if way == "AsyncClient" else sdk.blocking for sdk in ([kind] if kind else KINDS)]
    if kind is not None and httpx_library(inner, "Client") is not None:
        raise WrongClient(f"{name} is a blocking client. Use carpool.Fleet with it, or an {wanted[0]} here.")
    if kind is not None and httpx_library(inner, "AsyncClient") is not None:
        raise WrongClient(f"{name} is an asyncio client. Use carpool.FleetDispatcher with it, or an {wanted[0]} here.")
    ways = " or an ".join(f"{sdk.package or sdk.dialect}.{text}" for sdk, text in zip(KINDS, wanted, strict=False))
    raise WrongClient(f"carpool sends through an {ways}, and this is a {name}.")


def inner_http(client: Any) -> Any:
    """The HTTP client inside an SDK client. All supported SDKs keep it in the same private attribute."""
    return getattr(client, "_client", None)


# ---------------------------------------------------------------- options


def make_options(
    latency_budget_ms: float | None,
    budget: str | float | None,
    deadline: datetime | None,
    lane: Lane | str | None,
    tags: Mapping[str, str] | None,
    key: str | None,
    task: str | None = None,
    task_budget: str | float | None = None,
    task_deadline: datetime | None = None,
    caching: str | None = None,
) -> Options:
    if sum(value is not None for value in (latency_budget_ms, budget, deadline)) > 1:
        raise BadCall("Say how long the call may take only once: latency_budget_ms, budget or deadline.")
    if task_budget is not None and task_deadline is not None:
        raise BadCall("Say when the task must be done only once: task_budget or task_deadline.")
    for until in (deadline, task_deadline):
        if until is not None and (not isinstance(until, datetime) or until.tzinfo is None):
            raise BadCall(
                "A deadline is a datetime with a time zone, such as datetime.now(UTC) + timedelta(minutes=10)."
            )
    if not isinstance(tags, Mapping | None):
        raise BadCall(f"Tags are names with values, such as {{'team': 'ci'}}, and not a {type(tags).__name__}.")
    if latency_budget_ms is not None:
        budget = f"{latency_budget_ms}ms"
    return Options(
        budget=None if budget is None else parse_budget(str(budget)),
        deadline=None if deadline is None else deadline.timestamp(),
        lane=None if lane is None else parse_lane(lane),
        tags={str(name): str(value) for name, value in (tags or {}).items()},
        key=None if key is None else parse_key(key),
        task=None if task is None else parse_task(task),
        task_budget=None if task_budget is None else parse_budget(str(task_budget)),
        task_deadline=None if task_deadline is None else task_deadline.timestamp(),
        caching=None if caching is None else parse_caching(caching),
    )


# ---------------------------------------------------------------- errors


@contextmanager
def _submitting(submission: Submission) -> Iterator[None]:
    """Hands a submission to the transport below the SDK, and translates the SDK's errors."""
    token = current.set(submission)
    try:
        yield
    except Exception as error:  # noqa: BLE001  translated and raised again
        cause = _translated(error)
        own = isinstance(cause, CarpoolError) and not isinstance(cause, BadParams)
        raise cause from (cause if own else error).__cause__  # its own cause, not the SDK's wrapper
    finally:
        current.reset(token)


def _translated(error: Exception) -> Exception:
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
