"""Which prefixes of prompts a provider probably has in its cache: where, for how long, how large.

An entry counts from the response to the request that wrote it, since nobody can read it earlier. Its life counts from
the start of that request, and every read renews it. The index never asks the provider: it follows what was sent, and
corrects itself by the `usage` of the answers:

- A prefix that was expected to be read, and was not, is removed.
- A read that was not expected reveals an entry, say of another program with the same key.
- What is below the model's minimum is not written, so it is not entered either.

The cache belongs to a workspace at the provider. Everything here has a `scope`: one number for each credential, or for
all that share a workspace, if the config says so. Equal prompts of two scopes have nothing in common.

A provider with marks looks for the longest stored prefix that ends at a mark or at one of the 19 positions before it,
and writes at marks only. An implicit cache stores the whole prompt, and finds any prefix of it.

An entry is one item of a `dict[int, int]`: 59 bits of a hash and one for the surface, and a number with expiry, tokens
and life. That is 106 bytes. There are two generations instead of an order of use: when the younger one is full, the
older one is forgotten, and what was used meanwhile is in the younger one.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from itertools import chain as chained
from typing import Final, NamedTuple

from carpool.core.model import PromptChain, Usage

MAX_PREFIXES: Final = 1_000_000
LOOKBACK: Final = 20  # positions that a provider searches from each mark, the mark included
IMPLICIT_LOOKBACK: Final = 64  # positions searched from the end of a prompt that is cached implicitly
IMPLICIT_TOKENS: Final = 1024  # a shorter prompt is not cached implicitly
SAME: Final = 0.02  # token counts that differ by less mean the same prefix
DEFAULT_TTL: Final = "5m"
IMPLICIT_TTL: Final = "30m"
LIVES: Final = {DEFAULT_TTL: 300, "1h": 3600, IMPLICIT_TTL: 1800, "12h": 43_200}
_TTLS: Final = tuple(LIVES)
_HASH: Final = (1 << 59) - 1
_TOKENS: Final = (1 << 22) - 1


class Surface(IntEnum):
    """Where a cache lives. Synchronous requests and batches do not share one reliably."""

    SYNCHRONOUS = 0
    BATCH = 1


class WarmPrefix(NamedTuple):
    """The longest prefix of a prompt that a surface probably has."""

    position: int  # its index in the chain
    tokens: int
    expires: float
    ttl: str


class _Entry(NamedTuple):
    """A stored prefix of a chain, unpacked."""

    position: int
    key: int
    expires: int
    tokens: int
    ttl: str

    @property
    def renewed(self) -> int:
        """When it was written or read last."""
        return self.expires - LIVES[self.ttl]


class PrefixIndex:
    """The caller passes the time."""

    def __init__(self, most: int = MAX_PREFIXES) -> None:
        self._generation = most // 2
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._known: set[int] = set()  # scopes and surfaces with entries: many clients never use batches

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def lookup(self, scope: int, chain: PromptChain, surface: Surface, now: float) -> WarmPrefix | None:
        """The longest prefix that a request with these marks would read; None if it would read nothing."""
        if scope << 1 | surface not in self._known:
            return None
        young, old, positions = self._young, self._old, chain.positions
        for index in _searched(chain):
            key = (hash((scope, positions[index])) & _HASH) << 1 | surface
            value = young.get(key) or old.get(key)
            if value is not None and (expires := value >> 24) > now:
                return WarmPrefix(index, value >> 2 & _TOKENS, expires, _TTLS[value & 3])
        return None

    def answered(
        self, scope: int, chain: PromptChain, surface: Surface, started: float, usage: Usage, least: int = 0
    ) -> None:
        """A request that was sent at `started` was answered: what it read and wrote. A prefix of fewer tokens than
        `least` is not stored, whatever marks it."""
        total, read = usage.total_input, usage.cache_read_tokens
        if not total:
            return
        known = [
            entry
            for index in _searched(chain)
            if (entry := self._entry(scope, chain, surface, index)) is not None and entry.expires > started
        ]
        hit = self._hit(known, chain, total, read) if read else 0
        for entry in known:
            if entry.position > hit and entry.renewed <= started:  # it was there to be read, and was not
                self._young.pop(entry.key, None)
                self._old.pop(entry.key, None)
            elif entry.position <= hit:
                self._renew(entry, started, read if entry.position == hit else entry.tokens)
        if hit and all(entry.position != hit for entry in known):
            self._put(scope, chain, surface, hit, started, read, _ttl_at(chain, hit))
        self._enter_writes(
            scope, chain, surface, started, usage, hit, max(least, IMPLICIT_TOKENS if chain.implicit else 0)
        )

    def _hit(self, known: list[_Entry], chain: PromptChain, total: int, read: int) -> int:
        """The position up to which the request read."""
        for entry in known:
            if abs(entry.tokens - read) <= SAME * read:
                return entry.position
        target = read / total * chain.size(-1)
        return min(_searched(chain), key=lambda index: abs(chain.size(index) - target), default=0)

    def _enter_writes(
        self, scope: int, chain: PromptChain, surface: Surface, started: float, usage: Usage, hit: int, least: int
    ) -> None:
        total, written = usage.total_input, usage.cache_write_5m_tokens + usage.cache_write_1h_tokens
        last = len(chain.positions) - 1
        if chain.implicit:
            writes = {chain.root, chain.parent or 0, last} if total >= least else set()
            ttl = IMPLICIT_TTL if written else DEFAULT_TTL  # models whose writes cost nothing forget sooner
            places = [(index, ttl) for index in writes]
        else:
            places = [(mark.position, mark.ttl) for mark in chain.marks] if written else []
        size = chain.size(-1)
        for index, ttl in places:
            if index > max(hit, 0):
                tokens = total * chain.size(index) // size
                if tokens >= least:
                    self._put(scope, chain, surface, index, started, tokens, ttl)

    # ------------------------------------------------------------ entries

    def _entry(self, scope: int, chain: PromptChain, surface: Surface, index: int) -> _Entry | None:
        key = (hash((scope, chain.positions[index])) & _HASH) << 1 | surface
        value = self._young.get(key) or self._old.get(key)
        return None if value is None else _Entry(index, key, value >> 24, value >> 2 & _TOKENS, _TTLS[value & 3])

    def _renew(self, entry: _Entry, started: float, tokens: int) -> None:
        expires = max(entry.expires, int(started) + LIVES[entry.ttl])
        self._write(entry.key, expires, tokens, entry.ttl)

    def _put(
        self, scope: int, chain: PromptChain, surface: Surface, index: int, started: float, tokens: int, ttl: str
    ) -> None:
        """A stored prefix keeps the longer of two lives."""
        entry, ttl = self._entry(scope, chain, surface, index), ttl if ttl in LIVES else DEFAULT_TTL
        expires = int(started) + LIVES[ttl]
        if entry is not None and entry.expires > expires:
            expires, ttl = entry.expires, max(ttl, entry.ttl, key=LIVES.__getitem__)
        self._known.add(scope << 1 | surface)
        self._write((hash((scope, chain.positions[index])) & _HASH) << 1 | surface, expires, tokens, ttl)

    def _write(self, key: int, expires: int, tokens: int, ttl: str) -> None:
        if len(self._young) >= self._generation and key not in self._young:
            self._old, self._young = self._young, {}
        self._old.pop(key, None)
        self._young[key] = expires << 24 | min(tokens, _TOKENS) << 2 | _TTLS.index(ttl)


def _searched(chain: PromptChain) -> Iterable[int]:
    """The positions at which the provider looks for a stored prefix, the longest first. The first position of a chain
    has no content."""
    last = len(chain.positions) - 1
    if chain.implicit:
        first = max(1, last - IMPLICIT_LOOKBACK + 1)
        window = range(last, first - 1, -1)
        return (*window, chain.root) if 0 < chain.root < first else window
    below, windows = last + 1, []
    for mark in reversed(chain.marks):
        first = max(1, mark.position - LOOKBACK + 1)
        windows.append(range(min(mark.position, below - 1), first - 1, -1))
        below = min(below, first)
    return chained.from_iterable(windows)


def _ttl_at(chain: PromptChain, index: int) -> str:
    """The life that a revealed entry probably has: that of the mark which found it."""
    if chain.implicit:
        return DEFAULT_TTL
    return next((mark.ttl for mark in chain.marks if mark.position >= index), DEFAULT_TTL)
