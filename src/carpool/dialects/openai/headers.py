"""Which of a client's headers travel with its call to OpenAI."""

from __future__ import annotations

from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

from carpool.dialects.headers import DROPPED, DROPPED_PREFIXES, check_encoding, is_positive
from carpool.model import Headers

_NAME = itemgetter(0)

# Organisation and project say who pays: calls that differ in them are calls of different credentials.
SECRETS = frozenset({"authorization", "api-key", "openai-organization", "openai-project"})
_KEYS = frozenset({"authorization", "api-key"})
# What Codex says of its session, and each request of itself.
_DROPPED = DROPPED | {"originator", "session-id", "session_id", "thread-id", "conversation_id", "x-openai-subagent"}
_DROPPED_PREFIXES = (*DROPPED_PREFIXES, "x-codex-")


class Sorted(NamedTuple):
    """A client's headers, told apart."""

    travelling: Headers  # goes upstream with the call, sorted by name
    secret: Headers
    retry: bool  # the client's SDK says that it sends this again

    def __repr__(self) -> str:  # never the secret
        return f"<Sorted {len(self.travelling)} headers>"


@lru_cache(maxsize=256)  # a client sends the same ones with every call
def sort(headers: Headers) -> Sorted:
    """Raises `BadCall` for headers that no body here can have."""
    check_encoding(headers)
    kept: list[tuple[str, str]] = []
    retry = False
    nominated: tuple[str, ...] = ()
    for name, value in headers:
        if name == "x-stainless-retry-count":
            retry = retry or is_positive(value)
        elif name == "connection":
            nominated += tuple(listed.strip().lower() for listed in value.split(","))
        elif name not in SECRETS and name not in _DROPPED and not name.startswith(_DROPPED_PREFIXES):
            kept.append((name, value.strip()))
    if nominated:  # `connection` may declare any header to be hop-by-hop
        kept = [header for header in kept if header[0] not in nominated]
    kept.sort(key=_NAME)  # stable: repeated names stay in the client's order
    return Sorted(tuple(kept), secret(headers), retry)


def secret(headers: Headers) -> Headers:
    """The client's credential; an organisation alone is none."""
    found = tuple(pair for pair in headers if pair[0] in SECRETS)
    return found if any(name in _KEYS for name, _ in found) else ()
