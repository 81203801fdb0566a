"""What the hindsight bound knows in advance: which prefixes are always readable, and what a token costs where.

A prefix counts as always readable if several sessions of one model share it, or if it is a session's tools and system
prompt. In truth somebody writes it first and pays at least the full price of its tokens, where the bound lets everybody
read them. So `shared_tokens`, at `saving` each, are added to the bound once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from math import lcm
from typing import NamedTuple

from carpool import dialects
from carpool.core.errors import ConfigError
from carpool.core.model import Lane
from carpool.core.prices import Rates
from carpool.sim.money.billing import PriceTable
from carpool.sim.money.cache import cache_rules
from carpool.sim.money.hindsight import Caching, Way
from carpool.sim.money.labels import NEVER, Subtrees
from carpool.sim.money.model import ROOT, Trace, TraceSession


class TracePrefixes:
    def __init__(self, trace: Trace, minimum: Mapping[str, int]) -> None:
        self._nodes = trace.nodes
        self.tree = Subtrees([node.parent for node in trace.nodes])
        self._always = {model: self._find_always(trace, model, least) for model, least in minimum.items()}

    def always(self, model: str, node: int) -> int:
        """How many tokens of a prompt that ends at this node are always readable."""
        always = self._always[model]
        return next((self._nodes[one].tokens for one in self.tree.path(node) if one in always), 0)

    def shared_tokens(self, model: str, step: int) -> int:
        """All tokens that are always readable, each once. Reads are rounded down, so a step less for each prefix."""
        total = 0
        for node in self._always[model]:
            parent = self._nodes[node].parent
            before = self.always(model, parent) if parent != ROOT else 0
            total += max(0, self._nodes[node].tokens - before - (step - 1))
        return total

    def jumps(self, session: TraceSession) -> tuple[int, ...]:
        """Where the prompts of those turns end that don't continue the turn before."""
        ends = [turn.node for turn in session.turns]
        return tuple(after for before, after in pairwise(ends) if self._nodes[after].parent != before)

    def _find_always(self, trace: Trace, model: str, least: int) -> frozenset[int]:
        """Walks up from each prompt until the rest of its path is known for the same session."""
        user: dict[int, int] = {}
        systems = {session.system for session in trace.sessions if session.model == model}
        found: set[int] = set()
        for number, session in enumerate(trace.sessions):
            if session.model != model:
                continue
            for turn in session.turns:
                for node in self.tree.path(turn.node):
                    known = user.get(node)
                    if known == number:
                        break
                    user[node] = number
                    if known is not None or node in systems:
                        found.add(node)
        return frozenset(node for node in found if self._nodes[node].tokens >= least)


class _Tokens(NamedTuple):
    """Prices per token on one lane, as integers of the model's scale."""

    fresh: int
    output: int
    read: int
    writes: tuple[int, ...]  # for each life, the shortest first; empty: no cache


class ModelPrices:
    """One model's prices and cache rules."""

    def __init__(self, provider: str, model: str, table: PriceTable, lanes: Sequence[Lane]) -> None:
        dialect = dialects.get(provider)
        self.rules = cache_rules(dialect, model)
        cards = {lane: card for lane in lanes if (card := table.card(dialect, model, lane)) is not None}
        if Lane.NOW not in cards:
            raise ConfigError(f"Nobody knows what {model} costs: leave it out.")
        self.scale = lcm(*(rates.scale for card in cards.values() for _, rates in card))
        self._cards = {
            lane: [(above, self._tokens(lane, rates)) for above, rates in card] for lane, card in cards.items()
        }
        every = [tokens for card in self._cards.values() for _, tokens in card]
        self.saving = Fraction(max(0, min(one.fresh - one.read if one.writes else 0 for one in every)), self.scale)
        self._values = (self._value(Lane.NOW, Lane.FLEX), self._value(Lane.BATCH))

    def _tokens(self, lane: Lane, rates: Rates) -> _Tokens:
        fresh, output, read, short, long, _, scale = rates
        if fresh is None or output is None:
            raise ConfigError("A price per input or output token is unknown: leave that model out.")
        finer, rules = self.scale // scale, self.rules
        if read is None or (lane is Lane.BATCH and not rules.batches):
            return _Tokens(fresh * finer, output * finer, fresh * finer, ())
        writes: tuple[int, ...] = (fresh * finer,)
        if rules.fee:
            writes = tuple(rate * finer for rate in ((short,) if rules.implicit else (short, long)) if rate is not None)
        return _Tokens(fresh * finer, output * finer, read * finer, writes)

    def _value(self, *lanes: Lane) -> int:
        rows = [tokens for lane in lanes for _, tokens in self._cards.get(lane, ())]
        return max([write - one.read for one in rows for write in one.writes], default=0)

    def of_size(self, tokens: int) -> Mapping[Lane, _Tokens]:
        """What a token of a prompt of this size costs: a long one may be in a dearer tier."""
        return {lane: next(row for above, row in card if tokens > above) for lane, card in self._cards.items()}

    def way(self, price: _Tokens, surface: int, takes: float, reads: float, lives: float) -> Way:
        return Way(surface, takes, reads, lives, *price)

    def caching(self, trace: Trace, jumps: tuple[int, ...], *, pings_in_batches: bool) -> Caching:
        rules, nodes = self.rules, trace.nodes

        def ping(surface: int, node: int) -> int:
            if surface == 1 and not pings_in_batches:
                return NEVER
            tokens = nodes[node].tokens
            offered = self.of_size(tokens)
            lanes = [Lane.BATCH] if surface == 1 else [lane for lane in (Lane.NOW, Lane.FLEX) if lane in offered]
            read = tokens // rules.step * rules.step
            return min(read * offered[lane].read + (tokens - read) * offered[lane].fresh for lane in lanes)

        return Caching(
            lives=(rules.lives["5m"],) if rules.implicit else (rules.lives["5m"], rules.lives["1h"]),
            minimum=rules.minimum,
            step=rules.step,
            implicit=rules.implicit,
            optional=rules.fee,
            tokens=lambda node: nodes[node].tokens,
            values=self._values,
            jumps=jumps,
            ping=ping,
        )
