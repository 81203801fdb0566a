"""Sends through the user's own asynchronous httpx client."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from carpool.core.errors import NotConnected, Severed, TimedOut, WireError, WrongClient
from carpool.core.model import Headers
from carpool.core.ports import HttpRequest, StreamedBody
from carpool.http.http1.client import host_of
from carpool.http.http1.requests import Unmade, blocks, framed, sliced

# ------------------------------------------------------------ shared by both httpx adapters
# They support `httpx` and `httpx2`, so neither is imported: clients are recognised by their methods, exceptions by
# their names.

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


def check_client(client: Any, *, asynchronous: bool) -> None:
    """Raises `WrongClient` for anything that is not the right kind of httpx client."""
    closer = "aclose" if asynchronous else "close"
    if not all(hasattr(client, name) for name in ("build_request", "send", closer)):
        kind = "an httpx AsyncClient" if asynchronous else "a blocking httpx Client"
        raise WrongClient(f"carpool can't send through {type(client).__name__}: give it {kind}.")


def bare_request(client: Any, request: HttpRequest, content: Any, extensions: dict[str, Any]) -> Any:
    """Builds a request without the client's defaults.

    `client.build_request` would merge the client's own headers, cookies and parameters, so it is used only to find the
    request class.
    """
    request_class = type(client.build_request("GET", "http://localhost/"))
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in framed(request)]
    return request_class(
        request.method,
        request.url,
        headers=headers,
        content=content,
        extensions={"timeout": _timeouts(request.timeout), **extensions},
    )


def _timeouts(seconds: float) -> dict[str, float]:
    return dict.fromkeys(("connect", "read", "write", "pool"), seconds)


def headers_of(response: Any) -> Headers:
    pairs = ((name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in response.headers.raw)
    if read_before(response) is None or "content-encoding" not in response.headers:
        return tuple(pairs)
    return tuple(pair for pair in pairs if pair[0] not in ("content-encoding", "content-length"))


def read_before(response: Any) -> bytes | None:
    """Returns the body if a hook or transport of the user has read it already; it is decompressed then."""
    return response.content if response.is_stream_consumed else None


def wire_error(error: Exception, host: str) -> WireError:
    names = {base.__name__ for base in type(error).__mro__}
    for name, message in _UNCONNECTED.items():
        if name in names:
            return NotConnected(message.format(host=host))
    if "TimeoutException" in names or isinstance(error, TimeoutError):
        return TimedOut(f"{host} was silent for too long.")
    if isinstance(error, Unmade):
        return Severed(f"The request to {host} was broken off. {error}")
    return Severed(f"The connection to {host} broke before the whole answer was here.")


@contextmanager
def giving_up(host: str) -> Iterator[None]:
    """Wraps the closing of a response: the connection is dropped either way, so an error is only logged."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - httpx has no base class that both flavours share
        _log.debug("Closing a connection to %s raised %s.", host, type(error).__name__)


class HttpxClient:
    """Adapts any `httpx.AsyncClient` or `httpx2.AsyncClient`.

    The client's TLS, proxies, mounts and transport apply; its default headers, cookies, authentication and redirects do
    not, since a request is already complete. The client belongs to the user and is not closed.
    """

    def __init__(self, client: Any) -> None:
        check_client(client, asynchronous=True)
        self._client = client

    async def send(self, request: HttpRequest) -> HttpxResponse:
        host = host_of(request.url)
        outgoing = self._prepare(request, host)
        try:
            response = await self._client.send(outgoing, stream=True, auth=None, follow_redirects=False)
        except Exception as error:
            raise wire_error(error, host) from error
        return HttpxResponse(response, host)

    def _prepare(self, request: HttpRequest, host: str) -> Any:
        if self._client.is_closed:
            raise NotConnected("The client that carpool was given is closed.")
        body = request.body
        try:
            return bare_request(self._client, request, blocks(body) if isinstance(body, StreamedBody) else body, {})
        except Exception as error:
            raise NotConnected(f"This is no request that can be sent to {host}.") from error

    async def aclose(self) -> None:
        """Does nothing: the client belongs to the user."""


class HttpxResponse:
    def __init__(self, response: Any, host: str) -> None:
        self._response = response
        self._host = host
        self.status: int = response.status_code
        self.headers: Headers = headers_of(response)

    async def chunks(self) -> AsyncIterator[bytes]:
        body = read_before(self._response)
        try:
            async with aclosing(self._response.aiter_raw() if body is None else sliced(body)) as raw:
                async for chunk in raw:
                    yield chunk
        except Exception as error:
            raise wire_error(error, self._host) from error

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self.chunks()])

    async def aclose(self) -> None:
        with giving_up(self._host):
            await self._response.aclose()
