"""House keys: a provider key that carpool adds to requests of local clients without a key.

A web page can make a browser post to carpool, though it can't read the response. Such a request has no key, and a house
key would let it spend money. So requests from a page of another origin get none, and neither do forwarded requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from carpool.core.model import Headers

LOCAL = frozenset({"127.0.0.1", "localhost", "::1"})
_PASSED_ON = frozenset({"forwarded", "via", "x-forwarded-for", "x-real-ip"})


class HouseKeys:
    """The house keys by provider, each a header name and value."""

    def __init__(self, keys: Mapping[str, tuple[str, str]]) -> None:
        self._keys = keys

    def add_house_key(self, provider: str, headers: Headers, carries_key: bool) -> Headers:
        if carries_key or provider not in self._keys or _from_foreign_page(headers) or passed_on(headers):
            return headers
        return (*headers, self._keys[provider])

    def __repr__(self) -> str:  # never the keys
        return f"<Purse of {len(self._keys)}>"


def passed_on(headers: Headers) -> bool:
    """Whether a reverse proxy forwarded the request: then it may come from anywhere."""
    return any(name in _PASSED_ON for name, _ in headers)


def _from_foreign_page(headers: Headers) -> bool:
    for name, value in headers:
        if name == "sec-fetch-site" and value.strip().lower() not in ("same-origin", "none"):
            return True
        if name == "origin" and not _is_local(value):
            return True
    return False


def _is_local(origin: str) -> bool:
    try:
        return urlsplit(origin.strip()).hostname in LOCAL
    except ValueError:
        return False
