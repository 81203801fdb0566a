"""The server's side of one connection: what passes the gate, with three more words for the application.

`carpool.informational` sends a 1xx answer before the head. `carpool.leaving` gives a future that is done when the
client has hung up, so that thousands who wait need no task each to listen for it. Both are ASGI extensions: under
another server they are missing, and the proxy does without.

An application that has the methods of `Relaying` may answer a request on the spot, without a task for it; and where
its head was met before, without even reading that again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Protocol

from httptools import parse_url
from msgspec import Struct
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from carpool.doors.asgi import Scope
from carpool.doors.proxy.cycles import BODYLESS, Cycle, Informer, OldCycle
from carpool.doors.proxy.gate import Gate
from carpool.doors.proxy.heads import Heads, Known
from carpool.model import Headers

INFORMATIONAL = "carpool.informational"
LEAVING = "carpool.leaving"

Inform = Callable[[int, Headers], None]
Leaving = asyncio.Future[None]  # done when the client has hung up

MOST_AT_ONCE = 256 * 1024  # of a body that is gathered here


class Answering(Protocol):
    """An answer that is being given without a task."""

    def pause(self, paused: bool) -> None:
        """The client can't take more for now, or can again."""
        ...

    def left(self) -> None:
        """The client has hung up."""
        ...


class Relaying(Protocol):
    """What an application offers that answers requests on the spot."""

    heads: Heads

    def meet(self, scope: Scope) -> Any:
        """Whether a request, by its head, may be answered so when its body is here; None if not. What it says holds for
        every request with the same head, but for its length, on the same connection."""
        ...

    def relay(self, met: Any, body: bytes, sink: Sink, scope: Scope | None) -> Answering | None:
        """Begins to answer it. None if that takes a task after all: then nothing was done, and what was found out is
        in the scope; there is none for a head that was met before."""
        ...


