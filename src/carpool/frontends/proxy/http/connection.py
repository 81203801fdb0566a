"""The server side of one HTTP/1.1 connection. A request takes one of three paths, the cheapest that can serve it.

1. Known head, no task. The data start with the head of the previous call, apart from the content length
   (`known_heads`). The head is not parsed again. Once the body is complete, `RelayingApp.relay` starts the answer.
2. New head, no task. uvicorn's parser reads the head and `RelayingApp.parse_head` looks at it. If the request may be
   relayed, the body is collected here, up to `MOST_AT_ONCE`, and then passed to `relay`.
3. ASGI task. Everything else runs as a uvicorn task: other applications and protocol versions, larger bodies, requests
   for which `parse_head` or `relay` returns None, and exceptions of both, which uvicorn then reports.

Without a task, the events of the two connections carry the call: the engine writes the provider's response to a
`ClientSink`, which stands in for uvicorn's request cycle until the response ends; backpressure and disconnects go to
the `TasklessAnswer`. A path never answers halfway: as long as nothing was sent, a request can fall back to the next
path. For path 1 that means that the buffered bytes are fed to the parser as if they had just arrived.

A head becomes known only after the parser accepted it and its call was relayed on a connection that stays open, and
only if it arrived at the start of the data. Path 1 requires that no other request is in progress. If `relay` declines a
known head, the connection forgets it. Slow bodies go back to the parser at the next idle check, which knows the limits.

Requests that run as a task get three ASGI extensions; the proxy also works under servers that lack them:
`carpool.informational` sends a 1xx response (not for HTTP/1.0). `carpool.leaving` returns a future that is done when
the client disconnects, so that waiting clients need no listener task each. `carpool.received` tells whether the client
has the whole response (`liveness`).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, ClassVar, Protocol

from httptools import parse_url
from msgspec import Struct
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from carpool.core.bounded import BoundedMap
from carpool.core.model import Headers
from carpool.frontends.proxy.http.asgi import Scope
from carpool.frontends.proxy.http.bounds import BoundedProtocol
from carpool.frontends.proxy.http.liveness import ConnectionLost, DeliveryReceipts
from carpool.frontends.proxy.http.responses import BODYLESS, Cycle, Informer, OldCycle

INFORMATIONAL = "carpool.informational"
LEAVING = "carpool.leaving"
RECEIVED = "carpool.received"

Inform = Callable[[int, Headers], None]
Leaving = asyncio.Future[None]  # done when the client has disconnected
Receive = Callable[[ConnectionLost], Awaitable[bool]]

MOST_AT_ONCE = 256 * 1024  # bytes of a body that is buffered here


class TasklessAnswer(Protocol):
    """A response in progress that has no task."""

    def pause(self, paused: bool) -> None:
        """Backpressure: the client can't take more for now, or can again."""
        ...

    def left(self) -> None:
        """The client has disconnected."""
        ...


class RelayingApp(Protocol):
    """An application that can answer requests without a task."""

    heads: KnownHeads

    def parse_head(self, scope: Scope) -> Any:
        """Facts about a request that may be relayed once its body is complete; None if it may not. They hold for every
        request on the same connection whose head differs only in its length."""
        ...

    def relay(self, parsed_head: Any, body: bytes, sink: ClientSink, scope: Scope | None) -> TasklessAnswer | None:
        """Starts the answer. None if a task is needed after all: then nothing was done, and the result so far is in
        the scope. A known head has no scope."""
        ...

    def left(self, parsed_head: Any, scope: Scope) -> None:
        """The client disconnected before the body of such a request was complete."""
        ...


