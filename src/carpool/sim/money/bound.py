"""The hindsight bound: what a trace costs at least, for somebody who knows all pauses and latencies in advance.

Each session is solved on its own by `hindsight`, as billed and with its deadlines kept. The sum is below what any
policy pays in a run of the same world and seed, because nothing here is harder than for a policy:

- A turn's batch takes as long as its own draw. Batches that are shared end later. Slowdowns of the world don't count.
- A turn that the policy answered later than its budget may be as late here. Likewise a task.
- Prefixes that several sessions share, and tools and system prompts, are always readable. Whoever came first paid for
  them in full: that is added once, at the price of the cheapest lane.
- Marks look back without limit, and pings come at the last moment.
- A second purchase of a turn, such as a batch that is billed beside its rescue, keeps a prefix warm on that surface. In
  a session that has one, the bound may do the same for the price of the reads alone, for the longest life; and what a
  turn stores that was bought twice lives from its answer.

Every purchase of a policy is rounded to nano-dollars, the bound is not: half of one for each purchase is taken off.
Where batch copies were bought again after a batch gave the call back, the time that the policy took counts, if it is
shorter than the first draw.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, Protocol

from carpool.core.model import Lane
from carpool.sim.money.billing import PriceTable
from carpool.sim.money.hindsight import SOON_S, TurnChoice, cheapest
from carpool.sim.money.model import RunRecord, Trace, TraceSession
from carpool.sim.money.prefixes import ModelPrices, TracePrefixes

MOST_LABELS = 8  # 16 raised the bound by 1 % on ten recorded sessions, and took twice as long
BEFORE = -1.0  # seconds: before any slowdown


class BatchDraws(Protocol):
    def batch_s(self, session: int, turn: int, at: float) -> float:
        """How long this call takes in a batch of its own that is created at this time."""
        ...


@dataclass(frozen=True, slots=True)
class HindsightBound:
    """In nano-dollars. `by_session` leaves out the first payment for what sessions share."""

    cost: int
    by_session: Sequence[int]


class _Conduct(NamedTuple):
    """What a policy did with a turn, as far as it matters for what the bound may do."""

    wait_s: float = 0.0  # from the request to its answer
    batch_s: float = math.inf  # the same, if a batch gave the answer
    twice: bool = False  # bought more than once


class Hindsight:
    """Bounds of one trace under one table. A session that is solved already is not solved again."""

    def __init__(
        self,
        trace: Trace,
        draws: BatchDraws,
        table: PriceTable,
        *,
        flex_s: Callable[[int, int], float] | None = None,
        slowest: float = 1.0,
        most_labels: int = MOST_LABELS,
    ) -> None:
        """`flex_s` says how long a turn takes on flex, where that is to be offered; `slowest` by how much synchronous
        answers may be slowed down."""
        self._trace, self._draws, self._flex_s, self._slowest = trace, draws, flex_s, slowest
        self._most = most_labels
        models = {session.model for session in trace.sessions}
        lanes = (Lane.NOW, Lane.BATCH) if flex_s is None else (Lane.NOW, Lane.FLEX, Lane.BATCH)
        self._prices = {model: ModelPrices(trace.provider, model, table, lanes) for model in models}
        self._prefixes = TracePrefixes(trace, {model: prices.rules.minimum for model, prices in self._prices.items()})
        self._solved: dict[tuple[object, ...], Fraction] = {}

    def bound(
        self, budget_s: float | None = None, task_budget_s: float | None = None, run: RunRecord | None = None
    ) -> HindsightBound:
        """What that policy's run needed beyond the budgets, or had twice, is allowed to the bound too: give the run
        with which it is to be compared."""
        conducts, spans = _conducts(run)
        budget = math.inf if budget_s is None else budget_s
        task = math.inf if task_budget_s is None else task_budget_s
        costs = [
            self._session(number, budget, max(task, spans.get(number, 0.0)), conducts)
            for number in range(len(self._trace.sessions))
        ]
        purchases = max(self._trace.calls, len(run.purchases) if run else 0)
        exact = all(prices.scale == 1 for prices in self._prices.values())
        rounding = 0 if exact else Fraction(purchases, 2)
        return HindsightBound(math.floor(sum(costs) + self._first_payments() - rounding), [int(cost) for cost in costs])

    def _first_payments(self) -> Fraction:
        return sum(
            (
                self._prefixes.shared_tokens(model, prices.rules.step) * prices.saving
                for model, prices in self._prices.items()
            ),
            Fraction(0),
        )

    def _session(
        self, number: int, budget: float, limit: float, conducts: Mapping[tuple[int, int], _Conduct]
    ) -> Fraction:
        session = self._trace.sessions[number]
        done = [conducts.get((number, turn), _Conduct()) for turn in range(len(session.turns))]
        turns = [
            self._choice(session, number, position, max(budget, did.wait_s) + SOON_S, did)
            for position, did in enumerate(done)
        ]
        twice = any(did.twice for did in done)
        key = (number, limit, twice, tuple(way[:4] for turn in turns for way in turn.ways))
        if key not in self._solved:
            prices = self._prices[session.model]
            caching = prices.caching(self._trace, self._prefixes.jumps(session), pings_in_batches=twice)
            cost = cheapest(turns, self._prefixes.tree, caching, limit_s=limit, most=self._most)
            self._solved[key] = Fraction(cost, prices.scale)
        return self._solved[key]

    def _choice(self, session: TraceSession, number: int, position: int, budget: float, did: _Conduct) -> TurnChoice:
        turn, prices = session.turns[position], self._prices[session.model]
        tokens = self._trace.nodes[turn.node].tokens
        offered = prices.of_size(tokens)
        ways = [prices.way(offered[Lane.NOW], 0, turn.sync_s, 0.0, turn.sync_s if did.twice else 0.0)]
        if self._flex_s is not None and Lane.FLEX in offered:
            takes = self._flex_s(number, position)
            if takes <= budget:
                ways.append(prices.way(offered[Lane.FLEX], 0, takes, 0.0, takes if did.twice else 0.0))
        takes = min(self._draws.batch_s(number, position, BEFORE), did.batch_s)
        if Lane.BATCH in offered and takes <= budget and takes < math.inf:
            reads, lives = (takes - min(takes, turn.sync_s * slow) for slow in (self._slowest, 1.0))
            ways.append(prices.way(offered[Lane.BATCH], 1, takes, reads, lives))
        always = self._prefixes.always(session.model, turn.node)
        return TurnChoice(turn.node, tokens, always, turn.output_tokens, turn.think_s if position else 0.0, tuple(ways))


def _conducts(run: RunRecord | None) -> tuple[Mapping[tuple[int, int], _Conduct], Mapping[int, float]]:
    if run is None:
        return {}, {}
    bought = Counter((one.session, one.turn) for one in run.purchases if one.kind not in ("ping", "leader"))
    conducts, asked, answered = {}, dict[int, float](), dict[int, float]()
    for answer in run.answers:
        place, wait = (answer.session, answer.turn), answer.answered - answer.asked
        by_batch = wait if answer.lane is Lane.BATCH else math.inf
        conducts[place] = _Conduct(wait, by_batch, bought[place] > 1)
        asked[answer.session] = min(answer.asked, asked.get(answer.session, math.inf))
        answered[answer.session] = max(answer.answered, answered.get(answer.session, -math.inf))
    return conducts, {session: answered[session] - asked[session] for session in asked}
