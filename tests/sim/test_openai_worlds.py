"""Worlds made by hand, each for one thing that may happen at OpenAI."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from carpool.core.model import Entry, Lane
from carpool.mock import Constant, Faults, MockConfig, OpenAIConfig, Outcome, Uniform
from carpool.planners.policy import RoutingPolicy
from carpool.sim.checks import problems
from carpool.sim.openai import CHAT, EMBEDDINGS, HOOK_URL
from carpool.sim.plan import AgentPlan, Crash, Plan, TurnPlan
from carpool.sim.timeline import Timeline
from carpool.sim.world import World, run_world

MODELS = ("gpt-6-luna", "gpt-5-mini", "gpt-5.2", "gpt-4o-mini")


def _agent(number: int, model: str, budget: float | None, starts: float) -> AgentPlan:
    endpoint = EMBEDDINGS if model.startswith("text-") else CHAT
    turn = TurnPlan(f"agent {number}", model, 200, budget, False, 0.0, (), 0.1, endpoint)
    return AgentPlan(f"agent {number}", "sk-one", True, "", None, starts, (turn,), provider="openai")


def _plan(
    mock: MockConfig,
    count: int = 8,
    models: tuple[str, ...] = MODELS[:1],
    *,
    budget: float | None = None,
    crashes: tuple[Crash, ...] = (),
    policy: RoutingPolicy | None = None,
    apart: float = 0.01,
) -> Plan:
    agents = tuple(_agent(number, models[number % len(models)], budget, apart * number) for number in range(count))
    return Plan(7, {"openai": mock}, policy or RoutingPolicy(), agents, crashes, 1, 0.0, 0.0, not crashes)


def _after(plan: Plan, look: Callable[[World, list[Entry]], None]) -> None:
    """Runs the world to its end, finds every promise kept, and looks at what is left and at the ledger."""
    timeline = Timeline()

    async def go() -> None:
        world = await run_world(plan, timeline)
        try:
            found = await problems(world)
            assert not found, world.log.text() + "\n" + "\n".join(found)
            tickets = [call.ticket for turn in world.turns for call in turn.calls]
            look(world, [entry for ticket in tickets for entry in await world.store.entries(ticket)])
        finally:
            await world.store.aclose()

    with asyncio.Runner(loop_factory=lambda: timeline) as runner:
        runner.run(go())


def _mock(**settings: object) -> MockConfig:
    return MockConfig(**{"seed": 7, "batch_latency": Constant(60.0), **settings})  # type: ignore[arg-type]


def test_a_pace_that_nobody_names_is_found() -> None:
    """An upload and a create for every batch: whoever goes on at his own pace gets one of the two, and never both."""

    def look(world: World, entries: list[Entry]) -> None:
        seen = world.providers["openai"].requests_seen
        assert seen.count("upload") <= 30
        assert seen.count("create") <= 20

    _after(_plan(_mock(batch_rpm=5.0), count=12, models=MODELS), look)


def test_results_that_are_promised_and_never_named_are_not_waited_for() -> None:
    """Its counts speak of a line, and no file has one."""

    def look(world: World, entries: list[Entry]) -> None:
        assert "missing" in world.log.text()

    _after(_plan(_mock(faults=Faults(line_missing=0.4)), count=3, models=MODELS), look)


def test_a_part_of_an_expired_batch_is_kept_and_the_rest_bought_anew() -> None:
    def look(world: World, entries: list[Entry]) -> None:
        provider = world.providers["openai"]
        expired = [batch for batch in provider.batches if batch.status == "expired"]
        assert any({Outcome.SUCCEEDED, Outcome.EXPIRED} <= set(batch.outcomes) for batch in expired)
        assert len(provider.bill.charges) == len(world.turns)
        assert not [entry for entry in entries if entry.paid is None]

    mock = _mock(expiry_s=600.0, batch_latency=Uniform(10.0, 750.0), per_request=True)
    _after(_plan(mock, count=20, policy=RoutingPolicy(batch_max_size=5)), look)


def test_what_failed_stands_in_the_other_file() -> None:
    def look(world: World, entries: list[Entry]) -> None:
        assert world.providers["openai"].faults_struck["line_api_error"] > 0
        assert not [entry for entry in entries if entry.paid is None]

    _after(_plan(_mock(faults=Faults(line_api_error=0.3)), count=12), look)


def test_a_create_that_was_cut_is_looked_for_and_never_sent_again() -> None:
    def look(world: World, entries: list[Entry]) -> None:
        provider = world.providers["openai"]
        assert provider.faults_struck["create_accepted_cut"] > 0
        assert len(provider.bill.charges) == len(world.turns)

    _after(_plan(_mock(faults=Faults(create_accepted_cut=0.5)), count=12, models=MODELS), look)


def test_what_is_not_ours_is_never_taken_for_it() -> None:
    """Some creates never arrive, while others of ours, and strangers', stand in the list."""

    def look(world: World, entries: list[Entry]) -> None:
        provider = world.providers["openai"]
        assert provider.faults_struck["create_cut"] > 0
        assert provider.strangers_bill.charges
        assert len(provider.bill.charges) == len(world.turns)

    faults = Faults(create_cut=0.4, stranger=1.0)
    _after(_plan(_mock(faults=faults), count=16, models=MODELS, apart=30.0), look)


