"""Responses on `now` that are streamed to the client without a task.

A task and its futures are most of the CPU cost of a quick call. Here the events of the connection drive the response:
from the HTTP client, through the usage tap for the ledger, to the frontend.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any, cast

from msgspec import Struct

from carpool.core.errors import NotConnected, ProviderFailing, TooBusy, WireError
from carpool.core.model import Entry, Headers, Lane, safe_repr
from carpool.core.ports import (
    Dialect,
    HttpRequest,
    HttpResponse,
    PushClient,
    RequestHandle,
    ResponseEnd,
    ResponseReceiver,
    UsageTap,
)
from carpool.core.upstream import WholeResponse
from carpool.engine.background import BackgroundTasks
from carpool.engine.now.decompress import reading
from carpool.engine.now.gate import Slot


class Purchase(Struct, eq=False):
    """One purchase under way. It is in the ledger as an attempt before it is started.

    The HTTP client pushes the response to it, and it to the frontend, which may pause it or give it up; after that the
    receiver is not called any more. At the end, `entry` is the ledger entry, if the response had begun, and `complete`
    tells whether the client got everything it waits for, however the connection ended.
    """

    record: Callable[[Entry, int, Dialect, ResponseEnd], Entry]  # the result of the attempt, in the ledger
    record_unsent: Callable[[Entry], None]
    lost: Callable[[Entry], None]  # called if it ended before a response had begun: what was bought is not known
    dialect: Dialect
    attempt: Entry
    receiver: ResponseReceiver
    slot: Slot
    status: int = 0
    headers: Headers = ()
    tap: UsageTap | None = None
    read: Callable[[bytes], None] | None = None
    request_handle: RequestHandle | None = None
    connecting: asyncio.Task[Any] | None = None  # opens a new connection
    complete: bool = False
    entry: Entry | None = None

    def __repr__(self) -> str:  # never the content
        return f"<{type(self).__name__}>"

    def start(self, http_client: PushClient, request: HttpRequest, background: BackgroundTasks) -> None:
        try:
            self.request_handle = http_client.push(request, self)
        except NotConnected as error:
            asyncio.get_running_loop().call_soon(self.fail, error)
            return
        if self.request_handle is None:
            self.connecting = background.spawn(self._push_on_new_connection(http_client, request), "connect")

    async def _push_on_new_connection(self, http_client: PushClient, request: HttpRequest) -> None:
        try:
            self.request_handle = await http_client.push_on_new_connection(request, self)
        except NotConnected as error:
            self.fail(error)

    # ------------------------------------------------------------ called by the HTTP client

    def answered(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers
        self.slot.answered(cast("HttpResponse", self))  # it reads status and headers only
        self.tap = self.dialect.usage_tap()
        self.read = _reader(self.tap, headers)
        self.receiver.answered(status, headers)

    def add(self, chunk: bytes) -> None:
        assert self.read is not None
        self.read(chunk)
        self.receiver.add(chunk)

    def flush_buffers(self) -> None:
        self.receiver.flush_buffers()

    def finish(self) -> None:
        self.request_handle = None
        self._close_entry(whole=True)
        self.receiver.finish()

    def fail(self, error: WireError) -> None:
        self.request_handle = None
        self.slot.failed(error)
        if isinstance(error, NotConnected):
            self.record_unsent(self.attempt)
        elif self.status:
            self._close_entry(whole=False)
        else:
            self.lost(self.attempt)
        self.receiver.fail(error)

    def _close_entry(self, whole: bool) -> None:
        assert self.tap is not None
        end = self.tap.end(whole)
        self.complete = end.answered
        self.entry = self.record(self.attempt, self.status, self.dialect, end)

    # ------------------------------------------------------------ called by the frontend

    def pause(self, paused: bool) -> None:
        if self.request_handle is not None:
            self.request_handle.pause(paused)

    def give_up(self) -> None:
        """Aborts the request."""
        if self.connecting is not None:
            self.connecting.cancel()
        if self.request_handle is not None:
            self.request_handle.give_up()
        self.slot.failed(asyncio.CancelledError())
        if self.status:
            self._close_entry(whole=False)
        else:
            self.lost(self.attempt)


def _reader(tap: UsageTap, headers: Headers) -> Callable[[bytes], None]:
    """What feeds the tap with the chunks of a response."""
    return reading(tap, headers) if "content-encoding" in dict(headers) else tap.feed


# ------------------------------------------------------------ streaming
# A response that is streamed to its client while its usage is read for the ledger.


class TappedChunks:
    """Iterates over the chunks of a response and reads its usage. Closing it ends the response, begun or not.

    `entry` is the ledger entry, once the response has ended. `answered` says whether the client got everything it waits
    for by then. `size` counts the bytes.
    """

    __slots__ = ("_chunks", "_finish", "_read", "_response", "_tap", "answered", "entry", "size")

    def __init__(self, response: HttpResponse, tap: UsageTap, finish: Callable[[ResponseEnd], Entry]) -> None:
        self.entry: Entry | None = None
        self.answered = False
        self.size = 0
        self._response = response
        self._chunks = response.chunks()
        self._tap = tap
        self._read = _reader(tap, response.headers)
        self._finish = finish

    def __aiter__(self) -> TappedChunks:
        return self

    async def __anext__(self) -> bytes:
        try:
            chunk = await anext(self._chunks)
        except StopAsyncIteration:
            await self._end(whole=True)
            raise
        except BaseException:
            await self.aclose()
            raise
        self._read(chunk)
        self.size += len(chunk)
        return chunk

    async def aclose(self) -> None:
        await self._end(whole=False)

    async def _end(self, whole: bool) -> None:
        if self.entry is None:
            end = self._tap.end(whole)
            self.answered = end.answered
            self.entry = self._finish(end)
            await self._response.aclose()


class StreamedResponse(Struct, frozen=True):
    """A response that is streamed to its client: status and headers, and the chunks as they arrive."""

    ticket: int | None  # None if nothing was bought, so there is nothing to look up
    status: int
    headers: Headers
    chunks: TappedChunks
    reason: str
    lane: Lane = Lane.NOW

    def __repr__(self) -> str:
        return safe_repr(self)


def local_refusal(error: TooBusy | ProviderFailing, dialect: Dialect) -> WholeResponse:
    """An error response by carpool itself, in the provider's format, to a call that can't be sent in time."""
    body, after = dialect.error(error.status, error.code, str(error)), str(math.ceil(error.retry_after))
    length = ("content-length", str(len(body)))
    headers = (("content-type", "application/json"), length, ("retry-after", after))
    return WholeResponse(error.status, headers, body)
