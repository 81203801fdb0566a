"""Sends through the user's own httpx client: on the event loop, or in worker threads if the client blocks.

Both adapters support `httpx` and `httpx2`, so neither is imported: clients are recognised by their methods, exceptions
by their names. The client's TLS, proxies, mounts and transport apply; its default headers, cookies, authentication and
redirects do not, since a request is already complete. The client belongs to the user and is not closed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from carpool.core.errors import ConnectionBroken, NotConnected, TimedOut, WireError, WrongClient
from carpool.core.model import Headers
from carpool.core.ports import HttpRequest, StreamedBody
from carpool.http.http1.client import BodyUnavailable, blocks, framed, host_of, sliced

_T = TypeVar("_T")
_CONNECTED = ("connection.connect_tcp.complete", "connection.start_tls.complete")
_PHASES = ("connect", "read", "write", "pool")
_log = logging.getLogger(__name__)

# Raised before any byte of the request was sent.
_UNCONNECTED = {
    "ConnectError": "No connection to {host} could be made.",
    "ConnectTimeout": "Connecting to {host} took too long.",
    "PoolTimeout": "No connection to {host} became free in time.",
    "ProxyError": "The proxy made no connection to {host}.",
    "UnsupportedProtocol": "The address of {host} is not one for HTTP.",
    "InvalidURL": "The address is not a valid URL.",
}


class _HttpxAdapter:
    def __init__(self, client: Any, closer: str, kind: str) -> None:
        if not all(hasattr(client, name) for name in ("build_request", "send", closer)):
            raise WrongClient(f"carpool can't send through {type(client).__name__}: give it {kind}.")
        self._client = client
        self._closed = False

    def _prepare(self, request: HttpRequest, content: Any, host: str, extensions: dict[str, Any]) -> Any:
        """Builds a request without the client's defaults.

        `client.build_request` would merge the client's own headers, cookies and parameters, so it is used only to find
        the request class.
        """
        if self._closed or self._client.is_closed:
            raise NotConnected("The client that carpool sends with is closed.")
        try:
            return type(self._client.build_request("GET", "http://localhost/"))(
                request.method,
                request.url,
                headers=[(name.encode("latin-1"), value.encode("latin-1")) for name, value in framed(request)],
                content=content,
                extensions=extensions | {"timeout": dict.fromkeys(_PHASES, request.timeout)},
            )
        except Exception as error:
            raise NotConnected(f"This is no request that can be sent to {host}.") from error

    async def aclose(self) -> None:
        """Refuses further requests. Threads end with their requests."""
        self._closed = True


class HttpxClient(_HttpxAdapter):
    """Adapts any `httpx.AsyncClient` or `httpx2.AsyncClient`."""

    def __init__(self, client: Any) -> None:
        super().__init__(client, "aclose", "an httpx AsyncClient")

    async def send(self, request: HttpRequest) -> HttpxResponse:
        host, body = host_of(request.url), request.body
        outgoing = self._prepare(request, blocks(body) if isinstance(body, StreamedBody) else body, host, {})
        try:
            response = await self._client.send(outgoing, stream=True, auth=None, follow_redirects=False)
        except Exception as error:
            raise _wire_error(error, host) from error
        return HttpxResponse(response, host)


class HttpxResponse:
    def __init__(self, response: Any, host: str) -> None:
        self._response = response
        self._host = host
        # A body that a hook or transport of the user has read already is decompressed.
        self._body: bytes | None = response.content if response.is_stream_consumed else None
        decoded = self._body is not None and "content-encoding" in response.headers
        dropped = ("content-encoding", "content-length") if decoded else ()
        pairs = ((name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in response.headers.raw)
        self.status: int = response.status_code
        self.headers: Headers = tuple(pair for pair in pairs if pair[0] not in dropped)

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            async with aclosing(self._response.aiter_raw() if self._body is None else sliced(self._body)) as raw:
                async for chunk in raw:
                    yield chunk
        except Exception as error:
            raise _wire_error(error, self._host) from error

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self.chunks()])

    async def aclose(self) -> None:
        await _log_errors(self._response.aclose(), self._host)


def _wire_error(error: Exception, host: str) -> WireError:
    names = {base.__name__ for base in type(error).__mro__}
    for name, message in _UNCONNECTED.items():
        if name in names:
            return NotConnected(message.format(host=host))
    if "TimeoutException" in names or isinstance(error, TimeoutError):
        return TimedOut(f"{host} was silent for too long.")
    if isinstance(error, BodyUnavailable):
        return ConnectionBroken(f"The request to {host} was broken off. {error}")
    return ConnectionBroken(f"The connection to {host} broke before the whole answer was here.")


async def _log_errors(closing: Awaitable[None], host: str) -> None:
    """Closes a response: the connection is dropped either way, so an error is only logged."""
    try:
        await closing
    except Exception as error:  # noqa: BLE001 - httpx has no base class that both flavours share
        _log.debug("Closing a connection to %s raised %s.", host, type(error).__name__)


# ------------------------------------------------------------ blocking clients


class ThreadedHttpxClient(_HttpxAdapter):
    """Adapts any `httpx.Client` or `httpx2.Client`, for programs without an event loop of their own.

    At most `threads` requests wait for a response at the same time; others queue for a thread.

    Cancelling immediately ends an upload, a response, or the wait for one on a new connection. On a reused connection
    the wait ends when the response's head arrives or the timeout expires: until then httpx does not reveal the socket.
    """

    def __init__(self, client: Any, threads: int = 64) -> None:
        super().__init__(client, "close", "a blocking httpx Client")
        self._free = asyncio.Semaphore(threads)

    async def send(self, request: HttpRequest) -> ThreadedResponse:
        host, body = host_of(request.url), request.body
        connection = _ThreadConnection()
        content = connection.upload(body) if isinstance(body, StreamedBody) else body
        outgoing = self._prepare(request, content, host, {"trace": connection.watch})
        try:
            async with self._free:
                response = await connection.run(lambda: connection.send(self._client, outgoing))
        except Exception as error:
            raise _wire_error(error, host) from error
        finally:
            await connection.end_upload()
        return ThreadedResponse(response, host, connection)


class _ThreadConnection:
    """State of one request, shared by event loop and worker thread, so that the loop can cut the connection."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = None
        self._source: AsyncGenerator[bytes, None] | None = None
        self._cut = False

    async def run(self, work: Callable[[], _T]) -> _T:
        """Runs `work` in a daemon thread, which unlike an executor's does not delay the exit of the program, and awaits
        it. Cancelling cuts the connection."""
        done: Future[_T] = Future()
        done.set_running_or_notify_cancel()

        def fulfil() -> None:
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001 - it is raised where the result is awaited
                done.set_exception(error)

        threading.Thread(target=fulfil, name="carpool-http", daemon=True).start()
        try:
            return await asyncio.wrap_future(done)
        except asyncio.CancelledError:
            self.cut()
            raise

    def send(self, client: Any, outgoing: Any) -> Any:
        """Runs in the thread. A response that arrives after the cut is closed immediately."""
        self._check()
        response = client.send(outgoing, stream=True, auth=None, follow_redirects=False)
        self._socket = _socket_of(response.extensions.get("network_stream"))
        if self._cut:
            response.close()
        self._check()
        return response

    def upload(self, body: StreamedBody) -> Iterator[bytes]:
        """Runs in the thread. Fetches one block at a time from the loop, so only one is in memory."""
        self._source = source = blocks(body)

        async def next_block() -> bytes | None:
            return await anext(source, None)

        while True:
            self._check()
            block = asyncio.run_coroutine_threadsafe(next_block(), self._loop).result()
            if block is None:
                return
            yield block

    def watch(self, event: str, info: dict[str, Any]) -> None:
        """Runs in the thread, as httpcore's trace callback: the result of connecting is the new connection's stream."""
        if event in _CONNECTED:
            self._socket = _socket_of(info.get("return_value"))
            self._check()

    async def end_upload(self) -> None:
        """Runs in the loop. If a block is just being produced, the thread ends the upload when it fetches it."""
        if self._source is not None:
            with suppress(RuntimeError):
                await self._source.aclose()

    def cut(self) -> None:
        """Runs in the loop. Closing a socket does not wake a thread that reads from it; shutting it down does."""
        self._cut = True
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _check(self) -> None:
        if self._cut:
            raise BodyUnavailable("Nobody waits for the answer any more.")


class ThreadedResponse(HttpxResponse):
    def __init__(self, response: Any, host: str, connection: _ThreadConnection) -> None:
        super().__init__(response, host)
        self._connection = connection

    async def chunks(self) -> AsyncIterator[bytes]:
        raw = self._response.iter_raw() if self._body is None else iter([self._body])
        try:
            while (chunk := await self._connection.run(lambda: next(raw, None))) is not None:
                yield chunk
        except Exception as error:
            raise _wire_error(error, self._host) from error

    async def read(self) -> bytes:
        """Reads in one thread; `chunks` starts one for every chunk."""
        if self._body is not None:
            return self._body
        try:
            return await self._connection.run(lambda: b"".join(self._response.iter_raw()))
        except Exception as error:
            raise _wire_error(error, self._host) from error

    async def aclose(self) -> None:
        if not self._response.is_closed:
            self._connection.cut()
            await _log_errors(self._connection.run(self._response.close), self._host)


def _socket_of(stream: Any) -> socket.socket | None:
    return stream.get_extra_info("socket") if hasattr(stream, "get_extra_info") else None
