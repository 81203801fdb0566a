"""Sends through the user's own blocking httpx client, in worker threads."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from carpool.core.errors import NotConnected
from carpool.core.model import Headers
from carpool.core.ports import HttpRequest, StreamedBody
from carpool.http.http1.client import host_of
from carpool.http.http1.requests import Unmade, blocks
from carpool.http.httpx.asynchronous import bare_request, check_client, giving_up, headers_of, read_before, wire_error

_T = TypeVar("_T")
_CONNECTED = ("connection.connect_tcp.complete", "connection.start_tls.complete")


class ThreadedHttpxClient:
    """Adapts any `httpx.Client` or `httpx2.Client`, for programs without an event loop of their own.

    As with `HttpxClient`, only the client's TLS, proxies, mounts and transport apply, and it is not closed. At most
    `threads` requests wait for a response at the same time; others queue for a thread.

    Cancelling immediately ends an upload, a response, or the wait for one on a new connection. On a reused connection
    the wait ends when the response's head arrives or the timeout expires: until then httpx does not reveal the socket.
    """

    def __init__(self, client: Any, threads: int = 64) -> None:
        check_client(client, asynchronous=False)
        self._client = client
        self._free = asyncio.Semaphore(threads)
        self._closed = False

    async def send(self, request: HttpRequest) -> ThreadedResponse:
        host = host_of(request.url)
        connection = _ThreadConnection()
        outgoing = self._prepare(request, host, connection)
        try:
            async with self._free:
                response = await connection.run(lambda: connection.send(self._client, outgoing))
        except Exception as error:
            raise wire_error(error, host) from error
        finally:
            await connection.end_upload()
        return ThreadedResponse(response, host, connection)

    def _prepare(self, request: HttpRequest, host: str, connection: _ThreadConnection) -> Any:
        if self._closed or self._client.is_closed:
            raise NotConnected("The wire, or the client that it was given, is closed.")
        content = connection.upload(request.body) if isinstance(request.body, StreamedBody) else request.body
        try:
            return bare_request(self._client, request, content, {"trace": connection.watch})
        except Exception as error:
            raise NotConnected(f"This is no request that can be sent to {host}.") from error

    async def aclose(self) -> None:
        """Refuses further requests. The client belongs to the user, and threads end with their requests."""
        self._closed = True


class _ThreadConnection:
    """State of one request, shared by event loop and worker thread, so that the loop can cut the connection."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = None
        self._source: AsyncGenerator[bytes, None] | None = None
        self._cut = False

    async def run(self, work: Callable[[], _T]) -> _T:
        """Runs `work` in a thread and awaits it; cancelling cuts the connection."""
        try:
            return await _in_thread(work)
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
        while True:
            self._check()
            block = asyncio.run_coroutine_threadsafe(_next(source), self._loop).result()
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
            raise Unmade("Nobody waits for the answer any more.")


class ThreadedResponse:
    def __init__(self, response: Any, host: str, connection: _ThreadConnection) -> None:
        self._response = response
        self._host = host
        self._connection = connection
        self.status: int = response.status_code
        self.headers: Headers = headers_of(response)

    async def chunks(self) -> AsyncIterator[bytes]:
        raw = self._raw()
        try:
            while (chunk := await self._connection.run(lambda: next(raw, None))) is not None:
                yield chunk
        except Exception as error:
            raise wire_error(error, self._host) from error

    async def read(self) -> bytes:
        try:
            return await self._connection.run(lambda: b"".join(self._raw()))
        except Exception as error:
            raise wire_error(error, self._host) from error

    def _raw(self) -> Iterator[bytes]:
        body = read_before(self._response)
        raw: Iterator[bytes] = self._response.iter_raw() if body is None else iter([body])
        return raw

    async def aclose(self) -> None:
        if not self._response.is_closed:
            self._connection.cut()
            with giving_up(self._host):
                await self._connection.run(self._response.close)


async def _in_thread(work: Callable[[], _T]) -> _T:
    """Runs `work` in a daemon thread: unlike an executor's, it does not delay the exit of the program."""
    done: Future[_T] = Future()
    done.set_running_or_notify_cancel()
    threading.Thread(target=_fulfil, args=(done, work), name="carpool-wire", daemon=True).start()
    return await asyncio.wrap_future(done)


def _fulfil(done: Future[_T], work: Callable[[], _T]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:  # noqa: BLE001 - it is raised where the result is awaited
        done.set_exception(error)


async def _next(source: AsyncGenerator[bytes, None]) -> bytes | None:
    return await anext(source, None)


def _socket_of(stream: Any) -> socket.socket | None:
    return stream.get_extra_info("socket") if hasattr(stream, "get_extra_info") else None
