"""Read the usage of a response while it is forwarded: server-sent events in chunks of any size, or plain JSON."""

from __future__ import annotations

from typing import Protocol

from msgspec import DecodeError, Raw, Struct, field
from msgspec.json import Decoder

from carpool.core.model import Usage
from carpool.core.ports import Seen

_MOST_HELD = 4 * 1024 * 1024  # a larger event is not parsed; of larger plain JSON only the tail is kept
_TAIL = 64 * 1024
_RAW = Decoder(Raw)


class StreamListener(Protocol):
    """The dialect's parser for the events of a stream, or for plain JSON."""

    def event(self, data: bytes) -> None: ...
    def whole(self, body: bytes) -> Usage | None: ...
    def tail(self, end: bytes) -> Usage | None:
        """The usage of a response that is too long to keep, from its last bytes."""
        ...

    def usage(self) -> Usage | None: ...
    def end(self, whole: bool) -> Seen:
        """The result of a stream after its last event."""
        ...


class Tap(Struct, eq=False):
    """`ports.UsageTap` over a listener. Buffers one event at most.

    A response in plain JSON is buffered up to a limit and parsed at the end.
    """

    listener: StreamListener
    rest: bytearray = field(default_factory=bytearray)  # the incomplete line
    one: bytes = b""  # plain JSON of a single chunk so far: the usual case, which needs no copy
    data: list[bytes] = []
    held: int = 0
    skipping: bool = False  # inside a line that is too long to buffer
    plain: bool | None = None
    cut: bool = False

    def __repr__(self) -> str:  # never the content
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
        body = self._body()
        return self.listener.tail(body) if self.cut else self.listener.whole(body)

    def end(self, whole: bool) -> Seen:
        if not self.plain:
            self._line()  # the last line may lack its line break,
            self._line()  # and the last event its empty line
            return self.listener.end(whole)
        usage = self.usage()
        complete = whole or usage is not None or (not self.cut and _is_json(self._body()))
        return Seen(usage, complete, complete)

    def _body(self) -> bytes:
        return self.one or bytes(self.rest)

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
            self.data.append(b"")  # the event is incomplete: make sure that it is not parsed
        elif not line:
            data = b"\n".join(self.data)
            self.data.clear()
            self.held = 0
            self.listener.event(data)
        elif line.startswith(b"data:"):
            self.data.append(line[5:])
            self.held += len(line)


def _is_json(body: bytes) -> bool:
    """Whether the JSON is complete."""
    try:
        _RAW.decode(body)
    except (DecodeError, RecursionError):
        return False
    return True
