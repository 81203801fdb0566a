"""What recorded traffic would have cost otherwise: with a budget for every call, or with planned cache lifetimes.

Each account (provider and credential) is replayed for itself, because nothing is shared between accounts. A call that
the question does not concern stays as it was: same price, no wait.

There is no planner of cache lifetimes in production yet. `caching=plan` stands for one that chooses between the
client's own marks, 5 minutes and 1 hour for each conversation. It learns from the others of its kind (client and
model), never from the conversation itself, whose pauses nobody knows in advance.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import ceil
from typing import Final

from carpool import dialects
from carpool.core.errors import ConfigError
from carpool.core.model import Lane
from carpool.planners.policy import parse_budget
from carpool.planners.routing import Capabilities
from carpool.sim.money.billing import PriceTable, bill, usages
from carpool.sim.money.cache import cache_rules
from carpool.sim.money.fleet import simulate
from carpool.sim.money.model import ClientMarks, RunRecord, Trace
from carpool.sim.money.planned import Knowledge, taught
from carpool.sim.money.policies import POLICIES, MoneyPolicy
from carpool.sim.money.record_source import dialect_of
from carpool.sim.money.recorded import Conversation, RecordedCall
from carpool.sim.money.recorded_trace import RecordHabits, recorded_trace
from carpool.sim.money.worlds import ProviderWorld

CARPOOL: Final = POLICIES["carpool"]
ON_NOW: Final = replace(POLICIES["now"], keeps_marks=True)
CHOICES: Final = (None, ClientMarks("5m", "5m"), ClientMarks("1h", "1h"))  # None: the client's own; the first of equals


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A question. `budget_s` None: as it was."""

    text: str
    budget_s: float | None = None
    plans_cache: bool = False


def parse_what_if(text: str) -> WhatIf:
    """Reads `budget=20m`, `caching=plan`, or both with a comma between them."""
    parts = text.replace(" ", "").split(",")
    named = {name: value for name, _, value in (part.partition("=") for part in parts)}
    if len(named) != len(parts) or not named.keys() <= {"budget", "caching"} or named.get("caching", "plan") != "plan":
        raise ConfigError(
            f"--what-if {text[:60]!r} is not known. Write budget=20m (or another duration), caching=plan, or both "
            "with a comma between them."
        )
    return WhatIf(",".join(parts), parse_budget(named["budget"]) if "budget" in named else None, "caching" in named)


@dataclass(frozen=True, slots=True)
class Replayed:
    """How a call went in a replay. `cost` is in nano-dollars, all that was bought for it."""

    call: RecordedCall
    cost: int
    lane: Lane
    wait_s: float = 0.0  # beyond what `now` would have taken
    rescued: bool = False
    miss: str = ""


# ------------------------------------------------------------ accounts


@dataclass(frozen=True, slots=True)
class ReplayedAccount:
    dialect: str
    conversations: Sequence[Conversation]
    world: ProviderWorld


WorldOf = Callable[[str], ProviderWorld]  # of a provider


def sampled(found: Sequence[Conversation], most: int) -> tuple[Sequence[Conversation], int]:
    """One in so many conversations, drawn at random but the same every time, with about `most` calls at the most. Each
    stands for so many; 1: all of them."""
    calls = sum(map(len, found))
    if calls <= most:
        return found, 1
    times = ceil(calls / most)
    rng = random.Random(f"sample {calls}")  # noqa: S311  a report must be the same every time
    kept = [one for one in found if rng.randrange(times) == 0]
    return [[replace(call, weight=call.weight * times) for call in one] for one in kept], times


def accounts(
    found: Iterable[Conversation], names: Mapping[str, str], world_of: WorldOf
) -> tuple[list[ReplayedAccount], Mapping[str, int]]:
    """The accounts, and how many calls are left out for which reason."""
    left_out: Counter[str] = Counter()
    grouped: dict[tuple[str, str, str], list[Conversation]] = defaultdict(list)
    table = PriceTable()
    for conversation in found:
        first = conversation[0]
        dialect = dialect_of(first, names)
        if dialect is None:
            reason = f"the config does not name their provider {first.provider}"
        elif table.card(dialects.get(dialect), first.model, Lane.NOW) is None:
            reason = f"nobody knows what {first.model} costs"
        elif any(call.paid is None for call in conversation):
            reason = "what was paid for them is unknown"
        else:
            grouped[first.provider, first.credential, dialect].append(conversation)
            continue
        left_out[reason] += sum(call.weight for call in conversation)
    listed = [ReplayedAccount(dialect, own, world_of(provider)) for (provider, _, dialect), own in grouped.items()]
    return listed, left_out


# ------------------------------------------------------------ replays


def replays(account: ReplayedAccount, habits: RecordHabits, asked: WhatIf, seed: int) -> Iterator[Replayed]:
    """Every call of an account, as it would have gone."""
    if asked.budget_s is None:
        yield from _replays(account, _on_now_and_marked, habits, asked, seed)
    else:
        yield from _replays(account, _batchable(account.dialect), habits, asked, seed)


