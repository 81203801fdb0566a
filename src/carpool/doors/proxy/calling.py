"""An understood call, from intake to answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from carpool.dialects.early import Vigil
from carpool.doors.asgi import EVENT_STREAM, Disconnected, Once, send_chunk, send_head, send_whole
from carpool.doors.intake import answer_headers, carpool_headers, latin, recognisable, understand
from carpool.doors.proxy.connection import Sink
from carpool.doors.proxy.greeting import Greeting
from carpool.doors.proxy.kinds import Client
from carpool.doors.proxy.leaving import Guard
from carpool.doors.proxy.logs import Line
from carpool.doors.proxy.passing import as_it_is, pass_answer, pass_through
from carpool.doors.proxy.relaying import CLIENT_LEFT, Relay
from carpool.doors.proxy.returning import send_accepted
from carpool.doors.proxy.ruling import House
from carpool.doors.proxy.visit import Visit
from carpool.doors.proxy.waiting import Patience, vigil, wait
from carpool.engine import Diverted, Engine, Reply, Seat, Upstream
from carpool.engine.unpacking import read_whole
from carpool.errors import BadCall, CallFailed, CallTooLarge, CarpoolError, Closed, Garbled
from carpool.model import Call, Entry, Headers, Lane, ticket_text
from carpool.ports import Clock, Dialect, Parsed, RawRequest
from carpool.routing import Decision
from carpool.rules import RuleBook

ACCEPTED = 202
MAX_BODY = 32_000_000  # of a call; what only passes may be longer

Note = Callable[[Line], None]


@dataclass(frozen=True, slots=True)
class Ride:
    """A call that waits, and what is needed to answer it. The call itself is on disk and not held here."""

    seat: Seat
    dialect: Dialect
    line: Line
    signs: Vigil | None  # where it streams
    wait: float | None  # where its client comes back for the answer: how long it holds the line before
    wish: str = ""  # of its client for the stream


class Decided(Struct, frozen=True):
    call: Call
    decision: Decision
    direct: bool  # it travels at once and without a trace in the store


class Caller:
    """Buys what clients ask for. `on_disconnect`: what becomes of a batched call whose client hangs up."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        guard: Guard,
        on_disconnect: Literal["keep", "cancel"],
        patience: Patience,
        note: Note,
        book: RuleBook,
        max_body: int = MAX_BODY,
    ) -> None:
        self._max_body = max_body
        self._house = House(book)
        self._engine = engine
        self._clock = clock
        self._guard = guard
        self._on_disconnect: Literal["keep", "cancel"] = on_disconnect
        self._patience = patience
        self._note = note

    def relay(self, sink: Sink, greeting: Greeting, raw: RawRequest, address: str) -> Relay | Decided | None:
        """Answers a call on `now` on the spot, where nothing has to be waited for; otherwise what was decided of it."""
        upstream = greeting.upstream
        assert upstream is not None
        decided = self._decided(upstream, greeting, raw)
        if decided is None or not decided.direct or decided.decision.lane is not Lane.NOW:
            return decided
        call, decision = decided.call, decided.decision
        ticket = ticket_text(call.ticket)
        line = _line(call, raw, greeting.client, address, Lane.NOW, decision.reason, ticket)
        relay = Relay(sink, upstream.dialect, _said(ticket, Lane.NOW, decision.reason), line, self._tell)
        purchase = self._engine.relay(call, as_it_is(raw, greeting.onward), decision, relay)
        if purchase is None:
            return decided
        self._guard.relays.add(relay)
        relay.begin(purchase, self._guard.ended)
        return relay

    async def call(
        self, visit: Visit, upstream: Upstream, greeting: Greeting, raw: RawRequest, decided: Decided | None = None
    ) -> Ride | None:
        """Answers a call that travels on `now`. Of one that waits it gives back what is to be waited for."""
        decided = decided or self._decided(upstream, greeting, raw)
        if decided is None:
            passing = pass_through(upstream, raw, raw.body, visit.send, visit.inform)
            await self._guard.unless_gone(passing, visit.leaving, passing=True)
            return None
        call, decision = decided.call, decided.decision
        if decided.direct:
            passed = self._pass(visit, call, raw, greeting, decision)
            diverted = await self._guard.unless_gone(passed, visit.leaving, passing=True)
            if diverted is None:
                return None
            decision = diverted
        hold = greeting.hold
        gone = call.on_disconnect or self._on_disconnect
        seat = await self._engine.tickets.board(call, decision, "keep" if hold is not None else gone)
        signs = None
        if call.stream and hold is None:
            arrived = call.arrived
            signs = vigil(upstream.dialect, call.endpoint, visit.client, call.model, seat.ticket, arrived)
        line = _line(call, raw, visit.client, visit.address, seat.lane, seat.reason, ticket_text(seat.ticket))
        wish = upstream.dialect.wish(_plain(raw, greeting, self._max_body).body) if signs else ""
        return Ride(seat, upstream.dialect, line, signs, hold, wish)

    def _decided(self, upstream: Upstream, greeting: Greeting, raw: RawRequest) -> Decided | None:
        """None for what can't be read. What was decoded for it is let go here, before anybody waits."""
        understood = self._understood(upstream, greeting, raw)
        if understood is None:
            return None
        call, parsed = understood
        greeting.memory.credential = call.credential
        if call.flexible and greeting.guest is not None and not greeting.guest.key.profile.allows(Lane.FLEX):
            call = replace(call, flexible=False)
        decision = self._engine.decide(call, kept=greeting.hold is not None)
        direct = decision.lane is not Lane.BATCH and call.key is None and greeting.hold is None
        if direct and decision.lane is Lane.NOW:
            return Decided(call, decision, True)
        return Decided(recognisable(call, parsed), decision, direct)

    def _understood(self, upstream: Upstream, greeting: Greeting, raw: RawRequest) -> tuple[Call, Parsed] | None:
        """None where carpool can't read a call of which nothing is asked: the provider says best what is wrong."""
        options = greeting.options
        try:
            plain = _plain(raw, greeting, self._max_body)
            standing = RawRequest(raw.method, raw.path, raw.query, greeting.standing, plain.body)
            rules = partial(self._house.ruled, greeting, plain)
            credential = greeting.memory.credential
            return understand(self._engine, upstream, self._clock, standing, options, rules, credential)
        except CallTooLarge:  # only unpacked does it show its size
            raise
        except BadCall:
            if greeting.guest is not None and not greeting.guest.key.profile.allows(Lane.NOW):
                raise  # what is not read can't ride a batch, and may not go otherwise
            if options.timed or options.key is not None or options.lane not in (None, Lane.NOW):
                raise
            return None

    # ------------------------------------------------------------ on `now`

    async def _pass(
        self, visit: Visit, call: Call, raw: RawRequest, greeting: Greeting, decision: Decision
    ) -> Decision | None:
        """Gives the answer of a call on `now` or `flex` as it comes. The client's own request buys it. Where flex has
        no room, and `now` is not the next lane, that decision."""
        ticket = ticket_text(call.ticket)
        line = _line(call, raw, visit.client, visit.address, decision.lane, decision.reason, ticket)
        try:
            if decision.lane is Lane.FLEX and greeting.packed:  # what is changed can't stay packed
                raw, onward = _plain(raw, greeting, self._max_body), None
            else:
                onward = greeting.onward
            passage = await self._engine.passage(call, as_it_is(raw, onward), decision)
            if isinstance(passage, Diverted):
                return passage.decision
            line.lane = str(passage.lane)
            size = await pass_answer(passage, _said(ticket, passage.lane, passage.reason), visit.send)
        except (Disconnected, asyncio.CancelledError, CarpoolError) as error:
            self._failed(visit, line, error)
            raise
        self._tell(line, passage.status, passage.chunks.entry, size)
        return None

    # ------------------------------------------------------------ waiting

    async def wait(self, visit: Visit, ride: Ride) -> None:
        """Sees a waiting client through to its answer."""
        try:
            reply = await (self._wait(visit, ride) if ride.wait is None else self._later(visit, ride, ride.wait))
        except (Disconnected, asyncio.CancelledError, CarpoolError) as error:
            self._failed(visit, ride.line, error)
            raise
        if reply is not None:
            await self._deliver(visit, ride, reply)

    async def _wait(self, visit: Visit, ride: Ride) -> Reply:
        seat = ride.seat
        try:
            said = _said(ride.line.ticket, seat.lane, seat.reason)
            return await wait(seat, visit, self._patience, said, ride.signs)
        finally:
            if not seat.answer.done():
                self._engine.tickets.leave(seat)

    async def _later(self, visit: Visit, ride: Ride, hold: float) -> Reply | None:
        """The client comes back for its answer, unless that is here within the time that it holds the line."""
        reply = await self._engine.tickets.hold(ride.seat, visit.leaving, hold)
        if reply is None:
            await send_accepted(visit.send, ride.seat)
            self._tell(ride.line, ACCEPTED, None, 0)
        return reply

    async def _deliver(self, visit: Visit, ride: Ride, reply: Reply) -> None:
        outcome = reply.outcome
        reply = Reply(reply.ticket, outcome, reply.entry, outcome.reason or ride.seat.reason)
        ride.line.batch, ride.line.lane, ride.line.reason = outcome.batch, str(outcome.lane), reply.reason
        try:
            await _answer(reply, ride, visit.send)
            if not visit.gone:  # otherwise its answer waits in the store for it to come back
                self._engine.delivered_soon(reply.ticket)
        finally:
            status = CLIENT_LEFT if visit.gone else outcome.status
            self._tell(ride.line, status, reply.entry, len(outcome.body))

    # ------------------------------------------------------------ the log

    def _failed(self, visit: Visit, line: Line, error: BaseException) -> None:
        """Notes a call that ends without an outcome: its client left, carpool stops, the provider can't be reached."""
        ended = CLIENT_LEFT if visit.gone else Closed.status
        self._tell(line, error.status if isinstance(error, CarpoolError) else ended, None, 0)

    def _tell(self, line: Line, status: int, entry: Entry | None, size: int) -> None:
        line.status, line.bytes_out = status, size
        line.duration_s = self._clock.now() - line.at
        self._note(line.bought(entry))


