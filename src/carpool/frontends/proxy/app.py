"""The proxy as an ASGI application: parses the head of a request and dispatches to the module that answers it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Literal

from carpool.core.errors import BadCall, CarpoolError
from carpool.core.ports import Clock, Dialect, RawRequest
from carpool.engine import Engine, Upstream
from carpool.frontends.proxy.admin import HOOKS, Admin, Hooks
from carpool.frontends.proxy.calls import MAX_BODY, PASSED, CallHandler, WaitingCall
from carpool.frontends.proxy.disconnect import DisconnectGuard
from carpool.frontends.proxy.http.asgi import (
    JSON,
    Disconnected,
    Once,
    Receive,
    Scope,
    Send,
    Upload,
    advice,
    gone,
    read_body,
    request_headers,
    send_whole,
)
from carpool.frontends.proxy.http.connection import ClientSink, KnownHeads, informer, receiver
from carpool.frontends.proxy.http.responses import RequestRefused
from carpool.frontends.proxy.log import Note, Tell
from carpool.frontends.proxy.parse_head import LOCAL_ONLY, HeadFacts, HeadParser, ParsedHead
from carpool.frontends.proxy.pass_through import pass_through
from carpool.frontends.proxy.relay import Relay
from carpool.frontends.proxy.request_context import RequestContext
from carpool.frontends.proxy.request_log import RequestLog
from carpool.frontends.proxy.tickets import TicketRoutes
from carpool.frontends.proxy.waiting import Patience
from carpool.planners.access.hosts import Hosts
from carpool.planners.access.providers import HouseKeys, below, upgrade_refused, wire_of
from carpool.planners.access.rules import RuleBook
from carpool.planners.access.virtual_keys import VirtualKeyAccess

log = logging.getLogger("carpool.proxy")

GREETING = "carpool.greeting"  # scope key: the `HeadFacts`
LINE = "carpool.line"  # scope key: the log line
DECIDED = "carpool.decided"  # scope key: the `DecidedCall`
NO_RULES = RuleBook()
NO_KEYS: Mapping[str, tuple[str, str]] = MappingProxyType({})
NO_SECRETS: Mapping[str, str] = MappingProxyType({})


class Proxy:
    """A plain ASGI application over one engine and its upstreams.

    `defaults`: the providers to use where several have the same dialect.
    `on_disconnect`: what happens to a batched call whose client disconnects.
    `patience`: how long clients wait in silence.
    `note` is called with the log line of every answered request, `tell` with every call that starts to wait.
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
        patience: Patience | None = None,
        note: Note = lambda line: None,
        tell: Tell = lambda event: None,
        book: RuleBook = NO_RULES,
        keys: Mapping[str, tuple[str, str]] = NO_KEYS,
        keys_required: bool = False,
        max_body: int = MAX_BODY,
        hosts: Hosts = LOCAL_ONLY,
        admin_token: str | None = None,
        hook_secrets: Mapping[str, str] = NO_SECRETS,
    ) -> None:
        self.heads = KnownHeads()
        self._max_body = max_body
        self._engine = engine
        self._upstreams = upstreams
        self._hosts = hosts
        key_access = VirtualKeyAccess(engine.guests, self._upstreams, required=keys_required)
        self._head_parser = HeadParser(self._upstreams, frozenset(defaults), HouseKeys(keys), hosts, key_access)
        self._first = next(iter(self._upstreams.values())).dialect
        self._guard = DisconnectGuard()
        self._request_log = RequestLog(clock, hosts, note)
        self._caller = CallHandler(
            engine, clock, self._guard, on_disconnect, patience or Patience(), note, tell, book, max_body
        )
        self._admin = Admin(engine, clock, TicketRoutes(engine, self._upstreams), self._first, admin_token)
        self._hooks = Hooks(engine, clock, hook_secrets)
        self._open: set[asyncio.Task[Any]] = set()
        self._long_waits: set[asyncio.Task[Any]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        once, task = Once(send), asyncio.current_task()
        ended: Exception | None = None
        line = scope[LINE] = self._request_log.begin(scope)
        assert task is not None
        self._open.add(task)
        try:
            await self._serve(scope, receive, once)
        except Disconnected as error:
            ended = error
        except CarpoolError as error:
            ended = error
            if once.begun:
                log.warning("A begun answer breaks off: %s", error)
                raise  # the head is sent: only a broken connection shows the failure
            body = (once.dialect or self._error_dialect(scope)).error(error.status, error.code, str(error))
            await send_whole(once, error.status, [JSON, *advice(error)], body)
        finally:
            self._open.discard(task)
            self._request_log.ended(line, scope, once.status, ended)
            ended = None  # it refers to this frame: the cycle would keep the body in memory

    # ------------------------------------------------------------ calls without a task

    def parse_head(self, scope: Scope) -> ParsedHead | None:
        """`connection.RelayingApp`: the head of a call that may be relayed once its body is complete."""
        try:
            head = scope[GREETING] = self._head_parser.greet(scope)
        except CarpoolError:  # raised again in the task
            return None
        if not head.understood or head.hold is not None:
            return None
        return ParsedHead.of(head, scope, self._hosts.client(scope.get("client"), scope["headers"]))

    def relay(self, parsed_head: ParsedHead, body: bytes, sink: ClientSink, scope: Scope | None) -> Relay | None:
        """Starts the answer, or leaves the decision in the scope for the task."""
        if len(body) > self._max_body or not self._head_parser.is_current(parsed_head.head):
            return None
        try:
            relay = self._caller.relay(sink, parsed_head.head, parsed_head.request(body), parsed_head.address)
        except CarpoolError:  # raised again in the task
            return None
        if isinstance(relay, Relay):
            return relay
        if scope is not None:
            scope[DECIDED] = relay
        return None

    def left(self, parsed_head: ParsedHead, scope: Scope) -> None:
        """`connection.RelayingApp`: the client disconnected before anything was done."""
        self._request_log.left(parsed_head, scope)

    def refused(
        self,
        refused: RequestRefused,
        method: str,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        peer: tuple[str, int] | None,
    ) -> None:
        """Called by `BoundedProtocol` for a request that it refused itself."""
        self._request_log.refused(refused, method, target, headers, peer)

    # ------------------------------------------------------------ requests with a task

    async def _serve(self, scope: Scope, receive: Receive, send: Once) -> None:
        """Releases the request and its body before the wait, which may be long, and many may wait."""
        waiting = await self._begin(scope, receive, send)
        if waiting is not None:
            request, waiting_call = waiting
            with self._long_wait():
                try:
                    await self._caller.wait(request, waiting_call)
                finally:
                    request.leaving.cancel()

    async def _begin(self, scope: Scope, receive: Receive, send: Once) -> tuple[RequestContext, WaitingCall] | None:
        head = scope.pop(GREETING, None) or self._head_parser.greet(scope)
        upstream, query = head.upstream, scope["query_string"].decode("latin-1")
        if upstream is None:
            await self._answer_own(scope, receive, send, head, query)
            return None
        send.dialect, scope[LINE].provider = upstream.dialect, upstream.provider
        body = await read_body(receive, self._max_body, "limits.max_body_mb") if head.understood else b""
        raw = RawRequest(scope["method"], head.path, query, head.headers_of(scope), body)
        if head.understood:
            return await self._call(scope, receive, send, upstream, head, raw)
        await self._pass(scope, receive, send, upstream, raw)
        return None

    async def _call(
        self, scope: Scope, receive: Receive, send: Once, upstream: Upstream, head: HeadFacts, raw: RawRequest
    ) -> tuple[RequestContext, WaitingCall] | None:
        leaving = self._guard.watch(scope, lambda: gone(receive))
        address = self._hosts.client(scope.get("client"), scope["headers"])
        request = RequestContext(send, head.client, leaving, informer(scope), scope[LINE], receiver(scope), address)
        waiting_call = None
        try:
            waiting_call = await self._caller.call(request, upstream, head, raw, scope.pop(DECIDED, None))
        finally:
            if waiting_call is None:
                leaving.cancel()
        return None if waiting_call is None else (request, waiting_call)

    async def _pass(self, scope: Scope, receive: Receive, send: Once, upstream: Upstream, raw: RawRequest) -> None:
        status = upgrade_refused(raw.path, raw.headers)
        if status is not None:
            message = "carpool does not speak WebSocket. Send this as a plain HTTP request."
            await send_whole(send, status, [JSON], upstream.dialect.error(status, BadCall.code, message))
            return
        scope[LINE].lane = PASSED
        upload = Upload(receive, raw.headers)
        body = await upload.body()
        leaving = self._guard.watch(scope, upload.gone)
        try:
            passing = pass_through(upstream, raw, body, send, informer(scope))
            await self._guard.unless_gone(passing, leaving, passing=True)
        finally:
            leaving.cancel()

    def _error_dialect(self, scope: Scope) -> Dialect:
        """The dialect for an error if no provider was chosen: that of the requested API."""
        path = scope["raw_path"].decode("latin-1").partition("?")[0]
        path = below("/" + path[1:].partition("/")[2] if path.startswith("/@") else path)
        name = wire_of(path, request_headers(scope))
        dialects = (upstream.dialect for upstream in self._upstreams.values())
        return next((dialect for dialect in dialects if dialect.name == name), self._first)

    async def _answer_own(self, scope: Scope, receive: Receive, send: Once, head: HeadFacts, query: str) -> None:
        headers = head.headers_of(scope)
        if head.path.startswith(HOOKS):
            await self._hooks.answer(scope["method"], head.path, headers, receive, send)
            return
        leaving = self._guard.watch(scope, lambda: gone(receive))
        request = RequestContext(send, head.client, leaving, informer(scope), scope[LINE], receiver(scope))
        with self._long_wait():
            try:
                await self._admin.answer(scope["method"], head.path, query, headers, request)
            finally:
                leaving.cancel()

    @contextmanager
    def _long_wait(self) -> Iterator[None]:
        """Marks a wait that may be long and ends when the engine closes: `drain` does not wait for it."""
        task = asyncio.current_task()
        assert task is not None
        self._long_waits.add(task)
        try:
            yield
        finally:
            self._long_waits.discard(task)

    async def drain(self, timeout: float) -> None:
        """Waits up to `timeout` for requests in progress, then cuts off what passes through. Runs before the engine
        closes, so that the ledger gets their entries. Calls that wait for a batch are not awaited: they are persisted
        and get their response when the engine closes."""
        self._admin.draining = True
        self._admin.news.stop()
        under_way = self._open - self._long_waits
        if self._guard.relays:
            under_way.add(self._guard.background.lend(self._guard.relayed(), "relays"))
        if under_way:
            await asyncio.wait(under_way, timeout=timeout)
        await self._guard.cut()

    async def aclose(self) -> None:
        """Ends what is left. Runs after the engine has closed and woken its waiters."""
        await self._guard.aclose()
