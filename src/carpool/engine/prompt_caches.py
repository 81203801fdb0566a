"""What the engine knows of the providers' prompt caches: it keeps the index of prefixes up to date.

A call that goes straight to `now` or `flex` carries the chain of its prompt until it is answered. A call on disk leaves
its chain here until its batch is collected; of very many, and of those that another process admitted, the chain is not
known, and the index does not hear of their prefixes.

Credentials are kept apart. Those of a provider with a `workspace` in the config are known to share one cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b

from carpool.core.bounded import BoundedMap
from carpool.core.model import Call, Entry, Lane, PromptChain, Usage
from carpool.core.upstream import Upstream
from carpool.engine.events import Stats
from carpool.planners.caching.index import PrefixIndex, Surface

MAX_WAITING = 10_000  # chains of calls on disk; that of a long conversation takes 5 KB


class PromptCaches:
    def __init__(self, upstreams: Mapping[str, Upstream], stats: Stats) -> None:
        self.index = PrefixIndex()
        self._upstreams = upstreams
        self._stats = stats
        self._waiting: BoundedMap[int, tuple[int, PromptChain]] = BoundedMap(MAX_WAITING)
        self.scope = lru_cache(maxsize=8192)(self._scope_of)

    def _scope_of(self, provider: str, credential: str) -> int:
        upstream = self._upstreams[provider]
        whose = (upstream.base_url, upstream.workspace) if upstream.workspace else (provider, credential, "")
        return int.from_bytes(blake2b("\n".join(whose).encode(), digest_size=7).digest(), "big")

    def admitted(self, call: Call, ticket: int) -> None:
        """A call is on disk, under this ticket."""
        if call.prompt is not None:
            self._waiting[ticket] = self.scope(call.provider, call.credential), call.prompt

    def answered(self, call: Call, entry: Entry) -> None:
        """A call was answered on `now` or `flex`."""
        if call.prompt is not None:
            self._answered(self.scope(call.provider, call.credential), call.prompt, entry.lane, entry.at, entry.usage)
        elif (waiting := self._waiting.pop(call.ticket, None)) is not None:  # rescued
            self._answered(*waiting, entry.lane, entry.at, entry.usage)

    def collected(self, ticket: int, sent: float, usage: Usage | None) -> None:
        """A call was answered in a batch that was sent at this time."""
        if (waiting := self._waiting.pop(ticket, None)) is not None:
            self._answered(*waiting, Lane.BATCH, sent, usage)

    def _answered(self, scope: int, prompt: PromptChain, lane: Lane, started: float, usage: Usage | None) -> None:
        if usage is None:
            return
        surface = Surface.BATCH if lane is Lane.BATCH else Surface.SYNCHRONOUS
        expected = self.index.lookup(scope, prompt, surface, started)
        self._stats.cache_expected_tokens += 0 if expected is None else expected.tokens
        self._stats.cache_read_tokens += usage.cache_read_tokens
        self.index.answered(scope, prompt, surface, started, usage)
