"""Tunnels through an outgoing proxy: `CONNECT`, then TLS with the provider itself, so that the proxy sees neither keys
nor bodies."""

from __future__ import annotations

import asyncio
import socket
from base64 import b64encode
from urllib.parse import urlsplit

from carpool.core.errors import NotConnected

LARGEST_ANSWER = 16 * 1024


class OutgoingProxy:
    """`url` is `http://host:port`; `login` is `user:password`."""

    def __init__(self, url: str, login: str | None = None) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "", parts.port or 80
        self._login = login

    def __repr__(self) -> str:  # without the login
        return f"<OutgoingProxy {self.host}:{self.port}>"

    async def open(self, host: str, port: int) -> socket.socket:
        """Returns a socket that is connected to the provider through the proxy. If it fails, nothing of a request was
        sent."""
        loop = asyncio.get_running_loop()
        connection = await _connected(self.host, self.port)
        try:
            await loop.sock_sendall(connection, self._connect(host, port))
            status = await _read_status(connection)
        except BaseException:
            connection.close()
            raise
        if status != 200:
            connection.close()
            raise NotConnected(_refusal(status, self.host, host))
        return connection

    def _connect(self, host: str, port: int) -> bytes:
        authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        lines = [f"CONNECT {authority} HTTP/1.1", f"host: {authority}"]
        if self._login is not None:
            lines.append(f"proxy-authorization: Basic {b64encode(self._login.encode()).decode()}")
        return "\r\n".join([*lines, "", ""]).encode("ascii")


async def _connected(host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    last_error: OSError = OSError("no address")
    for family, kind, protocol, _, address in sorted(addresses, key=lambda info: info[0] != socket.AF_INET):
        connection = socket.socket(family, kind, protocol)
        connection.setblocking(False)
        try:
            await loop.sock_connect(connection, address)
        except OSError as error:
            connection.close()
            last_error = error
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise last_error


async def _read_status(connection: socket.socket) -> int:
    """Returns the status of the proxy's response. Reads byte by byte: what follows its head belongs to the provider."""
    loop, head = asyncio.get_running_loop(), b""
    while not head.endswith(b"\r\n\r\n"):
        received = await loop.sock_recv(connection, 1)
        head += received
        if not received or len(head) > LARGEST_ANSWER:
            raise OSError("The proxy's answer has no end.")
    fields = head.split(b"\r\n", 1)[0].split(b" ")
    if len(fields) < 2 or not fields[0].startswith(b"HTTP/1.") or not fields[1].isdigit():
        raise OSError("The proxy does not speak HTTP.")
    return int(fields[1])


def _refusal(status: int, proxy: str, host: str) -> str:
    if status == 407:
        return f"The proxy {proxy} wants another login. Check the variable that server.outgoing_proxy_auth_env names."
    return f"The proxy {proxy} would not connect to {host} (status {status})."
