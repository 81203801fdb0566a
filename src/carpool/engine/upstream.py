"""One provider as the engine sees it: where it is, what it speaks, and who carries the bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import lru_cache

from carpool.model import Headers
from carpool.ports import Ask, Dialect, PouringWire, StreamedBody, Wire, WireRequest, WireResponse

_VERSIONED = re.compile(r"/v\d\w*$")


def versioned(base: str) -> bool:
    """Whether a base URL ends in a version, as OpenAI's do."""
    return _VERSIONED.search(base) is not None


@lru_cache(maxsize=256)
def join(base_url: str, path: str) -> str:
    """Where a path lies at a provider. By its convention an OpenAI base URL ends in `/v1`, an Anthropic one does not;
    paths always begin with it. Either way the version stands in the address once."""
    base = base_url.rstrip("/")
    if path.startswith("/v1/") and versioned(base):
        return base + path[3:]
    return base + path


@dataclass(frozen=True, slots=True)
class Upstream:
    provider: str
    base_url: str
    dialect: Dialect
    wire: Wire
    pouring: PouringWire | None = field(init=False)  # the same, where it can hand an answer on without a task

    def __post_init__(self) -> None:
        object.__setattr__(self, "pouring", self.wire if isinstance(self.wire, PouringWire) else None)

    def url(self, path: str) -> str:
        """Where a path lies, with the query that every request has here."""
        query = self.dialect.query
        if not query or query.partition("=")[0] + "=" in path.partition("?")[2]:
            return join(self.base_url, path)
        return join(self.base_url, f"{path}{'&' if '?' in path else '?'}{query}")

    async def ask(self, ask: Ask, secret: Headers, *, timeout: float, body: StreamedBody | None = None) -> WireResponse:
        """Sends one request, once, with the credential added at the last moment."""
        return await self.wire.send(self.request(ask, secret, timeout, body))

    def request(self, ask: Ask, secret: Headers, timeout: float, body: StreamedBody | None = None) -> WireRequest:
        return WireRequest(
            method=ask.method,
            url=self.url(ask.path),
            headers=ask.headers + secret if secret else ask.headers,
            body=ask.body if body is None else body,
            timeout=timeout,
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer in memory. Used for everything but streams and results."""

    status: int
    headers: Headers = field(repr=False)
    body: bytes = field(repr=False)

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)


async def whole(response: WireResponse) -> Answer:
    try:
        return Answer(response.status, response.headers, await response.read())
    finally:
        await response.aclose()


def clock_offset(answer: Answer | WireResponse, now: float) -> float | None:
    """The provider's clock minus ours, from its `Date` header; good to a second or two."""
    text = next((value for name, value in answer.headers if name == "date"), None)
    if text is None:
        return None
    try:
        return parsedate_to_datetime(text).timestamp() - now
    except ValueError:
        return None