def as_it_was(account: ReplayedAccount, habits: RecordHabits, seed: int) -> Iterator[Replayed]:
    """Every call of an account with the budget, or the lane, that it had: a check of the replay, because what was paid
    for that is known."""
    batchable = _batchable(account.dialect)
    known = [one for one in account.conversations if _on_now(one) or batchable(account, one)]
    if known:
        trace = recorded_trace("as it was", account.dialect, known, habits, as_recorded=True)
        yield from _run(account, known, trace, CARPOOL, None, seed)


def _on_now(conversation: Conversation) -> bool:
    return all(call.lane is Lane.NOW and call.budget_s is None for call in conversation)


def _replays(
    account: ReplayedAccount,
    concerns: Callable[[ReplayedAccount, Conversation], bool],
    habits: RecordHabits,
    asked: WhatIf,
    seed: int,
) -> Iterator[Replayed]:
    concerned = [one for one in account.conversations if concerns(account, one)]
    others = [one for one in account.conversations if not concerns(account, one)]
    for call in chain.from_iterable(others):
        yield Replayed(call, call.paid or 0, call.lane)
    if concerned:
        trace = recorded_trace("what if", account.dialect, concerned, habits)
        if asked.plans_cache:
            trace = _planned_marks(account, trace)
        policy = ON_NOW if asked.budget_s is None else CARPOOL
        yield from _run(account, concerned, trace, policy, asked.budget_s, seed)


def _on_now_and_marked(account: ReplayedAccount, conversation: Conversation) -> bool:
    """Whether it is for the client to say how long a prompt is cached. Calls that rode a batch stay as they were."""
    marked = not cache_rules(dialects.get(account.dialect), conversation[0].model).implicit
    return marked and all(call.lane is Lane.NOW for call in conversation)


def _batchable(dialect: str) -> Callable[[ReplayedAccount, Conversation], bool]:
    known, capabilities, table = dialects.get(dialect), Capabilities(), PriceTable()

    def batchable(_: ReplayedAccount, conversation: Conversation) -> bool:
        if any(call.lane is Lane.FLEX for call in conversation):
            return False  # the replay has no such lane, and a batch costs as much
        model = conversation[0].model
        able = capabilities.of(dialect, known, model).batch
        return able and table.card(known, model, Lane.BATCH) is not None

    return batchable


def _run(
    account: ReplayedAccount,
    replayed: Sequence[Conversation],
    trace: Trace,
    policy: MoneyPolicy,
    budget_s: float | None,
    seed: int,
) -> Iterator[Replayed]:
    forecast = taught(account.world, trace.provider, {session.model for session in trace.sessions}, 0.0)
    record = simulate(trace, account.world, policy, seed, budget_s=budget_s, knowledge=Knowledge(forecast))
    costs = _costs(trace, record)
    for answer in record.answers:
        call = replayed[answer.session][answer.turn]
        cost, wait = costs[answer.session, answer.turn], max(0.0, answer.wait_s)
        yield Replayed(call, cost, answer.lane, wait, answer.rescued, answer.miss or "")


def _costs(trace: Trace, record: RunRecord) -> Mapping[tuple[int, int], int]:
    """What was bought for each turn, in nano-dollars."""
    table, dialect = PriceTable(), dialects.get(trace.provider)
    costs: dict[tuple[int, int], int] = defaultdict(int)
    for purchase, usage in zip(record.purchases, usages(trace, record.purchases), strict=True):
        model = trace.sessions[purchase.session].model
        costs[purchase.session, purchase.turn] += table.cost(dialect, model, usage, purchase.lane)
    return costs


# ------------------------------------------------------------ cache lifetimes


def _planned_marks(account: ReplayedAccount, trace: Trace) -> Trace:
    """The same trace, with the marks that would have been the cheapest for the other conversations of each one's kind.
    The client's own stay where there are no others."""
    costs = [_by_session(account, _marked(trace, choice)) for choice in CHOICES]
    kinds: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0] * len(CHOICES))
    for number, session in enumerate(trace.sessions):
        total = kinds[session.client, session.model]
        for choice, by_session in enumerate(costs):
            total[choice] += by_session[number]
    sessions = []
    for number, session in enumerate(trace.sessions):
        others = [
            total - by_session[number]
            for total, by_session in zip(kinds[session.client, session.model], costs, strict=True)
        ]
        chosen = CHOICES[others.index(min(others))]
        sessions.append(session if chosen is None else replace(session, marks=chosen))
    return replace(trace, sessions=tuple(sessions))


def _marked(trace: Trace, marks: ClientMarks | None) -> Trace:
    if marks is None:
        return trace
    return replace(trace, sessions=tuple(replace(session, marks=marks) for session in trace.sessions))


def _by_session(account: ReplayedAccount, trace: Trace) -> Sequence[int]:
    return bill(trace, simulate(trace, account.world, ON_NOW).purchases, [PriceTable()])[0].by_session
