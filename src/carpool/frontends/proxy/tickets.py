"""Clients that come back for their response: `202` and a ticket now, the response by ticket later.

Only the credential that a ticket was made for can see it; for all others it does not exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import parse_qs

from carpool.core.errors import BadCall
from carpool.core.keys import header_forms, single_key
from carpool.core.lifecycle import TicketState
from carpool.core.model import CallRow, Entry, Headers, ticket_number, ticket_text
from carpool.core.ports import Dialect
from carpool.dialects import key_headers
from carpool.engine import Engine, PendingCall, Upstream
from carpool.frontends.intake import answer_headers
from carpool.frontends.proxy.parse_head import CALLS, LONGEST_HOLD_S
from carpool.frontends.proxy.request import RequestContext
from carpool.planners.access.virtual_keys import virtual_key
from carpool.planners.ledger import dollars
from carpool.planners.policy import parse_budget

RETRY_AFTER_S = "1"  # retry-after: long-polling clients ask again at once; others choose their interval

_MESSAGES: Mapping[TicketState, str] = {
    TicketState.QUEUED: "It waits for its batch.",
    TicketState.BOARDED: "It is on its way in a batch.",
    TicketState.SENDING: "It is on its way.",
    TicketState.SETTLED: "Its answer is here.",
}


# ------------------------------------------------------------ 202


async def send_accepted(request: RequestContext, call: PendingCall | CallRow, more: Headers = ()) -> None:
    text, state, lane = ticket_text(call.ticket), call.state, call.lane
    location = CALLS + text
    message = f"{_MESSAGES[state]} Ask for it with GET {location}?wait=60s."
    body = {"ticket": text, "state": state, "lane": lane, "reason": call.reason, "location": location}
    headers: Headers = (("location", location), ("x-carpool-ticket", text), ("x-carpool-lane", str(lane)))
    await request.send_json(body | {"message": message}, 202, (*headers, ("retry-after", RETRY_AFTER_S), *more))


# ------------------------------------------------------------ requests by ticket


class TicketRoutes:
    """Collects responses and cancels calls, by ticket."""

    def __init__(self, engine: Engine, upstreams: Mapping[str, Upstream]) -> None:
        self._engine = engine
        self._upstreams = upstreams

    async def find(self, text: str, headers: Headers) -> CallRow | list[Entry]:
        """The call of a ticket, if the request has the key that it was made with; if the call is not persisted, its
        purchases. A call of another credential takes the same path as a missing one: the list is empty."""
        owners = self.owners(headers)
        try:
            ticket = ticket_number(text)
        except BadCall:
            return []
        row = await self._engine.tickets.find(ticket, list(owners))
        if row is None:
            return await self._engine.tickets.purchases(ticket, list(owners))
        if (passed := owners[row.credential]) is not None:
            self._engine.add_secret(*passed)  # calls that waited for their key can proceed
        return row

    def owners(self, headers: Headers) -> dict[str, tuple[str, Headers] | None]:
        """The names of the secrets in a request, in all their forms, each with the secret as it was sent. The
        credential of a call is among them, whichever header its key was sent in."""
        key = virtual_key(headers)
        if key is not None:
            return dict.fromkeys(self._engine.virtual_key_cache.find(key).names)
        secrets = [
            (upstream.provider, self._secret(headers, upstream.dialect)) for upstream in self._upstreams.values()
        ]
        return {
            name: (provider, secret)
            for provider, secret in secrets
            if secret
            for name in self._engine.names(provider, secret)
        }

    def _secret(self, headers: Headers, dialect: Dialect) -> Headers:
        """The secret of a request. For tickets, any key header is accepted, even one that the provider ignores."""
        names = key_headers()
        key = single_key(tuple([pair for pair in headers if pair[0] in names]))
        secret = dialect.secret(headers)
        if secret or key is None:
            return secret
        [usual, *_] = header_forms(dialect.key_headers, key)
        return dialect.secret((*usual, *headers))

    async def collect(self, row: CallRow, query: str, request: RequestContext) -> None:
        """Sends the provider's response; `202` if it does not arrive in time."""
        engine = self._engine
        reply = await engine.tickets.collect(row, request.leaving, _wait(query))
        if reply is None:
            current = await engine.tickets.find(row.ticket) or row
            await send_accepted(request, current)
            if not await request.received():
                await engine.tickets.not_collected(row)
            return
        await request.send_whole(reply.outcome.status, answer_headers(reply), reply.outcome.body)
        if await request.received(partial(engine.deliveries.take_back, reply.ticket)):
            engine.deliveries.add(reply.ticket)

    async def cancel(self, row: CallRow, request: RequestContext) -> None:
        cancelled, state = await self._engine.tickets.cancel(row)
        body = {"ticket": ticket_text(row.ticket), "cancelled": cancelled, "state": state}
        message = "The call is on its way and may be billed. Nobody waits for it any more, and it will not be rescued."
        if cancelled:
            message = "The call is taken back. Nothing was bought."
        elif state is TicketState.SETTLED:
            message = "The call is answered already, and its answer is kept."
        await request.send_json(body | {"message": message})


