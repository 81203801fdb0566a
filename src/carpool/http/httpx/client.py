"""Sends through the user's own httpx client for asyncio; and what `threaded.py` shares, for blocking clients.

Both adapters support `httpx` and `httpx2`, so neither is imported: clients are recognised by their methods, exceptions
by their names. The client's TLS, proxies, mounts and transport apply; its default headers, cookies, authentication and
redirects do not, since a request is already complete. The client belongs to the user and is not closed.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing
from typing import Any

from carpool.core.errors import ConnectionBroken, NotConnected, TimedOut, WireError, WrongClient
from carpool.core.model import Headers
from carpool.core.ports import HttpRequest, StreamedBody
from carpool.http.http1.client import BodyUnavailable, blocks, framed, host_of, sliced

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


class HttpxAdapter:
    def __init__(self, client: Any, closer: str, kind: str) -> None:
        if not all(hasattr(client, name) for name in ("build_request", "send", closer)):
            raise WrongClient(f"carpool can't send through {type(client).__name__}: give it {kind}.")
        self._client = client
        self._closed = False

    def prepare(self, request: HttpRequest, content: Any, host: str, extensions: dict[str, Any]) -> Any:
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
            raise NotConnected(f"This request can't be sent to {host}.") from error

    async def aclose(self) -> None:
        """Refuses further requests. Threads end with their requests."""
        self._closed = True


class HttpxClient(HttpxAdapter):
    """Adapts any `httpx.AsyncClient` or `httpx2.AsyncClient`."""

    def __init__(self, client: Any) -> None:
        super().__init__(client, "aclose", "an httpx AsyncClient")

    async def send(self, request: HttpRequest) -> HttpxResponse:
        host, body = host_of(request.url), request.body
        outgoing = self.prepare(request, blocks(body) if isinstance(body, StreamedBody) else body, host, {})
        try:
            response = await self._client.send(outgoing, stream=True, auth=None, follow_redirects=False)
        except Exception as error:
            raise wire_error(error, host) from error
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
            raise wire_error(error, self._host) from error

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self.chunks()])

    async def aclose(self) -> None:
        await log_errors(self._response.aclose(), self._host)


def wire_error(error: Exception, host: str) -> WireError:
    names = {base.__name__ for base in type(error).__mro__}
    for name, message in _UNCONNECTED.items():
        if name in names:
            return NotConnected(message.format(host=host))
    if "TimeoutException" in names or isinstance(error, TimeoutError):
        return TimedOut(f"{host} was silent for too long.")
    if isinstance(error, BodyUnavailable):
        return ConnectionBroken(f"The request to {host} was broken off. {error}")
    return ConnectionBroken(f"The connection to {host} broke before the whole answer was here.")


async def log_errors(closing: Awaitable[None], host: str) -> None:
    """Closes a response: the connection is dropped either way, so an error is only logged."""
    try:
        await closing
    except Exception as error:  # noqa: BLE001 - httpx has no base class that both flavours share
        _log.debug("Closing a connection to %s raised %s.", host, type(error).__name__)
