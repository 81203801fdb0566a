"""The HTTP client port."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from msgspec import Struct

from carpool.core.errors import WireError
from carpool.core.model import Headers, safe_repr


@dataclass(frozen=True, slots=True)
class StreamedBody:
    """A request body that is produced while it is sent. Without a length it uses chunked encoding."""

    length: int | None
    pieces: AsyncIterator[bytes]
    live: bool = False  # the producer may pause between pieces, so each piece is sent at once instead of buffered


class HttpRequest(Struct, frozen=True):
    """One HTTP request. `url` is absolute. `timeout` limits connecting and every period without traffic.

    `informed` is called for 1xx responses, if the client supports it; they are never the final response.
    """

    method: str
    url: str
    headers: Headers
    body: bytes | StreamedBody = b""
    timeout: float = 600.0
    informed: Callable[[int, Headers], None] | None = None

    def __repr__(self) -> str:
        return safe_repr(self)


class HttpResponse(Protocol):
    """A response whose headers have arrived. The body follows in chunks, exactly as the provider sent it: clients do
    not decompress, and carpool's own requests ask for `identity`."""

    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> Headers:
        """In the order received, names in lower case, repeated headers kept."""

    def chunks(self) -> AsyncIterator[bytes]:
        """Yields chunks until the body is complete. A cut one raises `ConnectionBroken`; it never ends normally."""

    async def read(self) -> bytes: ...
    async def aclose(self) -> None:
        """Releases the connection. May be called twice, and before the body has ended."""


class HttpClient(Protocol):
    """Sends one HTTP request, once.

    It never retries, never follows a redirect, never changes a header or a byte. It raises `NotConnected` only if
    connecting itself failed, so nothing was sent, provably. Every other failure is `ConnectionBroken`, or `TimedOut`
    after its limit, because the provider may have acted on the request. Cancelling the task aborts the request.
    """

    async def send(self, request: HttpRequest) -> HttpResponse: ...
    async def aclose(self) -> None: ...


class ResponseReceiver(Protocol):
    """Receives a response as it arrives; its methods are called on the event loop. `finish` or `fail` ends it."""

    def answered(self, status: int, headers: Headers) -> None: ...
    def add(self, chunk: bytes) -> None: ...
    def flush_buffers(self) -> None:
        """All data received so far was passed on; more may take a while, so buffered data should be flushed."""

    def finish(self) -> None: ...
    def fail(self, error: WireError) -> None: ...


class RequestHandle(Protocol):
    """Lets a `ResponseReceiver` control the request whose response it receives."""

    def pause(self, paused: bool) -> None:
        """Pauses or resumes reading the response, for backpressure when the client can't keep up."""

    def give_up(self) -> None:
        """Aborts the request; the receiver is not called again."""


@runtime_checkable
class PushClient(HttpClient, Protocol):
    """An HTTP client that can also push a response to a receiver without a task that waits for it. The contract of
    `HttpClient` applies, except that timeouts are checked only periodically: a period without traffic may last
    somewhat longer than the request's `timeout`."""

    @property
    def max_push_bytes(self) -> int:
        """The largest body, in bytes, that can be pushed; a larger one needs `send`."""

    def push(self, request: HttpRequest, receiver: ResponseReceiver) -> RequestHandle | None:
        """Sends immediately over an idle connection. Returns None if there is none; then nothing was sent."""

    async def push_on_new_connection(self, request: HttpRequest, receiver: ResponseReceiver) -> RequestHandle:
        """Opens a new connection and sends over it."""
