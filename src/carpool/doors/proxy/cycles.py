"""Answers that a task gives: what uvicorn's cycle leaves to be wished for.

The head leaves together with the first bytes of the body; an answer that breaks off is seen to, by old clients too; and
a 1xx answer may go before it.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from carpool.model import Headers

BODYLESS = frozenset({204, 304})  # their content-length, where they have one, is that of another answer
_KNOWN = frozenset(map(int, HTTPStatus))
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Cycle(RequestResponseCycle):
    async def send(self, message: Any) -> None:
        if self.transport.is_closing():  # its end is on the way to us, and writing would be an error
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


class _HeadFirst:
    """A transport that holds the head back until the body's first bytes, or the end of this turn of the loop: what is
    there together leaves together, and nothing waits for what is not."""

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
    """HTTP/1.0: an answer without a length ends with its connection, so only a reset can say that it broke off."""

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


class Informer:
    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def __call__(self, status: int, headers: Headers) -> None:
        cycle = self._cycle
        if cycle.flow.write_paused:  # nobody reads them, and they may be left out
            return
        if not cycle.response_started and not cycle.disconnected and not cycle.transport.is_closing():
            phrase = HTTPStatus(status).phrase if status in _KNOWN else ""
            lines = [f"HTTP/1.1 {status} {phrase}", *(f"{name}: {value}" for name, value in headers), "", ""]
            cycle.transport.write("\r\n".join(lines).encode("latin-1"))