def _plain(raw: RawRequest, greeting: Greeting, most: int) -> RawRequest:
    """The request as it reads; what travels on `now` stays packed as it came."""
    if not greeting.packed:
        return raw
    headers = tuple([pair for pair in raw.headers if pair[0] != "content-encoding"])
    return RawRequest(raw.method, raw.path, raw.query, headers, read_whole(raw.body, raw.headers, most))


def _said(ticket: str, lane: Lane, reason: str) -> Headers:
    """What can be said of a call before its answer is there."""
    return (
        ("x-carpool-lane", str(lane)),
        ("x-carpool-ticket", ticket),
        ("x-carpool-reason", latin(reason)),
    )


def _line(call: Call, raw: RawRequest, client: Client, address: str, lane: Lane, reason: str, ticket: str) -> Line:
    return Line(
        at=call.arrived,
        ticket=ticket,
        provider=call.provider,
        model=call.model,
        lane=str(lane),
        reason=reason,
        status=0,
        duration_s=0.0,
        client=f"{client.kind} {client.name}".rstrip(),
        address=address,
        bytes_in=len(raw.body),
        tags=call.tags,
    )


# ------------------------------------------------------------ answers


async def _answer(reply: Reply, ride: Ride, send: Once) -> None:
    if ride.signs is not None:
        await _stream(reply, ride.dialect, ride.signs, ride.wish, send)
    elif not send.begun:
        await send_whole(send, reply.outcome.status, answer_headers(reply), reply.outcome.body)
    elif reply.outcome.status == 200:
        await send_chunk(send, reply.outcome.body, more=False)
    else:  # it was said to be well, and an error under a 200 would be taken for an answer
        text = ticket_text(reply.ticket)
        raise CallFailed(f"Call {text} failed with status {reply.outcome.status} while its client waited.", text)


async def _stream(reply: Reply, dialect: Dialect, signs: Vigil, wish: str, send: Once) -> None:
    outcome = reply.outcome
    if not send.begun:
        if outcome.status != 200:
            await send_whole(send, outcome.status, answer_headers(reply), outcome.body)
            return
        events = dialect.replay(outcome.body, wish)
        await send_head(send, 200, [EVENT_STREAM, *carpool_headers(reply)])
    elif outcome.status != 200:
        await send_chunk(send, dialect.stream_error(outcome.body), more=False)
        return
    else:
        try:
            events = signs.rest(dialect.replay(outcome.body, wish))
        except Garbled as error:
            said = dialect.error(error.status, error.code, str(error))
            await send_chunk(send, dialect.stream_error(said), more=False)
            return
    for event in events:
        await send_chunk(send, event, more=True)
    await send_chunk(send, b"", more=False)