def test_what_finds_no_room_waits_for_it_and_costs_nothing() -> None:
    def look(world: World, entries: list[Entry]) -> None:
        provider = world.providers["openai"]
        assert 0 < [batch.status for batch in provider.batches].count("failed") <= len(world.turns)
        assert len(provider.bill.charges) == len(world.turns)

    queue_full = OpenAIConfig(enqueued_tokens={"*": 30}, validation_latency=Constant(2.0))
    _after(_plan(_mock(openai=queue_full), count=12, policy=RoutingPolicy(batch_max_size=2)), look)


def test_a_crash_during_the_upload_leaves_nothing_unknown() -> None:
    def look(world: World, entries: list[Entry]) -> None:
        assert "never sent" in world.log.text()
        assert all(turn.reply is not None and turn.reply.outcome.status == 200 for turn in world.turns)
        assert not [entry for entry in entries if entry.paid is None]
        assert len(world.providers["openai"].bill.charges) == len(world.turns)

    slow = _mock(control_latency=Constant(5.0))
    _after(_plan(slow, crashes=(Crash(3.0, 1.0, clean=True), Crash(6.5, 1.0, clean=True))), look)


def test_webhooks_are_a_hint_whether_they_come_twice_late_or_never() -> None:
    def look(world: World, entries: list[Entry]) -> None:
        assert {sent.status for sent in world.providers["openai"].hooks_sent} == {200}

    faults = Faults(hook_lost=0.3, hook_double=0.5, hook_late=0.5, hook_late_s=900.0)
    _after(_plan(_mock(faults=faults, openai=OpenAIConfig(webhook_url=HOOK_URL)), count=12, models=MODELS), look)


def test_flex_that_has_no_room_is_free_and_another_lane_is_on_time() -> None:
    def look(world: World, entries: list[Entry]) -> None:
        assert world.providers["openai"].faults_struck["flex_429"] > 0
        assert {str(turn.reply.outcome.lane) for turn in world.turns if turn.reply} > {"flex"}
        assert not [entry for entry in entries if entry.paid is None]

    _after(_plan(_mock(faults=Faults(flex_429=0.5)), count=16, budget=300.0, apart=40.0), look)


def test_flex_that_takes_too_long_is_a_rescue() -> None:
    """It may be billed for all that: it stays in the ledger as unknown, and what answers in its place is a rescue."""

    def look(world: World, entries: list[Entry]) -> None:
        kinds = {(str(entry.lane), str(entry.kind)) for entry in entries}
        assert ("flex", "purchase") in kinds
        assert ("now", "rescue") in kinds
        assert {entry.paid for entry in entries if entry.lane is Lane.FLEX} == {None}

    slow = OpenAIConfig(flex_latency=Constant(3600.0))
    _after(_plan(_mock(openai=slow), count=3, budget=300.0), look)
