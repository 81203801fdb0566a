"""Keys of the house: a provider's own key for clients on this machine that send none.

A web page can make a browser post here, though it can't read the answer. It brings no key, so with one lent to it, it
would spend money: whoever comes from a page of another origin gets none.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from carpool.model import Headers

LOCAL = frozenset({"127.0.0.1", "localhost", "::1"})
_BEARER = ("authorization", "Bearer ")
_FORMS = {
    "anthropic": (("x-api-key", ""), _BEARER),
    "openai": (_BEARER,),
    "azure": (("api-key", ""), _BEARER),
}


def key_header(dialect: str, key: str, relative: str = "") -> tuple[str, str]:
    """How a key is sent to a provider of this dialect, and of this relative where it has a way of its own."""
    return forms(dialect, key, relative)[0][0]


def forms(dialect: str, key: str, relative: str = "") -> list[Headers]:
    """Every way in which clients send such a key, the usual one first."""
    return [((name, before + key),) for name, before in _FORMS.get(relative, _FORMS[dialect])]


_PASSED_ON = frozenset({"forwarded", "via", "x-forwarded-for", "x-real-ip"})


class Purse:
    """The keys that may be lent, by provider."""

    def __init__(self, keys: Mapping[str, tuple[str, str]]) -> None:
        self._keys = keys

    def lend(self, provider: str, headers: Headers, carries_key: bool) -> Headers:
        if carries_key or provider not in self._keys or _from_a_page(headers) or passed_on(headers):
            return headers
        return (*headers, self._keys[provider])

    def __repr__(self) -> str:  # never the keys
        return f"<Purse of {len(self._keys)}>"


def passed_on(headers: Headers) -> bool:
    """Whether a request bears the marks of a server in front: then it may come from anywhere."""
    return any(name in _PASSED_ON for name, _ in headers)


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
