"""One HTTP/1.1 connection, and the exchanges that follow each other on it."""

from __future__ import annotations

import asyncio
import select
import socket
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar

import httptools
from msgspec import Struct

from carpool.errors import Severed, TimedOut, WireError
from carpool.model import Headers
from carpool.ports import Taker, WireRequest

MOST_HELD = 256 * 1024  # of an answer that nobody takes away
LARGEST_HEAD = 256 * 1024
MOST_INFORMED = 10_000  # 1xx answers before the answer: one every 50 s for most of a week
KEEP_ALIVE_S = 60
_IGNORED: deque[tuple[bytes, bytes]] = deque(maxlen=0)


class Exchange:
    """A request and its answer. The line fills it, the caller takes from it; both may be ahead of the other."""

    def __init__(self, line: Line, host: str, request: WireRequest) -> None:
        self.status = 0
        self.headers: Headers = ()
        self.uploaded = False
        self.complete = False
        self.method = request.method
        self.informed = request.informed
        self._line: Line | None = line  # until the answer is complete, or broken
        self._host = host
        self._timeout = request.timeout
        self._held: list[bytes] = []
        self._size = 0
        self._error: WireError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.interrupt: asyncio.Timeout | None = None

    # ------------------------------------------------------------ filled by the line

    def answered(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers
        if status >= 300:
            self._interrupt()  # a refusal: what is not sent yet is not wanted
        self.wake()

    def add(self, chunk: bytes) -> None:
        self._held.append(chunk)
        self._size += len(chunk)
        if self._size > MOST_HELD and self._line is not None and self.uploaded:
            self._line.pause(True)
        self.wake()

    def finish(self) -> None:
        self.complete, self._line = True, None
        self._interrupt()
        self.wake()

    def fail(self, error: WireError) -> None:
        if not self.complete and self._error is None:
            self._error, self._line = error, None
            self._interrupt()
            self.wake()

    def sever(self) -> None:
        self.fail(Severed(f"The connection to {self._host} broke before the whole answer was here."))

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _interrupt(self) -> None:
        if self.interrupt is not None:
            self.interrupt.reschedule(0.0)
            self.interrupt = None

    # ------------------------------------------------------------ taken by the caller

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    async def moved(self) -> None:
        """Waits for anything to happen, as long as the silence may last."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        alarm = loop.call_later(self._timeout, self._time_out)
        try:
            await self._waiter
        finally:
            alarm.cancel()
            self._waiter = None

    def _time_out(self) -> None:
        line = self._line
        self.fail(TimedOut(f"{self._host} was silent for too long."))
        if line is not None:
            line.abort()

    async def head(self) -> None:
        while not self.status:
            self.check()
            await self.moved()

    async def take(self) -> bytes | None:
        """What has arrived of the body; None at its end."""
        while not self._held:
            if self.complete:
                return None
            self.check()
            await self.moved()
        chunk = self._held[0] if len(self._held) == 1 else b"".join(self._held)
        self._held.clear()
        self._size = 0
        if self._line is not None:
            self._line.pause(False)
        return chunk

    def give_up(self) -> None:
        if self._line is not None:
            self._line.abort()
            self._line = None


class Poured(Struct, eq=False):
    """An exchange whose answer is handed on as it comes: nobody waits for it. Its request is sent in one piece."""

    host: str
    method: str
    timeout: float
    informed: Callable[[int, Headers], None] | None
    taker: Taker | None  # until the answer is complete, or broken
    line: Line | None  # likewise
    status: int = 0
    quiet: float = 0.0  # seconds, as far as somebody looked
    uploaded: ClassVar[bool] = True

    def __repr__(self) -> str:  # never what passes
        return f"<{type(self).__name__}>"

    @classmethod
    def of(cls, line: Line, host: str, request: WireRequest, taker: Taker) -> Poured:
        return cls(host, request.method, request.timeout, request.informed, taker, line)

    # ------------------------------------------------------------ filled by the line

    def answered(self, status: int, headers: Headers) -> None:
        if self.taker is not None:
            self.status, self.quiet = status, 0.0
            self.taker.answered(status, headers)

    def add(self, chunk: bytes) -> None:
        if self.taker is not None:
            self.quiet = 0.0
            self.taker.add(chunk)

    def wake(self) -> None:
        if self.taker is not None:
            self.taker.rest()

    def finish(self) -> None:
        if (taker := self._end()) is not None:
            taker.finish()

    def sever(self) -> None:
        self._fail(Severed(f"The connection to {self.host} broke before the whole answer was here."))

    def _fail(self, error: WireError) -> None:
        if (taker := self._end()) is not None:
            taker.fail(error)

    def _end(self) -> Taker | None:
        """Holds nothing any more that holds it: nobody has to collect it."""
        taker, self.taker, self.line = self.taker, None, None
        return taker

    def look(self, seconds: float) -> None:
        """Called every so many seconds: an alarm of its own would be among the dearest things that a call costs."""
        line = self.line
        self.quiet += seconds
        if line is not None and self.quiet > self.timeout:
            self._fail(TimedOut(f"{self.host} was silent for too long."))
            line.abort()

    # ------------------------------------------------------------ held by the taker

    def pause(self, paused: bool) -> None:
        if self.line is not None:
            self.line.pause(paused)

    def give_up(self) -> None:
        line = self.line
        self._end()
        if line is not None:
            line.abort()


class Line(asyncio.Protocol):
    """A connection that carries one exchange at a time. `free` is called when it may carry the next."""

    def __init__(self, free: Callable[[Line], None]) -> None:
        self.open = False
        self.sweeps = 0  # how often the pool has met it idle
        self._free = free
        self._transport: Any = None
        self._poll: Any = None
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: Exchange | Poured | None = None
        self._headers: list[tuple[bytes, bytes]] | deque[tuple[bytes, bytes]] = []
        self._head_size = 0  # bytes since the request without the end of a head
        self._informed = 0
        self._until_end = False  # the end of the connection is the end of the answer
        self._reading = True
        self._spoilt = False
        self.writable = True

    # ------------------------------------------------------------ used by the wire

    def begin(self, exchange: Exchange | Poured, data: bytes) -> None:
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
        """Whether nothing has happened that the event loop has not told of yet: an idle peer only ever says goodbye."""
        return self.open and not (self._poll is not None and self._poll.poll(0))

    def look(self, seconds: float) -> None:
        """Called every so many seconds."""
        if isinstance(self._exchange, Poured):
            self._exchange.look(seconds)

    def spoil(self) -> None:
        """A request that was not sent to its end stands on this line: nobody may send another after it."""
        self._spoilt = True
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
            self.abort()  # nothing was asked
            return
        exchange = self._exchange
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            exchange.sever()
            self.abort()
            if isinstance(error, httptools.HttpParserCallbackError) and not isinstance(error.__context__, ValueError):
                raise  # none of the provider's making
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
            raise ValueError("Nothing was asked.")
        headers = tuple([(_name(name), value.decode("latin-1")) for name, value in self._headers])
        self._headers = _IGNORED  # what stands behind the body
        told = dict(headers)
        if status < 200 or status > 599 or "transfer-encoding" in told:
            _check_answer(status, headers)
        if status < 200:
            self._head_size = 0
            self._informed += 1
            if self._informed > MOST_INFORMED:
                raise ValueError("The answer itself never comes.")
            if exchange.informed is not None and status != 101:
                exchange.informed(status, headers)
            return
        exchange.answered(status, headers)
        if exchange.method == "HEAD":
            keep = self._parser.should_keep_alive()
            self._parser = httptools.HttpResponseParser(self)  # this one would wait for a body
            self._complete(keep=keep)
        else:
            self._until_end = "content-length" not in told and "transfer-encoding" not in told

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
        elif exchange.uploaded or self._spoilt:
            self.abort()


@lru_cache(4096)
def _name(name: bytes) -> str:
    return name.decode("latin-1").lower()


def _check_answer(status: int, headers: Headers) -> None:
    """What can be read in two ways is not passed on as if it could be read in one."""
    if not 100 <= status <= 599:
        raise ValueError("This is no status that a client could be given.")
    for name, value in headers:
        if name == "transfer-encoding" and (status < 200 or value.strip().lower() != "chunked"):
            raise ValueError("This coding of the answer would not reach the client.")
        if status < 200 and name == "content-length" and value.strip("0 \t"):
            raise ValueError("A body before the answer would be taken for a part of it.")
