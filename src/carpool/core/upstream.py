"""One provider as the engine sees it: base URL, dialect and HTTP client."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import lru_cache

from carpool.core.model import Headers
from carpool.core.ports import Ask, Dialect, HttpClient, HttpRequest, HttpResponse, PushClient, StreamedBody

_VERSIONED = re.compile(r"/v\d\w*$")
_METADATA_V6 = ipaddress.ip_address("fd00:ec2::254")  # of AWS


def ip_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parses an address, with or without a zone. An IPv4 address in the form of an IPv6 one becomes the former."""
    address = ipaddress.ip_address(text.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


def is_link_local(text: str) -> bool:
    """Whether an address is link-local: there, cloud metadata services hand out a machine's credentials."""
    address = ip_address(text)
    return address.is_link_local or address == _METADATA_V6


def versioned(base: str) -> bool:
    """Whether a base URL ends in a version segment, as OpenAI's do."""
    return _VERSIONED.search(base) is not None


@lru_cache(maxsize=256)
def join(base_url: str, path: str) -> str:
    """Joins a provider's base URL and a path. By convention an OpenAI base URL ends in `/v1` and an Anthropic one does
    not, while paths always begin with `/v1`. Either way the URL contains the version once."""
    base = base_url.rstrip("/")
    if path.startswith("/v1/") and versioned(base):
        return base + path[3:]
    return base + path


@dataclass(frozen=True, slots=True)
class Upstream:
    provider: str
    base_url: str
    dialect: Dialect
    http_client: HttpClient
    workspace: str = ""  # all keys of this provider share one; empty: unknown
    push_client: PushClient | None = field(init=False)  # the same client, if it can push a response without a task

    def __post_init__(self) -> None:
        object.__setattr__(self, "push_client", self.http_client if isinstance(self.http_client, PushClient) else None)

    def url(self, path: str) -> str:
        """Returns the URL of a path, with the query string that this dialect adds to every request."""
        query = self.dialect.query
        if not query or query.partition("=")[0] + "=" in path.partition("?")[2]:
            return join(self.base_url, path)
        return join(self.base_url, f"{path}{'&' if '?' in path else '?'}{query}")

    async def ask(self, ask: Ask, secret: Headers, *, timeout: float, body: StreamedBody | None = None) -> HttpResponse:
        """Sends one request, once. The credential is added only here."""
        return await self.http_client.send(self.request(ask, secret, timeout, body))

    def request(self, ask: Ask, secret: Headers, timeout: float, body: StreamedBody | None = None) -> HttpRequest:
        return HttpRequest(
            method=ask.method,
            url=self.url(ask.path),
            headers=ask.headers + secret if secret else ask.headers,
            body=ask.body if body is None else body,
            timeout=timeout,
        )


@dataclass(frozen=True, slots=True)
class WholeResponse:
    """A complete response in memory, also an `HttpResponse`. Used for everything but streams and batch results."""

    status: int
    headers: Headers = field(repr=False)
    body: bytes = field(repr=False)

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    async def chunks(self) -> AsyncIterator[bytes]:
        yield self.body

    async def read(self) -> bytes:
        return self.body

    async def aclose(self) -> None:
        return


async def whole(response: HttpResponse) -> WholeResponse:
    try:
        return WholeResponse(response.status, response.headers, await response.read())
    finally:
        await response.aclose()


def clock_offset(headers: Headers, now: float) -> float | None:
    """Returns the provider's clock minus ours, from the `Date` header; accurate to a second or two."""
    text = next((value for name, value in headers if name == "date"), None)
    if text is None:
        return None
    try:
        return parsedate_to_datetime(text).timestamp() - now
    except (ValueError, OverflowError):
        return None
