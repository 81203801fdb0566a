"""Open ports and shut servers down, with clear errors."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from carpool.config import ServerSettings, Tls
from carpool.core.errors import ConfigError

log = logging.getLogger("carpool.serve")


SHORTEST_TOKEN = 16


def is_local(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def reached(host: str, serving: ServerSettings) -> str | None:
    """Why clients on other machines can connect, as the beginning of a sentence; None if they can't."""
    if not is_local(host):
        return f"{host} can be reached from outside"
    if serving.trusted_proxies:
        return "Others reach carpool through the server in front that server.trusted_proxies names"
    return None


def admin_token(host: str, serving: ServerSettings, environ: Mapping[str, str]) -> str | None:
    """The token for carpool's own pages. Optional on this machine; required if other machines can connect."""
    variable = serving.admin_token_env
    token = environ.get(variable, "").strip()
    if token and (len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable()):
        raise ConfigError(
            f"The admin token in {variable} must be at least {SHORTEST_TOKEN} plain characters: make one with "
            "openssl rand -hex 32."
        )
    if not token and (why := reached(host, serving)):
        raise ConfigError(
            f"{why}, and carpool's own pages show all calls. Put an admin token into {variable} (openssl "
            "rand -hex 32 makes one), or stay on --host 127.0.0.1 without a reverse proxy."
        )
    return token or None


def check_keys(host: str, serving: ServerSettings, *, configured: bool) -> None:
    """Refuse to serve other machines without virtual keys."""
    if not configured and (why := reached(host, serving)):
        raise ConfigError(
            f"{why}, and nobody has a key yet. Give out keys with carpool keys add NAME, and leave keys.required on; "
            "or stay on --host 127.0.0.1 without a reverse proxy."
        )


def exposed(host: str, serving: ServerSettings) -> list[str]:
    """Warnings about how carpool can be reached."""
    notes = []
    if not is_local(host) and serving.tls is None and not serving.trusted_proxies:
        notes.append(
            "Clients' keys travel to carpool unencrypted. Set server.tls; or let a server in front end TLS, and name "
            "it in server.trusted_proxies."
        )
    if serving.tls is not None and Path(serving.tls.key).stat().st_mode & 0o077:
        notes.append(f"Others on this machine may read the TLS key: chmod 600 {serving.tls.key}.")
    return notes


def tls_context(tls: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    for path, what in ((tls.cert, "server.tls.cert"), (tls.key, "server.tls.key")):
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"{what} is {path}, which can't be read ({error.strerror}).") from error
    try:
        context.load_cert_chain(tls.cert, tls.key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"{tls.cert} and {tls.key} are no certificate and its key in PEM form, without a password: check "
            "server.tls.cert and server.tls.key."
        ) from error
    return context


def _no_password() -> str:
    raise ValueError("A key with a password can't be read without somebody to ask.")  # openssl would ask the terminal


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Open a port, before anything else that would need cleanup. A `shared` port may have several listeners, and the
    kernel distributes connections over them."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if not host:
        raise ConfigError("--host is empty. Name an address, such as 127.0.0.1.")
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048, reuse_port=shared)
    except OSError as error:
        why = str(error.strerror).partition(" (")[0]
        raise ConfigError(f"Port {port} on {host} can't be opened ({why}). {_remedy(error)}") from error
    # Accepted connections inherit it. Otherwise the end of a response may wait 40 ms for a delayed ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _remedy(error: OSError) -> str:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return "Choose an address of this machine with --host."
    if error.errno == errno.EACCES:
        return "Choose one above 1023 with --port."
    return "Choose another with --port."


def reserve(host: str, port: int) -> socket.socket:
    """Reserve a port for the workers without listening on it. Fails if another program uses it."""
    with listen(host, port) as alone:
        number = alone.getsockname()[1]
    holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind((host, number))
    return holder


def address(listener: socket.socket, scheme: str = "http") -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class ProxyServer(uvicorn.Server):
    """Shuts down in order: the port closes, `end` finishes the open calls, then the connections close.

    A signal requests a graceful stop, a second one an immediate stop; both exit cleanly.

    `begun` is called when clients are served and signals are handled. With `tls`, `SIGHUP` reloads certificate and key
    for new connections.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        end: Callable[[], Awaitable[None]],
        tls: Tls | None = None,
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(config)
        self._end = end
        self._begun = begun
        self._tls = tls
        config.load()
        if tls is not None:
            config.ssl = tls_context(tls)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._begun()

    def reload(self) -> None:
        assert self._tls is not None
        try:
            tls_context(self._tls)  # check first: a failed load must not leave the active context half changed
        except ConfigError as error:
            log.warning("The certificate stays as it was: %s", error)
            return
        assert self.config.ssl is not None
        self.config.ssl.load_cert_chain(self._tls.cert, self._tls.key)

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
        if self._tls is not None:
            loop.add_signal_handler(signal.SIGHUP, self.reload)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                loop.remove_signal_handler(number)
