"""Headers that mean the same at every provider: which to drop, whether a request is a retry, how long to wait.

The headers of a batch apply to every call in it. An unknown header is kept, and separates calls into different batches.
Only headers that can't influence the response are dropped: those about the connection, the client, or one request.
"""

from __future__ import annotations

import math
from operator import itemgetter
from typing import NamedTuple

from carpool.core.errors import BadCall
from carpool.core.model import Headers

_CONNECTION = """
    connection expect http2-settings keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer
    transfer-encoding upgrade
    cdn-loop forwarded from origin priority referer true-client-ip via x-client-ip x-original-url x-real-ip
"""
_CLIENT = """
    accept accept-charset accept-encoding accept-language cache-control content-encoding content-length content-md5
    content-type cookie date dnt host pragma prefer range user-agent x-app x-stainless-retry-count
"""
_ONE_REQUEST = """
    b3 baggage idempotency-key sentry-trace traceparent tracestate x-amzn-trace-id x-client-request-id
    x-cloud-trace-context x-correlation-id x-idempotency-key x-request-id x-request-start
"""
ONE_REQUEST = frozenset(_ONE_REQUEST.split())  # each belongs to one request, so it can't be sent with a batch
DROPPED = frozenset(_CONNECTION.split() + _CLIENT.split()) | ONE_REQUEST
DROPPED_PREFIXES = ("cf-", "sec-", "x-b3-", "x-carpool-", "x-datadog-", "x-envoy-", "x-forwarded-", "x-stainless-")


class SortedHeaders(NamedTuple):
    """A client's headers, sorted by purpose."""

    forwarded: Headers  # sent upstream with the call, sorted by name
    secret: Headers
    retry: bool  # the client's SDK marks the request as a retry
    unbatchable: tuple[str, ...] = ()  # why calls with these headers can't go into a batch, as sentences
    session: str = ""  # the client's own id of its session

    def __repr__(self) -> str:  # never the secret
        return f"<Sorted {len(self.forwarded)} headers>"


def first(headers: Headers, name: str) -> str | None:
    for key, value in headers:
        if key == name:
            return value
    return None


LONGEST_SESSION = 200


def session(headers: Headers, *names: str) -> str:
    """The client's own id of its session, from the first of these headers that it sends; empty if it sends none."""
    by_name = dict(headers)
    return next((value.strip()[:LONGEST_SESSION] for name in names if (value := by_name.get(name))), "")


def forwarded(
    headers: Headers, dropped: frozenset[str], prefixes: tuple[str, ...]
) -> tuple[list[tuple[str, str]], bool]:
    """The headers that are sent upstream with a call, sorted by name, and whether the client's SDK marks a retry.
    Raises `BadCall` for a compressed body that the frontend did not decompress."""
    kept: list[tuple[str, str]] = []
    retry = False
    nominated: set[str] = set()
    for name, value in headers:
        if name == "x-stainless-retry-count":
            retry = retry or (value.strip().isdecimal() and value.strip(" 0") != "")
        elif name == "connection":  # it may declare any header to be hop-by-hop
            nominated |= {listed.strip().lower() for listed in value.split(",")}
        elif name == "content-encoding" and value.strip().lower() not in ("", "identity"):
            raise BadCall(f"carpool does not read request bodies with content-encoding {value.strip()[:40]!r} yet.")
        elif name not in dropped and not name.startswith(prefixes):
            kept.append((name, value.strip()))
    # The sort is stable: repeated names stay in the client's order.
    return sorted((header for header in kept if header[0] not in nominated), key=itemgetter(0)), retry


def provider_wants_retry(headers: Headers) -> bool | None:
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
