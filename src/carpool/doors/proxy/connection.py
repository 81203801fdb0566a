"""The server's side of one connection: what passes the gate, with two more words for the application.

`carpool.informational` sends a 1xx answer before the head. `carpool.leaving` gives a future that is done when the
client has hung up, so that thousands who wait need no task each to listen for it. Both are ASGI extensions: under
another server they are missing, and the proxy does without.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

from httptools import parse_url
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from carpool.doors.asgi import Scope
from carpool.doors.proxy.gate import Gate
from carpool.model import Headers

INFORMATIONAL = "carpool.informational"
LEAVING = "carpool.leaving"

Inform = Callable[[int, Headers], None]
Leaving = asyncio.Future[None]  # done when the client has hung up

_KNOWN = frozenset(map(int, HTTPStatus))
_BODYLESS = frozenset({204, 304})  # their content-length, where they have one, is that of another answer
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Connection(Gate):
    _leaving: Leaving | None = None
    _answering: RequestResponseCycle | None = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        extensions: dict[str, object] = {LEAVING: partial(self._watch, cycle)}
        if cycle.scope["http_version"] == "1.0":  # would take a 1xx for the answer
            cycle.__class__ = _OldCycle
        else:
            cycle.__class__ = _Cycle
            extensions[INFORMATIONAL] = _Informer(cycle)
        cycle.scope["extensions"] = extensions  # type: ignore[typeddict-item]
        super()._start_asgi_task(cycle, app)

    def take_authority(self) -> None:
        """`GET http://name/path`: the name in the target holds, whatever `Host` says (RFC 9112, 3.2.2). So the check of
        the host can't be passed with one name while another is asked for."""
        target = parse_url(self.url)  # nonsense is refused by the parser's own error
        if target.host is not None:
            port = b"" if target.port is None else b":%d" % target.port
            host = b"[" + target.host + b"]" if b":" in target.host else target.host
            self.headers[:] = [pair for pair in self.headers if pair[0] != b"host"] + [(b"host", host + port)]

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._answering is not None and not self._answering.response_complete:  # others may be behind it in line
            self._answering.disconnected = True
            self._answering.message_event.set()
        self.hung_up()

    def hung_up(self) -> None:
        if self._leaving is not None and not self._leaving.done():
            self._leaving.set_result(None)

    def _watch(self, cycle: RequestResponseCycle) -> Leaving:
        """One request is answered at a time, so one future at a time is enough."""
        self._leaving = self.loop.create_future()
        if cycle.disconnected or self.transport.is_closing():
            cycle.disconnected = True  # or an answer would be missed that nobody can be given
            self._leaving.set_result(None)
        return self._leaving


class _Cycle(RequestResponseCycle):
    async def send(self, message: Any) -> None:
        if self.transport.is_closing():  # its end is on the way to us, and writing would be an error
            self.disconnected = True
            self.message_event.set()
        if message["type"] == "http.response.start":
            bodyless = message["status"] in _BODYLESS
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


class _OldCycle(_Cycle):
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


class _Informer:
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


def informer(scope: Scope) -> Inform | None:
    """How to send a 1xx answer, where the server and the client's protocol know such a thing."""
    found: Inform | None = scope.get("extensions", {}).get(INFORMATIONAL)
    return found


def watcher(scope: Scope) -> Callable[[], Leaving] | None:
    """How to learn that the client has hung up, where the server says so."""
    found: Callable[[], Leaving] | None = scope.get("extensions", {}).get(LEAVING)
    return found
