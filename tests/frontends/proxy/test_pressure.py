"""A provider under pressure, over real HTTP: a fleet slows down instead of failing, and fairly.

`CARPOOL_MINUTE_S=60` runs the fleet in real time, from a full minute's worth of requests on; otherwise its minute has
thirty seconds, and it begins with a fifth of that: so a slow machine can keep up.
"""

import asyncio
import os
import time
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from carpool.engine.events import AccountSlowed, BreakerClosed, BreakerOpened, TroubleBegan, TroubleOver
from carpool.mock import Constant, Faults, MockConfig, Uniform
from carpool.planners.policy import RoutingPolicy
from tests.support.deep import quick_and_deep
from tests.support.socket_agents import run_fleet
from tests.support.stage import QUICK, Stage, ask

MINUTE_S = float(os.environ.get("CARPOOL_MINUTE_S", "30"))
PER_MINUTE = 1000
IN_EARNEST = MINUTE_S >= 60
AT_FIRST = PER_MINUTE if IN_EARNEST else PER_MINUTE // 5
LASTS = [2.5] if IN_EARNEST else quick_and_deep([0.7, 1.2], [0.7])  # minutes
STORM_EVERY, STORM_S = (0.6 * MINUTE_S, MINUTE_S / 10) if IN_EARNEST else (7.0, 1.0)
TEAMS = {"red": 120, "green": 60, "blue": 20}
SEED = 20261116


def gates(stage: Stage) -> Any:
    return stage.engine._sender.gates


def in_flight(stage: Stage) -> int:
    return sum(gate.throttle.in_flight for gate in gates(stage)._gates.values())


def waiting(stage: Stage) -> int:
    return sum(len(gate.queue) for gate in gates(stage)._gates.values())


def slowed(**faults: Any) -> MockConfig:
    """A provider that refuses everybody for a minute as soon as it is told to, and says to come back in ten seconds."""
    return MockConfig(faults=Faults(**{"burst_s": 60.0, "retry_after_s": 10, **faults}))


async def press(stage: Stage, **headers: str) -> None:
    stage.mock.script("sync_429_burst")
    answer = await stage.post(ask(), **headers)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "10"  # the provider's own: without a budget nothing is tried again


# ---------------------------------------------------------------- the fleet


@pytest.mark.parametrize("minutes", LASTS)
async def test_two_hundred_agents_share_a_limit_through_bursts_of_429(stage_with: Any, minutes: float) -> None:
    print(f"seed {SEED}, a minute of {MINUTE_S:g} s")
    config = MockConfig(
        seed=SEED,
        sync_rpm=PER_MINUTE * 60 / MINUTE_S,
        sync_burst=AT_FIRST,
        sync_latency=Uniform(0.2, 0.5),
        faults=Faults(burst_s=STORM_S, retry_after_s=1),
    )
    seconds = minutes * MINUTE_S
    async with stage_with(config) as stage:
        began = time.time()
        storms = asyncio.create_task(_storms(stage, STORM_EVERY))
        try:
            done = await run_fleet(stage.url, TEAMS, seconds, SEED)
        finally:
            storms.cancel()
        arrivals = [one for one in stage.mock.arrivals if one.at < began + seconds]
        assert in_flight(stage) == waiting(stage) == 0
    taken = [one.at for one in arrivals if one.status == 200]
    refused = [one.at for one in arrivals if one.status == 429]
    print(f"{len(taken)} taken, {len(refused)} refused, {len(done)} finished", Counter(one.status for one in done))

    assert {one.status for one in done} == {200}, "everybody finishes"
    assert len(refused) >= 2, "there were bursts"
    assert len(refused) < len(taken) / 10, "and the fleet does not run against them"

    limit = AT_FIRST + PER_MINUTE * seconds / MINUTE_S
    print(f"throughput {len(taken) / limit:.1%} of the limit")
    assert len(taken) >= 0.9 * limit

    _no_herd([one.at for one in arrivals], refused)

    # While the limit is what holds the fleet back: after what was there at first is used up, and before the end.
    busy_after = MINUTE_S if IN_EARNEST else MINUTE_S / 3
    busy = Counter(one.tag for one in done if began + busy_after < one.at < began + seconds - 0.5)
    print(f"shares {dict(busy)}")
    fair = busy.total() / len(TEAMS)
    assert all(0.8 * fair <= busy[team] <= 1.2 * fair for team in TEAMS)


async def _storms(stage: Stage, every: float) -> None:
    while True:
        await asyncio.sleep(every)
        stage.mock.script("sync_429_burst")


