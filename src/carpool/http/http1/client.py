"""carpool's own HTTP client: HTTP/1.1 on the event loop, without worker threads; direct, or through an outgoing proxy
with `CONNECT` and then TLS with the provider itself, so that the proxy sees neither keys nor bodies."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from carpool.core.errors import ConnectionBroken, NotConnected, WireError
from carpool.core.model import Headers
from carpool.core.ports import HttpRequest, ResponseReceiver, StreamedBody
from carpool.core.upstream import is_link_local
from carpool.http.http1.connection import Http1Connection, Http1Exchange, Http1Response
from carpool.http.http1.proxy import OutgoingProxy, connect_to_any, resolve

BLOCK = 64 * 1024
SWEEP_S = 15.0  # an idle connection is closed after one or two of these
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_TARGET = re.compile(r"[!-~]+")
_FRAMING = ("content-length", "transfer-encoding")


def host_of(url: str) -> str:
    """Returns only the host of a URL, for messages: the path may be confidential, query and user info may hold
    secrets."""
    try:
        return urlsplit(url).hostname or "the provider"
    except ValueError:
        return "the provider"


class Origin(NamedTuple):
    secure: bool
    host: str
    port: int


class Http1Client:
    """An HTTP client with one connection pool per origin. Redirects are not followed, and proxy settings from the
    environment are ignored.

    `proxy` is used for every https origin. A host name that resolves to a link-local address is refused unless
    `allow_link_local` is set: an attacker who controls the name could have keys sent to the cloud's metadata service.

    Cancelling aborts the request at any time: while connecting, uploading, or waiting for the response.

    A response with a status of 300 or more ends the upload; any other waits until the upload is complete.
    """

    max_push_bytes = 4 * BLOCK  # the largest body that is sent in one piece

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
        self._idle: dict[Origin, list[Http1Connection]] = {}
        self._lines: set[Http1Connection] = set()  # all open connections, idle or not
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    async def send(self, request: HttpRequest) -> Http1Response:
        head, origin = self._head(request)
        connection = self._idle_connection(origin) or await self._connect(origin, request.timeout)
        response = Http1Response(connection, origin.host, request)
        try:
            if isinstance(request.body, bytes) and len(request.body) <= self.max_push_bytes:
                response.exchange.uploaded = True
                connection.begin(response.exchange, head + request.body)
            else:
                connection.begin(response.exchange, head)
                await _upload(connection, response, request.body, origin.host)
            await response.head()
        except BaseException:
            response.exchange.give_up()
            raise
        return response

    def push(self, request: HttpRequest, receiver: ResponseReceiver) -> Http1Exchange | None:
        head, origin = self._head(request)
        connection = self._idle_connection(origin)
        return None if connection is None else Http1Exchange.begin(connection, origin.host, head, request, receiver)

    async def push_on_new_connection(self, request: HttpRequest, receiver: ResponseReceiver) -> Http1Exchange:
        head, origin = self._head(request)
        connection = await self._connect(origin, request.timeout)
        return Http1Exchange.begin(connection, origin.host, head, request, receiver)

    def _head(self, request: HttpRequest) -> tuple[bytes, Origin]:
        if self._closed:
            raise NotConnected("The HTTP client is closed.")
        origin, authority, target = _split(request.url)
        return head_of(request, authority, target, origin.host), origin

    async def aclose(self) -> None:
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connections in self._idle.values():
            for connection in connections:
                connection.abort()
        self._idle.clear()

    # ------------------------------------------------------------ connections

    def _idle_connection(self, origin: Origin) -> Http1Connection | None:
        """Returns the most recently used idle connection that its peer has not closed."""
        connections = self._idle.get(origin)
        while connections:
            connection = connections.pop()
            if connection.quiet():
                return connection
            connection.abort()
        return None

    async def _connect(self, origin: Origin, timeout: float) -> Http1Connection:
        connection = Http1Connection(lambda freed: self._free(origin, freed))
        try:
            async with asyncio.timeout(min(self._connect_timeout, timeout)):
                await self._open(origin, connection)
        except TimeoutError as error:
            raise NotConnected(f"Connecting to {origin.host} took too long.") from error
        except ssl.SSLCertVerificationError as error:
            raise NotConnected(f"The certificate of {origin.host} is not trusted.") from error
        except (OSError, ValueError) as error:
            raise NotConnected(f"No connection to {origin.host} could be made.") from error
        self._lines.add(connection)
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)
        return connection

    async def _open(self, origin: Origin, connection: Http1Connection) -> None:
        if self._proxy is not None and origin.secure:
            tunnel, start_tls = await self._proxy.open(origin.host, origin.port), asyncio.get_running_loop().start_tls
            transport = await start_tls(tunnel, connection, self._context(), server_hostname=origin.host)
            if transport is None or transport.is_closing():
                raise OSError("The connection was closed at once.")
            connection.connection_made(transport)
            return
        addresses = await resolve(origin.host, origin.port)
        if not self._allow_link_local and any(is_link_local(address) for address in addresses):
            raise NotConnected(
                f"{origin.host} leads to a link-local address, where a machine's own secrets are served. If the "
                "provider really is there, set its allow_link_local."
            )
        tls: dict[str, Any] = {"ssl": self._context(), "server_hostname": origin.host} if origin.secure else {}
        await connect_to_any(addresses, origin.port, lambda: connection, **tls)

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
            self._tls.set_alpn_protocols(["http/1.1"])
            if self._roots is not None:
                self._tls.load_verify_locations(cadata=self._roots.decode("ascii"))
        return self._tls

    def _free(self, origin: Origin, connection: Http1Connection) -> None:
        if self._closed:
            connection.abort()
            return
        self._idle.setdefault(origin, []).append(connection)

    def _sweep(self) -> None:
        """Checks timeouts and closes idle connections. One timer for all connections costs a call nothing."""
        self._sweeper = None
        for connection in list(self._lines):
            connection.add_idle_time(SWEEP_S)
        for origin, connections in list(self._idle.items()):
            for connection in connections:
                connection.sweeps += 1
                if connection.sweeps > 1:
                    connection.abort()
            self._idle[origin] = [connection for connection in connections if connection.open]
            if not self._idle[origin]:
                del self._idle[origin]
        self._lines = {connection for connection in self._lines if connection.open}
        if self._lines:
            self._sweeper = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)


# ------------------------------------------------------------ requests


@lru_cache(1024)
def _split(url: str) -> tuple[Origin, str, str]:
    """Splits a URL into origin, authority (for the Host header) and request target; the target stays unchanged."""
    scheme, _, rest = url.partition("#")[0].partition("://")
    ends = [at for mark in "/?" if (at := rest.find(mark)) >= 0]
    authority, target = (rest[: min(ends)], rest[min(ends) :]) if ends else (rest, "/")
    secure = scheme.lower() == "https"
    try:
        parts = urlsplit(f"{scheme}://{authority}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or scheme.lower() not in ("http", "https"):
        raise NotConnected(f"This request can't be sent to {host or 'the provider'}.")
    origin = Origin(secure, host, port or (443 if secure else 80))
    return origin, authority.rpartition("@")[2], target if target[0] == "/" else "/" + target


def head_of(request: HttpRequest, authority: str, target: str, host: str) -> bytes:
    """Returns request line and headers. Refuses values that could inject further headers."""
    try:
        before, after = _around_framing(request.method, authority, target, request.headers)
    except ValueError:
        raise NotConnected(f"This request can't be sent to {host}.") from None
    return before + _framing(request) + after


@lru_cache(512)  # a client sends the same headers with every call; like the keyring, in memory only
def _around_framing(method: str, authority: str, target: str, headers: Headers) -> tuple[bytes, bytes]:
    """Returns the parts of the head before and after the framing header, which depends on the body."""
    before, after = [f"{method} {target} HTTP/1.1", f"host: {authority}"], list[str]()
    lines = before
    for name, value in headers:
        lower = name.lower()
        if lower in _FRAMING:
            lines = after
        elif lower != "host":
            lines.append(f"{name}: {value}")
            if not _TOKEN.fullmatch(name):
                raise ValueError("This is not a valid header name.")
    text = "".join([*before, *after])
    if "\n" in text or "\r" in text or "\0" in text or not _TARGET.fullmatch(target):
        raise ValueError("A line break would begin another header.")
    return "\r\n".join([*before, ""]).encode("latin-1"), "\r\n".join([*after, "", ""]).encode("latin-1")


def _framing(request: HttpRequest) -> bytes:
    """Returns the framing header: content-length, or chunked encoding if the length is unknown."""
    length = request.body.length if isinstance(request.body, StreamedBody) else len(request.body)
    if length is None:
        return b"transfer-encoding: chunked\r\n"
    if length or request.method in ("POST", "PUT", "PATCH"):
        return b"content-length: %d\r\n" % length
    return b""


def framed(request: HttpRequest) -> list[tuple[str, str]]:
    """Returns the request's headers with the framing header for its body."""
    headers = [(name, value) for name, value in request.headers if name.lower() not in _FRAMING]
    if line := _framing(request):
        name, _, value = line.decode().strip().partition(": ")
        headers.append((name, value))
    return headers


