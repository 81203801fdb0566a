"""The checkers can fail: each is shown a world in which its promise was broken."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from msgspec import structs

from carpool.model import EntryKind
from carpool.sim import draw
from carpool.sim.checks import (
    deadlines_are_kept,
    everybody_is_answered,
    ledger_is_the_bill,
    open_books,
    replies_are_the_providers,
    second_purchases_are_recorded,
    strangers_are_left_alone,
)
from carpool.sim.timeline import Deadlock, Timeline, run
from carpool.sim.world import World, run_world

SEED = 100


def _world(seed: int = SEED) -> tuple[World, Timeline]:
    timeline = Timeline()
    loop_world: list[World] = []

    async def make() -> None:
        loop_world.append(await run_world(draw(seed), timeline))

    runner = asyncio.Runner(loop_factory=lambda: timeline)
    runner.run(make())
    return loop_world[0], timeline


def _sentences(check, change) -> list[str]:
    world, timeline = _world()
    books = timeline.run_until_complete(open_books(world)) if not timeline.is_closed() else None
    assert books is not None
    assert list(check(books)) == []
    books = timeline.run_until_complete(open_books(world))
    change(world, books)
    found = list(check(books))
    timeline.run_until_complete(world.store.aclose())
    timeline.close()
    return found


def test_a_missing_answer_is_seen() -> None:
    def change(world: World, books) -> None:
        world.turns[0].reply = None

    assert _sentences(everybody_is_answered, change)


def test_somebody_elses_answer_is_seen() -> None:
    def change(world: World, books) -> None:
        turn = next(turn for turn in world.turns if turn.reply.outcome.status == 200 and "[" not in turn.plan.text)
        turn.body = {**turn.body, "max_tokens": 49}

    assert _sentences(replies_are_the_providers, change)


def test_a_wrong_price_is_seen() -> None:
    def change(world: World, books) -> None:
        ticket = next(ticket for ticket, entries in books.entries.items() if any(entry.paid for entry in entries))
        books.entries[ticket] = [structs.replace(entry, paid=entry.paid + 1) for entry in books.entries[ticket]]

    assert _sentences(ledger_is_the_bill, change)


def test_a_purchase_that_is_not_in_the_ledger_is_seen() -> None:
    assert _sentences(ledger_is_the_bill, lambda world, books: books.entries.clear())


def test_a_hidden_second_purchase_is_seen() -> None:
    def change(world: World, books) -> None:
        ticket = next(ticket for ticket, entries in books.entries.items() if any(entry.paid for entry in entries))
        twice = structs.replace(next(e for e in books.entries[ticket] if e.paid), kind=EntryKind.PURCHASE)
        books.entries[ticket] = [twice, structs.replace(twice, purchase=99)]

    assert _sentences(second_purchases_are_recorded, change)


def test_a_cancelled_stranger_is_seen() -> None:
    def change(world: World, books) -> None:
        stranger = world.provider.add_stranger(world.plan.agents[0].key, 1)
        world.provider._state.canceled.append(stranger.id)

    assert _sentences(strangers_are_left_alone, change)


def test_a_missed_deadline_is_seen() -> None:
    def change(world: World, books) -> None:
        world.plan = replace(world.plan, calm=True)
        turn = world.turns[0]
        turn.plan = replace(turn.plan, budget=10.0)
        turn.interrupted, turn.answered_at = False, turn.asked_at + 60.0

    assert _sentences(deadlines_are_kept, change)


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
