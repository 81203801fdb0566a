"""What a quote is put together from, and what keeps decisions from swaying or freezing."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from carpool.core.model import Call, Lane
from carpool.core.ports import Capability
from carpool.core.prices import PriceBook
from carpool.dialects import ANTHROPIC
from carpool.planners.agents import Agents
from carpool.planners.forecast import BatchClass, Forecast
from carpool.planners.quoter import PROBE_SHARE, KnownPrompt, ProbeBudget, Quoter, lane_prices
from carpool.planners.quotes import Quote, Stored, TokenPrices
from carpool.planners.routing import BatchDeadlines, batch_class

NOW = 1_795_046_400.0
LANES = {Lane.NOW: TokenPrices(), Lane.BATCH: TokenPrices().times(0.5)}
ME = ("anthropic", "c", "m")
LIVES = dict.fromkeys(LANES, (300.0,))
CALL = Call(
    ticket=1, provider="anthropic", dialect="anthropic", endpoint="/v1/messages", body=b"", headers=(), credential="c",
    model="claude-sonnet-4-5", arrived=NOW, deadline=NOW + 3600, max_output_tokens=1000,
)  # fmt: skip


def after(seconds: float, count: int = 200) -> Forecast:
    """A forecast that has seen so many batches end at about this age."""
    forecast = Forecast()
    for number in range(count):
        forecast.batch_ended(batch_class(CALL), 0.0, seconds * (0.9 + 0.2 * number / count), NOW - count + number)
    return forecast


def best(quoter: Quoter, prompt: KnownPrompt, call: Call = CALL, seconds: float = 3500.0) -> Lane:
    times = BatchDeadlines(NOW + seconds, 0.5, seconds)
    return quoter.quote(call, prompt, LANES, times, NOW)[0].lane


# ------------------------------------------------------------ prices


def test_known_prices_are_those_of_the_table() -> None:
    on_now, in_batch = (lane_prices(PriceBook(), Capability(), ANTHROPIC, CALL.model, lane, NOW) for lane in LANES)
    assert on_now.fresh == 3000.0  # nano-dollars
    assert on_now.read == pytest.approx(300)
    assert in_batch == on_now.times(0.5)


def test_unknown_prices_are_estimated() -> None:
    able = Capability(batch_price=0.4)
    on_now, in_batch = (lane_prices(PriceBook(), able, ANTHROPIC, "never-heard-of", lane, NOW) for lane in LANES)
    assert on_now == TokenPrices()
    assert in_batch == TokenPrices().times(0.4)


# ------------------------------------------------------------ calls and conversations


def test_a_single_call_goes_to_quick_batches_and_not_to_slow_ones() -> None:
    assert best(Quoter(after(60.0), Agents()), KnownPrompt(10_000)) is Lane.BATCH
    assert best(Quoter(after(7200.0), Agents()), KnownPrompt(10_000), seconds=600.0) is Lane.NOW


def test_a_warm_conversation_stays_where_it_is() -> None:
    """As a single call, the same prompt would go to a batch."""
    agents, quoter = Agents(), Quoter(after(400.0), Agents())
    agents.asked("talk", "agent", 10_000, NOW - 100)
    agents.answered("talk", 100, NOW - 90)
    quoter = Quoter(after(400.0), agents)
    warm = KnownPrompt(10_500, "talk", "agent", on_sync=Stored(10_000, NOW + 200), lives=LIVES)
    assert best(quoter, warm) is Lane.NOW
    assert best(quoter, KnownPrompt(10_500)) is Lane.BATCH


def test_each_change_makes_the_next_one_harder_but_the_way_to_now_stays_open() -> None:
    agents = Agents()
    agents.asked("talk", "agent", 1000, NOW)
    hurdles = []
    for in_batch in (False, True, False):
        agents.sent("talk", in_batch=in_batch)
        assert agents.reluctance("talk", in_batch=in_batch) == 0
        hurdles.append(agents.reluctance("talk", in_batch=not in_batch))
    to_batch, to_now, to_batch_again = hurdles
    assert 0 < to_now <= to_batch < to_batch_again


def test_a_task_without_slack_expects_its_turns_on_now() -> None:
    agents = Agents()
    agents.asked("talk", "agent", 10_000, NOW - 100)
    agents.answered("talk", 100, NOW - 90)
    prompt = KnownPrompt(10_500, "talk", "agent", lives=LIVES)
    bound = replace(CALL, task_deadline=NOW + 7200)

    def later(seconds: float) -> float:
        times = BatchDeadlines(NOW + seconds, 0.5)
        found = Quoter(after(60.0), agents).quote(bound, prompt, LANES, times, NOW)
        return next(quote.later for quote in found if quote.lane is Lane.BATCH)

    assert later(90.0) > later(3600.0)


# ------------------------------------------------------------ probes


def quoted(now: float, batch: float) -> list[Quote]:
    return [Quote(Lane.NOW, 0.0, now, 0.0, 1.0), Quote(Lane.BATCH, 0.0, batch, 0.0, 0.5)]


def test_probes_cost_a_share_of_what_calls_cost() -> None:
    budget, paid, lost = ProbeBudget(), 0.0, 0.0
    for _ in range(10_000):
        probe = budget.probe(ME, quoted(100.0, 130.0), observed=0.0)
        paid += 100.0
        lost += 0.0 if probe is None else 30.0
    assert lost == pytest.approx(PROBE_SHARE * paid, rel=0.01)


def test_nothing_is_probed_where_enough_was_observed_or_a_batch_is_best_anyway() -> None:
    budget = ProbeBudget()
    for _ in range(1000):
        assert budget.probe(ME, quoted(100.0, 101.0), observed=50.0) is None
        assert budget.probe(ME, quoted(100.0, 50.0)[::-1], observed=0.0) is None


def test_a_probe_that_costs_more_than_was_saved_waits() -> None:
    budget = ProbeBudget()
    assert budget.probe(ME, quoted(100.0, 130.0), observed=0.0) is None
    probe = budget.probe(ME, quoted(100.0, 101.5), observed=0.0)
    assert probe is not None
    assert probe.probe


def test_nobody_pays_for_the_probes_of_others() -> None:
    budget, other = ProbeBudget(), ("anthropic", "another", "m")
    for _ in range(100):
        budget.probe(other, quoted(100.0, 1000.0), observed=0.0)
    assert budget.probe(ME, quoted(100.0, 102.0), observed=0.0) is None
    assert budget.probe(other, quoted(100.0, 102.0), observed=0.0) is not None


def test_a_probe_that_is_expected_to_save_earns_no_others() -> None:
    """A batch that is cheaper is passed over for a conversation that is reluctant to change."""
    budget = ProbeBudget()
    for _ in range(10):
        assert budget.probe(ME, quoted(0.001, -50.0), observed=0.0) is not None
    assert budget.probe(ME, quoted(0.001, 1.0), observed=0.0) is None


def test_without_probes_a_forecast_would_never_notice_that_batches_are_quick() -> None:
    """The prior advises against a batch for a budget of 90 s. In truth all batches take 20 s."""
    forecast = Forecast()
    quoter, of, batches = Quoter(forecast, Agents()), BatchClass("anthropic", CALL.model, "s"), 0
    call = replace(CALL, model=CALL.model, max_output_tokens=100)
    for number in range(2000):
        now = NOW + number * 5.0
        [chosen, *_] = quoter.quote(call, KnownPrompt(1000), LANES, BatchDeadlines(now + 60.0, 0.5, 60.0), now)
        if chosen.lane is Lane.BATCH:
            batches += 1
            forecast.batch_ended(of, 0.0, 20.0, now)
    assert batches > 1500


def test_a_forecast_that_does_not_learn_needs_no_probes() -> None:
    assert Forecast(learns=False).observed(batch_class(CALL)) == math.inf