def _no_herd(arrivals: list[float], refused: list[float]) -> None:
    """After a 429 nearly nobody comes before the time that it named, and then one after another."""
    steady = PER_MINUTE / MINUTE_S
    onsets = [refused[0]] + [after for before, after in pairwise(refused) if after - before > 0.6]
    for onset in onsets:
        early = sum(onset + 0.4 < at < onset + 0.9 for at in arrivals)
        assert early <= 10, f"{early} came although they were told to wait"
        back = [at for at in arrivals if onset + 0.9 <= at < onset + 3.0]
        crowd = max((sum(at <= other < at + 0.25 for other in back) for at in back), default=0)
        assert crowd <= max(5.0, steady * 0.25 * 3), f"{crowd} came within a quarter of a second"


# ---------------------------------------------------------------- waiting in line


async def test_a_calm_provider_holds_nobody_up(stage_with: Any) -> None:
    async with stage_with() as stage:
        answers = await asyncio.gather(*(stage.post(ask(str(number))) for number in range(50)))
        assert {answer.status_code for answer in answers} == {200}
        assert stage.engine.stats.held_calls == 0
        assert in_flight(stage) == 0


async def test_calls_wait_for_the_time_that_was_named_and_then_go(stage_with: Any) -> None:
    async with stage_with(slowed(retry_after_s=1, burst_s=0.5)) as stage:
        stage.mock.script("sync_429_burst")
        assert (await stage.post(ask())).status_code == 429
        answers = await asyncio.gather(*(stage.post(ask(str(number))) for number in range(5)))
        assert {answer.status_code for answer in answers} == {200}
        assert stage.engine.stats.held_calls == 5
        refused, *rest = stage.mock.arrivals
        assert len(rest) == 5
        assert all(one.at >= refused.at + 1.0 for one in rest)


async def test_who_could_not_be_served_in_time_is_told_so_in_the_providers_words(stage_with: Any) -> None:
    async with stage_with(slowed(), RoutingPolicy(max_wait_now_s=0.2)) as stage:
        await press(stage)
        began = time.time()
        answer = await stage.post(ask())
        assert time.time() - began < 5.0  # at once: a pause of ten seconds is longer than it may wait
        assert answer.status_code == 429
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert 1 <= int(answer.headers["retry-after"]) <= 13
        assert answer.headers["x-carpool-lane"] == "now"
        assert stage.mock.requests_seen.count("messages") == 1
        assert stage.engine.stats.turned_away_calls == 1


async def test_a_turn_that_does_not_come_is_given_up(stage_with: Any) -> None:
    async with stage_with(slowed(retry_after_s=1), RoutingPolicy(max_wait_now_s=2.0)) as stage:
        stage.mock.script("sync_429_burst")
        assert (await stage.post(ask())).status_code == 429
        answers = await asyncio.gather(*(stage.post(ask(str(number))) for number in range(8)))
        assert {answer.status_code for answer in answers} == {429}
        assert stage.mock.requests_seen.count("messages") < 9  # most were never sent
        assert waiting(stage) == in_flight(stage) == 0


async def test_the_line_has_an_end(stage_with: Any) -> None:
    async with stage_with(slowed(), RoutingPolicy(max_waiting_now=3)) as stage:
        await press(stage)
        held = [asyncio.create_task(stage.post(ask(str(number)))) for number in range(3)]
        await stage.until(lambda: waiting(stage) == 3)
        answer = await stage.post(ask("one too many"))
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        for task in held:
            task.cancel()
        await stage.until(lambda: waiting(stage) == 0)


async def test_a_client_that_hangs_up_leaves_the_line(stage_with: Any) -> None:
    async with stage_with(slowed()) as stage:
        await press(stage)
        held = asyncio.create_task(stage.post(ask("leaves")))
        await stage.until(lambda: waiting(stage) == 1)
        held.cancel()
        await stage.until(lambda: waiting(stage) == 0)
        assert in_flight(stage) == 0
        assert stage.mock.requests_seen.count("messages") == 1


async def test_a_budget_is_waited_for_inside_its_deadline(stage_with: Any) -> None:
    policy = RoutingPolicy(max_wait_now_s=0, linger_ms=20)  # of calls without a budget
    async with stage_with(slowed(retry_after_s=1, burst_s=0.5), policy) as stage:
        stage.mock.script("sync_429_burst")
        assert (await stage.post(ask())).status_code == 429
        answer = await stage.post(ask(), **{"x-carpool-budget": "10s", "x-carpool-lane": "now"})
        assert answer.status_code == 200
        late = await stage.post(ask("calm again"))
        assert late.status_code == 200


