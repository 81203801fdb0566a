"""Keys of the house: a provider's own key for clients on this machine that send none.

A web page can make a browser post here, though it can't read the answer. It brings no key, so with one lent to it, it
would spend money: whoever comes from a page of another origin gets none.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from carpool.model import Headers

LOCAL = frozenset({"127.0.0.1", "localhost", "::1"})
_FORMS = {"anthropic": ("x-api-key", ""), "openai": ("authorization", "Bearer ")}


def key_header(dialect: str, key: str) -> tuple[str, str]:
    """How a key is sent to a provider of this dialect."""
    name, before = _FORMS[dialect]
    return name, before + key


class Purse:
    """The keys that may be lent, by provider."""

    def __init__(self, keys: Mapping[str, tuple[str, str]]) -> None:
        self._keys = keys

    def lend(self, provider: str, headers: Headers, carries_key: bool) -> Headers:
        if carries_key or provider not in self._keys or _from_a_page(headers):
            return headers
        return (*headers, self._keys[provider])

    def __repr__(self) -> str:  # never the keys
        return f"<Purse of {len(self._keys)}>"


def _from_a_page(headers: Headers) -> bool:
    for name, value in headers:
        if name == "sec-fetch-site" and value.strip().lower() not in ("same-origin", "none"):
            return True
        if name == "origin" and not _local(value):
            return True
    return False


def _local(origin: str) -> bool:
    try:
        return urlsplit(origin.strip()).hostname in LOCAL
    except ValueError:
        return False
