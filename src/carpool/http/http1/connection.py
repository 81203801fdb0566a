"""One HTTP/1.1 connection and the exchanges (request plus response) on it.

The client must tell apart two kinds of failure, because one of them may cost money:

- Never connected: opening the connection failed, so provably nothing was sent (`NotConnected`, raised in
  `client.py`).
- Cut after sending: once `begin` has written the first byte, the provider may have acted on the request. A reset or an
  unparsable response is `ConnectionBroken`, a timeout is `TimedOut`. The outcome is unknown, and nothing here retries.

A server may close an idle connection just as the next request goes out, so before reuse `quiet` polls the socket for a
close that the event loop has not reported yet. A close that arrives even later counts as cut after sending.

A connection is reused only if the last exchange is finished on both sides: response complete, request sent to its last
byte. Otherwise it is aborted: the rest of an abandoned response would be read as the answer to the next request, and
after a truncated upload the next request would be parsed as part of its body (`forbid_reuse`). `close` would not do:
it first flushes unsent data to a peer that may not be reading, while `abort` also tells the provider at once to stop.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import lru_cache
from math import inf
from typing import Any

import httptools
from msgspec import Struct

from carpool.core.errors import ConnectionBroken, TimedOut, WireError
from carpool.core.model import Headers
from carpool.core.ports import HttpRequest, ResponseReceiver

MAX_HELD = 256 * 1024  # bytes of an unread response; above that, reading pauses
LARGEST_HEAD = 256 * 1024
MAX_INFORMED = 10_000  # 1xx responses before the final one: one every 50 s for most of a week
KEEP_ALIVE_S = 60
_IGNORED: deque[tuple[bytes, bytes]] = deque(maxlen=0)


class Http1Exchange(Struct, eq=False):
    """A request and its response, which is pushed to a receiver as it arrives, without a waiting task."""

    host: str
    method: str
    timeout: float
    informed: Callable[[int, Headers], None] | None
    receiver: ResponseReceiver | None  # until the response is complete or has failed
    connection: Http1Connection | None  # the connection, as long as `receiver`
    status: int = 0
    quiet: float = 0.0  # seconds without traffic, counted by `add_idle_time`
    uploaded: bool = True  # the request was sent completely

    def __repr__(self) -> str:  # without the data
        return f"<{type(self).__name__}>"

    @classmethod
    def begin(
        cls, connection: Http1Connection, host: str, head: bytes, request: HttpRequest, receiver: ResponseReceiver
    ) -> Http1Exchange:
        assert isinstance(request.body, bytes)
        exchange = cls(host, request.method, request.timeout, request.informed, receiver, connection)
        connection.begin(exchange, head + request.body)
        return exchange

    # ------------------------------------------------------------ filled by the connection

    def answered(self, status: int, headers: Headers) -> None:
        if self.receiver is not None:
            self.status, self.quiet = status, 0.0
            self.receiver.answered(status, headers)

    def add(self, chunk: bytes) -> None:
        if self.receiver is not None:
            self.quiet = 0.0
            self.receiver.add(chunk)

    def wake(self) -> None:
        if self.receiver is not None:
            self.receiver.flush_buffers()

    def finish(self) -> None:
        if (receiver := self._end()) is not None:
            receiver.finish()

    def sever(self) -> None:
        self._fail(ConnectionBroken(f"The connection to {self.host} broke before the whole answer was here."))

    def _fail(self, error: WireError) -> None:
        if (receiver := self._end()) is not None:
            receiver.fail(error)

    def _end(self) -> ResponseReceiver | None:
        """Drops its references, which form a cycle, so that it is freed without the garbage collector."""
        receiver, self.receiver, self.connection = self.receiver, None, None
        return receiver

    def add_idle_time(self, seconds: float) -> None:
        """Checks the timeout; called every `seconds`. A timer per call would be one of its largest costs."""
        self.quiet += seconds
        if self.quiet > self.timeout:
            self.time_out()

    def time_out(self) -> None:
        connection = self.connection
        self._fail(TimedOut(f"{self.host} was silent for too long."))
        if connection is not None:
            connection.abort()

    # ------------------------------------------------------------ called by the receiver

    def pause(self, paused: bool) -> None:
        if self.connection is not None:
            self.connection.pause(paused)

    def give_up(self) -> None:
        connection = self.connection
        self._end()
        if connection is not None:
            connection.abort()


class Http1Response:
    """Receives what its exchange pushes, and keeps it for a caller that waits for it; either may be ahead."""

    def __init__(self, connection: Http1Connection, host: str, request: HttpRequest) -> None:
        self.status = 0
        self.headers: Headers = ()
        # It has its own, exact timer, which runs only while the caller waits.
        self.exchange = Http1Exchange(host, request.method, inf, request.informed, self, connection, uploaded=False)
        self.interrupt: asyncio.Timeout | None = None  # of the upload
        self._complete = False
        self._timeout = request.timeout
        self._held: list[bytes] = []
        self._size = 0
        self._failure: tuple[type[WireError], str] | None = None  # not the exception: it would keep its frames alive
        self._waiter: asyncio.Future[None] | None = None

    # ------------------------------------------------------------ filled by the exchange

    def answered(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers
        if status >= 300:
            self._interrupt()  # refused or redirected: the rest of the upload is not wanted

    def add(self, chunk: bytes) -> None:
        self._held.append(chunk)
        self._size += len(chunk)
        if self._size > MAX_HELD and self.exchange.uploaded:
            self.exchange.pause(True)

    def flush_buffers(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def finish(self) -> None:
        self._complete = True
        self._interrupt()
        self.flush_buffers()

    def fail(self, error: WireError) -> None:
        self._failure = type(error), str(error)
        self._interrupt()
        self.flush_buffers()

    def _interrupt(self) -> None:
        if self.interrupt is not None:
            self.interrupt.reschedule(0.0)
            self.interrupt = None

    # ------------------------------------------------------------ taken by the caller

    def check(self) -> None:
        if self._failure is not None:
            kind, message = self._failure
            raise kind(message)

    async def moved(self) -> None:
        """Waits until anything happens on the connection, up to the timeout."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(self._timeout, self.exchange.time_out)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    async def head(self) -> None:
        while not self.status:
            self.check()
            await self.moved()

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yields the body data received since the last time."""
        while self._held or not self._complete:
            if not self._held:
                self.check()
                await self.moved()
                continue
            chunk = self._held[0] if len(self._held) == 1 else b"".join(self._held)
            self._held.clear()
            self._size = 0
            self.exchange.pause(False)
            yield chunk

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self.chunks()])

    async def aclose(self) -> None:
        self.exchange.give_up()


class Http1Connection(asyncio.Protocol):
    """A connection that carries one exchange at a time. `free` is called when it is ready for the next one."""

    def __init__(self, free: Callable[[Http1Connection], None]) -> None:
        self.open = False
        self.sweeps = 0  # how many sweeps of the pool it has been idle for
        self._free = free
        self._transport: Any = None
        self._poll: Any = None
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: Http1Exchange | None = None
        self._headers: list[tuple[bytes, bytes]] | deque[tuple[bytes, bytes]] = []
        self._head_size = 0  # bytes received of an incomplete response head
        self._informed = 0
        self._until_end = False  # the response ends with the connection
        self._reading = True
        self._no_reuse = False
        self.writable = True

    # ------------------------------------------------------------ used by the client

    def begin(self, exchange: Http1Exchange, data: bytes) -> None:
        self._exchange = exchange
        self._informed = 0
        self._head_size = 0
        self.sweeps = 0
        self._until_end = False
        self.write(data)

    def write(self, data: bytes) -> None:
        if self.open:
            self._transport.write(data)

    def pause(self, paused: bool) -> None:
        if paused == self._reading and self.open:
            self._reading = not paused
            (self._transport.pause_reading if paused else self._transport.resume_reading)()

    def quiet(self) -> bool:
        """Whether the socket has no event that the event loop has not delivered yet. On an idle connection, such an
        event means that the peer has closed it."""
        return self.open and not (self._poll is not None and self._poll.poll(0))

    def add_idle_time(self, seconds: float) -> None:
        """Checks the timeout of the exchange; called every `seconds`."""
        if self._exchange is not None:
            self._exchange.add_idle_time(seconds)

    def forbid_reuse(self) -> None:
        """The current request was not sent completely, so the connection can't carry another one after it."""
        self._no_reuse = True
        if self._exchange is None:
            self.abort()

    def abort(self) -> None:
        self.open = False
        self._exchange = None
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------ called by the event loop

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.open = True
        raw = transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE_S)
        if hasattr(select, "poll"):
            self._poll = select.poll()
            self._poll.register(raw.fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        if self._exchange is None:
            self.abort()  # data without a request
            return
        exchange = self._exchange
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            exchange.sever()
            self.abort()
            if isinstance(error, httptools.HttpParserCallbackError) and not isinstance(error.__context__, ValueError):
                raise  # our own bug, not bad data from the provider
            return
        if not exchange.status:
            self._head_size += len(data)
            if self._head_size > LARGEST_HEAD:
                exchange.sever()
                self.abort()
                return
        exchange.wake()

    def eof_received(self) -> None:
        if self._exchange is not None and self._until_end:
            self._complete(keep=False)

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.sever()

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        if self._exchange is not None:
            self._exchange.wake()

    # ------------------------------------------------------------ called by the parser

    def on_message_begin(self) -> None:
        self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        exchange, status = self._exchange, self._parser.get_status_code()
        if exchange is None or exchange.status:
            raise ValueError("There is no request for this response.")
        headers = tuple([(_name(name), value.decode("latin-1")) for name, value in self._headers])
        self._headers = _IGNORED  # trailers after the body are dropped
        by_name = dict(headers)
        if status < 200 or status > 599 or "transfer-encoding" in by_name:
            _check_answer(status, headers)
        if status < 200:
            self._head_size = 0
            self._informed += 1
            if self._informed > MAX_INFORMED:
                raise ValueError("There are too many 1xx responses before the final one.")
            if exchange.informed is not None and status != 101:
                exchange.informed(status, headers)
            return
        exchange.answered(status, headers)
        if exchange.method == "HEAD":
            keep = self._parser.should_keep_alive()
            self._parser = httptools.HttpResponseParser(self)  # the old one would wait for a body
            self._complete(keep=keep)
        else:
            self._until_end = "content-length" not in by_name and "transfer-encoding" not in by_name

    def on_body(self, chunk: bytes) -> None:
        if self._exchange is not None:
            self._exchange.add(chunk)

    def on_message_complete(self) -> None:
        if self._exchange is not None and self._exchange.status:
            self._complete(keep=self._parser.should_keep_alive())

    def _complete(self, *, keep: bool) -> None:
        exchange, self._exchange = self._exchange, None
        assert exchange is not None
        exchange.finish()
        self.pause(False)
        if keep and exchange.uploaded:
            self._free(self)
        elif exchange.uploaded or self._no_reuse:
            self.abort()


@lru_cache(4096)
def _name(name: bytes) -> str:
    return name.decode("latin-1").lower()


def _check_answer(status: int, headers: Headers) -> None:
    """Refuses a response whose framing is ambiguous: passed on, it could be read differently by the client."""
    if not 100 <= status <= 599:
        raise ValueError("This is not a valid status.")
    for name, value in headers:
        if name == "transfer-encoding" and (status < 200 or value.strip().lower() != "chunked"):
            raise ValueError("This transfer coding can't be passed on.")
        if status < 200 and name == "content-length" and value.strip("0 \t"):
            raise ValueError("A 1xx response has no body.")
