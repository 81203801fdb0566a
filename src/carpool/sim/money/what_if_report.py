"""The answer to a question about recorded traffic, by team, model, client or tag.

Counts are weighted: where a sample was recorded, a call stands for several. Latencies are drawn anew for each of a few
seeds, and means are shown. What was paid comes from the ledger.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from carpool.core.errors import ConfigError
from carpool.core.model import Lane
from carpool.sim.money.recorded import RecordedCall
from carpool.sim.money.recorded_trace import RecordHabits
from carpool.sim.money.what_if import Replayed, ReplayedAccount, WhatIf, as_it_was, replays

SEEDS: Final = 3
NONE: Final = "(none)"

GroupOf = Callable[[RecordedCall], str]


@dataclass(frozen=True, slots=True)
class WhatIfGroup:
    """Some of the calls. Money is in nano-dollars, times are in seconds."""

    name: str
    calls: float
    paid: float
    would_pay: float
    by_batch: float  # how many calls a batch would have answered
    rescued: float
    late: Mapping[str, float]  # how many calls, by reason
    wait_p50_s: float
    wait_p95_s: float

    @property
    def saved(self) -> float:
        return self.paid - self.would_pay

    @property
    def saved_share(self) -> float | None:
        """Of what was paid; None if that is nothing."""
        return self.saved / self.paid if self.paid else None


@dataclass(frozen=True, slots=True)
class WhatIfAnswer:
    asked: WhatIf
    groups: Sequence[WhatIfGroup]  # the dearest first
    total: WhatIfGroup


def group_of(by: str | None) -> GroupOf | None:
    """`team`, `model`, `client`, `tag` (all tags together) or `tag.NAME`."""
    if by is None:
        return None
    if by == "model":
        return lambda call: call.model
    if by == "client":
        return lambda call: call.client or NONE
    if by == "tag":
        return lambda call: ", ".join(f"{name}={value}" for name, value in sorted(call.tags.items())) or NONE
    name = "team" if by == "team" else by.removeprefix("tag.") if by.startswith("tag.") else ""
    if not name:
        raise ConfigError(f"--by {by[:40]!r} is not known: write team, model, client, tag, or tag.NAME.")
    return lambda call: call.tags.get(name, NONE)


def answer(
    accounts: Sequence[ReplayedAccount], habits: RecordHabits, asked: WhatIf, by: GroupOf | None, seeds: int = SEEDS
) -> WhatIfAnswer:
    replayed = [one for account in accounts for seed in range(seeds) for one in replays(account, habits, asked, seed)]
    groups: dict[str, list[Replayed]] = defaultdict(list)
    if by is not None:
        for one in replayed:
            groups[by(one.call)].append(one)
    listed = [_group(name, members, seeds) for name, members in groups.items()]
    listed.sort(key=lambda group: (-group.paid, group.name))
    return WhatIfAnswer(asked, listed, _group("all", replayed, seeds))


def _group(name: str, replayed: Sequence[Replayed], seeds: int) -> WhatIfGroup:
    def mean(amounts: Iterable[float]) -> float:
        """A sum over the calls, each counted by its weight, as the mean of the seeds."""
        return sum(amount * one.call.weight for amount, one in zip(amounts, replayed, strict=True)) / seeds

    reasons = Counter(one.miss for one in replayed if one.miss)
    waits = sorted((one.wait_s, one.call.weight) for one in replayed)
    return WhatIfGroup(
        name=name,
        calls=mean(1 for _ in replayed),
        paid=mean(one.call.paid or 0 for one in replayed),
        would_pay=mean(one.cost for one in replayed),
        by_batch=mean(one.lane is Lane.BATCH for one in replayed),
        rescued=mean(one.rescued for one in replayed),
        late={reason: mean(one.miss == reason for one in replayed) for reason, _ in reasons.most_common()},
        wait_p50_s=_weighted_quantile(waits, 0.5),
        wait_p95_s=_weighted_quantile(waits, 0.95),
    )


def _weighted_quantile(ordered: Sequence[tuple[float, int]], share: float) -> float:
    """The smallest value that at least `share` of the weight does not exceed; 0 without any."""
    wanted = share * sum(weight for _, weight in ordered)
    reached = 0
    for value, weight in ordered:
        reached += weight
        if reached >= wanted:
            return value
    return 0.0


def replayed_share(accounts: Sequence[ReplayedAccount], habits: RecordHabits) -> float | None:
    """What the replay pays for the same calls on the lanes and with the budgets that they had, relative to what was
    paid for them: how far a replay can be trusted. None if nothing was paid."""
    replayed = list(
        chain.from_iterable(as_it_was(account, habits, seed) for account in accounts for seed in range(SEEDS))
    )
    group = _group("as it was", replayed, SEEDS)
    return group.would_pay / group.paid if group.paid else None
