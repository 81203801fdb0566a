"""One request in its task: its context, reading its body, sending its response, and clients that disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import Struct

from carpool.core.errors import BadCall, CallTooLarge, CarpoolError, Closed, KeyUnready
from carpool.core.model import Call, Headers
from carpool.core.ports import Dialect, RawRequest, StreamedBody
from carpool.dialects.keep_alive import Client
from carpool.engine.background import BackgroundTasks
from carpool.frontends.intake import NO_RETRY
from carpool.frontends.proxy.http.liveness import ConnectionLost
from carpool.frontends.proxy.http.responses import CLIENT, Cycle, Disconnected, Leaving, RequestRefused
from carpool.frontends.proxy.log import LogLine
from carpool.frontends.proxy.parse_head import HeadFacts, Scope
from carpool.planners.routing import Decision

T = TypeVar("T")
Inform = Callable[[int, Headers], None]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]

SMALL_BODY = 64 * 1024
JSON = ("content-type", "application/json")
EVENT_STREAM = ("content-type", "text/event-stream; charset=utf-8")
RETRY = (("retry-after", "1"), ("x-should-retry", "true"))  # the call is persisted, or was never started


class DecidedCall(Struct, frozen=True):
    call: Call
    decision: Decision
    direct: bool  # sent at once, and not persisted


class RequestContext:
    """One request, from its head to its response. It is an ASGI application that answers this request with `serve`.

    `head` is None until it is parsed, `raw` until the body is read, which may both have happened before the task.
    `decided` is the decision on a call that could not be answered without a task.
    """

    scope: Scope
    receive: Receive
    line: LogLine
    client: Client
    leaving: Leaving  # done when the client has disconnected

    def __init__(
        self,
        serve: Callable[[RequestContext], Awaitable[None]],
        head: HeadFacts | None = None,
        raw: RawRequest | None = None,
        decided: DecidedCall | None = None,
        address: str = "",
    ) -> None:
        self._serve = serve
        self.head = head
        self.raw = raw
        self.decided = decided
        self.address = address  # of the client; empty if local
        self.dialect: Dialect | None = None  # for errors; set when the provider is chosen
        self.begun = False  # the head of the response is sent
        self.status = 0  # of the response

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        self.scope, self.receive, self._send = scope, receive, send
        self._cycle: Cycle | None = scope.get("extensions", {}).get(CLIENT)
        return self._serve(self)

    def send_head(self, status: int, headers: Iterable[tuple[str, str]]) -> Awaitable[None]:
        if not self.begun:
            self.begun, self.status = True, status
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        return self._send({"type": "http.response.start", "status": status, "headers": encoded})

    def send_chunk(self, body: bytes, *, more: bool) -> Awaitable[None]:
        return self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def send_whole(self, status: int, headers: Iterable[tuple[str, str]], body: bytes) -> None:
        await self.send_head(status, (*headers, ("content-length", str(len(body)))))
        await self.send_chunk(body, more=False)

    async def send_json(self, value: object, status: int = 200, headers: Headers = ()) -> None:
        await self.send_whole(status, (JSON, *headers), msgspec.json.encode(value))

    @property
    def inform(self) -> Inform | None:
        """Sends a 1xx response; None if the server or the client's protocol does not support it."""
        return None if self._cycle is None or not self._cycle.can_inform else self._cycle.inform

    @property
    def refused(self) -> RequestRefused | None:
        """Why the server itself refused the request."""
        return None if self._cycle is None else self._cycle.refused

    @property
    def disconnected(self) -> bool:
        return self.leaving.done()

    def watch(self, listen: Callable[[], Coroutine[Any, Any, None]], background: BackgroundTasks) -> Leaving:
        """Sets `leaving`. If the server does not tell when the client disconnects, a task listens for it."""
        cycle = self._cycle
        if cycle is None:
            self.leaving = background.spawn_awaited(listen(), "client")
            return self.leaving
        self.leaving = cycle.leaving = asyncio.get_running_loop().create_future()
        if cycle.disconnected or cycle.transport.is_closing():
            cycle.disconnected = True  # a response sent now could not be delivered
            self.leaving.set_result(None)
        return self.leaving

    async def received(self, lost: ConnectionLost = lambda: None) -> bool:
        """Whether the client has the whole response, after all of it was sent. `lost` is called if the client resets
        the connection afterwards, which shows that it did not read everything."""
        return not self.disconnected if self._cycle is None else await self._cycle.received(lost)


# ------------------------------------------------------------ bodies


