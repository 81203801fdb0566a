"""A provider's prompt cache, billed as the provider bills it: which tokens a request reads, writes, or pays in full.

Anthropic caches what a request *marks*. Three positions of the prompt divide its tokens into classes:

    0 ........ A ........ B ........ C ........ end
      read       1h write   5m write   full price

A is the end of the longest stored prefix that a mark finds, B the last 1h mark and C the last 5m mark behind A. A mark
up to A costs nothing and extends the life of what it marks, where that is stored; so does the read at A. An entry
becomes readable when the response that writes it begins, and lives from the *start* of the request that wrote or read
it last: a slow answer eats into its own entry's life. So the members of a cold batch read nothing of each other.

A mark looks back a limited number of blocks. A trace has nodes instead of blocks: a turn appends at least two blocks
(the answer and the next input), so 19 earlier blocks are taken for 9 earlier nodes. Clients that send many blocks a
turn are seen a little too favourably, and no policy here is helped more than another.

OpenAI caches every prompt without a mark, and reads the longest beginning that it has seen, in steps of 128 tokens. In
a trace the beginnings are its nodes. Older models write for nothing; since GPT-5.6 a write costs a fee, for every token
that was not read, and a request may decline the cache: here that is a purchase without a mark. Models before GPT-5 have
no cache in batches. How long unmarked entries live is documented as 30 minutes for the newer models only, and taken for
the older ones too.

Synchronous and batch traffic don't see each other's entries; flex shares the synchronous ones. An entry belongs to one
model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from carpool.core.errors import Misuse
from carpool.core.model import Lane, Usage
from carpool.core.ports import Dialect
from carpool.planners.routing import Capabilities
from carpool.sim.money.model import ROOT, Node, RunPurchase, Ttl

Surface = Literal["synchronous", "batch"]


@dataclass(frozen=True, slots=True)
class CacheRules:
    """How a provider caches the prompts of one model."""

    lives: Mapping[Ttl, float]  # seconds
    minimum: int = 0  # a shorter prefix is not cached, and nobody is told
    lookback: int = 9  # how many nodes before a mark are looked at
    implicit: bool = False  # every prompt is cached, marked or not
    step: int = 1  # reads are rounded down to a multiple of it
    fee: bool = True  # writes have a price of their own
    batches: bool = True  # whether batches have a cache


_MARKED = CacheRules(lives={"5m": 300.0, "1h": 3600.0})
_IMPLICIT = CacheRules(lives={"5m": 1800.0, "1h": 1800.0}, implicit=True, step=128)
_FREE = replace(_IMPLICIT, fee=False)
_RULES: tuple[tuple[str, str, CacheRules], ...] = (  # dialect, model; the first that matches applies
    ("openai", "gpt-6*", _IMPLICIT),
    ("openai", "gpt-5.6*", _IMPLICIT),
    ("openai", "gpt-5*", _FREE),
    ("openai", "*", replace(_FREE, batches=False)),
    ("*", "*", _MARKED),
)


def cache_rules(dialect: Dialect, model: str) -> CacheRules:
    rules = next(
        row for name, pattern, row in _RULES if fnmatchcase(dialect.name, name) and fnmatchcase(model, pattern)
    )
    return replace(rules, minimum=Capabilities().of(dialect.name, dialect, model).cacheable_tokens or 0)


def surface(lane: Lane) -> Surface:
    return "batch" if lane is Lane.BATCH else "synchronous"


class _Entry:
    __slots__ = ("expires", "readable", "ttl")

    def __init__(self) -> None:
        self.ttl: Ttl = "5m"
        self.readable = float("inf")
        self.expires = float("-inf")


_Entries = dict[int, _Entry]


class CacheModel:
    """The stored prefixes of one workspace. Purchases are to be given in the order of their start."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._entries: dict[tuple[Surface, str], _Entries] = {}

    def use(self, purchase: RunPurchase, model: str, rules: CacheRules) -> Usage:
        """The tokens of one purchase by class, after its traffic with the cache."""
        total = self._nodes[purchase.node].tokens
        entries = self._entries.setdefault((surface(purchase.lane), model), {})
        if rules.implicit:
            read, written, written_1h = self._use_unmarked(entries, purchase, rules), 0, 0
            if rules.fee and purchase.ttl is not None and total >= rules.minimum:
                written = total // rules.step * rules.step - read
        else:
            read, written, written_1h = self._use_marked(entries, purchase, rules)
        fresh = total - read - written - written_1h
        speed = "flex" if purchase.lane is Lane.FLEX else None  # as the answer states it
        return Usage(fresh, purchase.output_tokens, read, written, written_1h, speed=speed)

    # -- marked

    def _use_marked(self, entries: _Entries, purchase: RunPurchase, rules: CacheRules) -> tuple[int, int, int]:
        marks = self._marks(purchase, rules.minimum)
        start, nodes = purchase.starts, self._nodes
        hit = self._longest_hit(entries, [node for node, _ in reversed(marks)], start, rules.lookback)
        read = done = 0 if hit == ROOT else nodes[hit].tokens
        written: dict[Ttl, int] = {"5m": 0, "1h": 0}
        for node, ttl in marks:
            tokens = nodes[node].tokens
            if tokens <= read:
                _refresh(entries.get(node), start, rules)
                continue
            written[ttl] += tokens - done
            done = tokens
            _store(entries, node, ttl, purchase, rules)
        _refresh(entries.get(hit), start, rules)
        return read, written["5m"], written["1h"]

    def _marks(self, purchase: RunPurchase, minimum: int) -> list[tuple[int, Ttl]]:
        """The marks that count, in their order: those below the minimum are ignored."""
        if purchase.system_ttl == "5m" and purchase.ttl == "1h" and purchase.system != ROOT:
            raise Misuse("A mark of one hour comes after one of 5 minutes: the provider refuses that.")
        marks: list[tuple[int, Ttl]] = []
        if purchase.system_ttl and purchase.system not in (ROOT, purchase.node):
            marks.append((purchase.system, purchase.system_ttl))
        if purchase.ttl:
            marks.append((purchase.node, purchase.ttl))
        return [mark for mark in marks if self._nodes[mark[0]].tokens >= minimum]

    def _longest_hit(self, entries: _Entries, marked: Sequence[int], start: float, lookback: int) -> int:
        for node in marked:
            for _ in range(lookback + 1):
                if node == ROOT:
                    break
                entry = entries.get(node)
                if entry is not None and entry.readable < start < entry.expires:
                    return node
                node = self._nodes[node].parent
        return ROOT

    # -- unmarked

    def _use_unmarked(self, entries: _Entries, purchase: RunPurchase, rules: CacheRules) -> int:
        if purchase.lane is Lane.BATCH and not rules.batches:
            return 0
        if rules.fee and purchase.ttl is None:  # declined
            return 0
        read, node = 0, purchase.node
        while node != ROOT and (tokens := self._nodes[node].tokens) >= rules.minimum:
            entry = entries.get(node)
            if not read and entry is not None and entry.readable < purchase.starts < entry.expires:
                read = tokens // rules.step * rules.step
            _store(entries, node, "5m", purchase, rules)
            node = self._nodes[node].parent
        return read


def _refresh(entry: _Entry | None, start: float, rules: CacheRules) -> None:
    if entry is not None and entry.readable < start < entry.expires:
        entry.expires = max(entry.expires, start + rules.lives[entry.ttl])


def _store(entries: _Entries, node: int, ttl: Ttl, purchase: RunPurchase, rules: CacheRules) -> None:
    entry = entries.get(node)
    if entry is None or entry.expires <= purchase.starts:
        entry = entries[node] = _Entry()
    if ttl == "1h":
        entry.ttl = ttl
    entry.readable = min(entry.readable, purchase.begins)
    entry.expires = max(entry.expires, purchase.starts + rules.lives[ttl])
