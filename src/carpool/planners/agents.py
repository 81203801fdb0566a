"""How agents go on: when the next turn comes, how many are still to come, and how much each adds. Pure; time is passed.

What is learned belongs to a *kind* of agent (its client, with `/subagent` for a subagent), because conversations of one
kind resemble each other. Where a kind is new, the average of all agents stands in for it, and before there are any, a
prior that follows recorded sessions of coding agents.

Gaps are counted as in a survival analysis, on logarithmic bins: of the conversations that were silent for so long, how
many came back within the next bin? A silent conversation counts in each bin that it has passed, so the curve does not
assume that all of them return. It levels off below 1: the rest has ended.

The number of turns to come depends on how many there were. So the chance that another follows is learned by turn, in
classes that widen. A conversation that was silent for the first of `HORIZONS_S` counts as ended, until it goes
on.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from carpool.core.bounded import BoundedMap
from carpool.planners.quotes import Outlook

GONE_S: Final = 9600.0
HORIZONS_S: Final = (
    60.0,
    150.0,
    300.0,
    600.0,
    1200.0,
    2400.0,
    4800.0,
    GONE_S,
)  # a silent conversation is counted when it passes these
EDGES_S: Final = tuple(2.0 * 1.45**step for step in range(27))  # 2 s to 9 h
TURN_STARTS: Final = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 18, 22, 27, 33, 40, 48, 58, 70, 85, 102, 122, 147, 176, 250, 400)
PRIOR_WEIGHT: Final = 4.0  # observations
HALF_LIFE_S: Final = 86_400.0
DECAY_EVERY_S: Final = 300.0
MOST_TURNS: Final = 200.0  # expected, at most
RELUCTANCE: Final = 0.1
TASK_DOUBT: Final = 0.05
LONGEST_PAUSE_S: Final = 300.0  # of a turn of a task; a longer one is its user's
FEWEST_USUAL, MOST_USUAL = 8.0, 100.0  # expected turns, of a kind of agent of which nothing is known
SUREST: Final = 0.999  # chance that a turn follows
REFRESH_S: Final = 20.0  # what is computed from the curves is kept so long
MAX_CONVERSATIONS: Final = 50_000
MAX_KINDS: Final = 500
MAX_BATCH_GAPS: Final = 5_000

_PRIOR_FOLLOWS: Final = tuple(1 - 0.25 / start**0.6 for start in TURN_STARTS)  # 0.75 after the first, 0.97 after 33
_PRIOR_GROWTH: Final = 2000.0
_PRIOR_OUTPUT: Final = 400.0
_PRIOR_ANSWER_S: Final = 10.0


def _prior_hazards() -> tuple[float, ...]:
    """Most turns follow within seconds, because a tool answers; some wait for a person."""

    def returned(seconds: float) -> float:
        tools, people = _log_normal(seconds, 8.0, 0.9), _log_normal(seconds, 180.0, 1.6)
        return 0.95 * (0.78 * tools + 0.22 * people)

    hazards, before = [], 0.0
    for edge in EDGES_S:
        at = returned(edge)
        hazards.append((at - before) / (1 - before))
        before = at
    return tuple(hazards)


def _log_normal(seconds: float, median: float, sigma: float) -> float:
    return 0.5 * math.erfc(math.log(median / seconds) / (sigma * math.sqrt(2)))


@dataclass(slots=True)
class _Mean:
    """A mean that begins at a prior, and forgets."""

    total: float
    weight: float

    def add(self, value: float, count: int = 1) -> None:
        self.total += value * count
        self.weight += count

    def decay(self, factor: float) -> None:
        self.total *= factor
        self.weight *= factor

    def value(self, parent: float) -> float:
        return (self.total + PRIOR_WEIGHT * parent) / (self.weight + PRIOR_WEIGHT)


class AgentKind:
    """What is known of one kind of agent. `parent` stands in where it has few observations."""

    def __init__(self, parent: AgentKind | None) -> None:
        self.parent = parent
        self.ended = [0.0] * len(EDGES_S)
        self.passed = [0.0] * len(EDGES_S)  # at the beginning of each bin
        self._follows = [_Mean(0.0, 0.0) for _ in TURN_STARTS]
        self._growth, self._output, self._seconds = (_Mean(0.0, 0.0) for _ in range(3))
        self._observed = False
        self._decayed_at = 0.0
        self._computed_at = -math.inf
        self._back: list[float] = []
        self._turns: dict[int, float] = {}  # expected, by turn

    # ------------------------------------------------------------ learning

    def silent(self, since: float, until: float, now: float) -> None:
        """A conversation was silent from one age to another."""
        self._decay(now)
        first, last = bisect_right(EDGES_S, since), bisect_right(EDGES_S, until)
        for place in range(first, min(last, len(EDGES_S))):
            self.passed[place] += 1
        if self.parent is not None:
            self.parent.silent(since, until, now)

    def returned(self, since: float, gap: float, now: float) -> None:
        """A conversation that was counted as silent until `since` went on after `gap`."""
        self.silent(since, gap, now)
        place = bisect_right(EDGES_S, gap)
        kind: AgentKind | None = self
        while kind is not None and place < len(EDGES_S):
            kind.passed[place] += 1
            kind.ended[place] += 1
            kind = kind.parent

    def followed(self, turn: int, *, follows: bool, count: int = 1) -> None:
        self._observed = True
        self._follows[_turn_class(turn)].add(float(follows), count)
        if self.parent is not None:
            self.parent.followed(turn, follows=follows, count=count)

    def grew(self, tokens: float) -> None:
        self._growth.add(tokens)
        if self.parent is not None:
            self.parent.grew(tokens)

    def answered(self, output: float, seconds: float | None) -> None:
        self._output.add(output)
        if seconds is not None:
            self._seconds.add(seconds)
        if self.parent is not None:
            self.parent.answered(output, seconds)

    def _decay(self, now: float) -> None:
        passed = now - self._decayed_at
        if passed < DECAY_EVERY_S:
            return
        self._decayed_at = now
        factor = 0.5 ** (passed / HALF_LIFE_S)
        self.ended = [count * factor for count in self.ended]
        self.passed = [count * factor for count in self.passed]
        for mean in (*self._follows, self._growth, self._output, self._seconds):
            mean.decay(factor)

    # ------------------------------------------------------------ reading

    @property
    def is_known(self) -> bool:
        return self._follows[0].weight >= PRIOR_WEIGHT

    def growth(self) -> float:
        return self._growth.value(_PRIOR_GROWTH if self.parent is None else self.parent.growth())

    def output(self) -> float:
        return self._output.value(_PRIOR_OUTPUT if self.parent is None else self.parent.output())

    def turns(self, turn: int, now: float) -> float:
        """How many turns are expected after this one."""
        if now - self._computed_at > REFRESH_S:
            self._compute(now)
        expected = self._turns.get(turn)
        if expected is None:
            expected = self._turns[turn] = self._expected_turns(turn)
        return expected

    def _expected_turns(self, turn: int) -> float:
        expected, reached, at = 0.0, 1.0, turn
        while expected < MOST_TURNS and reached > 0.001:
            where = _turn_class(at)
            follows = min(self.follow_chance(where), SUREST)
            if where == len(TURN_STARTS) - 1:
                expected += reached * follows / (1 - follows)
                break
            width = TURN_STARTS[where + 1] - at  # turns of this class that are left, this one included
            expected += reached * follows * (1 - follows**width) / (1 - follows)
            reached *= follows**width
            at += width
        return min(expected, MOST_TURNS)

    def turns_at_most(self, turn: int, doubt: float) -> float:
        """So many turns or fewer follow after this one, but for a chance of `doubt`."""
        count, reached, at = 0.0, 1.0, turn
        while count < MOST_TURNS * 3:
            where = _turn_class(at)
            follows = min(self.follow_chance(where), SUREST)
            width = math.inf if where == len(TURN_STARTS) - 1 else TURN_STARTS[where + 1] - at
            needed = math.log(doubt / reached) / math.log(follows) if follows > 0 else 0.0
            if needed <= width:
                return min(count + needed, MOST_TURNS * 3)
            count, reached, at = count + width, reached * follows**width, at + int(width)
        return MOST_TURNS * 3

    def follow_chance(self, where: int) -> float:
        """The chance that another turn follows one of this class. What was seldom seen is taken to be as before."""
        mean = self._follows[where]
        if self.parent is not None:
            return mean.value(self.parent.follow_chance(where))
        if not self._observed:
            return _PRIOR_FOLLOWS[where]
        return mean.value(self.follow_chance(where - 1) if where else _PRIOR_FOLLOWS[0])

    def back(self, seconds: float, now: float) -> float:
        """The chance that the next turn comes within so long after the answer."""
        if now - self._computed_at > REFRESH_S:
            self._compute(now)
        if seconds <= 0:
            return 0.0
        place = bisect_right(EDGES_S, seconds)
        if place == len(EDGES_S):
            return self._back[-1]
        low = EDGES_S[place - 1] if place else EDGES_S[0] / 4
        before = self._back[place - 1] if place else 0.0
        share = math.log(max(seconds, low) / low) / math.log(EDGES_S[place] / low)
        return before + share * (self._back[place] - before)

    def mean_gap(self, now: float, most: float) -> float:
        """How long until the next turn, on average, of those that come within `most` seconds."""
        total = before = 0.0
        for low, edge in zip((0.0, *EDGES_S), EDGES_S, strict=False):
            if low >= most:
                break
            back = self.back(edge, now)
            total += (back - before) * (low + edge) / 2
            before = back
        return total / before if before else 0.0

    def turn_seconds(self) -> float:
        """How long a turn on `now` takes on average, with the pause before the next."""
        return self.answer_seconds() + self.mean_gap(max(self._decayed_at, self._computed_at), LONGEST_PAUSE_S)

    def answer_seconds(self) -> float:
        return self._seconds.value(_PRIOR_ANSWER_S if self.parent is None else self.parent.answer_seconds())

    def hazards(self) -> tuple[float, ...]:
        parents = PRIOR_HAZARDS if self.parent is None else self.parent.hazards()
        return tuple(
            (returned + PRIOR_WEIGHT * parent) / (silent + PRIOR_WEIGHT)
            for returned, silent, parent in zip(self.ended, self.passed, parents, strict=True)
        )

    def _compute(self, now: float) -> None:
        self._computed_at = now
        self._turns.clear()
        silent, self._back = 1.0, []
        for hazard in self.hazards():
            silent *= 1 - hazard
            self._back.append(1 - silent)


PRIOR_HAZARDS: Final = _prior_hazards()


def usual_turns_left(agent: str, turn: int) -> float:
    """As many turns as there have been: the longer a task runs, the longer it will go on."""
    return min(MOST_USUAL, max(FEWEST_USUAL, float(turn)))


def _turn_class(turn: int) -> int:
    return bisect_right(TURN_STARTS, max(turn, 1)) - 1


@dataclass(slots=True)
class _Conversation:
    kind: str
    turn: int = 0
    tokens: float = 0.0
    answered_at: float | None = None
    counted_until: float = 0.0  # age up to which its silence is counted
    in_batch: bool | None = None  # whether its last turn went to a batch; None: it has just begun
    changes: int = 0  # between batches and `now`


Chance = Callable[[float], float]


@dataclass(slots=True)
class Agents:
    """Everything that is known of agents, and the conversations that are going on."""

    _all: AgentKind = field(default_factory=lambda: AgentKind(None))
    _kinds: BoundedMap[str, AgentKind] = field(default_factory=lambda: BoundedMap(MAX_KINDS))
    _conversations: BoundedMap[object, _Conversation] = field(default_factory=lambda: BoundedMap(MAX_CONVERSATIONS))
    _silent: tuple[deque[tuple[float, object]], ...] = field(default_factory=lambda: tuple(deque() for _ in HORIZONS_S))
    _batch_gaps: BoundedMap[tuple[str, object, float], tuple[float, float]] = field(
        default_factory=lambda: BoundedMap(MAX_BATCH_GAPS)
    )

    def kind(self, name: str) -> AgentKind:
        kind = self._kinds.get(name)
        if kind is None:
            kind = self._kinds[name] = AgentKind(self._all)
        return kind

    def asked(self, conversation: object, kind: str, tokens: float, now: float) -> int:
        """A turn has come. Returns its number in the conversation, from 1 on."""
        self._sweep(now)
        known = self._conversations.get(conversation)
        if known is None:
            known = self._conversations[conversation] = _Conversation(kind)
        elif known.answered_at is not None:
            gap, of_kind = now - known.answered_at, self.kind(kind)
            of_kind.returned(known.counted_until, gap, now)
            if known.counted_until > 0:
                of_kind.followed(known.turn, follows=False, count=-1)
            of_kind.followed(known.turn, follows=True)
            of_kind.grew(max(0.0, tokens - known.tokens))
        known.turn, known.tokens, known.answered_at = known.turn + 1, tokens, None
        return known.turn

    def answered(self, conversation: object, output: float, now: float, seconds: float | None = None) -> None:
        """A turn was answered, on `now` after so many seconds."""
        known = self._conversations.get(conversation)
        if known is None:
            return
        self.kind(known.kind).answered(output, seconds)
        known.answered_at, known.counted_until = now, 0.0
        for passed in self._silent:
            passed.append((now, conversation))

    @property
    def size(self) -> int:
        return len(self._conversations) + len(self._kinds)

    def sent(self, conversation: object, *, in_batch: bool) -> None:
        """A turn was sent to a batch, or not."""
        known = self._conversations.get(conversation)
        if known is not None:
            known.changes += known.in_batch not in (None, in_batch)
            known.in_batch = in_batch

    def reluctance(self, conversation: object, *, in_batch: bool) -> float:
        """By what share a change must be cheaper than to stay, so that estimates that sway don't move a conversation
        to and fro: each change writes its whole context again. The way back to `now` is not made harder each time."""
        known = self._conversations.get(conversation)
        if known is None or known.in_batch is None or known.in_batch is in_batch:
            return 0.0
        return RELUCTANCE * 4.0**known.changes if in_batch else RELUCTANCE

    def turn(self, conversation: object) -> int:
        """The number of the turn that is asked now."""
        known = self._conversations.get(conversation)
        return 1 if known is None else known.turn + (known.answered_at is not None)

    def continues(self, conversation: object, kind: str) -> bool:
        """Whether turns to come are to be expected: a new conversation of an unknown kind may be a single call."""
        return conversation in self._conversations or self.kind(kind).is_known

    def settle(self, now: float) -> None:
        """Count all silent conversations as they are at this time."""
        self._sweep(now)

    def turns_left(self, kind: str, turn: int) -> float:
        """So many turns or fewer follow, but for a small doubt: what a task must keep time for."""
        found = self.kind(kind)
        return found.turns_at_most(turn, TASK_DOUBT) if found.is_known else usual_turns_left(kind, turn)

    def turn_seconds(self, kind: str) -> float:
        return self.kind(kind).turn_seconds()

    def outlook(self, conversation: object, kind: str, which: object, ends_within: Chance, now: float) -> Outlook:
        """How this conversation goes on after the turn that is asked now. `ends_within` is the chance that a batch of
        the class `which` ends within so many seconds."""
        of_kind = self.kind(kind)

        def back(seconds: float) -> float:
            return of_kind.back(seconds, now)

        def back_in_batch(life: float) -> float:
            return self._back_in_batch(kind, which, ends_within, life, now)

        return Outlook(of_kind.turns(self.turn(conversation), now), of_kind.growth(), back, back_in_batch)

    def _back_in_batch(self, kind: str, which: object, ends_within: Chance, life: float, now: float) -> float:
        key = (kind, which, life)
        at, chance = self._batch_gaps.get(key, (-math.inf, 0.0))
        if now - at > REFRESH_S:
            of_kind, chance, before = self.kind(kind), 0.0, 0.0
            for low, edge in zip((0.0, *EDGES_S), EDGES_S, strict=False):
                if low >= life:
                    break
                back = of_kind.back(edge, now)
                chance += (back - before) * ends_within(life - (low + edge) / 2)
                before = back
            self._batch_gaps[key] = (now, chance)
        return chance

    def _sweep(self, now: float) -> None:
        for horizon, passed in zip(HORIZONS_S, self._silent, strict=True):
            while passed and now - passed[0][0] >= horizon:
                answered_at, conversation = passed.popleft()
                known = self._conversations.get(conversation)
                if known is None or known.answered_at != answered_at:
                    continue
                kind = self.kind(known.kind)
                kind.silent(known.counted_until, horizon, now)
                if known.counted_until == 0:  # probably its last turn; taken back if not
                    kind.followed(known.turn, follows=False)
                known.counted_until = horizon
