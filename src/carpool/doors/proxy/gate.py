"""What comes in on a connection: how much, how fast, and whether it can be read in one way only.

The parser underneath is strict about the framing of messages. Here stands what it leaves open: sizes, other transfer
codings than `chunked`, trailers (which must not become headers), upgrades that nobody takes up, and clients that send
or read nothing. What is refused is refused in the words of the provider whose client asks, and the connection ends with
it: where one request is in doubt, so is everything behind it. What was asked before is answered first.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, Self

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from carpool.config.limits import Limits
from carpool.doors.proxy.pacing import pace_of
from carpool.doors.proxy.refusing import MALFORMED, Refused

LONGEST_NAME = 256  # of a header: names are remembered
LINGER_S = 5.0  # so long is read on after a refusal: closed at once, the client's kernel may throw the answer away
PROGRESS = 1024  # bytes between two looks, to count as such
_TURN = 256 * 1024  # what one turn of the loop may bring at most
_PER_BYTE = 16  # of chunked framing for a byte of body; the smallest chunks need five
_VERSIONS = frozenset({"1.0", "1.1"})


class Gate(HttpToolsProtocol):
    limits: ClassVar[Limits] = Limits()
    _most: ClassVar[int] = Limits().max_head  # asked for many times a request
    _trailers: _Trailers | None = None

    _received = 0  # since the last message was complete
    _body = 0  # of the message that is coming
    _in_head = True
    _amid = False  # a message has begun to come, and is not complete
    _crowded = False  # there were too many connections when it came
    _refused: Refused | None = None
    _last_words: bytes | None = None  # said when what was asked before is answered
    _continues = False  # an upgrade that is not taken up: its body comes as if nothing had been asked
    _stalls = 0
    _seen = 0
    _resting = False  # between two requests
    _rests = 0  # how often

    @classmethod
    def within(cls, limits: Limits) -> type[Self]:
        """The same protocol under other limits."""
        return type(cls.__name__, (cls,), {"limits": limits, "_most": limits.max_head})

    # ------------------------------------------------------------ the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        limits, many = self.limits, len(self.connections)
        if many > limits.max_connections:
            self._crowded = True
            if many > limits.max_connections + limits.max_connections // 4 + 16:  # not even room for a refusal
                transport.abort()
        connections: Any = self.connections
        pace_of(self.server_state, connections, limits.slow_sender_s, limits.slow_reader_s).keep(self.loop)

    def data_received(self, data: bytes) -> None:
        if self._refused is not None:
            return
        self._unset_keepalive_if_required()
        self._received += len(data)
        try:
            self.parser.feed_data(data)
            if self._received > self._most:
                self._check_framing()
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse(_why(error))
        except Refused as refused:
            self._refuse(refused)

    def _check_framing(self) -> None:
        """Everything that is no body is bounded: a head, and what stands around and behind chunks."""
        if self._in_head:
            raise self._too_long()
        if self._received - self._body > self._most + _TURN + _PER_BYTE * self._body:
            raise Refused(400, "This body is nearly all framing. Send it in larger chunks, without extensions.")

    def _too_long(self) -> Refused:
        most = self.limits.max_head_kb
        return Refused(431, f"The line and the headers of this request have more than {most} KB. Send less of them.")

    # ------------------------------------------------------------ called by the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._amid = True

    def on_url(self, url: bytes) -> None:
        self.url += url
        if len(self.url) > self._most:
            raise Refused(414, f"The address of this request has more than {self.limits.max_head_kb} KB.")

    def on_headers_complete(self) -> None:
        if self.url[:1] != b"/":
            self.take_authority()
        self._check_head()
        if self._crowded:
            self._check_room()
        super().on_headers_complete()
        if self._trailers is None:
            self._trailers = _Trailers(self._most)
        self.headers = self._trailers  # type: ignore[assignment]  # what follows is no header
        self._in_head = False

    def _check_head(self) -> None:
        headers, most = self.headers, self.limits.max_headers
        names = dict(headers)
        if len(headers) > most:
            raise Refused(431, f"This request has more than {most} headers. Send fewer.")
        if names and max(map(len, names)) > LONGEST_NAME:
            raise Refused(431, f"A header of this request has a name of more than {LONGEST_NAME} characters.")
        if self._received > self._most and _size(headers) + len(self.url) > self._most:
            raise self._too_long()  # otherwise it is the body, of which some came at once
        version = self.parser.get_http_version()
        if version not in _VERSIONS or (b"transfer-encoding" in names and not _is_chunked(headers, version)):
            raise Refused(400, MALFORMED)
        if self.parser.should_upgrade():
            self._continues = b"transfer-encoding" in names or names.get(b"content-length", b"0").strip(b"0") != b""

    def _check_room(self) -> None:
        self._crowded = len(self.connections) > self.limits.max_connections
        if self._crowded:
            raise Refused(429, "Too many connections are open at carpool. Try again in a moment.", again=1)

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        cycle = self.cycle
        if not cycle.response_complete:
            cycle.body += body
            if len(cycle.body) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
            cycle.message_event.set()

    def on_message_complete(self) -> None:
        if self._continues:
            return
        self._received = self._body = self._stalls = self._seen = 0
        self._in_head, self._amid = True, False
        if self._trailers is not None:
            self._trailers.left = self._most
        cycle = self.cycle
        if not cycle.response_complete:
            cycle.more_body = False
            cycle.message_event.set()

    @property
    def _busy(self) -> bool:
        """Whether a request that comes now has to wait, or will not be heard at all."""
        underway = self.cycle is not None and not self.cycle.response_complete
        return underway or self._crowded or self._refused is not None

    def _go_on(self, rest: bytes) -> None:
        """After an upgrade that nobody takes up, HTTP goes on. The parser does not, so another takes its place."""
        continued = self._continues
        self._continues = False
        if not continued:
            self.parser = httptools.HttpRequestParser(self)
            self.data_received(rest)
            return
        framing = [pair for pair in self.cycle.scope["headers"] if pair[0] in (b"content-length", b"transfer-encoding")]
        self._in_head = False
        self.parser = httptools.HttpRequestParser(_Continued(self))
        again = b"POST / HTTP/1.1\r\n" + b"".join([b"%b: %b\r\n" % pair for pair in framing]) + b"\r\n"
        self.data_received(again + rest)

    # ------------------------------------------------------------ the end

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._last_words is not None:
            self._say(self._last_words)
        else:
            self._rest()

    def _rest(self) -> None:
        self._resting = True
        self._rests += 1
        self._set_alarm()

    def _set_alarm(self) -> None:
        """For one that stays idle. It is not set anew for every request, which would be among the dearest things that a
        quick one costs: so it rings after one to two times as long as is given."""
        if self.timeout_keep_alive_task is None:
            given = self.timeout_keep_alive
            self.timeout_keep_alive_task = self.loop.call_later(given, self.timeout_keep_alive_handler, self._rests)

    def timeout_keep_alive_handler(self, rests: int = 0) -> None:
        self.timeout_keep_alive_task = None
        if self._resting and rests == self._rests:
            super().timeout_keep_alive_handler()
        elif self._resting:
            self._set_alarm()

    def _unset_keepalive_if_required(self) -> None:
        """Something is asked: the alarm will see that, and need not be taken back."""
        self._resting = False

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None

    def _refuse(self, refused: Refused) -> None:
        """What was asked before in due form is answered first; what is only half here is let go."""
        self._refused = refused
        words = refused.answer(getattr(self, "url", b""), self.headers if isinstance(self.headers, list) else [])
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self._say(words)
        elif not cycle.more_body:
            self._last_words = words
        elif self.pipeline:  # it has not begun: those before it have
            self.pipeline.popleft()
            self._last_words = words
        elif cycle.response_started:
            self.transport.abort()
        else:
            self._say(words)
            cycle.disconnected = True
            cycle.message_event.set()
            self.hung_up()

    def _say(self, words: bytes) -> None:
        self._unset_keepalive_if_required()
        self._last_words = None
        self.transport.write(words)
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.flow.resume_reading()
            self.loop.call_later(LINGER_S, self.transport.abort)
        else:
            self.transport.close()

    def hung_up(self) -> None:
        """The application is to think that its client is gone."""

    def take_authority(self) -> None:
        """The target of a request names its host itself."""

    def look(self, sender: int, reader: int) -> None:
        cycle, transport = self.cycle, self.transport
        if self.flow.write_paused or transport.is_closing():
            left = transport.get_write_buffer_size()
            self._stalls = self._stalls + 1 if abs(left - self._seen) < PROGRESS else 0
            self._seen = left
            if self._stalls >= reader:
                transport.abort()
        elif self._waits_for_us():
            self._stalls = self._seen = 0
        else:
            moved = not self._in_head and not cycle.response_complete and self._body - self._seen >= PROGRESS
            self._stalls = 0 if moved else self._stalls + 1
            self._seen = self._body
            if self._stalls >= sender:
                self._cut()

    def _waits_for_us(self) -> bool:
        if self.flow.read_paused or self._resting or self._refused is not None:
            return True
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body

    def _cut(self) -> None:
        if self._received and (self._in_head or not self.cycle.response_complete):
            self._refuse(Refused(408, "This request came too slowly, and its end was not seen. Send it again."))
        else:
            self.transport.abort()


class _Trailers:
    """Where the parser puts trailers: they are nobody's headers. RFC 9110, 6.5.1."""

    __slots__ = ("left",)

    def __init__(self, most: int) -> None:
        self.left = most

    def append(self, pair: tuple[bytes, bytes]) -> None:
        self.left -= len(pair[0]) + len(pair[1]) + 4
        if self.left < 0:
            raise Refused(431, "The trailers of this request are too long. carpool needs none of them.")


class _Continued:
    """Takes a parser's word for a connection whose request was read already, but for its body."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._begun = False
        self.on_body = gate.on_body
        self.on_message_complete = gate.on_message_complete

    def on_message_begin(self) -> None:
        if self._begun:
            self._gate.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._begun:
            self._gate.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._begun:
            self._gate.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._begun:
            self._gate.on_headers_complete()
        self._begun = True


def _why(error: httptools.HttpParserError) -> Refused:
    """What was refused here comes back in the parser's own error."""
    inner = error.__context__
    return inner if isinstance(inner, Refused) else Refused(400, MALFORMED)


def _size(headers: list[tuple[bytes, bytes]]) -> int:
    return sum([len(name) + len(value) + 4 for name, value in headers])


def _is_chunked(headers: list[tuple[bytes, bytes]], version: str) -> bool:
    """The one coding that every server on the way reads alike; an old client can't know it."""
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    return codings == [b"chunked"] and version == "1.1"
