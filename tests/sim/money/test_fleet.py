"""What holds in every run, whatever the trace, the world and the policy; and what each policy does."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial

import pytest

from carpool.core.errors import ConfigError
from carpool.core.model import Lane
from carpool.planners.forecast import BatchClass, Forecast
from carpool.planners.policy import RoutingPolicy
from carpool.planners.poll_pace import InFlight, next_poll
from carpool.planners.pressure.quota import TokenBucket
from carpool.sim.money.coding import coding_fleet
from carpool.sim.money.fleet import simulate
from carpool.sim.money.model import ROOT, Node, RunRecord, Trace, TraceSession, TraceTurn
from carpool.sim.money.policies import POLICIES, MoneyPolicy, find_policy
from carpool.sim.money.poll_times import PollTimes
from carpool.sim.money.worlds import (
    WORLDS,
    Latencies,
    LogNormalTimes,
    MeasuredTimes,
    ProviderWorld,
    Slowdown,
    find_world,
)

EVERY = (*POLICIES, "now+5m+pings(2)")
NEAR = 1e-6
ADMITTED_S = 0.1  # after which the engine plans for new calls


def steady(seconds: float, **more: object) -> ProviderWorld:
    return replace(ProviderWorld("steady", {"*": MeasuredTimes((seconds,))}), **more)  # type: ignore[arg-type]


def calls(starts: list[float], tokens: int = 1000, model: str = "claude-sonnet-4-5") -> Trace:
    """Independent calls."""
    sessions = (TraceSession(f"call {n}", at, model, (TraceTurn(n, 10, 0.0, 3.0),)) for n, at in enumerate(starts))
    return Trace("calls", [Node(ROOT, tokens)] * len(starts), tuple(sessions))


def conversation(pauses: list[float]) -> Trace:
    nodes = [Node(ROOT, 1000)] + [Node(n, 1100 + 100 * n) for n in range(len(pauses))]
    turns = tuple(TraceTurn(n + 1, 10, pause, 3.0) for n, pause in enumerate(pauses))
    return Trace("talk", nodes, (TraceSession("one", 0.0, "claude-sonnet-4-5", turns, system=0),))


# ------------------------------------------------------------ invariants


def drawn(seed: int) -> tuple[Trace, ProviderWorld, MoneyPolicy, float | None, float | None]:
    rng = random.Random(seed)
    trace = coding_fleet(rng.choice([2, 8, 20]), rng.choice([3, 10]), seed)
    world = replace(
        WORLDS[rng.choice(list(WORLDS))],
        batch_rpm=rng.choice([20, 200, None]),
        sync_rpm=rng.choice([None, 30, 300]),
        refusal=rng.choice([0.0, 0.0, 0.2]),
        slow_sync=rng.choice([Slowdown(0, 0, 1.0), Slowdown(600.0, 1800.0, 5.0)]),
    )
    policy = find_policy(rng.choice(EVERY + ("carpool",) * 6))
    if policy.name == "carpool":
        policy = replace(policy, settings=RoutingPolicy(sync_rpm=world.sync_rpm))
    return trace, world, policy, rng.choice([None, 60.0, 600.0, 7200.0]), rng.choice([None, None, 3600.0])


@pytest.mark.parametrize("seed", range(60))
def test_every_run_keeps_the_rules(seed: int) -> None:
    trace, world, policy, budget, task_budget = drawn(seed)
    record = simulate(trace, world, policy, seed, budget_s=budget, task_budget_s=task_budget)
    told = f"seed {seed}, {policy.name} in {world.name}"
    _each_turn_is_answered_once_and_in_order(trace, record, told)
    _deadlines_are_kept_or_a_reason_is_given(trace, record, budget, task_budget, told)
    _purchases_are_in_order_and_pay_for_the_answers(trace, record, told)
    if world.batch_rpm is not None:
        end = max(purchase.ends for purchase in record.purchases)
        assert record.api_calls <= world.batch_rpm * (1 + end / 60) + 1, told


def _each_turn_is_answered_once_and_in_order(trace: Trace, record: RunRecord, told: str) -> None:
    answers = {(answer.session, answer.turn): answer for answer in record.answers}
    assert len(answers) == len(record.answers) == trace.calls, told
    for (session, turn), answer in answers.items():
        think = trace.sessions[session].turns[turn].think_s
        before = trace.sessions[session].starts if turn == 0 else answers[session, turn - 1].answered
        assert answer.asked == pytest.approx(before + think), told
        assert answer.answered > answer.asked, told


def _deadlines_are_kept_or_a_reason_is_given(
    trace: Trace, record: RunRecord, budget: float | None, task_budget: float | None, told: str
) -> None:
    for answer in record.answers:
        session = trace.sessions[answer.session]
        task_end = session.starts + session.turns[0].think_s + (task_budget or math.inf)
        deadline = min(answer.asked + (budget or math.inf), task_end)
        assert (answer.deadline or math.inf) == pytest.approx(deadline), told
        late = answer.deadline is not None and answer.answered > answer.deadline + NEAR
        assert (answer.miss is not None) == late, f"{told}: {answer}"


def _purchases_are_in_order_and_pay_for_the_answers(trace: Trace, record: RunRecord, told: str) -> None:
    starts = [purchase.starts for purchase in record.purchases]
    assert starts == sorted(starts), told
    bought = defaultdict(Counter)  # type: ignore[var-annotated]
    for purchase in record.purchases:
        assert purchase.starts <= purchase.begins <= purchase.ends, told
        assert (purchase.batch is not None) == (purchase.lane is Lane.BATCH), told
        bought[purchase.session, purchase.turn][purchase.kind] += 1
    for answer in record.answers:
        kinds = bought[answer.session, answer.turn]
        assert kinds["purchase"] + kinds["rescue"] == 1, f"{told}: {answer}, {kinds}"
        answered = [
            purchase
            for purchase in record.purchases
            if (purchase.session, purchase.turn) == (answer.session, answer.turn)
            and purchase.kind in ("purchase", "rescue")
        ]
        assert answered[0].lane == answer.lane, told
        assert answered[0].ends <= answer.answered + NEAR, told


def test_a_run_is_the_same_for_a_seed() -> None:
    trace = coding_fleet(5, 5)
    first, again, other = (simulate(trace, find_world("economics"), find_policy("carpool"), seed) for seed in (1, 1, 2))
    assert first == again != replace(other, seed=1)


def test_all_policies_meet_the_same_latencies() -> None:
    trace, world = calls([0.0]), find_world("anthropic")
    expected = Latencies(world, trace, 5).batch_s(0, 0, 0.0)
    for name in ("batch", "batch+1h"):
        (bought,) = simulate(trace, world, find_policy(name), 5).purchases
        assert bought.ends == pytest.approx(expected)


def test_progress_ends_with_all_turns() -> None:
    seen: list[tuple[int, int]] = []
    trace = coding_fleet(40, 40)
    simulate(trace, find_world("quick"), find_policy("now"), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1000, trace.calls), (trace.calls, trace.calls)]


# ------------------------------------------------------------ the policies


@pytest.mark.parametrize(("name", "ttl"), [("now", None), ("now+5m", "5m"), ("now+1h", "1h")])
def test_now_answers_as_fast_as_the_trace(name: str, ttl: str | None) -> None:
    record = simulate(conversation([0.0, 10.0]), steady(100.0), find_policy(name))
    assert [answer.answered for answer in record.answers] == [3.0, 16.0]
    assert [answer.wait_s for answer in record.answers] == [0.0, 0.0]
    assert [(one.ttl, one.system_ttl) for one in record.purchases] == [(ttl, ttl)] * 2
    assert {one.system for one in record.purchases} == ({ROOT} if ttl is None else {0})


def test_a_call_that_shares_nothing_is_not_marked() -> None:
    assert [one.ttl for one in simulate(calls([0.0]), steady(1.0), find_policy("now+1h")).purchases] == [None]


def test_pings_keep_a_pausing_conversation_alive() -> None:
    record = simulate(conversation([0.0, 700.0]), steady(1.0), find_policy("now+5m+pings(2)"))
    pings = [purchase for purchase in record.purchases if purchase.kind == "ping"]
    assert [(ping.turn, ping.starts, ping.output_tokens) for ping in pings] == [
        (0, 290.0, 0),
        (0, 580.0, 0),
        (1, 993.0, 0),  # nobody tells a client that this was the last turn
        (1, 1283.0, 0),
    ]


def test_every_turn_is_a_batch_of_its_own() -> None:
    record = simulate(calls([0.0, 0.0, 0.0]), steady(100.0), find_policy("batch"))
    assert record.batches == 3
    assert [one.ends for one in record.purchases] == [100.0] * 3
    assert [one.starts for one in record.purchases] == [97.0] * 3  # executed at the end of its latency
    marked = simulate(conversation([0.0, 1.0]), steady(100.0), find_policy("batch+1h"))
    assert [(one.ttl, one.system_ttl) for one in marked.purchases] == [("1h", "1h")] * 2


def test_a_window_counts_from_its_first_call() -> None:
    record = simulate(calls([100.0, 120.0, 131.0]), steady(50.0), find_policy("window"))
    assert [one.ends for one in record.purchases] == [180.0, 180.0, 211.0]


def test_a_full_window_does_not_wait() -> None:
    record = simulate(calls([0.0] * 100), steady(50.0), find_policy("window"))
    assert (record.batches, record.purchases[0].ends) == (1, 50.0 + ADMITTED_S)


def test_llmfleet_splits_a_burst_and_has_one_batch_in_flight() -> None:
    record = simulate(calls([100.0, 100.0, 100.0]), steady(50.0), find_policy("llmfleet"))
    first, *rest = record.purchases
    assert (record.batches, first.ends) == (2, 150.0 + ADMITTED_S)  # its window was over before the burst came
    assert [one.ends for one in rest] == pytest.approx([150.1 + 30.0 + 50.0] * 2)


def test_llmfleet_and_windows_send_tight_budgets_at_once() -> None:
    for name in ("llmfleet", "window"):
        assert simulate(calls([0.0]), steady(1.0), find_policy(name), budget_s=5.0).answers[0].lane is Lane.NOW
        late = simulate(calls([0.0]), steady(100.0), find_policy(name), budget_s=60.0).answers[0]
        assert (late.lane, late.miss) == (Lane.BATCH, "the batch was late")


def test_carpool_rescues_what_its_batch_would_make_late() -> None:
    trace = calls([0.0, 0.1])
    record = simulate(trace, steady(5000.0), find_policy("carpool"), budget_s=3600.0)
    assert [(answer.lane, answer.rescued, answer.miss) for answer in record.answers] == [(Lane.NOW, True, None)] * 2
    assert [purchase.kind for purchase in record.purchases] == ["rescue"] * 2  # the batch was cancelled before
    assert record.batches == 1


def test_a_batch_that_answers_beside_its_rescue_is_a_duplicate() -> None:
    trace = calls([0.0])
    rescue_at = simulate(trace, steady(9999.0), find_policy("carpool"), budget_s=3600.0).purchases[0].starts
    world = steady(rescue_at + 2.0, cancel_s=60.0)
    world = replace(world, batch={"*": MeasuredTimes((rescue_at - 17.5,))})  # is executing when it is cancelled
    record = simulate(trace, world, find_policy("carpool"), budget_s=3600.0)
    assert [(one.kind, one.lane) for one in record.purchases] == [("duplicate", Lane.BATCH), ("rescue", Lane.NOW)]


def test_a_stuck_batch_expires_and_its_call_is_bought_again() -> None:
    world = replace(steady(10.0), stuck=0.5)
    record = simulate(calls([0.0] * 40), world, find_policy("batch"))
    late = [answer for answer in record.answers if answer.answered > world.expiry_s]
    assert 10 < len(late) < 30
    assert len(record.purchases) == 40  # nothing is billed for a call that expired
    assert record.batches > 50


def test_the_limit_of_now_delays_calls_and_is_a_reason() -> None:
    record = simulate(calls([0.0] * 12), steady(1.0, sync_rpm=10), find_policy("now"), budget_s=5.0)
    assert [answer.answered for answer in record.answers] == pytest.approx([3.0] * 10 + [9.0, 15.0])
    assert [answer.miss for answer in record.answers] == [None] * 10 + ["the provider had no room"] * 2


def test_refusals_delay_calls_and_are_a_reason() -> None:
    record = simulate(calls([0.0] * 50), steady(1.0, refusal=0.5), find_policy("now"), budget_s=4.0)
    reasons = Counter(answer.miss for answer in record.answers)
    assert set(reasons) == {None, "the provider refused"}
    assert len(record.purchases) == 50


def test_a_turn_has_what_is_left_of_its_task() -> None:
    record = simulate(conversation([5.0, 50.0, 100.0]), steady(1.0), find_policy("now"), task_budget_s=60.0)
    assert [answer.deadline for answer in record.answers] == [65.0] * 3
    assert [answer.miss for answer in record.answers] == [None, None, "the task ran out of time"]
    slow = simulate(conversation([0.0]), steady(1.0), find_policy("now"), budget_s=2.0)
    assert slow.answers[0].miss == "its answer takes longer"


@pytest.mark.parametrize("name", ["now+5m", "batch", "carpool"])
def test_other_providers_can_be_simulated(name: str) -> None:
    trace = replace(calls([0.0, 1.0], model="gpt-5.2"), provider="openai")
    record = simulate(trace, steady(100.0), find_policy(name), budget_s=7200.0)
    assert [answer.miss for answer in record.answers] == [None, None]


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ConfigError, match="'later' is not a policy: known are now, now"):
        find_policy("later")


# ------------------------------------------------------------ parts


@pytest.mark.parametrize("seed", range(20))
def test_the_next_poll_is_that_of_all_batches(seed: int) -> None:
    rng, forecast = random.Random(seed), Forecast()
    interval = rng.choice([None, 1.0, 5.0])
    poll_times, last = PollTimes(interval, forecast), None
    flying: list[tuple[float, str]] = []
    requests = TokenBucket(0.8, 5.0, 5.0, 0.0)
    for step in range(300):
        now = step * 7.0
        if rng.random() < 0.6:
            bought, size = now - rng.random() * 5, rng.choice("sml")
            flying.append((bought, size))
            poll_times.add(bought, BatchClass("anthropic", "m", size))
        elif flying:
            bought, size = flying.pop(rng.randrange(len(flying)))
            poll_times.remove(bought, BatchClass("anthropic", "m", size))
        if rng.random() < 0.5:
            last = now
        requests = requests.take(now, rng.choice([0, 4, 9]))
        every = [
            InFlight(
                partial(forecast.ends_within, of=BatchClass("anthropic", "m", size)),
                sorted(bought for bought, one in flying if one == size),
            )
            for size in "sml"
        ]
        found = poll_times.next(last, requests, now)
        assert found == pytest.approx(next_poll(every, last, interval, requests, now)), f"seed {seed}, step {step}"


def test_times_are_never_below_their_floor() -> None:
    times = LogNormalTimes(100.0, 2.0, 60.0)
    assert times.quantile(0.0, 0.0) == 60.0
    assert times.quantile(0.0, 0.5) == pytest.approx(100.0)
    assert times.quantile(0.0, 1.0) < math.inf
