"""Event streams: written by replays and keep-alives, and read for the usage of a response while it is forwarded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from msgspec import Raw, Struct, field
from msgspec.json import Decoder, encode

from carpool.core.model import Usage
from carpool.core.ports import ResponseEnd
from carpool.dialects.provider_api import decode_or_none

# ------------------------------------------------------------ writing
# Members of objects keep the provider's own bytes.

Members = dict[str, Raw]

MEMBERS = Decoder(Members)
LIST = Decoder(list[Members])
VALUES = Decoder(list[Raw])
TEXT = Decoder(str)
NULL = Raw(b"null")

_PIECE = 2048  # characters in a delta


def event(name: str, /, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode({"type": name, **fields}))


def one_line(body: bytes) -> bytes:
    """Replace line breaks by spaces. JSON has them between tokens only, and in an event each would start a new
    field."""
    return body.replace(b"\r", b" ").replace(b"\n", b" ")


def pieces(text: str) -> list[str]:
    return [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]


def opens(members: Members, name: str, sign: bytes) -> bool:
    """Whether there is a member of that name whose value starts with `sign`, that is, has this JSON type."""
    return name in members and bytes(members[name]).startswith(sign)


# ------------------------------------------------------------ reading
# Server-sent events in chunks of any size, or plain JSON.

_MAX_HELD = 4 * 1024 * 1024  # a larger event is not parsed; of larger plain JSON only the tail is kept
_TAIL = 64 * 1024
_RAW = Decoder(Raw)


class StreamListener(Protocol):
    """The dialect's parser for the events of a stream."""

    def event(self, data: bytes) -> None: ...
    def usage(self) -> Usage | None: ...
    def end(self, whole: bool) -> ResponseEnd:
        """The result of a stream after its last event."""
        ...


def _unknown(end: bytes) -> Usage | None:
    return None


class Tap(Struct, eq=False):
    """`ports.UsageTap` over a listener. Buffers one event at most.

    A response in plain JSON is buffered up to a limit and parsed at the end. `usage_of` is its usage, `usage_of_tail`
    that of one that is too long to keep, from its last bytes.
    """

    listener: StreamListener
    usage_of: Callable[[bytes], Usage | None]
    usage_of_tail: Callable[[bytes], Usage | None] = _unknown
    rest: bytearray = field(default_factory=bytearray)  # the incomplete line
    only_chunk: bytes = b""  # plain JSON of a single chunk so far: the usual case, which needs no copy
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
        return self.usage_of_tail(body) if self.cut else self.usage_of(body)

    def end(self, whole: bool) -> ResponseEnd:
        if not self.plain:
            self._line()  # the last line may lack its line break,
            self._line()  # and the last event its empty line
            return self.listener.end(whole)
        usage = self.usage()
        complete = whole or usage is not None or (not self.cut and decode_or_none(_RAW, self._body()) is not None)
        return ResponseEnd(usage, complete, complete)

    def _body(self) -> bytes:
        return self.only_chunk or bytes(self.rest)

    def _decide(self, chunk: bytes) -> None:
        if start := chunk.lstrip():
            self.plain = start.startswith(b"{")

    def _keep(self, chunk: bytes) -> None:
        if not self.rest and not self.only_chunk and len(chunk) <= _MAX_HELD:
            self.only_chunk = chunk
            return
        self.rest += self.only_chunk
        self.only_chunk = b""
        self.rest += chunk
        if len(self.rest) > _MAX_HELD:
            self.cut = True
            del self.rest[:-_TAIL]

    def _hold(self, piece: bytes) -> None:
        if self.skipping:
            return
        self.rest += piece
        if len(self.rest) + self.held > _MAX_HELD:
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
