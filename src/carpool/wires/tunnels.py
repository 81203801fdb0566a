"""Through a proxy to the provider: `CONNECT`, then TLS with the provider itself. The proxy sees no key and no body."""

from __future__ import annotations

import asyncio
import socket
from base64 import b64encode
from urllib.parse import urlsplit

from carpool.errors import NotConnected

LARGEST_ANSWER = 16 * 1024


class OutgoingProxy:
    """`url` is `http://host:port`; `login` is `user:password`."""

    def __init__(self, url: str, login: str | None = None) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "", parts.port or 80
        self._login = login

    def __repr__(self) -> str:  # never the login
        return f"<OutgoingProxy {self.host}:{self.port}>"

    async def open(self, host: str, port: int) -> socket.socket:
        """A connection on which the provider is at the other end. Nothing of a request has been sent when it fails."""
        loop = asyncio.get_running_loop()
        connection = await _connected(self.host, self.port)
        try:
            await loop.sock_sendall(connection, self._connect(host, port))
            status = await _answer(connection)
        except BaseException:
            connection.close()
            raise
        if status != 200:
            connection.close()
            raise NotConnected(_refusal(status, self.host, host))
        return connection

    def _connect(self, host: str, port: int) -> bytes:
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        lines = [f"CONNECT {place} HTTP/1.1", f"host: {place}"]
        if self._login is not None:
            lines.append(f"proxy-authorization: Basic {b64encode(self._login.encode()).decode()}")
        return "\r\n".join([*lines, "", ""]).encode("ascii")


async def _connected(host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    trouble: OSError = OSError("no address")
    for family, kind, protocol, _, place in sorted(found, key=lambda info: info[0] != socket.AF_INET):
        connection = socket.socket(family, kind, protocol)
        connection.setblocking(False)
        try:
            await loop.sock_connect(connection, place)
        except OSError as error:
            connection.close()
            trouble = error
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise trouble


async def _answer(connection: socket.socket) -> int:
    """The status of the proxy's answer. Byte for byte up to its end: what follows belongs to the provider."""
    loop, said = asyncio.get_running_loop(), b""
    while not said.endswith(b"\r\n\r\n"):
        more = await loop.sock_recv(connection, 1)
        said += more
        if not more or len(said) > LARGEST_ANSWER:
            raise OSError("The proxy's answer has no end.")
    words = said.split(b"\r\n", 1)[0].split(b" ")
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        raise OSError("The proxy does not speak HTTP.")
    return int(words[1])


def _refusal(status: int, proxy: str, host: str) -> str:
    if status == 407:
        return f"The proxy {proxy} wants another login. Check the variable that server.outgoing_proxy_auth_env names."
    return f"The proxy {proxy} would not connect to {host} (status {status})."
