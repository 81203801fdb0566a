"""Which of a client's headers travel with its call.

The headers of a batch hold for every call in it. So a header that nobody knows is kept and keeps calls apart, and only
headers known to say nothing about the answer are dropped: those about the connection, the client, or one request.
"""

from __future__ import annotations

from operator import itemgetter
from typing import NamedTuple

from carpool.model import Headers

_NAME = itemgetter(0)
SECRETS = frozenset({"authorization", "x-api-key"})

_HOP_BY_HOP = frozenset(
    {
        "connection",
        "expect",
        "http2-settings",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_TRANSPORT = frozenset(
    {
        "accept",
        "accept-charset",
        "accept-encoding",
        "accept-language",
        "cache-control",
        "content-encoding",
        "content-length",
        "content-md5",
        "content-type",
        "cookie",
        "date",
        "dnt",
        "host",
        "pragma",
        "prefer",
        "range",
        "user-agent",
    }
)
_ROUTE = frozenset(
    {
        "cdn-loop",
        "forwarded",
        "from",
        "origin",
        "priority",
        "referer",
        "true-client-ip",
        "via",
        "x-client-ip",
        "x-original-url",
        "x-real-ip",
    }
)
# Each names one request, so none may speak for a batch.
_ONE_REQUEST = frozenset(
    {
        "anthropic-dangerous-direct-browser-access",
        "b3",
        "baggage",
        "idempotency-key",
        "sentry-trace",
        "traceparent",
        "tracestate",
        "x-amzn-trace-id",
        "x-app",
        "x-client-request-id",
        "x-cloud-trace-context",
        "x-correlation-id",
        "x-idempotency-key",
        "x-request-id",
        "x-request-start",
    }
)
_DROPPED = _HOP_BY_HOP | _TRANSPORT | _ROUTE | _ONE_REQUEST
_DROPPED_PREFIXES = (
    "cf-",
    "sec-",
    "x-b3-",
    "x-carpool-",
    "x-claude-code-",
    "x-datadog-",
    "x-envoy-",
    "x-forwarded-",
    "x-stainless-",
)


class Sorted(NamedTuple):
    """A client's headers, told apart."""

    travelling: Headers  # goes upstream with the call, sorted by name
    secret: Headers
    betas: tuple[str, ...]  # each once, in the client's order; `travelling` has them as one header
    retry: bool  # the client's SDK says that it sends this again


def sort(headers: Headers) -> Sorted:
    kept: list[tuple[str, str]] = []
    secret: list[tuple[str, str]] = []
    betas: dict[str, None] = {}
    retry = False
    nominated: tuple[str, ...] = ()
    for name, value in headers:
        if name in SECRETS:
            secret.append((name, value))
        elif name == "anthropic-beta":
            betas |= dict.fromkeys(filter(None, map(str.strip, value.split(","))))
        elif name == "x-stainless-retry-count":
            retry = retry or _is_positive(value)
        elif name == "connection":
            nominated += tuple(listed.strip().lower() for listed in value.split(","))
        elif name not in _DROPPED and not name.startswith(_DROPPED_PREFIXES):
            kept.append((name, value.strip()))
    if nominated:  # `connection` may declare any header to be hop-by-hop
        kept = [header for header in kept if header[0] not in nominated]
    if betas:
        kept.append(("anthropic-beta", ",".join(betas)))
    kept.sort(key=_NAME)  # stable: repeated names stay in the client's order
    return Sorted(tuple(kept), tuple(secret), tuple(betas), retry)


def first(headers: Headers, name: str) -> str | None:
    for key, value in headers:
        if key == name:
            return value
    return None


def _is_positive(text: str) -> bool:
    try:
        return int(text) > 0
    except ValueError:
        return False
