"""Opens TCP connections: to the addresses of a host, or through an outgoing proxy with `CONNECT`."""

from __future__ import annotations

import asyncio
import re
import socket
from base64 import b64encode
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

from carpool.core.errors import NotConnected

LARGEST_PROXY_ANSWER = 16 * 1024


class OutgoingProxy:
    """`url` is `http://host:port`; `login` is `user:password`."""

    def __init__(self, url: str, login: str | None = None) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "", parts.port or 80
        self._login = login

    def __repr__(self) -> str:  # without the login
        return f"<OutgoingProxy {self.host}:{self.port}>"

    async def open(self, host: str, port: int) -> asyncio.Transport:
        """Returns a connection to the provider through the proxy. If it fails, nothing of a request was sent."""
        authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        lines = [f"CONNECT {authority} HTTP/1.1", f"host: {authority}"]
        if self._login is not None:
            lines.append(f"proxy-authorization: Basic {b64encode(self._login.encode()).decode()}")
        reader, addresses = asyncio.StreamReader(LARGEST_PROXY_ANSWER), await resolve(self.host, self.port)
        tunnel = await connect_to_any(addresses, self.port, lambda: asyncio.StreamReaderProtocol(reader))
        with ExitStack() as stack:
            stack.callback(tunnel.abort)
            tunnel.write("\r\n".join([*lines, "", ""]).encode("ascii"))
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (EOFError, asyncio.LimitOverrunError) as error:
                raise OSError("The head of the proxy's response is too long.") from error
            status = re.match(rb"HTTP/1\.[^ \r]* ([0-9]+)[ \r]", head)
            if status is None:
                raise OSError("The proxy does not speak HTTP.")
            if int(status[1]) == 407:
                variable = "the variable that server.outgoing_proxy_auth_env names"
                raise NotConnected(f"The proxy {self.host} requires a different login. Check {variable}.")
            if int(status[1]) != 200:
                raise NotConnected(f"The proxy {self.host} would not connect to {host} (status {int(status[1])}).")
            stack.pop_all()
        return tunnel


async def resolve(host: str, port: int) -> list[str]:
    """Resolves a host, IPv4 first: where IPv6 is broken, packets may be dropped silently."""
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(info[4][0]) for info in sorted(infos, key=lambda info: info[0] != socket.AF_INET)]


async def connect_to_any(
    addresses: list[str], port: int, protocol: Callable[[], asyncio.BaseProtocol], **tls: Any
) -> asyncio.Transport:
    """Connects to the first address that can be reached."""
    for number, address in enumerate(addresses, 1):
        try:
            return (await asyncio.get_running_loop().create_connection(protocol, address, port, **tls))[0]
        except OSError:
            if number == len(addresses):
                raise
    raise OSError("no address")
