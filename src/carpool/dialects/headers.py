"""Headers that mean the same at every provider: which to drop, whether a request is a retry, how long to wait.

The headers of a batch apply to every call in it. An unknown header is kept, and separates calls into different batches.
Only headers that can't influence the response are dropped: those about the connection, the client, or one request.
"""

from __future__ import annotations

import math

from carpool.core.errors import BadCall
from carpool.core.model import Headers

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
        "x-app",
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
# Each belongs to one request, so it can't be sent with a batch.
ONE_REQUEST = frozenset(
    {
        "b3",
        "baggage",
        "idempotency-key",
        "sentry-trace",
        "traceparent",
        "tracestate",
        "x-amzn-trace-id",
        "x-client-request-id",
        "x-cloud-trace-context",
        "x-correlation-id",
        "x-idempotency-key",
        "x-request-id",
        "x-request-start",
    }
)
DROPPED = _HOP_BY_HOP | _TRANSPORT | _ROUTE | ONE_REQUEST
DROPPED_PREFIXES = ("cf-", "sec-", "x-b3-", "x-carpool-", "x-datadog-", "x-envoy-", "x-forwarded-", "x-stainless-")


def first(headers: Headers, name: str) -> str | None:
    for key, value in headers:
        if key == name:
            return value
    return None


def check_encoding(headers: Headers) -> None:
    """Refuse compressed bodies that the frontend did not decompress."""
    for name, value in headers:
        if name == "content-encoding" and value.strip().lower() not in ("", "identity"):
            raise BadCall(f"carpool does not read request bodies with content-encoding {value.strip()[:40]!r} yet.")


def is_positive(text: str) -> bool:
    """Whether this value of `x-stainless-retry-count` marks a retry by the client's SDK."""
    try:
        return int(text) > 0
    except ValueError:
        return False


def wish(headers: Headers) -> bool | None:
    """Whether the provider wants a retry, according to `x-should-retry`; None without that header."""
    value = (first(headers, "x-should-retry") or "").strip().lower()
    return value == "true" if value in ("true", "false") else None


def retry_after(headers: Headers) -> float | None:
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            seconds = float(first(headers, name) or "") * unit
        except ValueError:
            continue
        if math.isfinite(seconds) and seconds >= 0:
            return seconds
    return None
