"""Everything under `/carpool/` is ours to answer."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import Any, TypeVar
from urllib.parse import parse_qs

import msgspec

from carpool.doors.asgi import JSON, send_whole
from carpool.doors.proxy.lending import passed_on
from carpool.doors.proxy.news import News
from carpool.doors.proxy.returning import PATH as CALLS
from carpool.doors.proxy.returning import Desk
from carpool.doors.proxy.visit import Visit
from carpool.doors.proxy.welcome import virtual_key
from carpool.engine import Engine
from carpool.errors import BadCall
from carpool.ledger import Summary
from carpool.lifecycle import BatchState, TicketState
from carpool.model import Batch, CallRow, Headers, ticket_number, ticket_text
from carpool.ports import Clock, Dialect

PREFIX = "/carpool/"
PAGE = 100
LONGEST_PAGE = 1000
OPEN = frozenset({"healthz", "readyz"})  # for those who look whether a server lives; they tell of nobody's calls
TOKEN_HEADER = "x-carpool-admin"  # noqa: S105  a header's name
TOKEN_NEEDED = (
    "This page needs the admin token. Send it as Authorization: Bearer … or x-carpool-admin: …; it is in the "  # noqa: S105
    "environment variable that server.admin_token_env names."
)

S = TypeVar("S", bound=StrEnum)
Viewer = Sequence[str] | None  # the credentials whose calls are shown; None: everybody's
Route = Callable[[str, Visit, Viewer], Awaitable[None]]


class Admin:
    """`token` opens the pages that tell of everybody's calls. Without one they are open to whoever may ask at all."""

    def __init__(self, engine: Engine, clock: Clock, desk: Desk, dialect: Dialect, token: str | None = None) -> None:
        self._token = None if token is None else _digest(token)
        self._engine = engine
        self._clock = clock
        self._desk = desk
        self._dialect = dialect
        self.news = News(engine.bulletin)
        self.draining = False
        self._routes: dict[str, Route] = {
            "healthz": self._healthz,
            "readyz": self._readyz,
            "stats": self._stats,
            "calls": self._calls,
            "batches": self._batches,
            "events": self._events,
        }

    async def answer(self, method: str, path: str, query: str, headers: Headers, visit: Visit) -> None:
        page = path.removeprefix(PREFIX)
        route = self._routes.get(page)
        if path.startswith(CALLS):  # the key that a call was made with opens that call
            await self._ticket(method, path.removeprefix(CALLS), query, headers, visit)
        elif page not in OPEN and not self._may(headers) and not self._own(headers):
            await self._refuse(visit, 401, TOKEN_NEEDED, ("www-authenticate", 'Bearer realm="carpool"'))
        elif route is None:
            await self._refuse(visit, 404, f"There is no {path} here.")
        elif method not in ("GET", "HEAD"):
            await self._refuse(visit, 405, f"{path} is only read: use GET.", ("allow", "GET, HEAD"))
        else:
            await route(query, visit, None if page in OPEN else self._viewer(headers))

    def _own(self, headers: Headers) -> bool:
        """Whoever has a virtual key may see what is its own."""
        return virtual_key(headers) is not None

    def _viewer(self, headers: Headers) -> Viewer:
        """The token shows everything. Without one, whoever asks with a key sees what belongs to that key."""
        if self._token is not None and self._may(headers):
            return None
        owners = list(self._desk.owners(headers))
        return owners if owners or self._own(headers) else None

    def _may(self, headers: Headers) -> bool:
        """Compared as a whole and by its hash, so that how long it takes tells nothing of the token. Where nobody set
        one, the pages are open until there are virtual keys: those who have one must not see more by leaving it out.
        They are open to this machine only: a server in front speaks for anybody."""
        if self._token is None:
            near = not self._engine.guests.expected and not passed_on(headers)
            return near or bool(self._desk.owners(headers))
        shown = [value for name, value in headers if name == TOKEN_HEADER]
        shown += [value[7:] for name, value in headers if name == "authorization" and value[:7].lower() == "bearer "]
        return any(hmac.compare_digest(_digest(one.strip()), self._token) for one in shown)

    async def _refuse(self, visit: Visit, status: int, message: str, *more: tuple[str, str]) -> None:
        code = {401: "authentication_error", 404: "not_found_error"}.get(status, "invalid_request_error")
        await send_whole(visit.send, status, [JSON, *more], self._dialect.error(status, code, message))

    # ------------------------------------------------------------ how it is

    async def _healthz(self, query: str, visit: Visit, viewer: Viewer) -> None:
        await send_whole(visit.send, 200, [JSON], b'{"status":"ok"}')

    async def _readyz(self, query: str, visit: Visit, viewer: Viewer) -> None:
        reasons = ["carpool is stopping."] if self.draining else []
        if not self._engine.alive:
            reasons.append("The engine is not running.")
        if (trouble := await self._engine.overview.trouble()) is not None:
            reasons.append(trouble)
        await _json(visit, {"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)

    async def _stats(self, query: str, visit: Visit, viewer: Viewer) -> None:
        """The counters of this process; and of the store what it holds and what was ever paid, by lane and kind. For
        a key only what was paid for it."""
        if viewer is not None:
            lanes = await self._engine.overview.totals(viewer)
            await _json(visit, {"money": _money(Summary.of(lanes)), "lanes": lanes})
            return
        stats, summary = self._engine.stats, await self._engine.overview.summary()
        money = {"paid_usd": stats.paid_usd, "would_have_paid_usd": stats.would_have_paid_usd}
        said = {
            "engine": self._engine.name,
            "process": os.getpid(),
            "leads": summary.leads,
            "waiting": summary.waiting,
            "money": money | {"saved_usd": stats.saved_usd},
            "lanes": summary.totals,
            "pressure": summary.pressure,
            "store": summary.counts,
        }
        await _json(visit, {**stats.metrics(), **said})

    # ------------------------------------------------------------ lists, newest first

    async def _calls(self, query: str, visit: Visit, viewer: Viewer) -> None:
        limit, before, state = _page(query, TicketState)
        at = None if before is None else ticket_number(before)
        rows = await self._engine.overview.calls(at, state, limit, viewer)
        after = ticket_text(rows[-1].ticket) if len(rows) == limit else None
        await _json(visit, {"calls": [_call(row) for row in rows], "next": after})

    async def _batches(self, query: str, visit: Visit, viewer: Viewer) -> None:
        limit, before, state = _page(query, BatchState)
        at = None if before is None else _whole(before, "before")
        rows = await self._engine.overview.batches(at, state, limit, viewer)
        now = self._clock.now()
        after = str(rows[-1].id) if len(rows) == limit else None
        await _json(visit, {"batches": [_batch(row, now) for row in rows], "next": after})

    async def _events(self, query: str, visit: Visit, viewer: Viewer) -> None:
        await self.news.listen(visit, viewer)

    # ------------------------------------------------------------ one call, for its own client

    async def _ticket(self, method: str, text: str, query: str, headers: Headers, visit: Visit) -> None:
        text, _, verb = text.partition("/")
        row = await self._desk.find(text, headers)
        if row is None:
            await self._refuse(visit, 404, "There is no such call for the key that this request carries.")
        elif (method, verb) in (("DELETE", ""), ("POST", "cancel")):
            await self._desk.cancel(row, visit.send)
        elif (method, verb) == ("GET", ""):
            reply = await self._desk.collect(row, query, visit)
            if reply is not None and not visit.gone:
                self._engine.delivered_soon(reply.ticket)
        else:
            await self._refuse(visit, 405, "Read a call with GET, end it with DELETE.", ("allow", "GET, DELETE"))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


async def _json(visit: Visit, value: object, status: int = 200) -> None:
    await send_whole(visit.send, status, [JSON, ("cache-control", "no-store")], msgspec.json.encode(value))


def _page(query: str, states: type[S]) -> tuple[int, str | None, S | None]:
    given = {name: values[-1] for name, values in parse_qs(query).items()}
    if unknown := given.keys() - {"limit", "before", "state"}:
        raise BadCall(f"{min(unknown)!r} is not known here. A list takes limit, before and state.")
    limit = _whole(given.get("limit", str(PAGE)), "limit")
    if not 1 <= limit <= LONGEST_PAGE:
        raise BadCall(f"The limit {limit} is out of range: it must be from 1 to {LONGEST_PAGE}.")
    state = given.get("state")
    if state is not None and state not in list(states):
        raise BadCall(f"{state[:40]!r} is not a state. The states are {', '.join(states)}.")
    return limit, given.get("before"), None if state is None else states(state)


def _whole(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise BadCall(f"{text[:40]!r} can't be {name}: it must be a whole number.")
    return int(text)


def _money(summary: Summary) -> dict[str, float]:
    paid, would, saved = (nano / 1e9 for nano in (summary.paid, summary.would_have_paid, summary.saved))
    return {"paid_usd": paid, "would_have_paid_usd": would, "saved_usd": saved}


def _call(row: CallRow) -> dict[str, Any]:
    said: dict[str, Any] = msgspec.to_builtins(row)
    return said | {"ticket": ticket_text(row.ticket), "credential": row.credential[:8]}


def _batch(batch: Batch, now: float) -> dict[str, Any]:
    end = batch.ended_at or now
    return {
        "batch": batch.id,
        "provider": batch.key.provider,
        "provider_id": batch.provider_id,
        "state": batch.state,
        "count": batch.count,
        "bytes": batch.bytes,
        "endpoint": batch.key.endpoint,
        "credential": batch.key.credential[:8],
        "intended_at": batch.intended_at,
        "ended_at": batch.ended_at,
        "expires_at": batch.expires_at,
        "age_s": max(0.0, end - batch.intended_at),
        "abandoned": batch.abandoned,
        "note": batch.note,
    }
