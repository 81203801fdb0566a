"""The prompt cache: which prefixes a body marks, and which of them are stored."""

from hashlib import sha256
from typing import Any, NamedTuple

import msgspec

from carpool.mock.anthropic.models import ModelSpec
from carpool.mock.core.blocks import Body, blocks, canonical, tokens_of, unmarked
from carpool.mock.core.errors import invalid

TTL = {"5m": 300.0, "1h": 3600.0}
MAX_BREAKPOINTS = 4
LOOKBACK = 20  # positions that are searched, the breakpoint included
_MESSAGE_LEVEL = ("tool_choice", "thinking", "output_config", "speed")


class Breakpoint(NamedTuple):
    position: int
    ttl: str


class CachePlan(msgspec.Struct, frozen=True):
    """A body's prefixes: `keys[i]` and `tokens[i]` name and measure the one that ends with block i."""

    keys: list[bytes]
    tokens: list[int]
    breakpoints: list[Breakpoint]


class CacheUse(NamedTuple):
    read: int
    write_5m: int
    write_1h: int


class _Entry:
    __slots__ = ("expires", "readable", "ttl")

    def __init__(self, ttl: str) -> None:
        self.ttl = ttl
        self.readable = float("inf")
        self.expires = float("-inf")


def plan_cache(body: Body, spec: ModelSpec) -> CachePlan | None:
    """The body's plan, None when nothing is marked; raises the provider's 400 for markers that break the rules."""
    keys, tokens, marks = _walk(body, spec)
    marks = _with_automatic(body.get("cache_control"), marks, len(keys) - 1)
    if len(marks) > MAX_BREAKPOINTS:
        raise invalid(f"A maximum of 4 blocks with cache_control may be provided. Found {len(marks)}.")
    ttls = [mark.ttl for mark in marks]
    if "5m" in ttls and "1h" in ttls[ttls.index("5m") :]:
        raise invalid("a ttl='1h' cache_control block must not come after a ttl='5m' cache_control block.")
    # A prefix below the model's minimum is not cached, without an error.
    kept = [mark for mark in marks if tokens[mark.position] >= spec.min_cacheable]
    return CachePlan(keys, tokens, kept) if kept else None


def _walk(body: Body, spec: ModelSpec) -> tuple[list[bytes], list[int], list[Breakpoint]]:
    keys: list[bytes] = []
    tokens: list[int] = []
    marks: list[Breakpoint] = []
    key, total, in_messages = spec.id.encode(), 0, False
    for position, (level, block) in enumerate(blocks(body)):
        if level == "messages" and not in_messages:
            # These settings change what follows the system prompt, so they belong to the messages' keys only.
            key += canonical([body.get(name) for name in _MESSAGE_LEVEL])
            in_messages = True
        key = sha256(key + canonical(unmarked(block))).digest()[:16]
        total += tokens_of(block)
        keys.append(key)
        tokens.append(total)
        if isinstance(block, dict) and block.get("cache_control") is not None:
            marks.append(Breakpoint(position, _ttl(block["cache_control"])))
    return keys, tokens, marks


def _with_automatic(control: Any, marks: list[Breakpoint], last: int) -> list[Breakpoint]:
    if control is None:
        return marks
    ttl = _ttl(control)
    if len(marks) == MAX_BREAKPOINTS:
        raise invalid("cache_control: automatic caching needs one of the 4 breakpoints, and all are in use.")
    if marks and marks[-1].position == last:
        if marks[-1].ttl != ttl:
            raise invalid("cache_control: the last block has an explicit cache_control with a different ttl.")
        return marks
    return [*marks, Breakpoint(last, ttl)]


def _ttl(control: Any) -> str:
    ttl = control.get("ttl", "5m") if isinstance(control, dict) else None
    if ttl not in TTL or control.get("type") != "ephemeral":
        raise invalid("cache_control: expected {'type': 'ephemeral', 'ttl': '5m' or '1h'}.")
    return str(ttl)


class PromptCache:
    """The stored prefixes of one workspace on one surface."""

    def __init__(self) -> None:
        self._entries: dict[bytes, _Entry] = {}
        self._sweep_at = 1024

    def use(self, plan: CachePlan, start: float, begins: float, may_hit: bool = True) -> CacheUse:
        """One request's cache traffic: it starts at `start`; after `begins` others can read what it wrote."""
        hit = self._longest_hit(plan, start) if may_hit else None
        read = done = plan.tokens[hit] if hit is not None else 0
        written = {"5m": 0, "1h": 0}
        for position, ttl in plan.breakpoints:
            if hit is not None and position <= hit:
                self._refresh(plan.keys[position], start)
                continue
            written[ttl] += plan.tokens[position] - done
            done = plan.tokens[position]
            self._store(plan.keys[position], ttl, start, begins)
        if hit is not None:
            self._refresh(plan.keys[hit], start)
        return CacheUse(read, written["5m"], written["1h"])

    def _longest_hit(self, plan: CachePlan, start: float) -> int | None:
        for position, _ in reversed(plan.breakpoints):
            for candidate in range(position, max(-1, position - LOOKBACK), -1):
                entry = self._entries.get(plan.keys[candidate])
                if entry is not None and entry.readable < start < entry.expires:
                    return candidate
        return None

    def _refresh(self, key: bytes, start: float) -> None:
        entry = self._entries.get(key)
        if entry is not None and entry.readable < start < entry.expires:
            entry.expires = max(entry.expires, start + TTL[entry.ttl])

    def _store(self, key: bytes, ttl: str, start: float, begins: float) -> None:
        entry = self._entries.get(key)
        if entry is None or entry.expires <= start:
            self._sweep(start)
            entry = self._entries[key] = _Entry(ttl)
        entry.ttl = max(entry.ttl, ttl, key=TTL.__getitem__)
        entry.readable = min(entry.readable, begins)
        entry.expires = max(entry.expires, start + TTL[ttl])

    def _sweep(self, now: float) -> None:
        """Drops expired entries, rarely enough that the cost per store stays constant on average."""
        if len(self._entries) >= self._sweep_at:
            self._entries = {key: entry for key, entry in self._entries.items() if entry.expires > now}
            self._sweep_at = max(1024, 2 * len(self._entries))
