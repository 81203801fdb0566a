"""The server's side of one connection: what passes the gate, with three more words for the application.

`carpool.informational` sends a 1xx answer before the head. `carpool.leaving` gives a future that is done when the
client has hung up, so that thousands who wait need no task each to listen for it. Both are ASGI extensions: under
another server they are missing, and the proxy does without.

An application that has the methods of `Relaying` may answer a request on the spot, without a task for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from httptools import parse_url
from msgspec import Struct
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from carpool.doors.asgi import Scope
from carpool.doors.proxy.cycles import BODYLESS, Cycle, Informer, OldCycle
from carpool.doors.proxy.gate import Gate
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

    def meet(self, scope: Scope) -> Any:
        """Whether a request, by its head, may be answered so when its body is here; None if not."""
        ...

    def relay(self, met: Any, scope: Scope, body: bytes, sink: Sink) -> Answering | None:
        """Begins to answer it. None if that takes a task after all."""
        ...


class Connection(Gate):
    _leaving: Leaving | None = None
    _due: tuple[RequestResponseCycle, Any] | None = None  # whose body is awaited, to answer it on the spot
    _answering: RequestResponseCycle | None = None
    relay: Answering | None = None  # of the same request, where it is answered without a task

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        plain = cycle.scope["http_version"] == "1.1" and not cycle.waiting_for_100_continue
        try:
            met = app.meet(cycle.scope) if plain and hasattr(app, "meet") else None
        except Exception as error:  # noqa: BLE001  told as uvicorn tells what goes wrong in an application
            app, met = partial(_failing, error), None
        if met is None:
            self._start_task(cycle, app)
            return
        self._due = (cycle, met)
        if not cycle.more_body:
            self._answer()

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
        (cycle, met), self._due = self._due, None
        app: Any = self.app
        try:
            self.relay = app.relay(met, cycle.scope, bytes(cycle.body), Sink(self, cycle))
        except Exception as error:  # noqa: BLE001
            app = partial(_failing, error)
        if self.relay is None:
            self._start_task(cycle, app)

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
        self._due = None
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


class Sink(Struct, eq=False):
    """The answer to one request, in HTTP/1.1. What is there together leaves together: at `flush` or at the end."""

    connection: Connection
    cycle: RequestResponseCycle
    out: list[bytes] = []
    chunked: bool = False

    def __repr__(self) -> str:  # never what passes
        return f"<{type(self).__name__}>"

    def head(self, status: int, headers: list[tuple[str, str]]) -> None:
        """Header names are in lower case. Where they name no length, the body goes out in chunks."""
        cycle = self.cycle
        cycle.response_started = True
        if status not in BODYLESS and "content-length" not in dict(headers):
            self.chunked = True
            headers.append(("transfer-encoding", "chunked"))
        if not cycle.keep_alive:
            headers.append(("connection", "close"))
        text = "\r\n".join(map(": ".join, headers))
        self.out.append(STATUS_LINE.get(status) or b"HTTP/1.1 %d \r\n" % status)
        self.out.append(f"{text}\r\n\r\n".encode("latin-1"))
        if cycle.flow.write_paused:
            self.connection.pause_writing()

    def add(self, chunk: bytes) -> None:
        if chunk:  # an empty one would be the last
            self.out.append(b"%x\r\n%b\r\n" % (len(chunk), chunk) if self.chunked else chunk)

    def flush(self) -> None:
        if self.out:
            self.cycle.transport.write(b"".join(self.out))
            self.out.clear()

    def end(self) -> None:
        if self.chunked:
            self.out.append(b"0\r\n\r\n")
        self.flush()
        self.connection.relay = None
        cycle = self.cycle
        cycle.response_complete = True
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()

    def break_off(self) -> None:
        """Without an end: the client sees that something is missing."""
        self.connection.relay = None
        self.flush()
        self.cycle.transport.close()


def informer(scope: Scope) -> Inform | None:
    """How to send a 1xx answer, where the server and the client's protocol know such a thing."""
    found: Inform | None = scope.get("extensions", {}).get(INFORMATIONAL)
    return found


def watcher(scope: Scope) -> Callable[[], Leaving] | None:
    """How to learn that the client has hung up, where the server says so."""
    found: Callable[[], Leaving] | None = scope.get("extensions", {}).get(LEAVING)
    return found