class Connection(BoundedProtocol):
    _leaving: Leaving | None = None
    _due: tuple[RequestResponseCycle, Any, KnownHead | None] | None = None  # to be relayed once its body is complete
    _answering: RequestResponseCycle | ClientSink | None = None
    relay: TasklessAnswer | None = None  # of the current request, if it has no task
    _known: KnownHead | None = None  # head of the previous call, most likely also of the next
    _first: bytes = b""  # the data being parsed, if they start a message
    _came: list[bytes] | None = None  # data so far of a call with the known head and an incomplete body
    _missing = 0  # bytes of that body still to come
    _failing_app: Any = None  # app for the next task: raises the error of a failed relay
    _receipts: DeliveryReceipts | None = None  # for responses sent by a task

    # ------------------------------------------------------------ known heads

    def data_received(self, data: bytes) -> None:
        if self._came is not None:
            self._gather(data)
        elif self._known is None or self._mid_message or not self._recognise(self._known, data):
            self._read(data)

    def _read(self, data: bytes) -> None:
        """Feeds the parser."""
        if not self._mid_message:
            self._first = data
        super().data_received(data)
        self._first = b""

    def _recognise(self, known: KnownHead, data: bytes) -> bool:
        """Whether `data` starts a call with that head. A short body usually arrives with its head."""
        body = known.body(data)
        if body is None or self._busy:
            return False
        start, length = body
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

    def _return_to_parser(self) -> None:
        """Hands the buffered part of a call to the parser."""
        pieces, self._came = self._came, None
        if pieces is not None:
            self._read(b"".join(pieces))

    def _answer_known(self, known: KnownHead, body: bytes) -> bool:
        app: RelayingApp = self.app
        sink = ClientSink(self, keep_alive=True)
        try:
            self.relay = app.relay(known.parsed_head, body, sink, None)
        except Exception as error:  # noqa: BLE001  raised again in a task, and not retried
            self._failing_app = partial(_failing, error)
        if self.relay is None:
            self._known = None
            return False
        self._unset_keepalive_if_required()
        self.cycle = self._answering = sink  # type: ignore[assignment]  # has the attributes that are read from a cycle
        return True

    def look(self, sender: int, reader: int) -> None:
        self._return_to_parser()  # the base class checks slow senders
        super().look(sender, reader)

    def shutdown(self) -> None:
        self._return_to_parser()
        super().shutdown()

    # ------------------------------------------------------------ parsed heads

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        failing_app, self._failing_app = self._failing_app, None
        if failing_app is not None:
            self._start_task(cycle, failing_app)
            return
        relayable = cycle.scope["http_version"] == "1.1" and not cycle.waiting_for_100_continue
        try:
            parsed_head = app.parse_head(cycle.scope) if relayable and hasattr(app, "parse_head") else None
        except Exception as error:  # noqa: BLE001  reported by uvicorn as any application error
            app, parsed_head = partial(_failing, error), None
        if parsed_head is None:
            self._start_task(cycle, app)
            return
        self._due = (cycle, parsed_head, self._cache_head(cycle, parsed_head) if self._first else None)
        if not cycle.more_body:
            self._answer()

    def _cache_head(self, cycle: RequestResponseCycle, parsed_head: Any) -> KnownHead | None:
        """Caches the head, unless the connection closes or upgrades after it: parsing may then differ."""
        app: RelayingApp = self.app
        reusable = cycle is self.cycle and cycle.keep_alive and not self.parser.should_upgrade()
        return app.heads.learn(self._first, parsed_head) if reusable else None

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
        (cycle, parsed_head, known), self._due = self._due, None
        app: Any = self.app
        sink = ClientSink(self, cycle.keep_alive)
        try:
            self.relay = app.relay(parsed_head, bytes(cycle.body), sink, cycle.scope)
        except Exception as error:  # noqa: BLE001
            app = partial(_failing, error)
        if self.relay is None:
            self._start_task(cycle, app)
            return
        self._known, self._answering = known, sink
        if self.cycle is cycle:  # otherwise another request is queued behind it
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
        if self._receipts is None:
            self._receipts = DeliveryReceipts(self.transport)
        extensions: dict[str, object] = {
            LEAVING: partial(self._watch, cycle),
            RECEIVED: partial(self._delivered, cycle),
        }
        if cycle.scope["http_version"] == "1.0":  # would mistake a 1xx for the response
            cycle.__class__ = OldCycle
        else:
            cycle.__class__ = Cycle
            extensions[INFORMATIONAL] = Informer(cycle)
        cycle.scope["extensions"] = extensions  # type: ignore[typeddict-item]
        super()._start_asgi_task(cycle, app)

    def take_authority(self) -> None:
        """`GET http://name/path`: the name in the target overrides `Host` (RFC 9112, 3.2.2). So a request can't
        pass the host check with one name and ask for another."""
        target = parse_url(self.url)  # raises the parser's error if malformed
        if target.host is not None:
            port = b"" if target.port is None else b":%d" % target.port
            host = b"[" + target.host + b"]" if b":" in target.host else target.host
            self.headers[:] = [pair for pair in self.headers if pair[0] != b"host"] + [(b"host", host + port)]

    def eof_received(self) -> None:
        if self._receipts is not None:
            self._receipts.left()
        super().eof_received()

    def give_up(self) -> None:
        if self._receipts is not None:
            self._receipts.given_up()
        super().give_up()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._receipts is not None:
            by_us = self._answering is not None and not self._answering.keep_alive
            self._receipts.closed(exc, by_us=by_us)
        super().connection_lost(exc)
        if self._answering is not None and not self._answering.response_complete:  # others may be queued behind it
            self._answering.disconnected = True
            self._answering.message_event.set()
        self.hung_up()

    def hung_up(self) -> None:
        app: Any = self.app
        if self._due is not None:
            app.left(self._due[1], self._due[0].scope)
        elif self._came is not None and self._known is not None:
            app.left(self._known.parsed_head, {})
        self._due = self._came = None
        relay, self.relay = self.relay, None
        if relay is not None:
            relay.left()
        if self._leaving is not None and not self._leaving.done():
            self._leaving.set_result(None)

    def _watch(self, cycle: RequestResponseCycle) -> Leaving:
        """Requests are answered one at a time, so one future is enough."""
        self._leaving = self.loop.create_future()
        if cycle.disconnected or self.transport.is_closing():
            cycle.disconnected = True  # a response sent now could not be delivered
            self._leaving.set_result(None)
        return self._leaving

    async def _delivered(self, cycle: RequestResponseCycle, lost: ConnectionLost) -> bool:
        assert self._receipts is not None
        return cycle.response_complete and await self._receipts.received(lost)


