"""The labels of the hindsight programme: what a sequence of choices has cost, and what it left in the caches.

An *entry* is a prefix that a surface stores. Which mark wrote it decides how long it lives and what writing it cost,
but the programme need not decide that in advance: it takes the cheapest mark (none, if nothing longer could be read
anyway), and pays the difference once a later turn needs a longer life. So one entry stands for every mark that may have
written it. `raises` holds what each life still costs; 0 is paid for.

One label *dominates* another if it is no dearer and no later, and covers every entry of the other by one that is as
deep, as fresh and as cheap to raise. It also dominates if it is cheaper by more than the missing entries could ever
save: who lacks an entry writes it anew, once.

Only labels that none dominates are kept. Beyond a limit, two neighbours in cost are *merged*: the lower cost, with the
entries of both. No sequence of choices has both, but whatever follows either costs no more after the merged one. So the
result stays a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

NEVER = 1 << 200  # the cost of what can't be had
NEAR = 3  # with so many neighbours a label is compared


class StoredPrefix(NamedTuple):
    node: int
    age: float  # since its life began anew, at the label's last answer
    raises: tuple[int, ...]  # what each of the lives, of which there are two at most, costs on top
    value: int  # at most this is saved by having it


class Label(NamedTuple):
    cost: int
    clock: float  # when the last answer came, after the session's first request
    caches: tuple[tuple[StoredPrefix, ...], ...]  # by surface


class Subtrees:
    """Which prefix begins with which, and how many turns are still to come behind each."""

    def __init__(self, parents: Sequence[int]) -> None:
        size = [1] * len(parents)
        for node in range(len(parents) - 1, -1, -1):  # a parent stands before its children
            if parents[node] >= 0:
                size[parents[node]] += size[node]
        self._parents = parents
        self._first = [0] * len(parents)
        free, roots = [0] * len(parents), 0
        for node, parent in enumerate(parents):
            if parent < 0:
                self._first[node], roots = roots, roots + size[node]
            else:
                self._first[node], free[parent] = free[parent], free[parent] + size[node]
            free[node] = self._first[node] + 1
        self._end = [first + count for first, count in zip(self._first, size, strict=True)]
        self.ahead = [0] * len(parents)

    def within(self, node: int, prefix: int) -> bool:
        return self._first[prefix] <= self._first[node] < self._end[prefix]

    def count(self, node: int, by: int) -> None:
        while node >= 0:
            self.ahead[node] += by
            node = self._parents[node]

    def path(self, node: int) -> Iterable[int]:
        while node >= 0:
            yield node
            node = self._parents[node]

    def replaces(self, one: int, other: int) -> bool:
        """Whether every turn to come behind `other` is also behind `one`."""
        return one == other or (self.ahead[one] == self.ahead[other] and self.within(one, other))


def reduced(labels: list[Label], tree: Subtrees, most: int, *, timed: bool) -> list[Label]:
    """The labels that none of the others dominates, merged to at most so many.

    Each label is compared with the cheapest ones, and with those before it that left the same in one of the caches:
    there the others are found that differ least. With a time limit it is compared with all."""
    labels.sort()
    kept: list[Label] = []
    alike: dict[object, list[Label]] = {}
    for label in labels:
        groups = [alike.setdefault(state, []) for state in enumerate(label.caches)]
        others = kept if timed else [*kept[:NEAR], *groups[0][-NEAR:], *groups[1][-NEAR:]]
        if not any(_dominates(other, label, tree, timed) for other in others):
            kept.append(label)
            for group in groups:
                group.append(label)
    while len(kept) > most:
        place = _least_loss(kept)
        kept[place : place + 2] = [_merged(kept[place], kept[place + 1], tree)]
    return kept


def _least_loss(labels: Sequence[Label]) -> int:
    """Where two neighbours are to be merged: close to each other, and far from the cheapest, because the best end of
    the session more likely goes back to a cheap label."""
    last = len(labels)
    losses = [(after.cost - before.cost) * (last - at) ** 2 for at, (before, after) in enumerate(pairwise(labels))]
    return losses.index(min(losses))


def _dominates(one: Label, other: Label, tree: Subtrees, timed: bool) -> bool:
    """`one` is no dearer."""
    if timed and one.clock > other.clock:
        return False
    missing, spare = 0, other.cost - one.cost
    for mine, theirs in zip(one.caches, other.caches, strict=True):
        if mine is theirs:
            continue
        for entry in theirs:
            if not any(_covers(better, entry, tree) for better in mine):
                missing += entry.value
                if missing > spare:
                    return False
    return True


def _covers(one: StoredPrefix, other: StoredPrefix, tree: Subtrees) -> bool:
    if one.age > other.age or one.raises[-1] > other.raises[-1] or one.raises[0] > other.raises[0]:
        return False
    return tree.replaces(one.node, other.node)


def _merged(one: Label, other: Label, tree: Subtrees) -> Label:
    caches = tuple(pruned([*mine, *theirs], tree) for mine, theirs in zip(one.caches, other.caches, strict=True))
    return Label(one.cost, min(one.clock, other.clock), caches)


def pruned(entries: Iterable[StoredPrefix], tree: Subtrees) -> tuple[StoredPrefix, ...]:
    """Without the entries that no turn to come can read, and without those that others cover."""
    kept: list[StoredPrefix] = []
    for entry in sorted(entries, key=_freshest):
        if tree.ahead[entry.node] and not any(_covers(better, entry, tree) for better in kept):
            kept.append(entry)
    return tuple(kept)


def _freshest(entry: StoredPrefix) -> tuple[float, tuple[int, ...]]:
    return entry.age, entry.raises
