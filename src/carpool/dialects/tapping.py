"""Reads along while an answer passes: server-sent events cut into chunks anywhere, or plain JSON."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct, field

from carpool.model import Usage

_MOST_HELD = 4 * 1024 * 1024  # an event beyond this is let pass unread; of an answer that is no stream, its end is kept
_TAIL = 64 * 1024


class Listener(Protocol):
    """What a dialect makes of what passes."""

    def event(self, data: bytes) -> None: ...
    def whole(self, body: bytes) -> Usage | None: ...
    def tail(self, end: bytes) -> Usage | None:
        """Of an answer too long to hold, from its last bytes."""
        ...

    def usage(self) -> Usage | None: ...


class Tap(Struct, eq=False):
    """`ports.UsageTap` over a listener. Holds one event at most.

    An answer that turns out to be plain JSON (an SDK may be answered so) is held up to a bound and read at the end.
    """

    listener: Listener
    rest: bytearray = field(default_factory=bytearray)  # the line that is not complete yet
    one: bytes = b""  # a plain answer that is one chunk so far: most are, and it need not be copied
    data: list[bytes] = []
    held: int = 0
    skipping: bool = False  # inside a line too long to hold
    plain: bool | None = None
    cut: bool = False

    def __repr__(self) -> str:  # never what passes
        return f"<{type(self).__name__}>"

    def feed(self, chunk: bytes) -> None:
        if self.plain is None:
            self._decide(chunk)
        if self.plain:
            self._keep(chunk)
            return
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            self._hold(line)
            self._line()
        self._hold(rest)

    def usage(self) -> Usage | None:
        if not self.plain:
            return self.listener.usage()
        body = self.one or bytes(self.rest)
        return self.listener.tail(body) if self.cut else self.listener.whole(body)

    def _decide(self, chunk: bytes) -> None:
        if start := chunk.lstrip():
            self.plain = start.startswith(b"{")

    def _keep(self, chunk: bytes) -> None:
        if not self.rest and not self.one and len(chunk) <= _MOST_HELD:
            self.one = chunk
            return
        self.rest += self.one
        self.one = b""
        self.rest += chunk
        if len(self.rest) > _MOST_HELD:
            self.cut = True
            del self.rest[:-_TAIL]

    def _hold(self, piece: bytes) -> None:
        if self.skipping:
            return
        self.rest += piece
        if len(self.rest) + self.held > _MOST_HELD:
            self.skipping = True
            self.rest.clear()

    def _line(self) -> None:
        line, skipped = bytes(self.rest).removesuffix(b"\r"), self.skipping
        self.rest.clear()
        self.skipping = False
        if skipped:
            self.data.append(b"")  # makes the event unreadable, as it is incomplete
        elif not line:
            data = b"\n".join(self.data)
            self.data.clear()
            self.held = 0
            self.listener.event(data)
        elif line.startswith(b"data:"):
            self.data.append(line[5:])
            self.held += len(line)
