"""The server side of one HTTP/1.1 connection. A request takes one of three paths, the cheapest that can serve it.

1. Known head. The data start with the head of the previous call, apart from the content length (`KnownHeads`). The
   head is not parsed again. Once the body is complete, `RequestHead.relay` starts the answer.
2. New head. uvicorn's parser reads it and `RelayingApp.parse_head` examines it. If the request may be relayed, the
   body is collected here, up to `MAX_AT_ONCE`, and then passed to `relay`.
3. Everything else runs the application as a uvicorn task: other applications and protocol versions, larger bodies,
   requests that `parse_head` or `relay` declines, and exceptions of both, which uvicorn then reports.

`relay` starts a response without a task, or returns what is to run in one. Without a task, the events of the two
connections carry the call: the provider's response is pushed to a `ClientResponse`, which replaces uvicorn's
request cycle until the response ends. If `relay` declines, nothing was sent: the request takes the next path. For path
1 that means that the buffered bytes are fed to the parser as if they had just arrived.

A head becomes known only after the parser accepted it and `relay` took its call on a connection that stays open, and
only if it arrived at the start of the data. Path 1 requires that no other request is in progress. If `relay` declines a
known head, the connection forgets it. Slow bodies go back to the parser at the next idle check, which knows the limits.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, ClassVar, Protocol
from urllib.parse import unquote

from httptools import parse_url
from msgspec import Struct
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from carpool.core.bounded import BoundedMap
from carpool.core.model import Headers
from carpool.frontends.proxy.http.bounds import BoundedProtocol
from carpool.frontends.proxy.http.liveness import DeliveryReceipts
from carpool.frontends.proxy.http.responses import BODYLESS, CLIENT, Cycle, OldCycle, RequestRefused

MAX_AT_ONCE = 256 * 1024  # bytes of a body that is buffered here

Application = Callable[[Any, Any, Any], Awaitable[None]]  # of ASGI


class RequestHead(Protocol):
    """The head of a request. It holds for every request on the same connection whose head differs only in its length.
    It is also the ASGI application that answers the request."""

    relayable: bool  # it may be answered without a task

    def relay(self, body: bytes, connection: Connection, *, keep_alive: bool) -> ClientResponse | Application | None:
        """Starts the answer without a task, or returns the application to run in one, which has the body. None if the
        application itself must read the request."""
        ...

    def left(self, refused: RequestRefused | None) -> None:
        """The client disconnected, or was refused, before the body of such a request was complete."""
        ...

    def __call__(self, scope: Any, receive: Any, send: Any) -> Awaitable[None]: ...


class RelayingApp(Protocol):
    """An application that can answer requests without a task."""

    heads: KnownHeads

    def parse_head(self, scope: Any) -> RequestHead | None:
        """None if the application itself must answer the request, in a task."""
        ...


class Connection(BoundedProtocol):
    _due: tuple[Cycle, RequestHead, KnownHead | None] | None = None  # to be relayed once its body is complete
    _answering: Cycle | ClientResponse | None = None
    _known: KnownHead | None = None  # head of the previous call, most likely also of the next
    _known_scope: Any = None  # of the first request with that head on this connection
    _first: bytes = b""  # the data being parsed, if they start a message
    _came: list[bytes] | None = None  # data so far of a call with the known head and an incomplete body
    _missing = 0  # bytes of that body still to come
    _receipts: DeliveryReceipts | None = None  # for responses sent by a task
    _rests = 0  # how many times it became idle

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
        body, cycle = known.body(data), self.cycle
        busy = (cycle is not None and not cycle.response_complete) or self._over_limit or self._refused is not None
        if body is None or busy:
            return False
        start, length = body
        missing = start + length - len(data)
        if missing == 0:
            return self._answer_known(known, data[start:])
        if missing < 0 or length > MAX_AT_ONCE:
            return False
        self._idle = False
        self._came, self._missing = [data], missing
        return True

    def _answer_known(self, known: KnownHead, body: bytes) -> bool:
        answer = self._relay(known.parsed_head, body, keep_alive=True)
        if answer is None:
            self._known = None
            return False
        self._idle = False
        if isinstance(answer, ClientResponse):
            self.cycle = self._answering = answer  # type: ignore[assignment]  # has the attributes that are read here
            return True
        self.cycle = self._answering = self._new_cycle(Cycle, self._known_scope, keep_alive=True)
        self.cycle.more_body = False
        self._start_task(self.cycle, answer)
        return True

    def _relay(self, head: RequestHead, body: bytes, *, keep_alive: bool) -> ClientResponse | Application | None:
        try:
            return head.relay(body, self, keep_alive=keep_alive)
        except Exception as error:  # noqa: BLE001  raised again in a task, and not retried
            return partial(_failing, error)

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

    def check_timeouts(self, sender: int, reader: int) -> None:
        self._return_to_parser()  # the base class checks slow senders
        super().check_timeouts(sender, reader)

    def shutdown(self) -> None:
        self._return_to_parser()
        super().shutdown()

    # ------------------------------------------------------------ parsed heads

    def begin_cycle(self) -> None:
        """As in uvicorn's `on_headers_complete`, with a `Cycle`, and without what carpool does not use."""
        parser, scope, target = self.parser, self.scope, parse_url(self.url)
        version, path = parser.get_http_version(), target.path.decode("ascii")
        scope["method"], scope["http_version"] = parser.get_method().decode("ascii"), version
        scope["path"] = unquote(path) if "%" in path else path
        scope["raw_path"], scope["query_string"] = target.path, target.query or b""
        earlier, keep_alive = self.cycle, version == "1.1" and parser.should_keep_alive()
        self.cycle = self._new_cycle(Cycle if version == "1.1" else OldCycle, scope, keep_alive=keep_alive)
        self.cycle.waiting_for_100_continue = self.expect_100_continue
        if earlier is None or earlier.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:  # requests are answered in their order
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def _new_cycle(self, kind: type[Cycle], scope: Any, *, keep_alive: bool) -> Cycle:
        return kind(
            scope=scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=keep_alive,
            on_response=self.on_response_complete,
        )

    def _start_asgi_task(self, cycle: Cycle, app: Any) -> None:  # type: ignore[override]
        self._answering = cycle
        parsed_head: RequestHead | None = None
        if cycle.scope["http_version"] == "1.1" and not cycle.waiting_for_100_continue and hasattr(app, "parse_head"):
            try:
                parsed_head = app.parse_head(cycle.scope)
            except Exception as error:  # noqa: BLE001  reported by uvicorn as any application error
                app = partial(_failing, error)
        if parsed_head is None or not parsed_head.relayable:
            self._start_task(cycle, parsed_head or app)
            return
        # Unless the connection closes or upgrades after it: parsing may then differ.
        reusable = self._first and cycle is self.cycle and cycle.keep_alive and not self.parser.should_upgrade()
        self._due = (cycle, parsed_head, app.heads.learn(self._first, parsed_head) if reusable else None)
        if not cycle.more_body:
            self._answer()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self._due is not None and self._due[0] is self.cycle:
            if len(self.cycle.body) <= MAX_AT_ONCE:
                self.flow.resume_reading()
            else:
                (_, parsed_head, _), self._due = self._due, None
                self._start_task(self.cycle, parsed_head)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self._due is not None and self._due[0] is self.cycle and not self.cycle.more_body:
            self._answer()

    def _answer(self) -> None:
        assert self._due is not None
        (cycle, parsed_head, known), self._due = self._due, None
        answer = self._relay(parsed_head, bytes(cycle.body), keep_alive=cycle.keep_alive)
        if answer is None:
            self._start_task(cycle, self.app)
            return
        self._known, self._known_scope = known, cycle.scope
        if not isinstance(answer, ClientResponse):
            cycle.body = bytearray()
            self._start_task(cycle, answer)
            return
        self._answering = answer
        if self.cycle is cycle:  # otherwise another request is queued behind it
            self.cycle = answer  # type: ignore[assignment]

    def _start_task(self, cycle: Cycle, app: Application) -> None:
        if self._receipts is None:
            self._receipts = DeliveryReceipts(self.transport)
        cycle.receipts = self._receipts
        cycle.scope = {**cycle.scope, "extensions": {CLIENT: cycle}}  # type: ignore[dict-item]
        super()._start_asgi_task(cycle, app)

    def take_authority(self) -> None:
        """`GET http://name/path`: the name in the target overrides `Host` (RFC 9112, 3.2.2). So a request can't
        pass the host check with one name and ask for another."""
        target = parse_url(self.url)  # raises the parser's error if malformed
        if target.host is not None:
            port = b"" if target.port is None else b":%d" % target.port
            host = b"[" + target.host + b"]" if b":" in target.host else target.host
            self.headers[:] = [pair for pair in self.headers if pair[0] != b"host"] + [(b"host", host + port)]

    # ------------------------------------------------------------ between two requests

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())  # type: ignore[arg-type]  # only cycles of ours are in there
        elif self._last_words is not None:
            self._send_refusal(self._last_words)
        else:
            self._idle = True
            self._rests += 1
            if self.timeout_keep_alive_task is None:
                self._start_idle_timer()

    def _start_idle_timer(self) -> None:
        """Starts the keep-alive timer. Restarting it for every request would be a large part of the cost of a quick
        one, so it runs on and fires after one to two times the configured time."""
        timeout = self.timeout_keep_alive
        self.timeout_keep_alive_task = self.loop.call_later(timeout, self.timeout_keep_alive_handler, self._rests)

    def timeout_keep_alive_handler(self, rests: int = 0) -> None:
        self.timeout_keep_alive_task = None
        if self._idle and rests == self._rests:
            super().timeout_keep_alive_handler()
        elif self._idle:
            self._start_idle_timer()

    def _unset_keepalive_if_required(self) -> None:
        """A request has arrived. The running timer checks the flag, so it need not be cancelled."""
        self._idle = False

    # ------------------------------------------------------------ clients that read slowly or disconnect

    def pause_writing(self) -> None:
        super().pause_writing()
        if isinstance(self._answering, ClientResponse):
            self._answering.pause(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        if isinstance(self._answering, ClientResponse):
            self._answering.pause(False)

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
        if self._due is not None:
            self._due[1].left(self._due[0].refused)
        elif self._came is not None and self._known is not None:
            self._known.parsed_head.left(None)
        self._due = self._came = None
        if self._answering is not None:
            self._answering.left()


async def _failing(error: Exception, scope: object, receive: object, send: object) -> None:
    raise error


class _NullEvent:
    """Replaces an event that nothing waits for."""

    def set(self) -> None: ...


class ClientResponse(Struct, eq=False):
    """A response without a task: a `ResponseReceiver` that writes to the client. Output is buffered until `rest` or the
    end. Replaces uvicorn's cycle meanwhile: the first fields are those that the connection reads from a cycle."""

    connection: Connection
    keep_alive: bool
    response_started: bool = False
    response_complete: bool = False
    disconnected: bool = False
    out: list[bytes] = []
    chunked: bool = False
    size: int = 0  # bytes of the body so far
    more_body: ClassVar[bool] = False  # the request body is complete
    message_event: ClassVar[_NullEvent] = _NullEvent()

    def __repr__(self) -> str:  # never the content
        return f"<{type(self).__name__}>"

    def answered(self, status: int, headers: Headers) -> None:
        """Header names are lower case. Without a content length, the body is chunked."""
        self.response_started = True
        lines = list(map(": ".join, headers))
        if status not in BODYLESS and "content-length" not in dict(headers):
            self.chunked = True
            lines.append("transfer-encoding: chunked")
        if not self.keep_alive:
            lines.append("connection: close")
        text = "\r\n".join(lines)
        self.out.append(STATUS_LINE.get(status) or b"HTTP/1.1 %d \r\n" % status)
        self.out.append(f"{text}\r\n\r\n".encode("latin-1"))
        if self.connection.flow.write_paused:
            self.pause(True)

    def add(self, chunk: bytes) -> None:
        if chunk:  # an empty chunk would end the body
            self.size += len(chunk)
            self.out.append(b"%x\r\n%b\r\n" % (len(chunk), chunk) if self.chunked else chunk)

    def flush_buffers(self) -> None:
        if self.out:
            self.connection.transport.write(b"".join(self.out))
            self.out.clear()

    def finish(self) -> None:
        if self.chunked:
            self.out.append(b"0\r\n\r\n")
        self.flush_buffers()
        self.response_complete = True
        if not self.keep_alive:
            self.connection.transport.close()
        self.connection.on_response_complete()

    def break_off(self) -> None:
        """Closes without an end, so that the client sees that the response is incomplete."""
        self.flush_buffers()
        self.connection.transport.close()

    def pause(self, paused: bool) -> None:
        """Backpressure: the client can't take more for now, or can again."""

    def left(self) -> None:
        """The client has disconnected, perhaps after it got the whole response."""


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
    parsed_head: RequestHead

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

    def learn(self, data: bytes, parsed_head: RequestHead) -> KnownHead | None:
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
