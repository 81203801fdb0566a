"""Sends through the user's own asynchronous httpx client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from carpool.errors import NotConnected
from carpool.model import Headers
from carpool.ports import StreamedBody, WireRequest
from carpool.wires.addresses import host_of
from carpool.wires.bodies import blocks, sliced
from carpool.wires.httpx_shared import bare_request, check_client, giving_up, headers_of, read_before, wire_error


class HttpxWire:
    """Any `httpx.AsyncClient` or `httpx2.AsyncClient` as a wire.

    The client's TLS, proxies, mounts and transport hold; its default headers, cookies, authentication and redirects
    don't, since a request here is complete as it is. The client stays the user's: it is not closed.
    """

    def __init__(self, client: Any) -> None:
        check_client(client, asynchronous=True)
        self._client = client

    async def send(self, request: WireRequest) -> HttpxResponse:
        host = host_of(request.url)
        outgoing = self._prepare(request, host)
        try:
            response = await self._client.send(outgoing, stream=True, auth=None, follow_redirects=False)
        except Exception as error:
            raise wire_error(error, host) from error
        return HttpxResponse(response, host)

    def _prepare(self, request: WireRequest, host: str) -> Any:
        if self._client.is_closed:
            raise NotConnected("The client that carpool was given is closed.")
        body = request.body
        try:
            return bare_request(self._client, request, blocks(body) if isinstance(body, StreamedBody) else body, {})
        except Exception as error:
            raise NotConnected(f"This is no request that can be sent to {host}.") from error

    async def aclose(self) -> None:
        """Nothing to close: the client is the user's."""


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
