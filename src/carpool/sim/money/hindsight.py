"""The cheapest way through one session, for somebody who knows all its pauses and latencies in advance.

A dynamic programme over the turns of a session. For each label and each lane that a turn may take, it considers what
the request may read, and what must have been paid for that:

- a stored prefix that is alive is read, as the provider does with every marked prompt, and the rest is written;
- one that would have expired can have been written with a longer life (the difference is paid now), or kept alive by
  pings, each just before the end of its life (each is a read);
- or nothing stored is read, and nothing need have been marked.

All of it is paid as billed: read what is stored, write the rest. Three things are easier than in reality, so that the
result is below what any policy pays. They are named in `bound`: prefixes that count as always readable, marks that look
back without limit, and extra purchases that count as pings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from carpool.sim.money.labels import NEVER, Label, StoredPrefix, Subtrees, pruned, reduced

State = tuple[StoredPrefix, ...]  # what one surface stores
SOON_S = 1e-6  # sums of times are not exact


class Way(NamedTuple):
    """One way to buy a turn. Times count from the request; prices are per token, scaled to integers."""

    surface: int
    takes: float  # until the answer
    reads: float  # until it is decided what is readable
    lives: float  # from then on what it stored lives
    fresh: int
    output: int
    read: int
    writes: tuple[int, ...]  # for each life, the shortest first


class TurnChoice(NamedTuple):
    node: int
    tokens: int
    always: int  # so many of them are always readable
    output_tokens: int
    think_s: float
    ways: tuple[Way, ...]


class Caching(NamedTuple):
    """What the programme needs to know of the provider's cache and of the session's prefixes."""

    lives: tuple[float, ...]
    minimum: int
    step: int
    implicit: bool
    optional: bool  # whether a request may do without the cache
    tokens: Callable[[int], int]  # by node
    values: tuple[int, int]  # what a stored token can save at most, by surface
    jumps: tuple[int, ...]  # nodes of the turns that don't continue the turn before
    ping: Callable[[int, int], int]  # surface and node → cost

    def uses(self, node: int, tree: Subtrees) -> int:
        """How often somebody may come back to this prefix after it was continued."""
        return sum(1 for jump in self.jumps if tree.ahead[jump] and tree.within(jump, node))

    def worth(self, entry: StoredPrefix, surface: int) -> bool:
        """Whether reading it can still cost less than doing without it."""
        life = self.lives[-1]
        if entry.age < life:
            return True
        ping = self.ping(surface, entry.node)
        return ping < NEVER and entry.raises[-1] + int(entry.age // life) * ping < entry.value


class Hit(NamedTuple):
    """Something that a request may read, and what it took to have it there."""

    tokens: int
    paid: int
    entry: StoredPrefix | None  # as it was before the request


def cheapest(turns: Sequence[TurnChoice], tree: Subtrees, caching: Caching, *, limit_s: float, most: int) -> int:
    """The least cost of a session whose turns, pauses included, take at most `limit_s`."""
    rest, left = [], 0.0
    for turn in reversed(turns):
        rest.append(left)
        left += turn.think_s + min(way.takes for way in turn.ways)
    limit, timed = max(limit_s, left), limit_s < math.inf
    for turn in turns:
        tree.count(turn.node, 1)
    labels = [Label(0, 0.0, ((), ()))]
    for turn, least in zip(turns, reversed(rest), strict=True):
        tree.count(turn.node, -1)
        bought = [after for way in turn.ways for after in _buy(labels, turn, way, tree, caching)]
        in_time = [label for label in bought if label.clock + least <= limit * (1 + 1e-12)] if timed else bought
        labels = reduced(in_time, tree, most, timed=timed)
    return min(label.cost for label in labels)


def _buy(labels: Sequence[Label], turn: TurnChoice, way: Way, tree: Subtrees, caching: Caching) -> Iterable[Label]:
    """All labels after buying the turn in one way. Many leave the same in a cache, so that is worked out once."""
    bought: dict[State, list[tuple[int, State]]] = {}
    aged: dict[State, State] = {}
    passes, output = turn.think_s + way.takes, turn.output_tokens * way.output
    for label in labels:
        used, idle = label.caches[way.surface], label.caches[1 - way.surface]
        if used not in bought:
            bought[used] = list(_use(used, turn, way, tree, caching))
        if idle not in aged:
            aged[idle] = _aged(idle, passes, 1 - way.surface, tree, caching)
        for cost, after in bought[used]:
            caches = (after, aged[idle]) if way.surface == 0 else (aged[idle], after)
            yield Label(label.cost + cost + output, label.clock + passes, caches)


def _use(stored: State, turn: TurnChoice, way: Way, tree: Subtrees, caching: Caching) -> Iterable[tuple[int, State]]:
    """What the request costs without its output, and what it leaves in the cache that it uses."""
    hits = _hits(stored, turn, way, tree, caching)
    for cost, hit, raises in (_unmarked if caching.implicit else _marked)(hits, turn, way, caching):
        entries = _after(stored, hit, raises, turn, way, tree, caching)
        yield cost, _aged(entries, turn.think_s + way.takes, way.surface, tree, caching)


def _aged(entries: Iterable[StoredPrefix], passes: float, surface: int, tree: Subtrees, caching: Caching) -> State:
    older = [StoredPrefix(one.node, one.age + passes, one.raises, one.value) for one in entries]
    return pruned([one for one in older if caching.worth(one, surface)], tree)


# ------------------------------------------------------------ what can be read


def _hits(stored: State, turn: TurnChoice, way: Way, tree: Subtrees, caching: Caching) -> list[Hit]:
    """What the request may find, deepest first. It ends with what is readable without paying for it."""
    on_path = [entry for entry in stored if tree.within(turn.node, entry.node)]
    on_path.sort(key=lambda entry: -caching.tokens(entry.node))
    passes = turn.think_s + way.reads - SOON_S
    hits: list[Hit] = []
    for entry in on_path:
        tokens = caching.tokens(entry.node)
        if tokens <= turn.always:
            break
        options = _kept_alive(entry, entry.age + passes, way, caching)
        cheapest_first = sorted(options, key=lambda option: option.paid)
        if turn.node != entry.node and tree.replaces(
            turn.node, entry.node
        ):  # it is not read again, so it does not matter how it lived
            cheapest_first = cheapest_first[:1]
        free = [option for option in cheapest_first if not option.paid]
        if free:
            return [*hits, free[0]]
        hits += cheapest_first
    return [*hits, Hit(turn.always, 0, None)]


def _kept_alive(entry: StoredPrefix, age: float, way: Way, caching: Caching) -> Iterable[Hit]:
    """The ways in which it can be readable at that time: by each of the lives, and by pings."""
    tokens, ping = caching.tokens(entry.node), caching.ping(way.surface, entry.node)
    for life, raised in zip(caching.lives, entry.raises, strict=True):
        pings = 0 if age < life else 1 + int((age - life) // (caching.lives[-1] if way.surface else life))
        paid = raised + pings * ping
        if pings == 0 or ping < NEVER:
            raises = tuple(max(0, cost - raised) for cost in entry.raises)
            yield Hit(tokens, paid, StoredPrefix(entry.node, entry.age, raises, entry.value))


# ------------------------------------------------------------ what is paid, and what it leaves

Bought = tuple[int, Hit, tuple[int, ...] | None]  # cost, what was read, what the lives of the new entry cost on top


def _marked(hits: Sequence[Hit], turn: TurnChoice, way: Way, caching: Caching) -> Iterable[Bought]:
    bare = turn.always * way.read + (turn.tokens - turn.always) * way.fresh
    if turn.tokens < caching.minimum:
        yield bare, Hit(turn.always, 0, None), None
        return
    shortest = way.writes[0]
    least = NEVER
    for hit in hits:
        rest = turn.tokens - hit.tokens
        if hit.entry is None:  # nothing need be marked, until something later reads it
            yield bare, hit, tuple((write - way.fresh) * rest for write in way.writes)
            return
        least = hit.paid + hit.tokens * way.read + rest * shortest
        yield least, hit, tuple((write - shortest) * rest for write in way.writes)
    if bare < least:  # the free hit was the last one
        yield bare, Hit(turn.always, 0, None), None


def _unmarked(hits: Sequence[Hit], turn: TurnChoice, way: Way, caching: Caching) -> Iterable[Bought]:
    whole = turn.tokens // caching.step * caching.step
    if turn.tokens < caching.minimum or not way.writes:
        yield turn.tokens * way.fresh, Hit(0, 0, None), None
        return
    for hit in hits:
        read = hit.tokens // caching.step * caching.step
        cost = hit.paid + read * way.read + (whole - read) * way.writes[0] + (turn.tokens - whole) * way.fresh
        yield cost, hit, (0,)
    if caching.optional:
        always = turn.always // caching.step * caching.step
        yield always * way.read + (turn.tokens - always) * way.fresh, Hit(0, 0, None), None


def _after(
    stored: State,
    hit: Hit,
    raises: tuple[int, ...] | None,
    turn: TurnChoice,
    way: Way,
    tree: Subtrees,
    caching: Caching,
) -> Iterable[StoredPrefix]:
    """The entries after a request, with the ages that they had before it. A mark reads the longest that is alive, so
    deeper ones were dead."""
    if raises is None:
        return stored
    entries, age = list(stored), -turn.think_s - way.lives
    if hit.entry is not None:
        entries = [
            entry
            for entry in stored
            if not tree.within(turn.node, entry.node) or caching.tokens(entry.node) < hit.tokens
        ]
        if hit.entry.node == turn.node or not tree.replaces(turn.node, hit.entry.node):
            entries.append(hit.entry._replace(age=min(age, hit.entry.age)))
        if hit.entry.node == turn.node and not caching.implicit:
            return entries  # nothing is written, so its life stays what it was
    ahead = 0
    for node in tree.path(turn.node) if caching.implicit else (turn.node,):
        tokens = caching.tokens(node)
        if tokens <= turn.always or tokens < caching.minimum:
            break
        if tree.ahead[node] > ahead:  # some turn to come begins with it, and with none of the longer ones
            ahead = tree.ahead[node]
            value = tokens * caching.values[way.surface] * (1 + caching.uses(node, tree))
            entries.append(StoredPrefix(node, age, raises, value))
    return entries
