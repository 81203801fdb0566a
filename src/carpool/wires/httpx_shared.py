"""What both httpx wires share. They work with `httpx` and `httpx2` alike, so neither is imported: clients are known by
their methods, exceptions by their names."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from carpool.errors import NotConnected, Severed, TimedOut, WireError, WrongClient
from carpool.model import Headers
from carpool.ports import WireRequest
from carpool.wires.bodies import Unmade, framed

_log = logging.getLogger(__name__)

# Raised before a connection could carry a byte of the request.
_UNCONNECTED = {
    "ConnectError": "No connection to {host} could be made.",
    "ConnectTimeout": "Connecting to {host} took too long.",
    "PoolTimeout": "No connection to {host} became free in time.",
    "ProxyError": "The proxy made no connection to {host}.",
    "UnsupportedProtocol": "The address of {host} is not one for HTTP.",
    "InvalidURL": "The address is not a valid URL.",
}


def check_client(client: Any, *, asynchronous: bool) -> None:
    """Fails early, and in a sentence, on anything that is not the right kind of httpx client."""
    closer = "aclose" if asynchronous else "close"
    if not all(hasattr(client, name) for name in ("build_request", "send", closer)):
        kind = "an httpx AsyncClient" if asynchronous else "a blocking httpx Client"
        raise WrongClient(f"carpool can't send through {type(client).__name__}: give it {kind}.")


def bare_request(client: Any, request: WireRequest, content: Any, extensions: dict[str, Any]) -> Any:
    """A request that carries what it was given and nothing of the client's defaults.

    `client.build_request` would merge the client's own headers, cookies and parameters, so it only tells the class.
    """
    request_class = type(client.build_request("GET", "http://localhost/"))
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in framed(request)]
    return request_class(
        request.method,
        request.url,
        headers=headers,
        content=content,
        extensions={"timeout": _timeouts(request.timeout), **extensions},
    )


def _timeouts(seconds: float) -> dict[str, float]:
    return dict.fromkeys(("connect", "read", "write", "pool"), seconds)


def headers_of(response: Any) -> Headers:
    pairs = ((name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in response.headers.raw)
    if read_before(response) is None or "content-encoding" not in response.headers:
        return tuple(pairs)
    return tuple(pair for pair in pairs if pair[0] not in ("content-encoding", "content-length"))


def read_before(response: Any) -> bytes | None:
    """The body of an answer that a hook or a transport of the user's has read already: it is decompressed by then."""
    return response.content if response.is_stream_consumed else None


def wire_error(error: Exception, host: str) -> WireError:
    names = {base.__name__ for base in type(error).__mro__}
    for name, message in _UNCONNECTED.items():
        if name in names:
            return NotConnected(message.format(host=host))
    if "TimeoutException" in names or isinstance(error, TimeoutError):
        return TimedOut(f"{host} was silent for too long.")
    if isinstance(error, Unmade):
        return Severed(f"The request to {host} was broken off. {error}")
    return Severed(f"The connection to {host} broke before the whole answer was here.")


@contextmanager
def giving_up(host: str) -> Iterator[None]:
    """Around the closing of an answer: the connection is gone either way, so trouble is only noted."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - httpx has no base class that both flavours share
        _log.debug("Closing a connection to %s raised %s.", host, type(error).__name__)