async def _failing(error: Exception, scope: Scope, receive: object, send: object) -> None:
    raise error


class _NullEvent:
    """Stands in for an event that nothing waits for."""

    def set(self) -> None: ...


class ClientSink(Struct, eq=False):
    """Writes the HTTP/1.1 response to one request. Output is buffered until `flush` or the end.

    Stands in for uvicorn's cycle meanwhile: the first fields are those that the connection reads from a cycle.
    """

    connection: Connection
    keep_alive: bool
    response_started: bool = False
    response_complete: bool = False
    disconnected: bool = False
    out: list[bytes] = []
    chunked: bool = False
    more_body: ClassVar[bool] = False  # the request body is complete
    message_event: ClassVar[_NullEvent] = _NullEvent()

    def __repr__(self) -> str:  # never the content
        return f"<{type(self).__name__}>"

    def head(self, status: int, headers: list[tuple[str, str]]) -> None:
        """Header names are lower case. Without a content length, the body is chunked."""
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
        if chunk:  # an empty chunk would end the body
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
        """Closes without an end, so that the client sees that the response is incomplete."""
        self.connection.relay = None
        self.flush()
        self.connection.transport.close()


def informer(scope: Scope) -> Inform | None:
    """Sends a 1xx response; None if the server or the client's protocol does not support it."""
    extension: Inform | None = scope.get("extensions", {}).get(INFORMATIONAL)
    return extension


def watcher(scope: Scope) -> Callable[[], Leaving] | None:
    """Returns a future for the client's disconnect; None if the server does not support it."""
    extension: Callable[[], Leaving] | None = scope.get("extensions", {}).get(LEAVING)
    return extension


def receiver(scope: Scope) -> Receive | None:
    """Tells whether the client has the whole response; None if the server does not support it."""
    extension: Receive | None = scope.get("extensions", {}).get(RECEIVED)
    return extension


# ------------------------------------------------------------ known heads


LARGEST = 8192  # bytes of a cached head
MOST = 1024  # cached heads; the oldest is dropped first
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]+)[ \t]*\r\n", re.IGNORECASE)
_DIGITS = 9  # most digits of a content length
_END = b"\r\n\r\n"


class KnownHead(Struct, frozen=True, eq=False):
    """A head as two pieces around the digits of its content length, and the application's facts about it."""

    before: bytes
    after: bytes  # up to the body
    parsed_head: Any

    def __repr__(self) -> str:  # never the secrets
        return f"<{type(self).__name__}>"

    def body(self, data: bytes) -> tuple[int, int] | None:
        """The offset and the length of the body, if `data` starts with this head."""
        start, after = len(self.before), self.after
        end = data.find(after, start, start + _DIGITS + len(after))
        if end < 0 or not data.startswith(self.before) or not (digits := data[start:end]).isdigit():
            return None
        return end + len(after), int(digits)


class KnownHeads:
    """Caches heads, each once, for all connections."""

    def __init__(self) -> None:
        self._known: BoundedMap[tuple[bytes, bytes], KnownHead] = BoundedMap(MOST)

    def learn(self, data: bytes, parsed_head: Any) -> KnownHead | None:
        """Caches the head at the start of `data`; None if it is incomplete or has no content length."""
        end = data.find(_END, 0, LARGEST) + len(_END)
        length = _LENGTH.search(data, 0, end)
        if length is None or end < len(_END):
            return None
        pieces = (data[: length.start(1)], data[length.end(1) : end])
        known = self._known.get(pieces)
        if known is None or known.parsed_head != parsed_head:
            known = self._known[pieces] = KnownHead(*pieces, parsed_head)
        return known
