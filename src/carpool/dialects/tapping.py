"""Reads along while an answer passes: server-sent events cut into chunks anywhere, or plain JSON."""

from __future__ import annotations

from typing import Protocol

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


class Tap:
    """`ports.UsageTap` over a listener. Holds one event at most.

    An answer that turns out to be plain JSON (an SDK may be answered so) is held up to a bound and read at the end.
    """

    __slots__ = ("_cut", "_data", "_held", "_listener", "_plain", "_rest", "_skipping", "_whole")

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._rest = bytearray()  # the line that is not complete yet
        self._whole = b""  # a plain answer that is one chunk so far: most are, and it need not be copied
        self._data: list[bytes] = []
        self._held = 0
        self._skipping = False  # inside a line too long to hold
        self._plain: bool | None = None
        self._cut = False

    def feed(self, chunk: bytes) -> None:
        if self._plain is None:
            self._decide(chunk)
        if self._plain:
            self._keep(chunk)
            return
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            self._hold(line)
            self._line()
        self._hold(rest)

    def usage(self) -> Usage | None:
        if not self._plain:
            return self._listener.usage()
        body = self._whole or bytes(self._rest)
        return self._listener.tail(body) if self._cut else self._listener.whole(body)

    def _decide(self, chunk: bytes) -> None:
        if start := chunk.lstrip():
            self._plain = start.startswith(b"{")

    def _keep(self, chunk: bytes) -> None:
        if not self._rest and not self._whole and len(chunk) <= _MOST_HELD:
            self._whole = chunk
            return
        self._rest += self._whole
        self._whole = b""
        self._rest += chunk
        if len(self._rest) > _MOST_HELD:
            self._cut = True
            del self._rest[:-_TAIL]

    def _hold(self, piece: bytes) -> None:
        if self._skipping:
            return
        self._rest += piece
        if len(self._rest) + self._held > _MOST_HELD:
            self._skipping = True
            self._rest.clear()

    def _line(self) -> None:
        line, skipped = bytes(self._rest).removesuffix(b"\r"), self._skipping
        self._rest.clear()
        self._skipping = False
        if skipped:
            self._data.append(b"")  # makes the event unreadable, as it is incomplete
        elif not line:
            data = b"\n".join(self._data)
            self._data.clear()
            self._held = 0
            self._listener.event(data)
        elif line.startswith(b"data:"):
            self._data.append(line[5:])
            self._held += len(line)