async def test_a_429_with_a_budget_is_tried_again_when_the_gate_opens(stage_with: Any) -> None:
    async with stage_with(slowed(retry_after_s=1, burst_s=0.5)) as stage:
        stage.mock.script("sync_429_burst")
        answer = await stage.post(ask(), **{"x-carpool-budget": "20s", "x-carpool-lane": "now"})
        assert answer.status_code == 200
        assert stage.engine.stats.retries == 1
        assert [one.status for one in stage.mock.arrivals] == [429, 200]


async def test_when_much_fails_not_all_of_it_is_tried_again_at_once(stage_with: Any) -> None:
    config = MockConfig(seed=SEED, faults=Faults(sync_500=0.5))
    async with stage_with(config) as stage:
        began, budget = time.time(), {"x-carpool-budget": "4s", "x-carpool-lane": "now"}
        answers = await asyncio.gather(*(stage.post(ask(str(number)), **budget) for number in range(80)))
        made, retries = len(stage.mock.arrivals), stage.engine.stats.retries
        print(f"seed {SEED}: {retries} of {made} were retries", Counter(answer.status_code for answer in answers))
        assert 5 < retries <= 10 + 0.2 * made + 0.5 * (time.time() - began) + 1


async def test_models_are_slowed_down_apart(stage_with: Any) -> None:
    async with stage_with(slowed(burst_s=0.1), RoutingPolicy(max_wait_now_s=0)) as stage:
        await press(stage)
        await asyncio.sleep(0.2)
        assert (await stage.post(ask())).status_code == 429
        assert (await stage.post(ask(model="claude-opus-4-8"))).status_code == 200


async def test_another_account_is_not_slowed_down(stage_with: Any) -> None:
    async with stage_with(slowed()) as stage:
        await press(stage)
        assert (await stage.post(ask(), **{"x-api-key": "another"})).status_code == 200


async def test_what_was_never_sent_stands_in_no_ledger(stage_with: Any) -> None:
    async with stage_with(slowed(), RoutingPolicy(max_wait_now_s=0)) as stage:
        await press(stage)
        for _ in range(5):
            assert (await stage.post(ask())).status_code == 429
        totals = await stage.engine.overview.summary()
        assert sum(row.purchases for row in totals.totals) == 1


async def test_pressure_is_shown_and_told(stage_with: Any) -> None:
    async with stage_with(slowed()) as stage:
        told: list[Any] = []
        stage.engine.event_hooks.add(told.append)
        await press(stage)
        (event,) = [event for event in told if isinstance(event, AccountSlowed)]
        assert (event.provider, event.status) == ("anthropic", 429)
        assert 10.0 <= event.pause_s <= 12.6
        stats = (await stage.http.get(f"{stage.url}/carpool/stats")).json()
        (hurdle,) = stats["pressure"]
        assert hurdle["closed_for_s"] > 5.0
        assert hurdle["model"] == "claude-haiku-4-5"
        assert stats["carpool.slowdowns"] == 1
        assert "k" not in (hurdle["account"], event.account)


async def test_the_heads_of_answers_slow_a_fleet_down_before_anything_is_refused(stage_with: Any) -> None:
    config = MockConfig(sync_rpm=1200, sync_burst=40, sync_latency=Constant(0.02))
    async with stage_with(config) as stage:
        done = await run_fleet(stage.url, {"red": 10, "green": 10}, 4.0, SEED)
        assert {one.status for one in done} == {200}
        refused = sum(one.status == 429 for one in stage.mock.arrivals)
        print(f"{refused} of {len(stage.mock.arrivals)} refused")
        assert refused < len(stage.mock.arrivals) / 10
        assert stage.engine.stats.held_calls > 20


# ---------------------------------------------------------------- the breaker


async def break_it(stage: Stage) -> list[int]:
    stage.mock.script("sync_500", 6)
    return [(await stage.post(ask(str(number)))).status_code for number in range(6)]


async def test_a_provider_that_fails_again_and_again_is_left_alone_and_found_again(stage_with: Any) -> None:
    async with stage_with() as stage:
        told: list[Any] = []
        stage.engine.event_hooks.add(told.append)
        assert await break_it(stage) == [500] * 6
        answer = await stage.post(ask())
        assert answer.status_code == 503
        assert answer.json()["error"]["type"] == "overloaded_error"
        assert int(answer.headers["retry-after"]) >= 1
        assert stage.mock.requests_seen.count("messages") == 6
        assert stage.engine.stats.breaker_openings == 1

        async with asyncio.timeout(10):
            while (await stage.post(ask("well again?"))).status_code != 200:  # noqa: ASYNC110  over there
                await asyncio.sleep(0.05)
        assert [type(event) for event in told] == [TroubleBegan, BreakerOpened, TroubleOver, BreakerClosed]
        assert in_flight(stage) == 0