def _wait(query: str) -> float:
    text = parse_qs(query).get("wait", [""])[-1]
    return min(parse_budget(text), LONGEST_HOLD_S) if text.strip("0s") else 0.0


# ------------------------------------------------------------ calls that are not persisted
# Only the ledger knows them; their responses are not stored.

GONE = 410
SENT, SETTLED = "sent", "settled"

_NOT_KEPT = (
    "Its answer is not kept: on now and flex it passes to its client as it comes, and one that was kept goes after "
    "store.retain_days."
)
_UNDER_WAY = "It was sent, and is on its way or broke off: what became of it is not in the ledger."


async def send_bought(request: RequestContext, entries: Sequence[Entry]) -> None:
    """Sends the purchases of a call, newest first."""
    newest, text = entries[-1], ticket_text(entries[-1].ticket)
    paid, saved = _sum(entries)
    body = {
        "ticket": text,
        "state": _state(newest),
        "provider": newest.provider,
        "model": newest.model,
        "lane": newest.lane,
        "reason": newest.reason,
        "cost_usd": _usd(paid),
        "saved_usd": _usd(saved),
        "tags": newest.tags,
        "purchases": [_purchase(entry) for entry in reversed(entries)],
        "message": _UNDER_WAY if _state(newest) == SENT else _NOT_KEPT,
    }
    headers: Headers = (("x-carpool-ticket", text), ("x-carpool-lane", str(newest.lane)))
    if paid is not None:
        headers += (("x-carpool-cost", dollars(paid)),)
    await request.send_json(body, GONE, headers)


async def send_too_late(request: RequestContext, entries: Sequence[Entry]) -> None:
    body = {
        "ticket": ticket_text(entries[-1].ticket),
        "cancelled": False,
        "state": _state(entries[-1]),
        "message": "The call was bought already, and can't be taken back.",
    }
    await request.send_json(body)


def _state(entry: Entry) -> str:
    """An attempt without a known result may still be in progress."""
    return SENT if entry.paid is None and entry.usage is None else SETTLED


def _purchase(entry: Entry) -> dict[str, Any]:
    paid, saved = _sum([entry])
    return {
        "at": entry.at,
        "lane": entry.lane,
        "kind": entry.kind,
        "usage": entry.usage,
        "cost_usd": _usd(paid),
        "saved_usd": _usd(saved),
    }


def _sum(entries: Sequence[Entry]) -> tuple[int | None, int | None]:
    """Paid and saved; None if a price is unknown."""
    paid = [entry.paid for entry in entries if entry.paid is not None]
    if len(paid) < len(entries):
        return None, None
    return sum(paid), sum(entry.would_have_paid or 0 for entry in entries) - sum(paid)


def _usd(nano: int | None) -> float | None:
    return None if nano is None else nano / 1e9
