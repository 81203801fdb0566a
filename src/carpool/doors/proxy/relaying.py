"""The short way of a call on `now`: the provider's connection and the client's are joined, and no task stands between.

Everything else about such a call is as on the long way: what is said to its client, to the log and in the ledger.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from msgspec import Struct

from carpool.doors.asgi import JSON, RETRY, passed_on
from carpool.doors.proxy.connection import Sink
from carpool.doors.proxy.logs import Line
from carpool.engine import Purchase
from carpool.errors import CarpoolError, Closed, WireError
from carpool.model import Entry, Headers
from carpool.ports import Dialect

log = logging.getLogger("carpool.proxy")

Tell = Callable[[Line, int, Entry | None, int], None]
CLIENT_LEFT = 499


class Relay(Struct, eq=False):
    """One answer on its way through: `engine.Outlet` for what comes, `connection.Answering` for its client.

    `said` is what carpool says of the call in its head; `tell` hears what became of it, once.
    """

    sink: Sink
    dialect: Dialect
    said: Headers
    line: Line
    tell: Tell
    purchase: Purchase | None = None
    done: Callable[[Relay], None] | None = None
    status: int = 0
    size: int = 0

    def __repr__(self) -> str:  # never what passes
        return f"<{type(self).__name__}>"

    def begin(self, purchase: Purchase, done: Callable[[Relay], None]) -> None:
        self.purchase, self.done = purchase, done

    # ------------------------------------------------------------ told by the engine

    def answered(self, status: int, headers: Headers) -> None:
        self.status = status
        self.sink.head(status, [*passed_on(headers), *self.said])

    def add(self, chunk: bytes) -> None:
        self.size += len(chunk)
        self.sink.add(chunk)

    def rest(self) -> None:
        self.sink.flush()

    def finish(self, entry: Entry) -> None:
        self._ended(self.status, entry, self.size)
        self.sink.end()

    def fail(self, error: WireError, entry: Entry | None) -> None:
        self._break(error)

    # ------------------------------------------------------------ told by the door

    def pause(self, paused: bool) -> None:
        if self.purchase is not None:
            self.purchase.pause(paused)

    def left(self) -> None:
        """The client is gone: nobody wants the rest."""
        self._give_up()
        self._ended(CLIENT_LEFT, None, 0)

    def cut(self) -> None:
        """carpool stops, and can't wait any longer."""
        self._give_up()
        self._break(Closed("carpool is stopping. Send this call again in a moment."))

    def _give_up(self) -> None:
        if self.purchase is not None:
            self.purchase.give_up()

    def _break(self, error: CarpoolError) -> None:
        self._ended(error.status, None, 0)
        if self.status:  # the head is out: only a broken connection tells the client the truth now
            log.warning("A begun answer breaks off: %s", error)
            self.sink.break_off()
            return
        body = self.dialect.error(error.status, error.code, str(error))
        more = RETRY if isinstance(error, Closed) else ()
        self.sink.head(error.status, [JSON, *more, ("content-length", str(len(body)))])
        self.sink.add(body)
        self.sink.end()

    def _ended(self, status: int, entry: Entry | None, size: int) -> None:
        self.purchase = None
        self.tell(self.line, status, entry, size)
        if self.done is not None:
            self.done(self)
