"""Clients that come back for their answer: `202` and a ticket at once, the answer by its ticket later.

A ticket is shown only to the credential that it was made for; to all others it is as if it did not exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import parse_qs

import msgspec

from carpool.doors.asgi import JSON, Send, send_whole
from carpool.doors.intake import answer_headers
from carpool.doors.proxy.visit import Visit
from carpool.doors.proxy.welcome import virtual_key
from carpool.engine import Engine, Reply, Seat, Upstream
from carpool.errors import BadCall
from carpool.lifecycle import TicketState
from carpool.model import CallRow, Headers, Lane, ticket_number, ticket_text
from carpool.policy import parse_budget

PATH = "/carpool/calls/"
LONGEST_HOLD_S = 600.0
COME_BACK_S = "1"  # a client that holds the line should ask again at once; others choose their own pace

_SAYS: Mapping[TicketState, str] = {
    TicketState.QUEUED: "It waits for its batch.",
    TicketState.BOARDED: "It is on its way in a batch.",
    TicketState.SENDING: "It is on its way.",
    TicketState.SETTLED: "Its answer is here.",
}


# ------------------------------------------------------------ 202


def later(prefer: str) -> float | None:
    """From `Prefer: respond-async, wait=10`: how long to hold the line before the `202`; None without that wish."""
    wishes = [wish.partition(";")[0].partition("=") for wish in prefer.lower().split(",")] if prefer else []
    named = {name.strip(): value.strip(' "') for name, _, value in wishes}
    if "respond-async" not in named:
        return None
    wait = named.get("wait", "0")
    return min(float(wait), LONGEST_HOLD_S) if wait.isascii() and wait.isdigit() else 0.0


async def send_accepted(send: Send, seat: Seat) -> None:
    applied = ("preference-applied", "respond-async")
    await _send_standing(send, 202, seat.ticket, seat.state, seat.lane, seat.reason, (applied,))


async def _send_standing(
    send: Send, status: int, ticket: int, state: TicketState, lane: Lane, reason: str, more: Headers = ()
) -> None:
    text = ticket_text(ticket)
    body = {
        "ticket": text,
        "state": state,
        "lane": lane,
        "reason": reason,
        "location": PATH + text,
        "message": f"{_SAYS[state]} Ask for it with GET {PATH}{text}?wait=60s.",
    }
    said: Headers = (JSON, ("location", PATH + text), ("x-carpool-ticket", text), ("x-carpool-lane", str(lane)))
    if status == 202:
        said += (("retry-after", COME_BACK_S),)
    await send_whole(send, status, (*said, *more), msgspec.json.encode(body))


# ------------------------------------------------------------ by its ticket


class Desk:
    """Where answers are collected and calls are cancelled."""

    def __init__(self, engine: Engine, upstreams: Mapping[str, Upstream]) -> None:
        self._engine = engine
        self._upstreams = upstreams

    async def find(self, text: str, headers: Headers) -> CallRow | None:
        """The call of a ticket, if this request carries the key that it was made with. The call of another is looked
        for exactly like one that is not there."""
        owners = self.owners(headers)
        try:
            ticket = ticket_number(text)
        except BadCall:
            return None
        row = await self._engine.tickets.find(ticket, list(owners))
        if row is not None and (passed := owners[row.credential]) is not None:
            self._engine.enrol(*passed)  # what waited for its key goes on
        return row

    def owners(self, headers: Headers) -> dict[str, tuple[str, Headers] | None]:
        """The credentials that a request may speak for, each with the secret that was passed for it."""
        found = virtual_key(headers)
        if found is not None:
            return dict.fromkeys(self._engine.guests.find(found[1]).credentials)
        secrets = [(name, upstream.dialect.secret(headers)) for name, upstream in self._upstreams.items()]
        return {self._engine.credential(name, secret): (name, secret) for name, secret in secrets if secret}

    async def collect(self, row: CallRow, query: str, visit: Visit) -> Reply | None:
        """Sends the answer as the provider gave it; `202` when it is not there in time."""
        reply, send = await self._engine.tickets.collect(row, visit.leaving, _wait(query)), visit.send
        if reply is None:
            now = await self._engine.tickets.find(row.ticket) or row
            await _send_standing(send, 202, now.ticket, now.state, now.lane, now.reason)
        else:
            await send_whole(send, reply.outcome.status, answer_headers(reply), reply.outcome.body)
        return reply

    async def cancel(self, row: CallRow, send: Send) -> None:
        cancelled, state = await self._engine.tickets.cancel(row)
        body = {"ticket": ticket_text(row.ticket), "cancelled": cancelled, "state": state}
        await send_whole(send, 200, [JSON], msgspec.json.encode(body | {"message": _ended(cancelled, state)}))


def _ended(cancelled: bool, state: TicketState) -> str:
    if cancelled:
        return "The call is taken back. Nothing was bought."
    if state is TicketState.SETTLED:
        return "The call is answered already, and its answer is kept."
    return "The call is on its way and may be billed. Nobody waits for it any more, and it will not be rescued."


def _wait(query: str) -> float:
    given = parse_qs(query).get("wait", [""])[-1]
    return min(parse_budget(given), LONGEST_HOLD_S) if given.strip("0s") else 0.0