async def read_body(receive: Receive, limit: int, setting: str = "") -> bytes:
    """The whole body. Raises `CallTooLarge` above the limit; `setting` names the config value to change.

    The pieces go into one buffer, because many small ones held until the end would fragment memory."""
    whole = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        piece = message.get("body", b"")
        if len(whole) + len(piece) > limit:
            source = f" by {setting} of its config" if setting else ""
            raise CallTooLarge(f"This body is over {limit / 1_000_000:.3g} MB, the most that carpool takes{source}.")
        if not message.get("more_body", False):
            whole += piece
            return bytes(whole) if len(whole) > len(piece) else piece
        whole += piece


class Upload:
    """A request body that is forwarded while it arrives. If its length is known and small, it is read at once."""

    def __init__(self, receive: Receive, headers: Headers) -> None:
        self._receive = receive
        self._ended = asyncio.Event()
        self._length = _content_length(headers)

    async def body(self) -> bytes | StreamedBody:
        if self._length is not None and self._length <= SMALL_BODY:
            body = await read_body(self._receive, SMALL_BODY) if self._length else b""
            self._ended.set()
            return body
        return StreamedBody(self._length, self._pieces(), live=True)

    async def _pieces(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            yield message.get("body", b"")
            more = message.get("more_body", False)
        self._ended.set()

    async def wait_for_disconnect(self) -> None:
        """Returns when the client disconnects after its body. During the body, reading it raises `Disconnected`."""
        await self._ended.wait()
        await wait_for_disconnect(self._receive)


def _content_length(headers: Headers) -> int | None:
    """The length of the body; None if it is unknown, 0 if no header announces a body."""
    by_name = dict(headers)
    length = "" if "transfer-encoding" in by_name else by_name.get("content-length", "0")
    return int(length) if length.isdecimal() else None


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        continue


# ------------------------------------------------------------ responses


def advice(error: CarpoolError) -> Headers:
    """The retry headers of an error: a retry helps after a shutdown, but never with an invalid request."""
    if isinstance(error, Closed):
        return RETRY
    return (NO_RETRY,) if isinstance(error, BadCall | KeyUnready) else ()


# ------------------------------------------------------------ clients that disconnect


class CancellableResponse(Protocol):
    """A response in progress that has no task."""

    def cut(self) -> None: ...


class DisconnectGuard:
    """Runs work for clients while they are connected. A shutdown may cut off work in `streamed` and `relays`."""

    def __init__(self) -> None:
        self.background = BackgroundTasks()
        self.relays: set[CancellableResponse] = set()
        self.relay_ended = asyncio.Event()
        self.streamed: set[_ClientWork] = set()
        self._others: set[_ClientWork] = set()

    async def run_while_connected(self, work: Coroutine[Any, Any, T], leaving: Leaving, *, streamed: bool = False) -> T:
        """Runs the work; cancels it and its upstream request if the client disconnects first.

        It runs in the request's own task, because another task would be most of the cost of a quick call.
        """
        client_work, group = _ClientWork(), self.streamed if streamed else self._others
        group.add(client_work)
        leaving.add_done_callback(client_work.left)
        try:
            return await work
        except asyncio.CancelledError:
            client_work.explain()
            raise
        finally:
            leaving.remove_done_callback(client_work.left)
            group.discard(client_work)
            client_work.end()

    @property
    def busy(self) -> bool:
        return bool(self.streamed or self._others or self.relays or self.background.busy)

    async def relayed(self) -> None:
        """Returns when no relay is left."""
        while self.relays:
            self.relay_ended.clear()
            await self.relay_ended.wait()

    async def cut(self) -> None:
        """Cuts off everything that passes through."""
        for relay in list(self.relays):
            relay.cut()
        await _stop(self.streamed)

    async def aclose(self) -> None:
        """Ends what is left."""
        await _stop(self._others)
        await self.cut()
        await self.background.finish(timeout=0.1)


class _ClientWork:
    """Work for one client, in the task of its request. Records the reason why this module cancelled it."""

    __slots__ = ("_ended", "_reason", "task")

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self._reason: Exception | None = None
        self._ended = False

    def left(self, leaving: Leaving) -> None:
        if not leaving.cancelled():
            self.cancel(Disconnected())

    def cancel(self, reason: Exception) -> None:
        if self._reason is None and not self._ended:  # a client may leave in the moment in which its work ends
            self._reason = reason
            self.task.cancel()

    def explain(self) -> None:
        """Raises the reason, unless the task was also cancelled from elsewhere."""
        if self._reason is not None and self.task.cancelling() == 1:
            raise self._reason from None

    def end(self) -> None:
        self._ended = True
        if self._reason is not None:
            self._reason = None  # breaks the cycle: the raised exception holds the frames that hold this
            self.task.uncancel()


async def _stop(group: set[_ClientWork]) -> None:
    for client_work in list(group):
        client_work.cancel(Closed("carpool is stopping. Send this call again in a moment."))
    tasks = [client_work.task for client_work in group]
    if tasks:
        await asyncio.wait(tasks, timeout=1.0)
