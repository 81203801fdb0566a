"""Which of a client's headers travel with its call to Anthropic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

from carpool.dialects.headers import DROPPED, DROPPED_PREFIXES, check_encoding, is_positive
from carpool.model import Headers

_NAME = itemgetter(0)
_NEVER_IN_A_BATCH = ("fast-mode", "research-preview-2026-02")  # betas
SECRETS = frozenset({"authorization", "x-api-key"})

_DROPPED = DROPPED | {"anthropic-dangerous-direct-browser-access"}
_DROPPED_PREFIXES = (*DROPPED_PREFIXES, "x-claude-code-")


class Sorted(NamedTuple):
    """A client's headers, told apart."""

    travelling: Headers  # goes upstream with the call, sorted by name
    secret: Headers
    betas: tuple[str, ...]  # each once, in the client's order; `travelling` has them as one header
    retry: bool  # the client's SDK says that it sends this again
    unbatchable: tuple[str, ...]  # why calls with such headers may not ride a batch, in sentences

    def __repr__(self) -> str:  # never the secret
        return f"<Sorted {len(self.travelling)} headers>"


@lru_cache(maxsize=256)  # a client sends the same ones with every call
def sort(headers: Headers) -> Sorted:
    """Raises `BadCall` for headers that no body here can have."""
    check_encoding(headers)
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
            retry = retry or is_positive(value)
        elif name == "connection":
            nominated += tuple(listed.strip().lower() for listed in value.split(","))
        elif name not in _DROPPED and not name.startswith(_DROPPED_PREFIXES):
            kept.append((name, value.strip()))
    if nominated:  # `connection` may declare any header to be hop-by-hop
        kept = [header for header in kept if header[0] not in nominated]
    if betas:
        kept.append(("anthropic-beta", ",".join(betas)))
    kept.sort(key=_NAME)  # stable: repeated names stay in the client's order
    return Sorted(tuple(kept), tuple(secret), tuple(betas), retry, tuple(_obstacles(kept, betas)))


def _obstacles(kept: list[tuple[str, str]], betas: Iterable[str]) -> Iterator[str]:
    for beta in betas:
        if beta.lower().replace("_", "-").startswith(_NEVER_IN_A_BATCH):
            yield f"A batch may not use the beta {beta}."
    if not any(value for name, value in kept if name == "anthropic-version"):
        yield "A batch needs an anthropic-version header."
