"""The checkers can fail: each is shown a world in which its promise was broken."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from msgspec import structs

from carpool.core.model import EntryKind, Lane, OutcomeKind
from carpool.sim import Fleet, draw
from carpool.sim.checks import (
    deadlines_are_kept,
    everybody_is_answered,
    files_are_flawless,
    ledger_is_the_bill,
    missed_deadlines_have_a_reason,
    mistakes_come_back,
    nobody_buys_again_by_coming_back,
    nothing_mixes,
    purchases_are_recorded_once,
    read_records,
    replies_are_the_providers,
    second_purchases_are_recorded,
    strangers_are_left_alone,
)
from carpool.sim.timeline import Deadlock, Timeline, run
from carpool.sim.world import World, run_world

SEED = 100
RESTLESS = 27  # a world in which clients leave and come back, and nobody is in doubt


def _world(seed: int = SEED, fleet: Fleet = "anthropic") -> tuple[World, Timeline]:
    timeline = Timeline()
    loop_world: list[World] = []

    async def make() -> None:
        loop_world.append(await run_world(draw(seed, fleet), timeline))

    runner = asyncio.Runner(loop_factory=lambda: timeline)
    runner.run(make())
    return loop_world[0], timeline


def _sentences(check, change, fleet: Fleet = "anthropic", seed: int = SEED) -> list[str]:
    world, timeline = _world(seed, fleet)
    records = timeline.run_until_complete(read_records(world)) if not timeline.is_closed() else None
    assert records is not None
    assert list(check(records)) == []
    records = timeline.run_until_complete(read_records(world))
    change(world, records)
    found = list(check(records))
    timeline.run_until_complete(world.store.aclose())
    timeline.close()
    return found


def test_a_missing_answer_is_seen() -> None:
    def change(world: World, records) -> None:
        world.turns[0].reply = None

    assert _sentences(everybody_is_answered, change)


def test_somebody_elses_answer_is_seen() -> None:
    def change(world: World, records) -> None:
        turn = next(turn for turn in world.turns if turn.reply.outcome.status == 200 and "[" not in turn.plan.text)
        turn.body = {**turn.body, "max_tokens": 49}

    assert _sentences(replies_are_the_providers, change)


def test_a_wrong_price_is_seen() -> None:
    def change(world: World, records) -> None:
        ticket = next(ticket for ticket, entries in records.entries.items() if any(entry.paid for entry in entries))
        records.entries[ticket] = [structs.replace(entry, paid=entry.paid + 1) for entry in records.entries[ticket]]

    assert _sentences(ledger_is_the_bill, change)


def test_a_purchase_that_is_not_in_the_ledger_is_seen() -> None:
    assert _sentences(ledger_is_the_bill, lambda world, records: records.entries.clear())


def test_a_hidden_second_purchase_is_seen() -> None:
    def change(world: World, records) -> None:
        ticket = next(ticket for ticket, entries in records.entries.items() if any(entry.paid for entry in entries))
        twice = structs.replace(next(e for e in records.entries[ticket] if e.paid), kind=EntryKind.PURCHASE)
        records.entries[ticket] = [twice, structs.replace(twice, purchase=99)]

    assert _sentences(second_purchases_are_recorded, change)


def test_a_purchase_for_one_who_only_came_back_is_seen() -> None:
    def change(world: World, records) -> None:
        paid = {
            ticket for ticket in records.entries for e in records.entries[ticket] if e.lane is Lane.BATCH and e.paid
        }
        turn = next(turn for turn in world.turns if turn.calls[0].ticket in paid)
        other = structs.replace(turn.calls[0], ticket=1)
        records.entries[1] = [structs.replace(entry, ticket=1) for entry in records.entries[turn.calls[0].ticket]]
        turn.calls.append(other)

    assert _sentences(nobody_buys_again_by_coming_back, change, seed=RESTLESS)


def test_a_cancelled_stranger_is_seen() -> None:
    def change(world: World, records) -> None:
        provider = world.providers["anthropic"]
        stranger = provider.add_stranger(world.plan.agents[0].key, 1)
        provider._state.canceled.append(stranger.id)

    assert _sentences(strangers_are_left_alone, change)


def test_a_strangers_file_that_was_deleted_is_seen() -> None:
    def change(world: World, records) -> None:
        provider = world.providers["openai"]
        stranger = provider.add_openai_stranger(world.plan.agents[0].key, 1)
        provider.end_batch(stranger.id)
        assert stranger.output_file_id in provider.files
        for project in provider._state.projects.values():
            if project.find(stranger.id):
                project.files.remove(stranger.output_file_id)

    assert _sentences(strangers_are_left_alone, change, fleet="openai")


def test_models_in_one_file_are_seen() -> None:
    def change(world: World, records) -> None:
        turn = next(turn for turn in world.turns if any(entry.lane is Lane.BATCH for entry in records.of(turn)))
        turn.calls = [structs.replace(call, model="gpt-4o-mini", endpoint="/v1/elsewhere") for call in turn.calls]

    assert _sentences(nothing_mixes, change, fleet="openai")


def test_a_file_that_can_not_be_read_is_seen() -> None:
    def change(world: World, records) -> None:
        batch = next(batch for _, batch in records.batches)
        batch.flaw = {"code": "mismatched_model", "message": "Two models.", "line": 2, "param": None}

    assert _sentences(files_are_flawless, change, fleet="openai")


def test_a_flex_call_that_stands_as_now_is_seen() -> None:
    def change(world: World, records) -> None:
        ticket = next(
            t for t, entries in records.entries.items() if any(e.lane is Lane.FLEX and e.paid for e in entries)
        )
        records.entries[ticket] = [structs.replace(entry, lane=Lane.NOW) for entry in records.entries[ticket]]

    assert _sentences(ledger_is_the_bill, change, fleet="openai", seed=101)


def test_a_deadline_that_was_missed_for_no_reason_is_seen() -> None:
    def change(world: World, records) -> None:
        reply = world.turns[0].reply
        outcome = structs.replace(reply.outcome, kind=OutcomeKind.DEADLINE, reason="")
        world.turns[0].reply = structs.replace(reply, outcome=outcome)

    assert _sentences(missed_deadlines_have_a_reason, change)


def test_a_missed_deadline_is_seen() -> None:
    def change(world: World, records) -> None:
        world.plan = replace(world.plan, fault_free=True)
        turn = world.turns[0]
        turn.plan = replace(turn.plan, budget=10.0)
        turn.interrupted, turn.answered_at = False, turn.asked_at + 60.0

    assert _sentences(deadlines_are_kept, change)


OVERLOADED = 529
MISTAKEN = 4  # a world in which some calls are wrong


def _overloaded(*, said: int, left: float) -> list[str]:
    """Of a call with a mistake that got 529: the provider `said` this to its last try, and so much time was `left`."""

    def change(world: World, records) -> None:
        turn = next(turn for turn in world.turns if turn.reply.outcome.status == 400)
        reply = turn.reply
        turn.reply = structs.replace(reply, outcome=structs.replace(reply.outcome, status=OVERLOADED, lane=Lane.NOW))
        turn.calls = [structs.replace(call, deadline=reply.outcome.at + left) for call in turn.calls]
        refused = {asked: status for asked, status in world.refused.items() if turn.plan.text.encode() not in asked[1]}
        world.refused = {**refused, (turn.plan.endpoint, f'{{"content":"{turn.plan.text}"}}'.encode()): said}

    return _sentences(mistakes_come_back, change, seed=MISTAKEN)


def test_a_mistake_that_nobody_told_of_is_seen() -> None:
    assert _overloaded(said=400, left=0.1)


def test_a_mistake_that_nobody_told_of_while_there_was_time_is_seen() -> None:
    assert _overloaded(said=OVERLOADED, left=60.0)


def test_a_mistake_that_a_provider_without_room_never_saw_is_none_of_ours() -> None:
    assert not _overloaded(said=OVERLOADED, left=0.1)


def test_standing_still_is_not_waited_for() -> None:
    async def nobody_comes() -> None:
        await asyncio.Event().wait()

    timeline = Timeline()
    with pytest.raises(Deadlock):
        timeline.run_until_complete(nobody_comes())
    timeline.close()


def test_a_day_costs_nothing() -> None:
    timeline = Timeline()
    assert run(asyncio.sleep(86_400, "rested"), timeline) == "rested"
    assert timeline.time() >= 86_400


def test_a_purchase_that_is_recorded_twice_is_seen() -> None:
    def change(world: World, books) -> None:
        assert len(books.recorded) > 10
        books.recorded.append(books.recorded[0])

    assert "recorded 2 times" in _sentences(purchases_are_recorded_once, change)[0]


def test_a_record_without_its_ledger_line_is_seen() -> None:
    def change(world: World, books) -> None:
        ticket = books.recorded[0].entry.ticket
        books.entries[ticket] = []

    assert "the ledger lacks" in _sentences(purchases_are_recorded_once, change)[0]
