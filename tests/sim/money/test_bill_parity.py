"""What the simulation says that carpool would have paid is what a provider bills for it, to the nano-dollar.

A fleet of agents runs through the real proxy to the mock. The simulation then replays it with the sizes that the mock
has billed and the same latencies. Both must buy the same, find the same in the caches, and come to the same bill. The
mock and the simulation share no code: neither caches nor prices.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import pytest

from carpool.core.model import Lane
from carpool.mock import Charge
from carpool.planners.forecast import Forecast
from carpool.sim.money.billing import PriceTable, bill, usages
from carpool.sim.money.fleet import simulate
from carpool.sim.money.model import RunRecord, Trace
from carpool.sim.money.planned import Knowledge
from carpool.sim.money.policies import find_policy
from carpool.sim.money.worlds import WORLDS
from tests.support.deep import quick_and_deep

from .through_proxy import ProxyRun, fleet
from .turn_latencies import Place

CALLS = 300
TOLERANCE_S = 0.001
FLEETS = [  # seed, world, share of stuck calls, budget of each call
    (1, "economics", 0.0, 600.0),
    (2, "anthropic", 0.0, 900.0),
    (3, "stuck", 0.1, 1800.0),
    (4, "economics", 0.0, 200.0),
]


class Bought(NamedTuple):
    """One purchase: what was asked, where, and with which tokens."""

    place: Place
    lane: Lane
    fresh: int
    output: int
    read: int
    written_5m: int
    written_1h: int


def charged(run: ProxyRun, charge: Charge) -> Bought:
    used = charge.usage
    tokens = used.input, used.output, used.read, used.write_5m, used.write_1h
    return Bought(run.place_of(charge), Lane(charge.lane), *tokens)


def bought(trace: Trace, record: RunRecord) -> list[Bought]:
    return [
        Bought(
            (one.session, one.turn),
            one.lane,
            used.input_tokens,
            used.output_tokens,
            used.cache_read_tokens,
            used.cache_write_5m_tokens,
            used.cache_write_1h_tokens,
        )
        for one, used in zip(record.purchases, usages(trace, record.purchases), strict=True)
    ]


FROZEN = Forecast(learns=False)  # as in `ProxyRun`: both sides see the ends of batches at times that differ a little


@pytest.mark.parametrize(("seed", "name", "stuck", "budget_s"), quick_and_deep(FLEETS, FLEETS[2:3]))
def test_the_simulated_bill_is_the_providers(seed: int, name: str, stuck: float, budget_s: float) -> None:
    print(f"seed {seed}")
    world = replace(WORLDS[name], stuck=stuck)
    run = ProxyRun(fleet(seed, CALLS), world, seed, budget_s)
    run.go()
    trace = run.trace
    record = simulate(trace, world, find_policy("carpool"), seed, budget_s=budget_s, knowledge=Knowledge(FROZEN))
    assert trace.calls == len(record.answers) == len(run.turns) == CALLS
    for answer in record.answers:
        seen = run.turns[answer.session, answer.turn]
        assert (answer.lane, answer.rescued) == (seen.lane, seen.rescued), (answer, seen)
        assert abs(answer.answered - seen.answered) < TOLERANCE_S, (answer, seen)
    assert Counter(bought(trace, record)) == Counter(charged(run, charge) for charge in run.charges)
    [simulated] = bill(trace, record.purchases, [PriceTable()])
    print(f"{len(run.charges)} purchases, {run.paid} nano-dollars, {simulated.cache_share:.0%} read from a cache")
    assert simulated.cost == run.paid == run.booked
