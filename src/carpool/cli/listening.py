"""Opening ports and ending servers, with sentences for what goes wrong."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import uvicorn

from carpool.errors import ConfigError


def check_local(host: str) -> None:
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local:
        raise ConfigError(
            f"carpool listens on this machine only, and {host} can be reached from outside. Use --host 127.0.0.1."
        )


def listen(host: str, port: int) -> socket.socket:
    """An open port, before anything else is made that would have to be taken down again."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        why = str(error.strerror).partition(" (")[0]
        raise ConfigError(f"Port {port} on {host} can't be opened ({why}). Choose another with --port.") from error
    # Accepted connections inherit it. Otherwise the end of an answer may wait 40 ms for the client's kernel.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Ends in order: the port closes, `end` brings the open calls to their end, then the connections close.

    A signal is a request to stop, and a second one to stop at once; either way the process ends as it should.
    """

    def __init__(self, config: uvicorn.Config, end: Callable[[], Awaitable[None]]) -> None:
        super().__init__(config)
        self._end = end

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        await self._end()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
