"""Sends through the user's own blocking httpx client, in worker threads."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from carpool.core.ports import HttpRequest, StreamedBody
from carpool.http.http1.client import BodyUnavailable, blocks, host_of
from carpool.http.httpx.client import HttpxAdapter, HttpxResponse, log_errors, wire_error

_T = TypeVar("_T")
_CONNECTED = ("connection.connect_tcp.complete", "connection.start_tls.complete")


class ThreadedHttpxClient(HttpxAdapter):
    """Adapts any `httpx.Client` or `httpx2.Client`, for programs without an event loop.

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
        outgoing = self.prepare(request, content, host, {"trace": connection.watch})
        try:
            async with self._free:
                response = await connection.run(lambda: connection.send(self._client, outgoing))
        except Exception as error:
            raise wire_error(error, host) from error
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
            raise wire_error(error, self._host) from error

    async def read(self) -> bytes:
        """Reads in one thread; `chunks` starts one for every chunk."""
        if self._body is not None:
            return self._body
        try:
            return await self._connection.run(lambda: b"".join(self._response.iter_raw()))
        except Exception as error:
            raise wire_error(error, self._host) from error

    async def aclose(self) -> None:
        if not self._response.is_closed:
            self._connection.cut()
            await log_errors(self._connection.run(self._response.close), self._host)


def _socket_of(stream: Any) -> socket.socket | None:
    return stream.get_extra_info("socket") if hasattr(stream, "get_extra_info") else None
