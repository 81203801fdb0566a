"""The simulated network: requests reach the mock provider's app within the process, after a delay, or get lost.

A request that was sent is independent of its sender: it may arrive although the sender died.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from carpool.core.errors import CarpoolError, ConnectionBroken, NotConnected, TimedOut, WireError
from carpool.core.model import Headers
from carpool.core.ports import HttpRequest, HttpResponse, StreamedBody
from carpool.engine.background import BackgroundTasks
from carpool.mock import ConnectionCut, MockAnthropic
from carpool.sim.event_log import SimLog

_END = b""
_FILE = re.compile(rb'"input_file_id":"([^"]+)"')


def address(provider: str) -> str:
    return f"http://{provider}.invalid"


class Network:
    """The network between all processes and the providers. Its tasks outlive the sender of a request."""

    def __init__(
        self, providers: Mapping[str, MockAnthropic], rng: random.Random, *, refuse: float = 0.0, latency: float = 0.05
    ) -> None:
        self._providers = {urlsplit(address(name)).netloc: provider for name, provider in providers.items()}
        self._rng = rng
        self._refuse = refuse
        self._latency = latency
        self._background = BackgroundTasks()
        self.refused: dict[tuple[str, bytes], int] = {}  # path and body → last refusal; the latest is last

    async def open(self, request: HttpRequest) -> SimExchange:
        if self._rng.random() < self._refuse:
            await asyncio.sleep(self._latency)
            raise NotConnected("The connection was refused.")
        body = request.body
        data = body if isinstance(body, bytes) else await _joined(body)
        if not isinstance(body, bytes) and len(data) != body.length:
            raise AssertionError(f"A body of {len(data)} bytes was announced as {body.length}.")
        await asyncio.sleep(self._rng.random() * self._latency)
        exchange = SimExchange(request.timeout)
        self._background.spawn(self._carry(request, data, exchange), "request")
        return exchange

    async def _carry(self, request: HttpRequest, data: bytes, exchange: SimExchange) -> None:
        provider = self._providers[urlsplit(request.url).netloc]
        try:
            await provider.app(_scope(request), _receiver(data), exchange.take)
            asked = urlsplit(request.url).path, data
            self.refused.pop(asked, None)
            if exchange.status >= 400:
                self.refused[asked] = exchange.status
            exchange.finish(None)
        except ConnectionCut:
            exchange.finish(ConnectionBroken("The connection was cut."))

    async def close(self) -> None:
        await self._background.finish(0.0)


class SimExchange:
    """A response in progress. Implements `ports.HttpResponse` once the headers have arrived."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._status = 0
        self._headers: Headers = ()
        self._pieces: asyncio.Queue[bytes | Exception] = asyncio.Queue()
        self._head: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._head.add_done_callback(lambda head: head.cancelled() or head.exception())  # the sender may be dead

    # provider side

    async def take(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = tuple((n.decode("latin-1").lower(), v.decode("latin-1")) for n, v in message["headers"])
            if not self._head.done():
                self._head.set_result(None)
        elif message.get("body"):
            self._pieces.put_nowait(message["body"])

    def finish(self, error: Exception | None) -> None:
        if error is not None and not self._head.done():
            self._head.set_exception(error)
        else:
            self._pieces.put_nowait(error or _END)

    # client side

    async def head(self) -> HttpResponse:
        try:
            await asyncio.wait_for(asyncio.shield(self._head), self._timeout)
        except TimeoutError:
            raise TimedOut("The provider did not answer in time.") from None
        return self

    @property
    def status(self) -> int:
        return self._status

    @property
    def headers(self) -> Headers:
        return self._headers

    async def chunks(self) -> AsyncIterator[bytes]:
        while True:
            try:
                piece = await asyncio.wait_for(self._pieces.get(), self._timeout)
            except TimeoutError:
                raise TimedOut("The provider fell silent.") from None
            if isinstance(piece, Exception):
                raise piece
            if piece == _END:
                return
            yield piece

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self.chunks()])

    async def aclose(self) -> None:
        return


class SimHttpClient:
    """`ports.HttpClient` of one process. A dead process sends nothing."""

    def __init__(self, network: Network, running: asyncio.Event, who: str, log: SimLog) -> None:
        self._network = network
        self._running = running
        self._who = who
        self._log = log
        self.dead = False

    async def send(self, request: HttpRequest) -> HttpResponse:
        await self._running.wait()
        if self.dead:
            raise asyncio.CancelledError
        try:
            exchange = await self._network.open(request)
            response = await exchange.head()
        except WireError as error:
            self._log_event(request, f"{error}")
            raise
        self._log_event(request, f"{response.status}")
        await self._running.wait()
        return response

    def _log_event(self, request: HttpRequest, answer: str) -> None:
        """Log a request. Successful polls are skipped: there are too many."""
        url = urlsplit(request.url)
        if self.dead or (request.method == "GET" and answer == "200" and "/v1/batches" in url.path):
            return
        self._log.add(self._who, f"asks {url.netloc}: {request.method} {url.path}{_about(request)} -> {answer}")

    async def aclose(self) -> None:
        return


def _about(request: HttpRequest) -> str:
    if not isinstance(request.body, bytes):
        form = next((value for name, value in request.headers if name == "content-type"), "")
        return f" ({request.body.length} bytes, {form})"
    file = _FILE.search(request.body)
    return f" (of {file[1].decode()})" if file else ""


def _scope(request: HttpRequest) -> dict[str, Any]:
    url = urlsplit(request.url)
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in request.headers]
    return {
        "type": "http",
        "method": request.method,
        "path": url.path,
        "raw_path": url.path.encode(),
        "query_string": url.query.encode(),
        "scheme": url.scheme,
        "headers": [*headers, (b"host", url.netloc.encode())],
    }


def _receiver(data: bytes) -> Any:
    given = False

    async def receive() -> dict[str, Any]:
        nonlocal given
        if given:
            await asyncio.Event().wait()
        given = True
        return {"type": "http.request", "body": data, "more_body": False}

    return receive


async def _joined(body: StreamedBody) -> bytes:
    """The whole body. If it breaks off, so does the request, as on a real connection."""
    try:
        return b"".join([piece async for piece in body.pieces])
    except CarpoolError as error:
        raise ConnectionBroken(f"The body could not be sent whole: {error}") from error
