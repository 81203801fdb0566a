"""The proxy as an ASGI application: who may ask, what was asked beside the call, and whose turn it is to answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Literal

from carpool.doors.asgi import (
    JSON,
    RETRY,
    Disconnected,
    Once,
    Receive,
    Scope,
    Send,
    Upload,
    gone,
    read_body,
    request_headers,
    send_whole,
)
from carpool.doors.proxy.admin import Admin
from carpool.doors.proxy.calling import MAX_BODY, Caller, Note, Ride
from carpool.doors.proxy.choosing import below, wire_of
from carpool.doors.proxy.connection import Sink, informer
from carpool.doors.proxy.greeting import LOCAL_ONLY, Greeter, Greeting, Met
from carpool.doors.proxy.heads import Heads
from carpool.doors.proxy.hooks import PREFIX as HOOKS
from carpool.doors.proxy.hooks import Hooks
from carpool.doors.proxy.hosts import Hosts
from carpool.doors.proxy.leaving import Guard
from carpool.doors.proxy.lending import Purse
from carpool.doors.proxy.passing import pass_through, upgrade_refused
from carpool.doors.proxy.relaying import Relay
from carpool.doors.proxy.returning import Desk
from carpool.doors.proxy.visit import Visit
from carpool.doors.proxy.waiting import Patience
from carpool.doors.proxy.welcome import Welcome
from carpool.engine import Engine, Upstream
from carpool.errors import BadCall, CarpoolError, Closed
from carpool.ports import Clock, Dialect, RawRequest
from carpool.rules import RuleBook

log = logging.getLogger("carpool.proxy")

GREETING = "carpool.greeting"  # in a scope: what its head says
DECIDED = "carpool.decided"  # in a scope: what was found out about its call
NO_RULES = RuleBook()
NO_KEYS: Mapping[str, tuple[str, str]] = MappingProxyType({})
NO_SECRETS: Mapping[str, str] = MappingProxyType({})


class Proxy:
    """A plain ASGI application over one engine and its upstreams.

    `defaults` names the provider to take where several speak the same dialect.

    `on_disconnect` says what becomes of a batched call whose client hangs up, `patience` how long clients wait in
    silence; `note` is told every call when it is answered. `book` holds the rules of the house, `keys` the header with
    the key of a provider, for clients that send none; with `keys_required` only virtual keys are taken. A call's body
    has at most `max_body` bytes. `hosts` says under which names it may be asked, `admin_token` what its own pages cost;
    without one they are open to whoever may ask. `hook_secrets` are those under which providers sign their webhooks.
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
        book: RuleBook = NO_RULES,
        keys: Mapping[str, tuple[str, str]] = NO_KEYS,
        keys_required: bool = False,
        max_body: int = MAX_BODY,
        hosts: Hosts = LOCAL_ONLY,
        admin_token: str | None = None,
        hook_secrets: Mapping[str, str] = NO_SECRETS,
    ) -> None:
        self.heads = Heads()
        self._max_body = max_body
        self._engine = engine
        self._upstreams = upstreams
        self._hosts = hosts
        welcome = Welcome(engine.guests, self._upstreams, required=keys_required)
        self._greeter = Greeter(self._upstreams, frozenset(defaults), Purse(keys), hosts, welcome)
        self._first = next(iter(self._upstreams.values())).dialect
        self._guard = Guard()
        self._caller = Caller(engine, clock, self._guard, on_disconnect, patience or Patience(), note, book, max_body)
        self._admin = Admin(engine, clock, Desk(engine, self._upstreams), self._first, admin_token)
        self._hooks = Hooks(engine, clock, hook_secrets)
        self._open: set[asyncio.Task[Any]] = set()
        self._patient: set[asyncio.Task[Any]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        once, task = Once(send), asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self._serve(scope, receive, once)
        except Disconnected:
            return
        except CarpoolError as error:
            if once.begun:
                log.warning("A begun answer breaks off: %s", error)
                raise  # the head is out: only a broken connection tells the client the truth now
            body = (once.dialect or self._shape(scope)).error(error.status, error.code, str(error))
            await send_whole(once, error.status, [JSON, *(RETRY if isinstance(error, Closed) else ())], body)
        finally:
            self._open.discard(task)

    # ------------------------------------------------------------ the short way

    def meet(self, scope: Scope) -> Met | None:
        """`connection.Relaying`: a call that may be answered on the spot, once it is here as a whole."""
        try:
            greeting = scope[GREETING] = self._greeter.greet(scope)
        except CarpoolError:  # told on the long way
            return None
        if not greeting.understood or greeting.hold is not None:
            return None
        return Met.of(greeting, scope, self._hosts.client(scope))

    def relay(self, met: Met, body: bytes, sink: Sink, scope: Scope | None) -> Relay | None:
        """Begins to answer it, or leaves what was found out about it to the long way."""
        if len(body) > self._max_body or not self._greeter.holds(met.greeting):
            return None
        try:
            found = self._caller.relay(sink, met.greeting, met.request(body), met.address)
        except CarpoolError:  # told on the long way
            return None
        if isinstance(found, Relay):
            return found
        if scope is not None:
            scope[DECIDED] = found
        return None

    # ------------------------------------------------------------ the long way

    async def _serve(self, scope: Scope, receive: Receive, send: Once) -> None:
        """The request and its body are let go before the wait begins: it may be long, and many may wait."""
        waiting = await self._begin(scope, receive, send)
        if waiting is not None:
            visit, ride = waiting
            with self._patiently():
                try:
                    await self._caller.wait(visit, ride)
                finally:
                    visit.leaving.cancel()

    async def _begin(self, scope: Scope, receive: Receive, send: Once) -> tuple[Visit, Ride] | None:
        greeting = scope.pop(GREETING, None) or self._greeter.greet(scope)
        upstream, query = greeting.upstream, scope["query_string"].decode("latin-1")
        if upstream is None:
            await self._own(scope, receive, send, greeting, query)
            return None
        send.dialect = upstream.dialect
        body = await read_body(receive, self._max_body) if greeting.understood else b""
        raw = RawRequest(scope["method"], greeting.path, query, greeting.headers_of(scope), body)
        if greeting.understood:
            return await self._call(scope, receive, send, upstream, greeting, raw)
        await self._pass(scope, receive, send, upstream, raw)
        return None

    async def _call(
        self, scope: Scope, receive: Receive, send: Once, upstream: Upstream, greeting: Greeting, raw: RawRequest
    ) -> tuple[Visit, Ride] | None:
        leaving = self._guard.watch(scope, lambda: gone(receive))
        visit = Visit(send, greeting.client, leaving, informer(scope), self._hosts.client(scope))
        ride = None
        try:
            ride = await self._caller.call(visit, upstream, greeting, raw, scope.pop(DECIDED, None))
        finally:
            if ride is None:
                leaving.cancel()
        return None if ride is None else (visit, ride)

    async def _pass(self, scope: Scope, receive: Receive, send: Once, upstream: Upstream, raw: RawRequest) -> None:
        status = upgrade_refused(raw.path, raw.headers)
        if status is not None:
            said = "carpool does not speak WebSocket. Send this as a plain HTTP request."
            await send_whole(send, status, [JSON], upstream.dialect.error(status, BadCall.code, said))
            return
        upload = Upload(receive, raw.headers)
        body = await upload.body()
        leaving = self._guard.watch(scope, upload.gone)
        try:
            passing = pass_through(upstream, raw, body, send, informer(scope))
            await self._guard.unless_gone(passing, leaving, passing=True)
        finally:
            leaving.cancel()

    def _shape(self, scope: Scope) -> Dialect:
        """In whose words an error is told where no provider was chosen: those of the wire that was spoken."""
        path = scope["raw_path"].decode("latin-1").partition("?")[0]
        path = below("/" + path[1:].partition("/")[2] if path.startswith("/@") else path)
        spoken = wire_of(path, request_headers(scope))
        speakers = (upstream.dialect for upstream in self._upstreams.values())
        return next((dialect for dialect in speakers if dialect.name == spoken), self._first)

    async def _own(self, scope: Scope, receive: Receive, send: Once, greeting: Greeting, query: str) -> None:
        headers = greeting.headers_of(scope)
        if greeting.path.startswith(HOOKS):
            await self._hooks.answer(scope["method"], greeting.path, headers, receive, send)
            return
        leaving = self._guard.watch(scope, lambda: gone(receive))
        visit = Visit(send, greeting.client, leaving, informer(scope))
        with self._patiently():
            try:
                await self._admin.answer(scope["method"], greeting.path, query, headers, visit)
            finally:
                leaving.cancel()

    @contextmanager
    def _patiently(self) -> Iterator[None]:
        """Around what may take long and is told when carpool stops: `drain` does not wait for it."""
        task = asyncio.current_task()
        assert task is not None
        self._patient.add(task)
        try:
            yield
        finally:
            self._patient.discard(task)

    async def drain(self, timeout: float) -> None:
        """Gives what is being bought so long, then cuts what passes through. Before the engine closes, to be entered.
        Calls that wait for a batch are not waited for: they are kept, and told so when the engine closes."""
        self._admin.draining = True
        self._admin.news.stop()
        under_way = self._open - self._patient
        if self._guard.relays:
            under_way.add(self._guard.crew.lend(self._guard.relayed(), "relays"))
        if under_way:
            await asyncio.wait(under_way, timeout=timeout)
        await self._guard.cut()

    async def aclose(self) -> None:
        """Ends what is left. After the engine has told its own waiters that it closed."""
        await self._guard.aclose()