class Connection(Gate):
    _leaving: Leaving | None = None
    _due: tuple[RequestResponseCycle, Any, Known | None] | None = None  # its body is awaited, to answer it on the spot
    _answering: RequestResponseCycle | Sink | None = None
    relay: Answering | None = None  # of the same request, where it is answered without a task
    _known: Known | None = None  # the head of the call before, which most likely is that of the next
    _first: bytes = b""  # what is being read, where it begins a message
    _came: list[bytes] | None = None  # of a call with that head, whose body is not all here
    _missing = 0
    _instead: Any = None  # of the application: tells what went wrong in it with such a call

    # ------------------------------------------------------------ heads that were met before

    def data_received(self, data: bytes) -> None:
        if self._came is not None:
            self._gather(data)
        elif self._known is None or self._amid or not self._recognise(self._known, data):
            self._read(data)

    def _read(self, data: bytes) -> None:
        """By the parser."""
        if not self._amid:
            self._first = data
        super().data_received(data)
        self._first = b""

    def _recognise(self, known: Known, data: bytes) -> bool:
        """Whether these data begin a call with that head. A short body is most often here with it."""
        found = known.body(data)
        if found is None or self._busy:
            return False
        start, length = found
        missing = start + length - len(data)
        if missing == 0:
            return self._answer_known(known, data[start:])
        if missing < 0 or length > MOST_AT_ONCE:
            return False
        self._unset_keepalive_if_required()
        self._came, self._missing = [data], missing
        return True

    def _gather(self, data: bytes) -> None:
        assert self._came is not None
        assert self._known is not None
        self._came.append(data)
        self._missing -= len(data)
        if self._missing > 0:
            return
        pieces, self._came = self._came, None
        data = b"".join(pieces)
        if not self._recognise(self._known, data):
            self._read(data)

    def _give_in(self) -> None:
        """What has come of a body is left to the parser after all."""
        pieces, self._came = self._came, None
        if pieces is not None:
            self._read(b"".join(pieces))

    def _answer_known(self, known: Known, body: bytes) -> bool:
        app: Relaying = self.app
        sink = Sink(self, keep_alive=True)
        try:
            self.relay = app.relay(known.met, body, sink, None)
        except Exception as error:  # noqa: BLE001  told as that of any other, and not tried again
            self._instead = partial(_failing, error)
        if self.relay is None:
            self._known = None
            return False
        self._unset_keepalive_if_required()
        self.cycle = self._answering = sink  # type: ignore[assignment]  # as far as anybody asks, it is one
        return True

    def look(self, sender: int, reader: int) -> None:
        self._give_in()  # the parser's side knows how slow is too slow
        super().look(sender, reader)

    def shutdown(self) -> None:
        self._give_in()
        super().shutdown()

    # ------------------------------------------------------------ the others

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        instead, self._instead = self._instead, None
        if instead is not None:
            self._start_task(cycle, instead)
            return
        plain = cycle.scope["http_version"] == "1.1" and not cycle.waiting_for_100_continue
        try:
            met = app.meet(cycle.scope) if plain and hasattr(app, "meet") else None
        except Exception as error:  # noqa: BLE001  told as uvicorn tells what goes wrong in an application
            app, met = partial(_failing, error), None
        if met is None:
            self._start_task(cycle, app)
            return
        self._due = (cycle, met, self._learned(cycle, met) if self._first else None)
        if not cycle.more_body:
            self._answer()

    def _learned(self, cycle: RequestResponseCycle, met: Any) -> Known | None:
        """After whatever else than a call that is followed by the next, the parser may be of another mind."""
        app: Relaying = self.app
        usual = cycle is self.cycle and cycle.keep_alive and not self.parser.should_upgrade()
        return app.heads.learn(self._first, met) if usual else None

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self._due is not None and self._due[0] is self.cycle:
            if len(self.cycle.body) <= MOST_AT_ONCE:
                self.flow.resume_reading()
            else:
                self._due = None
                self._start_task(self.cycle, self.app)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self._due is not None and self._due[0] is self.cycle and not self.cycle.more_body:
            self._answer()

    def _answer(self) -> None:
        assert self._due is not None
        (cycle, met, known), self._due = self._due, None
        app: Any = self.app
        sink = Sink(self, cycle.keep_alive)
        try:
            self.relay = app.relay(met, bytes(cycle.body), sink, cycle.scope)
        except Exception as error:  # noqa: BLE001
            app = partial(_failing, error)
        if self.relay is None:
            self._start_task(cycle, app)
            return
        self._known, self._answering = known, sink
        if self.cycle is cycle:  # otherwise another is in line behind it
            self.cycle = sink  # type: ignore[assignment]

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.relay is not None:
            self.relay.pause(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.relay is not None:
            self.relay.pause(False)

    def _start_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        extensions: dict[str, object] = {LEAVING: partial(self._watch, cycle)}
        if cycle.scope["http_version"] == "1.0":  # would take a 1xx for the answer
            cycle.__class__ = OldCycle
        else:
            cycle.__class__ = Cycle
            extensions[INFORMATIONAL] = Informer(cycle)
        cycle.scope["extensions"] = extensions  # type: ignore[typeddict-item]
        super()._start_asgi_task(cycle, app)

    def take_authority(self) -> None:
        """`GET http://name/path`: the name in the target holds, whatever `Host` says (RFC 9112, 3.2.2). So the check of
        the host can't be passed with one name while another is asked for."""
        target = parse_url(self.url)  # nonsense is refused by the parser's own error
        if target.host is not None:
            port = b"" if target.port is None else b":%d" % target.port
            host = b"[" + target.host + b"]" if b":" in target.host else target.host
            self.headers[:] = [pair for pair in self.headers if pair[0] != b"host"] + [(b"host", host + port)]

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._answering is not None and not self._answering.response_complete:  # others may be behind it in line
            self._answering.disconnected = True
            self._answering.message_event.set()
        self.hung_up()

    def hung_up(self) -> None:
        self._due = self._came = None
        relay, self.relay = self.relay, None
        if relay is not None:
            relay.left()
        if self._leaving is not None and not self._leaving.done():
            self._leaving.set_result(None)

    def _watch(self, cycle: RequestResponseCycle) -> Leaving:
        """One request is answered at a time, so one future at a time is enough."""
        self._leaving = self.loop.create_future()
        if cycle.disconnected or self.transport.is_closing():
            cycle.disconnected = True  # or an answer would be missed that nobody can be given
            self._leaving.set_result(None)
        return self._leaving


async def _failing(error: Exception, scope: Scope, receive: object, send: object) -> None:
    raise error


class _Unheard:
    """In place of an event that nobody waits for."""

    def set(self) -> None: ...


class Sink(Struct, eq=False):
    """The answer to one request, in HTTP/1.1. What is there together leaves together: at `flush` or at the end.

    Stands for uvicorn's cycle while it is given: the first fields are what the connection asks that for.
    """

    connection: Connection
    keep_alive: bool
    response_started: bool = False
    response_complete: bool = False
    disconnected: bool = False
    out: list[bytes] = []
    chunked: bool = False
    more_body: ClassVar[bool] = False  # it is all here
    message_event: ClassVar[_Unheard] = _Unheard()

    def __repr__(self) -> str:  # never what passes
        return f"<{type(self).__name__}>"

    def head(self, status: int, headers: list[tuple[str, str]]) -> None:
        """Header names are in lower case. Where they name no length, the body goes out in chunks."""
        self.response_started = True
        if status not in BODYLESS and "content-length" not in dict(headers):
            self.chunked = True
            headers.append(("transfer-encoding", "chunked"))
        if not self.keep_alive:
            headers.append(("connection", "close"))
        text = "\r\n".join(map(": ".join, headers))
        self.out.append(STATUS_LINE.get(status) or b"HTTP/1.1 %d \r\n" % status)
        self.out.append(f"{text}\r\n\r\n".encode("latin-1"))
        if self.connection.flow.write_paused:
            self.connection.pause_writing()

    def add(self, chunk: bytes) -> None:
        if chunk:  # an empty one would be the last
            self.out.append(b"%x\r\n%b\r\n" % (len(chunk), chunk) if self.chunked else chunk)

    def flush(self) -> None:
        if self.out:
            self.connection.transport.write(b"".join(self.out))
            self.out.clear()

    def end(self) -> None:
        if self.chunked:
            self.out.append(b"0\r\n\r\n")
        self.flush()
        connection = self.connection
        connection.relay = None
        self.response_complete = True
        if not self.keep_alive:
            connection.transport.close()
        connection.on_response_complete()

    def break_off(self) -> None:
        """Without an end: the client sees that something is missing."""
        self.connection.relay = None
        self.flush()
        self.connection.transport.close()


def informer(scope: Scope) -> Inform | None:
    """How to send a 1xx answer, where the server and the client's protocol know such a thing."""
    found: Inform | None = scope.get("extensions", {}).get(INFORMATIONAL)
    return found


def watcher(scope: Scope) -> Callable[[], Leaving] | None:
    """How to learn that the client has hung up, where the server says so."""
    found: Callable[[], Leaving] | None = scope.get("extensions", {}).get(LEAVING)
    return found