class BodyUnavailable(Exception):
    """The body could not be produced as announced, so the request was aborted."""


async def _upload(connection: Http1Connection, response: Http1Response, body: bytes | StreamedBody, host: str) -> None:
    if isinstance(body, bytes):
        body = StreamedBody(len(body), sliced(body))  # in blocks, so that a slow upload counts as progress
    try:
        async with asyncio.timeout(None) as response.interrupt:
            await _write(connection, response, body)
    except TimeoutError:  # the response, or the end of the connection, came before the end of the upload
        response.check()
        connection.forbid_reuse()
    except WireError:
        raise
    except BodyUnavailable as error:
        raise ConnectionBroken(f"The request to {host} was broken off. {error}") from error
    except Exception as error:
        raise ConnectionBroken(f"The request to {host} was broken off: its body could not be made.") from error
    finally:
        response.interrupt = None


async def _write(connection: Http1Connection, response: Http1Response, body: StreamedBody) -> None:
    chunked = body.length is None
    async with aclosing(blocks(body)) as pieces:
        async for piece in pieces:
            connection.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
            while not connection.writable:
                await response.moved()
                response.check()
    if chunked:
        connection.write(b"0\r\n\r\n")
    response.exchange.uploaded = True


async def blocks(body: StreamedBody) -> AsyncGenerator[bytes, None]:
    """Yields the body in blocks of at least `BLOCK` bytes, because each block costs a pass through the client; none is
    empty, which would end a chunked body. Raises `BodyUnavailable` if the total is not the announced length.

    A live body is not buffered: its producer may wait for the effect of the last piece.
    """
    least, sent, size, buffered = 1 if body.live else BLOCK, 0, 0, list[bytes]()
    async for piece in body.pieces:
        buffered.append(piece)
        size += len(piece)
        if body.length is not None and sent + size > body.length:
            raise BodyUnavailable(f"The body is longer than the {body.length} bytes announced.")
        if size >= least:
            yield b"".join(buffered)
            sent += size
            size = 0
            buffered.clear()
    if size:
        yield b"".join(buffered)
    if body.length not in (None, sent + size):
        raise BodyUnavailable(f"The body ended after {sent + size} of the {body.length} bytes announced.")


async def sliced(body: bytes) -> AsyncGenerator[bytes, None]:
    view = memoryview(body)
    for start in range(0, len(body), BLOCK):
        yield bytes(view[start : start + BLOCK])
