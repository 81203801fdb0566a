"""carpool's own client for what passes through: HTTP/1.1 on the event loop, without a thread between."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from carpool.errors import NotConnected, Severed, WireError
from carpool.model import Headers
from carpool.ports import StreamedBody, Taker, WireRequest
from carpool.wires.addresses import is_link_local
from carpool.wires.bodies import BLOCK, Unmade, blocks, sliced
from carpool.wires.heads import head_of
from carpool.wires.http1 import Exchange, Line, Poured
from carpool.wires.tunnels import OutgoingProxy

_SMALL = 4 * BLOCK
SWEEP_S = 15.0  # a connection rests for one or two of these, then it is closed
LAST_CHUNK = b"0\r\n\r\n"


class Origin(NamedTuple):
    secure: bool
    host: str
    port: int


class StraightWire:
    """Pools of connections, one for every origin. Redirects are not followed, the environment's proxies are ignored.

    `proxy` is the way to every origin that speaks TLS. A name that leads to a link-local address leads nowhere, unless
    that is allowed: whoever answers for the name could have keys sent to the cloud's own services.

    Cancelling aborts the request at any time: while connecting, uploading, or waiting for the answer's head or body.

    An answer of 300 and more ends the upload; any other waits for it.
    """

    def __init__(
        self,
        connect_timeout: float = 15.0,
        roots_pem: bytes | None = None,
        proxy: OutgoingProxy | None = None,
        allow_link_local: bool = False,
    ) -> None:
        self._connect_timeout = connect_timeout
        self._proxy = proxy
        self._allow_link_local = allow_link_local
        self._roots = roots_pem
        self._tls: ssl.SSLContext | None = None
        self._idle: dict[Origin, list[Line]] = {}
        self._lines: set[Line] = set()  # all that are open, idle or not
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    async def send(self, request: WireRequest) -> StraightResponse:
        head, origin = self._head(request)
        line = self._idle_line(origin) or await self._connect(origin, request.timeout)
        exchange = Exchange(line, origin.host, request)
        try:
            if isinstance(request.body, bytes) and len(request.body) <= _SMALL:
                exchange.uploaded = True
                line.begin(exchange, head + request.body)
            else:
                line.begin(exchange, head)
                await _upload(line, exchange, request.body, origin.host)
            await exchange.head()
        except BaseException:
            exchange.give_up()
            raise
        return StraightResponse(exchange)

    @property
    def most(self) -> int:
        return _SMALL

    def pour(self, request: WireRequest, taker: Taker) -> Poured | None:
        head, origin = self._head(request)
        line = self._idle_line(origin)
        if line is None:
            return None
        exchange = Poured.of(line, origin.host, request, taker)
        assert isinstance(request.body, bytes)
        line.begin(exchange, head + request.body)
        return exchange

    async def pour_anew(self, request: WireRequest, taker: Taker) -> Poured:
        head, origin = self._head(request)
        line = await self._connect(origin, request.timeout)
        exchange = Poured.of(line, origin.host, request, taker)
        assert isinstance(request.body, bytes)
        line.begin(exchange, head + request.body)
        return exchange

    def _head(self, request: WireRequest) -> tuple[bytes, Origin]:
        if self._closed:
            raise NotConnected("The wire is closed.")
        origin, authority, target = _split(request.url)
        return head_of(request, authority, target, origin.host), origin

    async def aclose(self) -> None:
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for lines in self._idle.values():
            for line in lines:
                line.abort()
        self._idle.clear()

    # ------------------------------------------------------------ connections

    def _idle_line(self, origin: Origin) -> Line | None:
        """The connection that was used last, if its peer has not left it meanwhile."""
        lines = self._idle.get(origin)
        while lines:
            line = lines.pop()
            if line.quiet():
                return line
            line.abort()
        return None

    async def _connect(self, origin: Origin, timeout: float) -> Line:
        line = Line(lambda line: self._free(origin, line))
        tls: dict[str, Any] = {"ssl": self._context(), "server_hostname": origin.host} if origin.secure else {}
        try:
            async with asyncio.timeout(min(self._connect_timeout, timeout)):
                if self._proxy is not None and origin.secure:
                    await self._tunnel(self._proxy, origin, line, tls)
                else:
                    await self._reach(origin, line, tls)
        except TimeoutError as error:
            raise NotConnected(f"Connecting to {origin.host} took too long.") from error
        except ssl.SSLCertVerificationError as error:
            raise NotConnected(f"The certificate of {origin.host} is not trusted.") from error
        except (OSError, ValueError) as error:
            raise NotConnected(f"No connection to {origin.host} could be made.") from error
        self._lines.add(line)
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)
        return line

    async def _reach(self, origin: Origin, line: Line, tls: dict[str, Any]) -> None:
        addresses = await _addresses(origin)
        if not self._allow_link_local and any(is_link_local(address) for address in addresses):
            raise NotConnected(
                f"{origin.host} leads to a link-local address, where a machine's own secrets are served. If the "
                "provider really is there, set its allow_link_local."
            )
        for number, address in enumerate(addresses):
            try:
                await asyncio.get_running_loop().create_connection(lambda: line, address, origin.port, **tls)
            except OSError:
                if number == len(addresses) - 1:
                    raise
            else:
                return

    async def _tunnel(self, proxy: OutgoingProxy, origin: Origin, line: Line, tls: dict[str, Any]) -> None:
        connection = await proxy.open(origin.host, origin.port)
        try:
            await asyncio.get_running_loop().create_connection(lambda: line, sock=connection, **tls)
        except BaseException:
            connection.close()
            raise

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
            self._tls.set_alpn_protocols(["http/1.1"])
            if self._roots is not None:
                self._tls.load_verify_locations(cadata=self._roots.decode("ascii"))
        return self._tls

    def _free(self, origin: Origin, line: Line) -> None:
        if self._closed:
            line.abort()
            return
        self._idle.setdefault(origin, []).append(line)

    def _sweep(self) -> None:
        """Closes what nobody has used for a while. One timer for all costs nothing on the way of a call."""
        self._sweeper = None
        for line in list(self._lines):
            line.look(SWEEP_S)
        for origin, lines in list(self._idle.items()):
            for line in lines:
                line.sweeps += 1
                if line.sweeps > 1:
                    line.abort()
            self._idle[origin] = [line for line in lines if line.open]
            if not self._idle[origin]:
                del self._idle[origin]
        self._lines = {line for line in self._lines if line.open}
        if self._lines:
            self._sweeper = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)


class StraightResponse:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.status: int = exchange.status
        self.headers: Headers = exchange.headers

    async def chunks(self) -> AsyncIterator[bytes]:
        while (chunk := await self._exchange.take()) is not None:
            yield chunk

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self.chunks()])

    async def aclose(self) -> None:
        self._exchange.give_up()


async def _upload(line: Line, exchange: Exchange, body: bytes | StreamedBody, host: str) -> None:
    if isinstance(body, bytes):
        body = StreamedBody(len(body), sliced(body))  # so that a slow upload is seen to make progress
    try:
        async with asyncio.timeout(None) as exchange.interrupt:
            await _write(line, exchange, body)
    except TimeoutError:  # the answer, or the end of the connection, came first
        exchange.check()
        line.spoil()
    except WireError:
        raise
    except Unmade as error:
        raise Severed(f"The request to {host} was broken off. {error}") from error
    except Exception as error:
        raise Severed(f"The request to {host} was broken off: its body could not be made.") from error
    finally:
        exchange.interrupt = None


async def _write(line: Line, exchange: Exchange, body: StreamedBody) -> None:
    chunked = body.length is None
    async with aclosing(blocks(body)) as pieces:
        async for piece in pieces:
            line.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
            while not line.writable:
                await exchange.moved()
                exchange.check()
    if chunked:
        line.write(LAST_CHUNK)
    exchange.uploaded = True


async def _addresses(origin: Origin) -> list[str]:
    """IPv4 first: where IPv6 leads nowhere, packets may vanish without a word."""
    found = await asyncio.get_running_loop().getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
    return [str(info[4][0]) for info in sorted(found, key=lambda info: info[0] != socket.AF_INET)]


@lru_cache(1024)
def _split(url: str) -> tuple[Origin, str, str]:
    """Where to, under which name, and what for; the last exactly as it was written."""
    scheme, _, rest = url.partition("#")[0].partition("://")
    ends = [at for mark in "/?" if (at := rest.find(mark)) >= 0]
    authority, target = (rest[: min(ends)], rest[min(ends) :]) if ends else (rest, "/")
    return (
        _origin(scheme.lower(), authority),
        authority.rpartition("@")[2],
        target if target[0] == "/" else "/" + target,
    )


@lru_cache(256)
def _origin(scheme: str, authority: str) -> Origin:
    try:
        parts = urlsplit(f"{scheme}://{authority}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or scheme not in ("http", "https"):
        raise NotConnected(f"This is no request that can be sent to {host or 'the provider'}.")
    return Origin(scheme == "https", host, port or (443 if scheme == "https" else 80))
