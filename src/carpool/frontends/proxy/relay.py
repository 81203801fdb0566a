"""A call on `now` without a task: the provider's connection writes directly to the client's.

Response, log line and ledger entry are the same as for a call that has a task.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from msgspec import Struct

from carpool.core.errors import CarpoolError, Closed, WireError
from carpool.core.model import Entry, Headers
from carpool.core.ports import Dialect
from carpool.engine import Purchase
from carpool.frontends.proxy.http.asgi import JSON, advice, passed_on
from carpool.frontends.proxy.http.connection import ClientSink
from carpool.frontends.proxy.log import LogLine, redacted

log = logging.getLogger("carpool.proxy")

Tell = Callable[[LogLine, int, Entry | None, int], None]
CLIENT_LEFT = 499


class Relay(Struct, eq=False):
    """One response in progress. A `ResponseSink` for the engine, a `TasklessAnswer` for the client's connection.

    `said` are carpool's headers in its head; `tell` is called once, with the result.
    """

    sink: ClientSink
    dialect: Dialect
    said: Headers
    line: LogLine
    tell: Tell
    purchase: Purchase | None = None
    done: Callable[[Relay], None] | None = None
    status: int = 0
    size: int = 0

    def __repr__(self) -> str:  # never the content
        return f"<{type(self).__name__}>"

    def begin(self, purchase: Purchase, done: Callable[[Relay], None]) -> None:
        self.purchase, self.done = purchase, done

    # ------------------------------------------------------------ called by the engine

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
        self._break(error, entry)

    # ------------------------------------------------------------ called by the client's connection

    def pause(self, paused: bool) -> None:
        if self.purchase is not None:
            self.purchase.pause(paused)

    def left(self) -> None:
        """The client has disconnected, perhaps after it got the whole response. Gives up the rest."""
        self._ended_early(CLIENT_LEFT, self._give_up())

    def cut(self) -> None:
        """carpool is shutting down and can't wait any longer."""
        self._break(Closed("carpool is stopping. Send this call again in a moment."), self._give_up())

    def _give_up(self) -> Entry | None:
        return None if self.purchase is None else self.purchase.give_up()

    def _break(self, error: CarpoolError, entry: Entry | None) -> None:
        self.line.error = redacted(str(error))
        self._ended_early(error.status, entry)
        if self.status:  # the head is sent: only a broken connection shows the failure
            log.warning("A begun answer breaks off: %s", error)
            self.sink.break_off()
            return
        body = self.dialect.error(error.status, error.code, str(error))
        self.sink.head(error.status, [JSON, *advice(error), ("content-length", str(len(body)))])
        self.sink.add(body)
        self.sink.end()

    def _ended_early(self, status: int, entry: Entry | None) -> None:
        """Ends the call before the end of the body. If only the end marker was missing, the call counts as answered."""
        complete = self.purchase is not None and self.purchase.complete
        self._ended(self.status if complete else status, entry, self.size)

    def _ended(self, status: int, entry: Entry | None, size: int) -> None:
        self.purchase = None
        self.tell(self.line, status, entry, size)
        if self.done is not None:
            self.done(self)
