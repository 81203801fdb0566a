"""carpool's own client, on pyreqwest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from pyreqwest.client import Client, ClientBuilder
from pyreqwest.exceptions import BuilderError, ConnectTimeoutError, DetailedPyreqwestError, PoolTimeoutError
from pyreqwest.proxy import ProxyBuilder
from pyreqwest.request import RequestBuilder, StreamRequest
from pyreqwest.response import Response

from carpool._version import __version__
from carpool.errors import NotConnected, Severed, TimedOut, WireError
from carpool.model import Headers
from carpool.ports import StreamedBody, WireRequest
from carpool.wires.addresses import host_of
from carpool.wires.bodies import BLOCK, Unmade, blocks, framed, sliced

_T = TypeVar("_T")
_SMALL = 4 * BLOCK

# The one cause that says positively that connecting itself failed. "client error (SendRequest)", which the same
# exception class carries too, means that bytes may have gone out.
_CONNECTING_FAILED = "client error (Connect)"


class ReqwestWire:
    """One client with one pool of connections.

    HTTP/1.1 only. Bodies pass as they are, redirects are not followed, the environment's proxies are ignored.

    `WireRequest.timeout` bounds every silence. Connecting has a bound of its own, since only the client knows when it
    ends; a shorter `WireRequest.timeout` that runs out while connecting is taken for `TimedOut`, to be safe.

    Cancelling ends an upload, or an answer, at once. In between, while the answer's head is awaited, pyreqwest goes on
    waiting by itself, and closes the connection when the first bytes of the answer's body arrive.
    """

    def __init__(self, proxy: str | None = None, connect_timeout: float = 15.0, roots_pem: bytes | None = None) -> None:
        self._client = _build(proxy, connect_timeout, roots_pem)
        self._closed = False

    async def send(self, request: WireRequest) -> ReqwestResponse:
        if self._closed:
            raise NotConnected("The wire is closed.")
        exchange = _Exchange(host_of(request.url), request.timeout)
        outgoing = exchange.prepare(self._client, request)
        try:
            response = await exchange.wait(outgoing.__aenter__())
        except BaseException:
            await exchange.break_off()
            raise
        return ReqwestResponse(exchange, outgoing, response)

    async def aclose(self) -> None:
        self._closed = True
        await self._client.close()


def _build(proxy: str | None, connect_timeout: float, roots_pem: bytes | None) -> Client:
    builder = (
        ClientBuilder()
        .http1_only()
        .http1_lower_case_headers()
        .gzip(False)
        .brotli(False)
        .zstd(False)
        .deflate(False)
        .follow_redirects(False)
        .referer(False)
        .no_proxy()
        .user_agent(f"carpool/{__version__}")  # only where the request brings none
        .connect_timeout(timedelta(seconds=connect_timeout))
        .tcp_keepalive(timedelta(seconds=60))
    )
    if proxy is not None:
        builder = builder.proxy(ProxyBuilder.all(proxy))
    if roots_pem is not None:
        builder = builder.add_root_certificate_pem(roots_pem)
    return builder.build()


class _Exchange:
    """One request and its answer: how long silence may last, and what errors mean."""

    def __init__(self, host: str, timeout: float) -> None:
        self._host = host
        self._timeout = timeout
        self._patience: asyncio.Timeout | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._body: AsyncGenerator[bytes, None] | None = None
        self._broken_off = False

    def prepare(self, client: Client, request: WireRequest) -> StreamRequest:
        try:
            builder = client.request(request.method, request.url).headers(framed(request))
            builder = self._add_body(builder, request.body)
            return builder.streamed_read_buffer_limit(0).build_streamed()
        except ValueError as error:
            raise NotConnected(f"This is no request that can be sent to {self._host}.") from error

    def _add_body(self, builder: RequestBuilder, body: bytes | StreamedBody) -> RequestBuilder:
        if not body:
            return builder
        if isinstance(body, bytes):
            if len(body) <= _SMALL:
                return builder.body_bytes(body)
            body = StreamedBody(len(body), sliced(body))  # so that a slow upload is seen to make progress
        self._body = blocks(body, self._moved)
        return builder.body_stream(self._body)

    def _moved(self) -> None:
        """The client came for more of the body: the peer is alive, so patience starts anew."""
        if self._broken_off:
            raise Unmade("Nobody waits for the answer any more.")
        if self._patience is not None:
            self._wind(self._patience)

    async def wait(self, step: Coroutine[Any, Any, _T]) -> _T:
        """Awaits one step of the exchange, as long as the silence may last."""
        try:
            async with asyncio.timeout(None) as self._patience:
                self._wind(self._patience)
                try:
                    return await step
                finally:
                    self._patience = None
                    self._unwind()
        except Exception as error:
            raise _wire_error(error, self._host) from error

    def _wind(self, patience: asyncio.Timeout) -> None:
        self._unwind()
        self._alarm = asyncio.get_running_loop().call_later(self._timeout, patience.reschedule, 0.0)

    def _unwind(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()

    async def break_off(self) -> None:
        """Stops an upload. Where the body is just being made, it stops at the next block."""
        self._broken_off = True
        if self._body is not None:
            with suppress(RuntimeError):
                await self._body.aclose()


class ReqwestResponse:
    def __init__(self, exchange: _Exchange, outgoing: StreamRequest, response: Response) -> None:
        self._exchange = exchange
        self._outgoing = outgoing
        self._reader = response.body_reader
        self._closed = False
        self.status: int = response.status
        self.headers: Headers = _headers(response)

    async def chunks(self) -> AsyncIterator[bytes]:
        while (chunk := await self._exchange.wait(self._reader.read_chunk())) is not None:
            yield bytes(chunk)

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self.chunks()])

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            await self._exchange.break_off()
            await self._outgoing.__aexit__(None, None, None)


def _headers(response: Response) -> Headers:
    try:
        return tuple((name.lower(), value) for name, value in response.headers.items())
    except ValueError:
        return tuple(_readable_headers(response))


def _readable_headers(response: Response) -> Iterator[tuple[str, str]]:
    """pyreqwest gives no header whose value is not ASCII, and one such value spoils the list of all."""
    for name in dict.fromkeys(response.headers):
        with suppress(ValueError):
            yield from ((name.lower(), value) for value in response.get_header_all(name))


def _wire_error(error: Exception, host: str) -> WireError:
    if isinstance(error, ConnectTimeoutError | PoolTimeoutError):
        return NotConnected(f"Connecting to {host} took too long.")
    if isinstance(error, DetailedPyreqwestError) and _CONNECTING_FAILED in _causes(error):
        return NotConnected(f"No connection to {host} could be made.")
    if isinstance(error, BuilderError):
        return NotConnected(f"This is no request that can be sent to {host}.")
    if isinstance(error, TimeoutError):
        return TimedOut(f"{host} was silent for too long.")
    if isinstance(error, Unmade):
        return Severed(f"The request to {host} was broken off. {error}")
    return Severed(f"The connection to {host} broke before the whole answer was here.")


def _causes(error: DetailedPyreqwestError) -> list[str]:
    return [cause["message"] for cause in error.details["causes"] or ()]
