"""Responses sent by a task: uvicorn's cycle with some additions, and refusals.

The head is sent together with the first bytes of the body; a response that breaks off is recognisable as such, also to
HTTP/1.0 clients; 1xx responses can precede it; and the application can ask about its client. For that the ASGI scope
has the extension `CLIENT`, which is the `Cycle` itself. The proxy also works under servers that lack it.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from carpool.core.model import Headers
from carpool.dialects import DEFAULT_DIALECT, DIALECTS, below, dialect_of_request
from carpool.frontends.proxy.http.liveness import ConnectionLost, DeliveryReceipts

Leaving = asyncio.Future[None]  # done when the client has disconnected


class Disconnected(Exception):
    """The client has disconnected."""


CLIENT = "carpool.client"  # ASGI extension: the `Cycle`, which knows about the client
BODYLESS = frozenset({204, 304})  # a content-length, if present, describes another response
_KNOWN = frozenset(map(int, HTTPStatus))
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Cycle(RequestResponseCycle):
    """One request and its response. The later methods are for the application."""

    can_inform = True  # the client's protocol has 1xx responses
    refused: RequestRefused | None = None  # why the server itself refused the request
    leaving: Leaving | None = None  # set by an application that waits for it
    receipts: DeliveryReceipts  # of the connection

    async def send(self, message: Any) -> None:
        if self.transport.is_closing():  # connection_lost will follow, and writing would be an error
            self.disconnected = True
            self.message_event.set()
        if message["type"] == "http.response.start":
            bodyless = message["status"] in BODYLESS
            if not bodyless and self.scope["method"] != "HEAD":
                self.transport = _HeadFirst(self.transport)  # type: ignore[assignment]
            await super().send(message)
            if bodyless:
                self.expected_content_length = 0
        else:
            await super().send(message)
        if self.response_complete:
            self.body = bytearray()  # unread request data, which an idle connection would keep

    def inform(self, status: int, headers: Headers) -> None:
        """Sends a 1xx response."""
        if self.flow.write_paused:  # the client does not read, and 1xx responses are optional
            return
        if not self.response_started and not self.disconnected and not self.transport.is_closing():
            phrase = HTTPStatus(status).phrase if status in _KNOWN else ""
            lines = [f"HTTP/1.1 {status} {phrase}", *(f"{name}: {value}" for name, value in headers), "", ""]
            self.transport.write("\r\n".join(lines).encode("latin-1"))

    def left(self) -> None:
        """Called by the connection when the client has disconnected."""
        if self.leaving is not None and not self.leaving.done():
            self.leaving.set_result(None)

    async def received(self, lost: ConnectionLost) -> bool:
        """Whether the client has the whole response (`liveness`)."""
        return self.response_complete and await self.receipts.received(lost)


class _HeadFirst:
    """A transport that holds the head until the first bytes of the body, at most until the next event loop iteration.
    So both leave in one packet where possible, and the head never waits for a slow body."""

    __slots__ = ("_held", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held: bytes | None = None

    def write(self, data: bytes) -> None:
        if self._held is None:
            self._held = data
            asyncio.get_running_loop().call_soon(self._flush)
        elif self._held:
            self._held, head = b"", self._held
            self._transport.write(head + data)
        else:
            self._transport.write(data)

    def _flush(self) -> None:
        if self._held and not self._transport.is_closing():
            self._held, head = b"", self._held
            self._transport.write(head)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class OldCycle(Cycle):
    """HTTP/1.0: a response without a length ends with its connection, so only a reset shows that it is incomplete."""

    can_inform = False  # it would mistake a 1xx for the response
    _open_ended = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start" and not self.response_started:
            self._open_ended = all(name.lower() != b"content-length" for name, _ in message["headers"])
            self.chunked_encoding = False if self._open_ended else None
        elif self._open_ended:
            more = message.get("more_body", False)
            self.expected_content_length = sys.maxsize if more else len(message.get("body", b""))
        await super().send(message)

    async def run_asgi(self, app: Any) -> None:
        await super().run_asgi(app)
        if self.response_started and not self.response_complete and not self.disconnected:
            peer = self.transport.get_extra_info("socket")
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self.transport.abort()


# ------------------------------------------------------------ refusals
# Responses to requests that are refused before they reach the application.

_CODES = {408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error"}


class RequestRefused(Exception):
    """Why a request is refused and its connection closed. `again`: seconds after which a retry may succeed."""

    def __init__(self, status: int, message: str, again: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.again = again

    def answer(self, target: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
        """The complete response. Nothing after the refused request is read."""
        dialect = DIALECTS.get(asked_dialect(target, headers) or "", DEFAULT_DIALECT)
        body = dialect.error(self.status, _CODES.get(self.status, "invalid_request_error"), str(self))
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}", "content-type: application/json"]
        if self.again is not None:
            lines.append(f"retry-after: {self.again}")
        lines += [f"content-length: {len(body)}", "connection: close", "", ""]
        return "\r\n".join(lines).encode("ascii") + body


MALFORMED = (
    "This is not HTTP/1.1 as carpool can read it without a doubt, so nothing of it was passed on. Send one "
    "content-length or transfer-encoding: chunked, and lines that end in CR LF."
)


def asked_dialect(target: bytes, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The name of the dialect that a request seems to use, as far as it was read: for an error without a provider."""
    path = target.decode("latin-1").partition("?")[0]
    if path.startswith("/@"):
        path = "/" + path[1:].partition("/")[2]
    decoded = tuple([(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers])
    return dialect_of_request(below(path), decoded)
