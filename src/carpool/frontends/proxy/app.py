"""The proxy as an ASGI application: parses the head of a request and dispatches to the module that answers it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Literal

from msgspec.structs import replace

from carpool.core.errors import BadCall, CarpoolError, KeyRefused
from carpool.core.ports import Clock, RawRequest
from carpool.engine import Engine, Upstream
from carpool.frontends.proxy.admin import HOOKS, Admin, Webhooks
from carpool.frontends.proxy.calls import MAX_BODY, PASSED, CallHandler, ParsedHead, forward_unchanged
from carpool.frontends.proxy.http.connection import KnownHeads
from carpool.frontends.proxy.http.responses import Disconnected, asked_dialect
from carpool.frontends.proxy.log import Note, RequestLog, WriteLogEvent, no_log
from carpool.frontends.proxy.parse_head import LOCAL_ONLY, HeadFacts, HeadParser, Scope
from carpool.frontends.proxy.request import (
    JSON,
    DisconnectGuard,
    Receive,
    RequestContext,
    Send,
    Upload,
    advice,
    read_body,
    wait_for_disconnect,
)
from carpool.frontends.proxy.tickets import TicketRoutes
from carpool.frontends.proxy.waiting import KeepAliveIntervals, Waiter, WaitingCall
from carpool.planners.access.providers import ConfiguredKeys, Hosts, upgrade_refused
from carpool.planners.access.rules import RuleApplier, RuleBook
from carpool.planners.access.virtual_keys import VirtualKeyAccess

log = logging.getLogger("carpool.proxy")

NO_RULES = RuleBook()
NONE: Mapping[str, Any] = MappingProxyType({})


class Proxy:
    """A plain ASGI application over one engine and its upstreams.

    `defaults`: the providers to use where several have the same dialect.
    `on_disconnect`: what happens to a batched call whose client disconnects.
    `intervals`: how long clients wait in silence.
    `note` is called with the log line of every answered request, `write_event` with every call that starts to wait.
    `book`: the operator's rules. `keys`: by provider, the header with the key for clients that send none.
    `keys_required`: only virtual keys are accepted.
    `max_body`: the largest body of a call, in bytes.
    `hosts`: the accepted host names, and the trusted proxies.
    `admin_token`: protects the admin pages; without one, everybody who may connect can read them.
    `hook_secrets`: by provider, the secret that signs its webhooks.
    """

    def __init__(
        self,
        engine: Engine,
        upstreams: Mapping[str, Upstream],
        clock: Clock,
        *,
        defaults: Collection[str] = (),
        on_disconnect: Literal["keep", "cancel"] = "keep",
        intervals: KeepAliveIntervals | None = None,
        note: Note = no_log,
        write_event: WriteLogEvent = no_log,
        book: RuleBook = NO_RULES,
        keys: Mapping[str, tuple[str, str]] = NONE,
        keys_required: bool = False,
        max_body: int = MAX_BODY,
        hosts: Hosts = LOCAL_ONLY,
        admin_token: str | None = None,
        hook_secrets: Mapping[str, str] = NONE,
    ) -> None:
        self.heads = KnownHeads()
        self._max_body = max_body
        self._engine = engine
        self._upstreams = upstreams
        self._hosts = hosts
        key_access = VirtualKeyAccess(engine.virtual_key_cache, self._upstreams, required=keys_required)
        self._head_parser = HeadParser(self._upstreams, frozenset(defaults), ConfiguredKeys(keys), hosts, key_access)
        self._first = next(iter(self._upstreams.values())).dialect
        self._guard = DisconnectGuard()
        self.aclose = self._guard.aclose  # runs after the engine has closed and woken its waiters
        self._request_log = RequestLog(clock, hosts, note)
        self.refused = self._request_log.refused  # called by `BoundedProtocol` for a request that it refused itself
        intervals = intervals or KeepAliveIntervals()
        rules = RuleApplier(book)
        self._calls = CallHandler(
            engine, clock, self._guard, self._request_log, on_disconnect, intervals, write_event, rules, max_body
        )
        self._waiter = Waiter(engine, self._request_log, intervals)
        self._admin = Admin(engine, clock, TicketRoutes(engine, self._upstreams), self._first, admin_token)
        self._hooks = Webhooks(engine, clock, hook_secrets)
        self._open: set[asyncio.Task[Any]] = set()
        self._long_waits: set[asyncio.Task[Any]] = set()

    def parse_head(self, scope: Scope) -> ParsedHead | None:
        """`connection.RelayingApp`: the head of a request, which may be answered without a task."""
        try:
            head = self._head_parser.facts_of_head(scope)
        except CarpoolError:  # raised again in the task
            return None
        address = self._hosts.client(scope.get("client"), scope["headers"])
        method, query, headers = scope["method"], scope["query_string"].decode("latin-1"), head.headers_of(scope)
        return ParsedHead(self._calls, self._serve, head, method, query, headers, address)

    # ------------------------------------------------------------ requests with a task

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await RequestContext(self._serve)(scope, receive, send)

    async def _serve(self, request: RequestContext) -> None:
        task = asyncio.current_task()
        ended: Disconnected | CarpoolError | None = None
        assert task is not None
        request.line = self._request_log.begin(request.scope)
        self._open.add(task)
        try:
            waiting_call = await self._begin(request)
            if waiting_call is not None:
                # The request and its body are released before the wait, which may be long, and many may wait.
                with self._long_wait(request):
                    await self._waiter.wait(request, waiting_call)
        except Disconnected as error:
            ended = error
        except CarpoolError as error:
            ended = error
            if request.begun:
                log.warning("A response breaks off after its head: %s", error)
                raise  # the head is sent: only a broken connection shows the failure
            dialect = request.dialect
            if dialect is None:  # no provider was chosen
                asked = asked_dialect(request.scope["raw_path"], request.scope["headers"])
                known = (upstream.dialect for upstream in self._upstreams.values())
                dialect = next((candidate for candidate in known if candidate.name == asked), self._first)
            body = dialect.error(error.status, error.code, str(error))
            await request.send_whole(error.status, [JSON, *advice(error)], body)
        finally:
            self._open.discard(task)
            refused = request.refused
            sent = request.status if refused is None else refused.status
            self._request_log.ended(request.line, request.scope, sent, refused or ended)
            ended = None  # it refers to this frame: the cycle would keep the body in memory

    async def _begin(self, request: RequestContext) -> WaitingCall | None:
        """Answers a request. For a call that must wait, returns what to wait for."""
        scope, receive = request.scope, request.receive
        head = request.head or await self._facts_of_head(scope)
        upstream, request.client = head.upstream, head.client
        if upstream is None:
            await self._answer_own(request, head)
            return None
        request.dialect, request.line.provider = upstream.dialect, upstream.provider
        raw, request.raw = request.raw, None
        if raw is None:
            query = scope["query_string"].decode("latin-1")
            raw = RawRequest(scope["method"], head.path, query, head.headers_of(scope), b"")
            if not head.understood:
                await self._pass(request, upstream, raw)
                return None
            raw = replace(raw, body=await read_body(receive, self._max_body, "limits.max_body_mb"))
            request.address = self._hosts.client(scope.get("client"), scope["headers"])
        leaving, waiting_call = request.watch(lambda: wait_for_disconnect(receive), self._guard.background), None
        try:
            waiting_call = await self._calls.call(request, head, raw)
        finally:
            if waiting_call is None:
                leaving.cancel()
        return waiting_call

    async def _facts_of_head(self, scope: Scope) -> HeadFacts:
        try:
            return self._head_parser.facts_of_head(scope)
        except KeyRefused:
            if not await self._engine.virtual_key_cache.refresh():
                raise
        return self._head_parser.facts_of_head(scope)

    async def _pass(self, request: RequestContext, upstream: Upstream, raw: RawRequest) -> None:
        status = upgrade_refused(upstream.dialect, raw.path, raw.headers)
        if status is not None:
            message = "carpool does not speak WebSocket. Send this as a plain HTTP request."
            await request.send_whole(status, [JSON], upstream.dialect.error(status, BadCall.code, message))
            return
        request.line.lane = PASSED
        upload = Upload(request.receive, raw.headers)
        body = await upload.body()
        leaving = request.watch(upload.wait_for_disconnect, self._guard.background)
        try:
            await self._guard.run_while_connected(
                forward_unchanged(request, upstream, raw, body), leaving, streamed=True
            )
        finally:
            leaving.cancel()

    async def _answer_own(self, request: RequestContext, head: HeadFacts) -> None:
        query = request.scope["query_string"].decode("latin-1")
        method, headers, receive = request.scope["method"], head.headers_of(request.scope), request.receive
        if head.path.startswith(HOOKS):
            await self._hooks.answer(method, head.path, headers, receive)
            await request.send_json({"received": True})
            return
        request.watch(lambda: wait_for_disconnect(receive), self._guard.background)
        with self._long_wait(request):
            await self._admin.answer(method, head.path, query, headers, request)

    @contextmanager
    def _long_wait(self, request: RequestContext) -> Iterator[None]:
        """Marks a wait that may be long and ends when the engine closes: `drain` does not wait for it."""
        task = asyncio.current_task()
        assert task is not None
        self._long_waits.add(task)
        try:
            yield
        finally:
            self._long_waits.discard(task)
            request.leaving.cancel()

    async def drain(self, timeout: float) -> None:
        """Waits up to `timeout` for requests in progress, then cuts off what passes through. Runs before the engine
        closes, so that the ledger gets their entries. Calls that wait for a batch are not awaited: they are persisted
        and get their response when the engine closes."""
        self._admin.draining = True
        self._admin.event_stream.stop()
        under_way = self._open - self._long_waits
        if self._guard.relays:
            under_way.add(self._guard.background.spawn_awaited(self._guard.relayed(), "relays"))
        if under_way:
            await asyncio.wait(under_way, timeout=timeout)
        await self._guard.cut()
