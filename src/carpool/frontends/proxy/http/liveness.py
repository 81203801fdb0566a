"""When a response counts as delivered, and checks for idle connections.

A stored outcome is marked as delivered only when the client has it; until then a client that comes back gets it. A
successful write does not show that: the bytes lie first in the event loop's write buffer, then in the kernel's send
queue, and have arrived when the client's kernel acknowledges them (`TIOCOUTQ` counts those that it has not). So a
response counts as delivered when buffer and queue are empty while the connection is still there.

- The client closes its side while bytes are unacknowledged: not delivered. It may have sent that before our last byte,
  so `received` first yields to the event loop twice, to process what the kernel already knows.
- The connection ends with an error, or is cut because the client does not read: not delivered.
- The client closes its socket with unread data in its kernel: the response was acknowledged, and a reset follows a
  moment later. `received` has then returned True already; the reset calls `lost`, which takes the delivery back.
- A `Connection: close` response: the event loop closes the socket as soon as the kernel has all bytes, which may be
  megabytes before the client has. So a duplicate of the socket stays open, shut down for writing, and is polled until
  the last byte is acknowledged, the connection breaks, or `LONGEST_CLOSE_S` is over.
- A kernel that does not report the queue counts as empty: then only errors and disconnects show a lost response.

Polling starts at 2 ms and doubles up to 0.5 s. Responses on one connection follow each other, so one
`DeliveryReceipts` per connection is enough. Relayed calls, which have no stored outcome, do not use it.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import struct
import termios
from collections.abc import Callable, Collection
from socket import SHUT_WR, SO_ERROR, SOL_SOCKET, socket
from typing import Any, Protocol
from weakref import WeakSet

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.002, 0.5  # between polls of the unacknowledged bytes
LONGEST_CLOSE_S = 60.0  # for the client to read the rest of a response that closes its connection

ConnectionLost = Callable[[], None]  # called when the connection is reset after a response
_COUNT = struct.Struct("i")


class DeliveryReceipts:
    """Tracks the responses of one connection, which follow each other."""

    __slots__ = ("_closing", "_lost", "_received_all", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._closing: socket | None = None  # duplicate, if we closed and the kernel has more to send
        self._received_all: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._lost: ConnectionLost | None = None

    async def received(self, lost: ConnectionLost) -> bool:
        """Waits until it is known whether the client acknowledged everything. `lost` is called if the client resets the
        connection afterwards."""
        self._lost = None
        for _ in range(2):  # lets the loop process a disconnect that already happened
            await asyncio.sleep(0)
        pause = FIRST_PAUSE_S
        while not self._received_all.done():
            if self._closing is None and not self._unsent():
                self._lost = lost
                return True
            await asyncio.wait((self._received_all,), timeout=pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        return self._received_all.result()

    def left(self) -> None:
        """The client has closed its side of the connection."""
        self._set_result(not self._unsent())

    def closed(self, error: Exception | None, *, by_us: bool) -> None:
        """The connection is closed. Without an error, everything written to it is in the kernel."""
        if error is None and by_us and not self._received_all.done() and self._unsent():
            self._keep_open_until_acknowledged()
        else:
            self._set_result(error is None and not self._unsent())
        lost, self._lost = self._lost, None
        if error is not None and lost is not None:
            lost()

    def given_up(self) -> None:
        """The connection is cut because the client did not read."""
        self._set_result(False)

    def _keep_open_until_acknowledged(self) -> None:
        self._closing = socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno()))
        try:
            self._closing.shutdown(SHUT_WR)
        except OSError:  # the client has just reset the connection
            self._end_closing(False)
        else:
            self._poll_closing(FIRST_PAUSE_S, 0.0)

    def _poll_closing(self, pause: float, waited: float) -> None:
        """Polls a connection that we closed until the client has everything, is gone, or takes too long."""
        assert self._closing is not None
        unsent, broken = self._unsent(), self._closing.getsockopt(SOL_SOCKET, SO_ERROR)
        if unsent and not broken and waited < LONGEST_CLOSE_S:
            next_pause = min(2 * pause, LONGEST_PAUSE_S)
            asyncio.get_running_loop().call_later(pause, self._poll_closing, next_pause, waited + pause)
            return
        self._end_closing(not unsent and not broken)

    def _end_closing(self, whole: bool) -> None:
        assert self._closing is not None
        self._set_result(whole)
        self._closing.close()
        self._closing = None

    def _set_result(self, whole: bool) -> None:
        if not self._received_all.done():
            self._received_all.set_result(whole)

    def _unsent(self) -> int:
        if self._closing is not None:
            return _unacknowledged(self._closing)
        return self._transport.get_write_buffer_size() + _unacknowledged(self._transport.get_extra_info("socket"))


def _unacknowledged(connection: Any) -> int:
    """Bytes in the kernel that the other side has not acknowledged; 0 where the kernel does not say."""
    try:
        return int(_COUNT.unpack(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(_COUNT.size)))[0])
    except (OSError, ValueError):
        return 0


# ------------------------------------------------------------ idle checks
# One timer checks all connections of a server for clients that neither send nor read. A timer per connection would be a
# large part of the cost of a quick request, and precision does not matter: a limit may be exceeded by a quarter.

CHECKS_PER_LIMIT = 4  # checks within the shorter limit
MAX_CHECK_INTERVAL_S = 15.0  # longest time between checks


class IdleChecked(Protocol):
    def check_timeouts(self, sender: int, reader: int) -> None:
        """Called periodically. Cuts a client that sends nothing for `sender` calls, or reads nothing for `reader`."""
        ...


_CHECKED: WeakSet[Any] = WeakSet()  # the servers with a timer


def check_idle(
    loop: asyncio.AbstractEventLoop, server: Any, connections: Collection[IdleChecked], sender_s: float, reader_s: float
) -> None:
    """Checks the connections of a server, which is identified by its state object, as long as there are any."""
    if server in _CHECKED:
        return
    _CHECKED.add(server)
    every = min(sender_s / CHECKS_PER_LIMIT, reader_s / CHECKS_PER_LIMIT, MAX_CHECK_INTERVAL_S)
    sender, reader = math.ceil(sender_s / every), math.ceil(reader_s / every)

    def check() -> None:
        for connection in list(connections):
            connection.check_timeouts(sender, reader)
        if connections:
            loop.call_later(every, check)
        else:
            _CHECKED.discard(server)

    loop.call_later(every, check)
