"""The port to HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from msgspec import Struct

from carpool.errors import WireError
from carpool.model import Headers, discreet


@dataclass(frozen=True, slots=True)
class StreamedBody:
    """A request body whose pieces are made while they are sent. Without a length it travels in chunks."""

    length: int | None
    pieces: AsyncIterator[bytes]
    live: bool = False  # its pieces come from somebody who may pause: none waits for the next


class WireRequest(Struct, frozen=True):
    """One HTTP request. `url` is absolute. `timeout` bounds connecting, and every silence between two bytes.

    `informed` hears of answers of 1xx, where the wire can tell; they are never the answer itself.
    """

    method: str
    url: str
    headers: Headers
    body: bytes | StreamedBody = b""
    timeout: float = 600.0
    informed: Callable[[int, Headers], None] | None = None

    def __repr__(self) -> str:
        return discreet(self)


class WireResponse(Protocol):
    """An answer whose headers have arrived; the body follows chunk by chunk, exactly as the provider sent it
    (no decompression happens below us; requests that we make ourselves ask for `identity`)."""

    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> Headers:
        """In order, names in lower case, repeated names repeated."""
        ...

    def chunks(self) -> AsyncIterator[bytes]:
        """Yields until the body is complete. A body that breaks off raises `Severed`, never ends cleanly."""
        ...

    async def read(self) -> bytes: ...
    async def aclose(self) -> None:
        """Gives the connection up. Safe to call twice, and before the body has ended."""
        ...


class Wire(Protocol):
    """Sends one HTTP request, once.

    It never retries, never follows a redirect, never changes a header or a byte. It raises `NotConnected` only when
    connecting itself failed, so that provably nothing was sent; every other trouble is `Severed` (`TimedOut` when
    time ran out), because the provider may have acted on the request. Cancelling the task aborts the request.
    """

    async def send(self, request: WireRequest) -> WireResponse: ...
    async def aclose(self) -> None: ...


class Taker(Protocol):
    """Takes an answer piece by piece while it comes, called on the event loop. One of the last two ends it."""

    def answered(self, status: int, headers: Headers) -> None: ...
    def add(self, chunk: bytes) -> None: ...
    def rest(self) -> None:
        """All that is here was handed over; what follows may take a while."""
        ...

    def finish(self) -> None: ...
    def fail(self, error: WireError) -> None: ...


class Tether(Protocol):
    """What a taker holds of the request whose answer it takes."""

    def pause(self, paused: bool) -> None:
        """Whether the rest of the answer is to wait: whoever it is for can't keep up."""
        ...

    def give_up(self) -> None:
        """Aborts the request; the taker hears nothing more."""
        ...


@runtime_checkable
class PouringWire(Wire, Protocol):
    """A wire that can also hand an answer on without a task that waits for it. All that a `Wire` promises holds, but
    that silence is looked for now and then only: it may last a little longer than the request's `timeout`."""

    @property
    def most(self) -> int:
        """Bytes of a body that can be sent so; a longer one is for `send`."""
        ...

    def pour(self, request: WireRequest, taker: Taker) -> Tether | None:
        """Sends at once, over a connection that is there. None where there is none: then nothing was sent."""
        ...

    async def pour_anew(self, request: WireRequest, taker: Taker) -> Tether:
        """Sends over a new connection, once that is made."""
        ...
