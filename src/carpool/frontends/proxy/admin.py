"""carpool's own pages, under `/carpool/`."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any, TypeVar
from urllib.parse import parse_qs

import msgspec

from carpool.core.bounded import BoundedMap
from carpool.core.errors import BadCall, NoProvider, TimedOut
from carpool.core.lifecycle import BatchState, TicketState
from carpool.core.model import Batch, CallRow, Headers, ticket_number, ticket_text
from carpool.core.ports import Clock, Dialect
from carpool.engine import Engine, Event
from carpool.engine.events import EventHooks
from carpool.frontends.proxy.http.responses import Disconnected
from carpool.frontends.proxy.parse_head import CALLS, PREFIX
from carpool.frontends.proxy.request import EVENT_STREAM, JSON, Receive, RequestContext, read_body
from carpool.frontends.proxy.tickets import TicketRoutes, send_bought, send_too_late
from carpool.planners.access.providers import is_forwarded
from carpool.planners.access.virtual_keys import virtual_key
from carpool.planners.ledger import LedgerSummary
from carpool.planners.policy import parse_budget
from carpool.planners.tasks import summary_row

PAGE = 100
LONGEST_PAGE = 1000
OPEN = frozenset({"healthz", "readyz"})  # for health checks; they show no calls
TOKEN_HEADER = "x-carpool-admin"  # noqa: S105  a header's name
NO_STORE = (("cache-control", "no-store"),)
TOKEN_NEEDED = (
    "This page needs the admin token. Send it as Authorization: Bearer … or x-carpool-admin: …; it is in the "  # noqa: S105
    "environment variable that server.admin_token_env names."
)

S = TypeVar("S", bound=StrEnum)
Viewer = Sequence[str] | None  # the credentials whose calls are shown; None: all
Route = Callable[[str, RequestContext, Viewer], Awaitable[None]]


class Admin:
    """`token` protects the pages that show everybody's calls. Without one they are open to every client."""

    def __init__(
        self, engine: Engine, clock: Clock, tickets: TicketRoutes, dialect: Dialect, token: str | None = None
    ) -> None:
        self._token = None if token is None else _digest(token)
        self._engine = engine
        self._clock = clock
        self._tickets = tickets
        self._dialect = dialect
        self.event_stream = EventStream(engine.event_hooks)
        self.draining = False
        self._routes: dict[str, Route] = {
            "healthz": lambda query, request, viewer: request.send_json({"status": "ok"}),
            "readyz": self._readyz,
            "stats": self._stats,
            "calls": self._calls,
            "batches": self._batches,
            "tasks": self._list_tasks,
            "events": lambda query, request, viewer: self.event_stream.listen(request, viewer),
        }

    async def answer(self, method: str, path: str, query: str, headers: Headers, request: RequestContext) -> None:
        page = path.removeprefix(PREFIX)
        route = self._routes.get(page)
        if path.startswith(CALLS):  # needs the key that the call was made with
            await self._ticket(method, path.removeprefix(CALLS), query, headers, request)
        elif page not in OPEN and not self._is_authorized(headers) and virtual_key(headers) is None:
            await self._refuse(request, 401, TOKEN_NEEDED, ("www-authenticate", 'Bearer realm="carpool"'))
        elif route is None:
            await self._refuse(request, 404, f"There is no {path} here.")
        elif method not in ("GET", "HEAD"):
            await self._refuse(request, 405, f"{path} is only read: use GET.", ("allow", "GET, HEAD"))
        else:
            await route(query, request, None if page in OPEN else self._viewer(headers))

    def _viewer(self, headers: Headers) -> Viewer:
        """The token shows everything. Otherwise a request with a key, virtual or not, sees what belongs to that key."""
        if self._token is not None and self._is_authorized(headers):
            return None
        owners = list(self._tickets.owners(headers))
        return owners if owners or virtual_key(headers) is not None else None

    def _is_authorized(self, headers: Headers) -> bool:
        """Whether the request may see the pages. The token is compared by its hash in constant time.

        Without a configured token the pages are open until there are virtual keys: holders must not see more by
        omitting theirs. They are not open to requests through a reverse proxy, which may come from anybody."""
        if self._token is None:
            is_open = not self._engine.virtual_key_cache.expected and not is_forwarded(headers)
            return is_open or bool(self._tickets.owners(headers))
        tokens = [value for name, value in headers if name == TOKEN_HEADER]
        tokens += [value[7:] for name, value in headers if name == "authorization" and value[:7].lower() == "bearer "]
        return any(hmac.compare_digest(_digest(token.strip()), self._token) for token in tokens)

    async def _refuse(self, request: RequestContext, status: int, message: str, *more: tuple[str, str]) -> None:
        code = {401: "authentication_error", 404: "not_found_error"}.get(status, "invalid_request_error")
        await request.send_whole(status, [JSON, *more], self._dialect.error(status, code, message))

    # ------------------------------------------------------------ health and statistics

    async def _readyz(self, query: str, request: RequestContext, viewer: Viewer) -> None:
        reasons = ["carpool is stopping."] if self.draining else []
        if not self._engine.alive:
            reasons.append("The engine is not running.")
        if (trouble := await self._engine.overview.trouble()) is not None:
            reasons.append(trouble)
        await request.send_json({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200, NO_STORE)

    async def _stats(self, query: str, request: RequestContext, viewer: Viewer) -> None:
        """The counters of this process, the contents of the store, and all costs by lane and kind. For a key only its
        own costs."""
        if viewer is not None:
            lanes = await self._engine.overview.totals(viewer)
            summed = LedgerSummary.of(lanes)
            paid, would, saved = (nano / 1e9 for nano in (summed.paid, summed.would_have_paid, summed.saved))
            money = {"paid_usd": paid, "would_have_paid_usd": would, "saved_usd": saved}
            await request.send_json({"money": money, "lanes": lanes}, 200, NO_STORE)
            return
        stats, summary = self._engine.stats, await self._engine.overview.summary()
        money = {"paid_usd": stats.paid_usd, "would_have_paid_usd": stats.would_have_paid_usd}
        details = {
            "engine": self._engine.name,
            "process": os.getpid(),
            "leads": summary.leads,
            "waiting": summary.waiting,
            "money": money | {"saved_usd": stats.saved_usd},
            "lanes": summary.totals,
            "pressure": summary.pressure,
            "store": summary.counts,
        }
        await request.send_json({**stats.metrics(), **stats.apart(), **details}, 200, NO_STORE)

    # ------------------------------------------------------------ lists, newest first

    async def _calls(self, query: str, request: RequestContext, viewer: Viewer) -> None:
        limit, before, state = _page(query, TicketState)
        at = None if before is None else ticket_number(before)
        rows = await self._engine.overview.calls(at, state, limit, viewer)
        next_page = ticket_text(rows[-1].ticket) if len(rows) == limit else None
        await request.send_json({"calls": [_call(row) for row in rows], "next": next_page}, 200, NO_STORE)

    async def _batches(self, query: str, request: RequestContext, viewer: Viewer) -> None:
        limit, before, state = _page(query, BatchState)
        at = None if before is None else _integer(before, "before")
        rows = await self._engine.overview.batches(at, state, limit, viewer)
        now, whose = self._clock.now(), self._engine.credential
        next_page = str(rows[-1].id) if len(rows) == limit else None
        batches = [_batch(row, whose(row.key.credential), now) for row in rows]
        await request.send_json({"batches": batches, "next": next_page}, 200, NO_STORE)

    async def _list_tasks(self, query: str, request: RequestContext, viewer: Viewer) -> None:
        given = {name: values[-1] for name, values in parse_qs(query).items()}
        if unknown := given.keys() - {"limit", "since"}:
            raise BadCall(f"{min(unknown)!r} is not known here. Tasks take limit and since, as in since=2h.")
        limit = _limit(given)
        since = self._clock.now() - parse_budget(given.get("since", "24h"))
        rows = await self._engine.tasks.listed(since, limit, viewer)
        await request.send_json({"tasks": [summary_row(row) for row in rows]}, 200, NO_STORE)

    # ------------------------------------------------------------ single calls

    async def _ticket(self, method: str, text: str, query: str, headers: Headers, request: RequestContext) -> None:
        text, _, verb = text.partition("/")
        call = await self._tickets.find(text, headers)
        sees_all = self._is_authorized(headers) and self._viewer(headers) is None
        if not call and verb == "purchases" and sees_all:
            call = await self._engine.tickets.find(ticket_number(text)) or []
        reads = method == "GET" and verb in ("", "purchases")
        ends = (method, verb) in (("DELETE", ""), ("POST", "cancel"))
        if not call:
            await self._refuse(request, 404, "There is no such call for the key that this request carries.")
        elif not reads and not ends:
            message = "Read a call, or its /purchases, with GET; end it with DELETE."
            await self._refuse(request, 405, message, ("allow", "GET, DELETE"))
        elif not isinstance(call, CallRow):
            await (send_bought if reads else send_too_late)(request, call)
        elif ends:
            await self._tickets.cancel(call, request)
        elif verb:
            rows = await self._engine.overview.purchases(call.ticket)
            await request.send_json({"call": _call(call), "purchases": rows}, 200, NO_STORE)
        else:
            await self._tickets.collect(call, query, request)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _page(query: str, states: type[S]) -> tuple[int, str | None, S | None]:
    given = {name: values[-1] for name, values in parse_qs(query).items()}
    if unknown := given.keys() - {"limit", "before", "state"}:
        raise BadCall(f"{min(unknown)!r} is not known here. A list takes limit, before and state.")
    limit = _limit(given)
    state = given.get("state")
    if state is not None and state not in list(states):
        raise BadCall(f"{state[:40]!r} is not a state. The states are {', '.join(states)}.")
    return limit, given.get("before"), None if state is None else states(state)


def _limit(given: Mapping[str, str]) -> int:
    limit = _integer(given.get("limit", str(PAGE)), "limit")
    if not 1 <= limit <= LONGEST_PAGE:
        raise BadCall(f"The limit {limit} is out of range: it must be from 1 to {LONGEST_PAGE}.")
    return limit


def _integer(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise BadCall(f"{text[:40]!r} can't be {name}: it must be a whole number.")
    return int(text)


def _call(row: CallRow) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(row)
    return fields | {"ticket": ticket_text(row.ticket), "credential": row.credential[:8]}


def _batch(batch: Batch, credential: str, now: float) -> dict[str, Any]:
    end = batch.ended_at or now
    return {
        "batch": batch.id,
        "provider": batch.key.provider,
        "provider_id": batch.provider_id,
        "state": batch.state,
        "count": batch.count,
        "bytes": batch.bytes,
        "endpoint": batch.key.endpoint,
        "credential": credential[:8],
        "intended_at": batch.intended_at,
        "ended_at": batch.ended_at,
        "expires_at": batch.expires_at,
        "age_s": max(0.0, end - batch.intended_at),
        "abandoned": batch.abandoned,
        "note": batch.note,
    }


# ------------------------------------------------------------ events


MAX_UNREAD = 1000  # events that a slow reader may lag behind
KEEP_ALIVE_S = 15.0  # between keep-alive comments
SLOWEST_READ_S = 30.0  # for the client to read a chunk

KEEP_ALIVE = b": still here\n\n"
TOO_SLOW = b": %d events were missed, because they were not read in time. Connect again.\n\n"
GOOD_BYE = b": carpool is stopping.\n\n"


class EventStream:
    """Sends events to listeners, each with its own hook into the engine."""

    def __init__(self, event_hooks: EventHooks) -> None:
        self._event_hooks = event_hooks
        self._woken: set[asyncio.Event] = set()  # of each listener
        self._stopping = False

    def stop(self) -> None:
        """Ends every listener's stream."""
        self._stopping = True
        for woken in self._woken:
            woken.set()

    async def listen(self, request: RequestContext, viewer: Viewer = None) -> None:
        unread: list[Event] = []
        missed, woken = 0, asyncio.Event()

        def on_event(event: Event) -> None:
            nonlocal missed
            if viewer is not None and event.credential not in viewer:
                return
            if len(unread) < MAX_UNREAD and not missed:
                unread.append(event)
            else:
                missed += 1
            woken.set()

        self._event_hooks.add(on_event)
        self._woken.add(woken)
        request.leaving.add_done_callback(lambda _: woken.set())
        try:
            await request.send_head(200, [EVENT_STREAM, ("cache-control", "no-cache")])
            while not request.disconnected:
                chunk = b"".join(map(_encoded, unread)) or KEEP_ALIVE
                unread.clear()
                await _send_in_time(request, chunk)
                if self._stopping or (missed and not unread):
                    last = TOO_SLOW % missed if missed and not unread else GOOD_BYE
                    await _send_in_time(request, last, more=False)
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(KEEP_ALIVE_S):
                        await woken.wait()
                    woken.clear()
            raise Disconnected
        finally:
            self._woken.discard(woken)
            self._event_hooks.remove(on_event)


async def _send_in_time(request: RequestContext, chunk: bytes, *, more: bool = True) -> None:
    try:
        async with asyncio.timeout(SLOWEST_READ_S):
            await request.send_chunk(chunk, more=more)
    except TimeoutError:
        raise TimedOut("A listener at /carpool/events reads nothing. Its connection is closed.") from None


def _encoded(event: Event) -> bytes:
    name = type(event).__name__
    fields = {"type": name, **msgspec.to_builtins(event), "credential": event.credential[:8]}
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(fields))


# ------------------------------------------------------------ webhooks


HOOKS = "/carpool/hooks/"
MAX_HOOK = 100_000
REMEMBERED = 10_000  # webhook ids, to ignore duplicates


class Webhooks:
    """`secrets`: by provider. The signature authenticates the sender, so no token is needed."""

    def __init__(self, engine: Engine, clock: Clock, secrets: Mapping[str, str]) -> None:
        self._engine = engine
        self._clock = clock
        self._secrets = secrets
        self._seen: BoundedMap[tuple[str, str], None] = BoundedMap(REMEMBERED)

    async def answer(self, method: str, path: str, headers: Headers, receive: Receive) -> None:
        """Takes a webhook, or raises."""
        provider = path.removeprefix(HOOKS)
        reader = self._engine.webhooks(provider) if provider in self._secrets else None
        if reader is None:
            raise NoProvider(
                f"carpool takes no webhooks at {path[:80]}: set providers.NAME.webhook_secret_env for a provider."
            )
        if method != "POST":
            raise BadCall("Send webhooks with POST.")
        body = await read_body(receive, MAX_HOOK)
        webhook = reader.read(self._secrets[provider], headers, body, self._clock.now())
        if (provider, webhook.id) not in self._seen:
            self._seen[provider, webhook.id] = None
            if webhook.batch is not None:
                self._engine.poll_soon(provider, webhook.batch)
