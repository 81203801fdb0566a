"""API keys and the headers that carry them. The same key in a different header is the same credential."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from carpool.core.model import Headers

BEARER: Final = "authorization"
KEY_HEADERS: Final = frozenset({BEARER, "api-key", "x-api-key", "x-goog-api-key"})


def _header(name: str, key: str) -> tuple[str, str]:
    return name, f"Bearer {key}" if name == BEARER else key


def bare(name: str, value: str) -> str | None:
    """Returns the key in a key header; None for an authorization scheme other than Bearer."""
    if name != BEARER:
        return value.strip()
    return value[7:].strip() if value[:7].lower() == "bearer " else None


def the_key(headers: Headers) -> str | None:
    """Returns the key in these headers if there is exactly one, possibly in several headers; None if there is none, or
    if the headers carry different keys."""
    keys = {bare(name, value) for name, value in headers if name in KEY_HEADERS} - {""}
    return keys.pop() if len(keys) == 1 else None


def sent_in(names: Sequence[str], key: str) -> list[Headers]:
    """Returns one set of headers per name, each carrying the key."""
    return [(_header(name, key),) for name in names]


def plain(secret: Headers) -> Headers:
    """Returns the secret in normal form: the same headers, the key written the same way, empty key headers removed."""
    key = the_key(secret)
    if key is None:
        return secret
    names = {name for name, value in secret if name in KEY_HEADERS and bare(name, value)}
    return _in_all(sorted(names), key) + _other_headers(secret)


def forms(secret: Headers, names: Sequence[str]) -> list[Headers]:
    """Returns every form of a secret: its key in each of the named headers, in all of them at once, and as it was sent.

    Headers that select who pays are kept in each form. A secret with several different keys has only its own form."""
    key = the_key(secret)
    if key is None:
        return [secret]
    key_headers = [*sent_in(names, key), _in_all(sorted(names), key)]
    return list(dict.fromkeys((*[headers + _other_headers(secret) for headers in key_headers], plain(secret))))


def _in_all(names: Sequence[str], key: str) -> Headers:
    return tuple([_header(name, key) for name in names])


def _other_headers(secret: Headers) -> Headers:
    return tuple([pair for pair in secret if pair[0] not in KEY_HEADERS])