async def test_one_call_at_a_time_asks_whether_the_provider_is_well(stage_with: Any) -> None:
    async with stage_with(MockConfig(sync_latency=Constant(0.5))) as stage:
        await break_it(stage)
        breaker = next(iter(gates(stage)._accounts.values())).breaker
        await stage.until(lambda: time.time() > breaker.open_until)
        answers = await asyncio.gather(*(stage.post(ask(str(number))) for number in range(10)))
        assert Counter(answer.status_code for answer in answers) == {200: 1, 503: 9}
        assert stage.mock.requests_seen.count("messages") == 7


async def test_calls_with_a_budget_wait_until_the_provider_is_well(stage_with: Any) -> None:
    async with stage_with() as stage:
        await break_it(stage)
        budget = {"x-carpool-budget": "20s", "x-carpool-lane": "now"}
        answers = await asyncio.gather(*(stage.post(ask(str(number)), **budget) for number in range(10)))
        assert {answer.status_code for answer in answers} == {200}
        assert in_flight(stage) == waiting(stage) == 0


async def test_a_probe_whose_client_leaves_lets_the_next_one_ask(stage_with: Any) -> None:
    async with stage_with(MockConfig(sync_latency=Constant(5.0))) as stage:
        await break_it(stage)
        breaker = next(iter(gates(stage)._accounts.values())).breaker
        await stage.until(lambda: time.time() > breaker.open_until)
        probe = asyncio.create_task(stage.post(ask("leaves")))
        await stage.until(lambda: stage.mock.requests_seen.count("messages") == 7)
        probe.cancel()
        await stage.until(lambda: in_flight(stage) == 0)
        await stage.until(lambda: breaker.ready_at(time.time()) <= time.time())


async def test_refusals_are_no_failures(stage_with: Any) -> None:
    async with stage_with(slowed(retry_after_s=0), RoutingPolicy(max_wait_now_s=30, linger_ms=20)) as stage:
        stage.mock.script("sync_429_bare", 8)
        for number in range(8):
            assert (await stage.post(ask(str(number)))).status_code == 429
            gate = next(iter(gates(stage)._gates.values()))
            gate.throttle.paused_until = gate.throttle._next_at = 0.0  # its pauses grow, and are not what is asked here
            gate.throttle.limit = 10.0
        assert (await stage.post(ask())).status_code == 200
        assert stage.engine.stats.breaker_openings == 0


# ---------------------------------------------------------------- nothing is left behind


@pytest.mark.parametrize("fault", ["sync_cut", "sync_500", "sync_529", "sync_429", "sync_accepted_cut"])
async def test_every_way_to_fail_gives_its_slot_back(stage_with: Any, fault: str) -> None:
    async with stage_with(MockConfig(faults=Faults(retry_after_s=0))) as stage:
        for number in range(3):
            stage.mock.script(fault)
            answer = await stage.post(ask(str(number)))
            assert answer.status_code >= 429
        assert in_flight(stage) == 0


async def test_a_client_that_leaves_during_its_call_gives_its_slot_back(stage_with: Any) -> None:
    async with stage_with(MockConfig(sync_latency=Constant(5.0))) as stage:
        call = asyncio.create_task(stage.post(ask()))
        await stage.until(lambda: in_flight(stage) == 1)
        call.cancel()
        await stage.until(lambda: in_flight(stage) == 0)


async def test_who_waits_when_carpool_closes_is_told(stage_with: Any) -> None:
    async with stage_with(slowed()) as stage:
        await press(stage)
        held = asyncio.create_task(stage.post(ask("waits")))
        await stage.until(lambda: waiting(stage) == 1)
        await stage.engine.close(0.0)
        answer = await held
        assert answer.status_code == 503
        assert answer.headers["retry-after"]


async def test_models_that_clients_make_up_are_forgotten(stage_with: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carpool.engine.now.gate.MAX_GATES", 10)
    async with stage_with(policy=QUICK) as stage:
        for number in range(40):
            await stage.post(ask(model=f"made-up-{number}"))
        assert len(gates(stage)._gates) <= 10
