"""Limits on incoming HTTP: size, speed, and unambiguous framing.

The underlying parser is strict about message framing. This module adds what the parser does not check: sizes, transfer
codings other than `chunked`, trailers (which must not become headers), protocol upgrades (which carpool ignores), and
clients that send or read nothing. A refusal uses the error format of the provider whose client is asking, and closes
the connection: if one request is ambiguous, so is everything after it. Earlier requests are answered first.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, Self

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from carpool.config import ConnectionLimits
from carpool.frontends.proxy.http.liveness import check_idle
from carpool.frontends.proxy.http.responses import MALFORMED, Cycle, RequestRefused

LONGEST_NAME = 256  # of a header name, in characters; names are cached
LINGER_S = 5.0  # keep reading after a refusal: closing at once may make the client's kernel drop the response
PROGRESS = 1024  # bytes between two checks that count as progress
_TURN = 256 * 1024  # most bytes that one event loop iteration delivers
_PER_BYTE = 16  # framing bytes allowed per body byte; one-byte chunks need five
_VERSIONS = frozenset({"1.0", "1.1"})


class BoundedProtocol(HttpToolsProtocol):
    cycle: Cycle  # of the newest request
    limits: ClassVar[ConnectionLimits] = ConnectionLimits()
    _max_head: ClassVar[int] = ConnectionLimits().max_head  # cached: read many times per request
    _trailers: _Trailers | None = None

    _received = 0  # bytes since the last complete message
    _body = 0  # body bytes of the current message
    _in_head = True
    _mid_message = False  # a message has started and is not complete
    _over_limit = False  # this connection opened above the connection limit
    _refused: RequestRefused | None = None
    _last_words: bytes | None = None  # a refusal to send once earlier requests are answered
    _upgrade_body = False  # an ignored upgrade request has a body to read
    _stalls = 0  # consecutive checks without progress
    _seen = 0  # bytes at the last check
    _idle = False  # idle between two requests

    @classmethod
    def within(cls, limits: ConnectionLimits) -> type[Self]:
        """A subclass with other limits."""
        return type(cls.__name__, (cls,), {"limits": limits, "_max_head": limits.max_head})

    # ------------------------------------------------------------ the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        limits, many = self.limits, len(self.connections)
        if many > limits.max_connections:
            self._over_limit = True
            if many > limits.max_connections + limits.max_connections // 4 + 16:  # too many even to send refusals
                transport.abort()
        connections: Any = self.connections
        check_idle(self.loop, self.server_state, connections, limits.slow_sender_s, limits.slow_reader_s)

    def data_received(self, data: bytes) -> None:
        if self._refused is not None:
            return
        self._unset_keepalive_if_required()
        self._received += len(data)
        try:
            self.parser.feed_data(data)
            if self._received > self._max_head:
                self._check_framing()
        except httptools.HttpParserUpgrade as upgrade:
            self._resume_http(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse(_refusal_in(error))
        except RequestRefused as refused:
            self._refuse(refused)

    def _check_framing(self) -> None:
        """Bounds everything that is not body: the head, chunk framing and trailers."""
        if self._in_head:
            raise self._too_long()
        if self._received - self._body > self._max_head + _TURN + _PER_BYTE * self._body:
            raise RequestRefused(400, "This body is nearly all framing. Send it in larger chunks, without extensions.")

    def _too_long(self) -> RequestRefused:
        most = self.limits.max_head_kb
        return RequestRefused(
            431, f"The line and the headers of this request have more than {most} KB. Send less of them."
        )

    # ------------------------------------------------------------ called by the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._mid_message = True

    def on_url(self, url: bytes) -> None:
        self.url += url
        if len(self.url) > self._max_head:
            raise RequestRefused(414, f"The address of this request has more than {self.limits.max_head_kb} KB.")

    def on_headers_complete(self) -> None:
        if self.url[:1] != b"/":
            self.take_authority()
        self._check_head()
        if self._over_limit:
            self._check_room()
        self.begin_cycle()
        if self._trailers is None:
            self._trailers = _Trailers(self._max_head)
        self.headers = self._trailers  # type: ignore[assignment]  # later fields are trailers, not headers
        self._in_head = False

    def _check_head(self) -> None:
        headers, most = self.headers, self.limits.max_headers
        names = dict(headers)
        if len(headers) > most:
            raise RequestRefused(431, f"This request has more than {most} headers. Send fewer.")
        if names and max(map(len, names)) > LONGEST_NAME:
            raise RequestRefused(431, f"A header of this request has a name of more than {LONGEST_NAME} characters.")
        if self._received > self._max_head and _size(headers) + len(self.url) > self._max_head:
            raise self._too_long()  # otherwise the excess is body that arrived with the head
        version = self.parser.get_http_version()
        if version not in _VERSIONS or (b"transfer-encoding" in names and not _is_chunked(headers, version)):
            raise RequestRefused(400, MALFORMED)
        if self.parser.should_upgrade():
            self._upgrade_body = b"transfer-encoding" in names or names.get(b"content-length", b"0").strip(b"0") != b""

    def _check_room(self) -> None:
        self._over_limit = len(self.connections) > self.limits.max_connections
        if self._over_limit:
            raise RequestRefused(429, "Too many connections are open at carpool. Try again in a moment.", again=1)

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        cycle = self.cycle
        if not cycle.response_complete:
            cycle.body += body
            if len(cycle.body) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
            cycle.message_event.set()

    def on_message_complete(self) -> None:
        if self._upgrade_body:
            return
        self._received = self._body = self._stalls = self._seen = 0
        self._in_head, self._mid_message = True, False
        if self._trailers is not None:
            self._trailers.left = self._max_head
        cycle = self.cycle
        if not cycle.response_complete:
            cycle.more_body = False
            cycle.message_event.set()
        if not self.pipeline:
            self.flow.resume_reading()  # paused, it would not notice a disconnect

    def _resume_http(self, rest: bytes) -> None:
        """Continues with HTTP after an ignored upgrade. The parser stops there, so a new one takes over."""
        has_body = self._upgrade_body
        self._upgrade_body = False
        if not has_body:
            self.parser = httptools.HttpRequestParser(self)
            self.data_received(rest)
            return
        framing = [pair for pair in self.cycle.scope["headers"] if pair[0] in (b"content-length", b"transfer-encoding")]
        self._in_head = False
        self.parser = httptools.HttpRequestParser(_BodyContinuation(self))
        replayed_head = b"POST / HTTP/1.1\r\n" + b"".join([b"%b: %b\r\n" % pair for pair in framing]) + b"\r\n"
        self.data_received(replayed_head + rest)

    # ------------------------------------------------------------ refusals

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if isinstance(self.cycle, RequestResponseCycle):
            self.cycle.body = bytearray()  # no longer needed
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None

    def _refuse(self, refused: RequestRefused) -> None:
        """Refuses a request. Complete earlier requests are answered first; incomplete ones are dropped."""
        self._refused = refused
        target, headers = getattr(self, "url", b""), self.headers if isinstance(self.headers, list) else []
        response = refused.answer(target, headers)
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self._note(refused, target, headers)
            self._send_refusal(response)
        elif self.pipeline or not cycle.more_body:
            self._note(refused, target, headers)
            if cycle.more_body:  # not started yet, unlike those before it
                self.pipeline.popleft()
            self._last_words = response
        elif cycle.response_started:
            self.transport.abort()
        else:
            cycle.refused = refused  # logged by the task that reads its body
            self._send_refusal(response)
            cycle.disconnected = True
            cycle.message_event.set()
            self.hung_up()

    def _note(self, refused: RequestRefused, target: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        """Reports a request that the application never sees, for its log."""
        report = getattr(self.app, "refused", None)
        if report is not None:
            method = self.parser.get_method().decode("latin-1") if self._mid_message and target else ""
            report(
                refused, method, target if self._mid_message else b"", headers if self._mid_message else [], self.client
            )

    def _send_refusal(self, response: bytes) -> None:
        self._unset_keepalive_if_required()
        self._last_words = None
        self.transport.write(response)
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.flow.resume_reading()
            self.loop.call_later(LINGER_S, self.transport.abort)
        else:
            self.transport.close()

    def hung_up(self) -> None:
        """Makes the application treat its client as disconnected."""

    def begin_cycle(self) -> None:
        """Starts to answer the request whose head is complete."""

    def take_authority(self) -> None:
        """Handles a request whose target is an absolute URL."""

    def check_timeouts(self, sender: int, reader: int) -> None:
        cycle, transport = self.cycle, self.transport
        if self.flow.write_paused or transport.is_closing():
            unsent = transport.get_write_buffer_size()
            self._stalls = self._stalls + 1 if abs(unsent - self._seen) < PROGRESS else 0
            self._seen = unsent
            if self._stalls >= reader:
                self.give_up()
        elif self._awaits_response():
            self._stalls = self._seen = 0
        else:
            moved = not self._in_head and not cycle.response_complete and self._body - self._seen >= PROGRESS
            self._stalls = 0 if moved else self._stalls + 1
            self._seen = self._body
            if self._stalls >= sender:
                self._drop_slow_sender()

    def give_up(self) -> None:
        """Drops a client that does not read its response."""
        self.transport.abort()

    def _awaits_response(self) -> bool:
        if self.flow.read_paused or self._idle or self._refused is not None:
            return True
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body

    def _drop_slow_sender(self) -> None:
        if self._received and (self._in_head or not self.cycle.response_complete):
            self._refuse(RequestRefused(408, "This request came too slowly, and its end was not seen. Send it again."))
        else:
            self.transport.abort()


class _Trailers:
    """Takes the trailers from the parser and discards them: they must not become headers. RFC 9110, 6.5.1."""

    __slots__ = ("left",)

    def __init__(self, most: int) -> None:
        self.left = most

    def append(self, pair: tuple[bytes, bytes]) -> None:
        self.left -= len(pair[0]) + len(pair[1]) + 4
        if self.left < 0:
            raise RequestRefused(431, "The trailers of this request are too long. carpool needs none of them.")


class _BodyContinuation:
    """Parser callbacks for a request whose head was already read. Ignores the replayed head, forwards the rest."""

    def __init__(self, protocol: BoundedProtocol) -> None:
        self._protocol = protocol
        self._begun = False
        self.on_body = protocol.on_body
        self.on_message_complete = protocol.on_message_complete

    def on_message_begin(self) -> None:
        if self._begun:
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._begun:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._begun:
            self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._begun:
            self._protocol.on_headers_complete()
        self._begun = True


def _refusal_in(error: httptools.HttpParserError) -> RequestRefused:
    """The refusal raised in a callback, which the parser wraps in its own error."""
    inner = error.__context__
    return inner if isinstance(inner, RequestRefused) else RequestRefused(400, MALFORMED)


def _size(headers: list[tuple[bytes, bytes]]) -> int:
    return sum([len(name) + len(value) + 4 for name, value in headers])


def _is_chunked(headers: list[tuple[bytes, bytes]], version: str) -> bool:
    """`chunked` alone is the one coding that every server reads the same way. HTTP/1.0 does not have it."""
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    return codings == [b"chunked"] and version == "1.1"
