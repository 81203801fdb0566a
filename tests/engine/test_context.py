"""The small parts of the engine, each alone."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from carpool.core.errors import Closed, StoreError, StoreLocked, StoreUnwritable
from carpool.core.model import Lane, Outcome, OutcomeKind, ticket_number, ticket_text
from carpool.core.ports import Clock
from carpool.core.prices import PriceBook
from carpool.engine.context import EngineContext, Reply, Waiters
from carpool.engine.events import EventHooks, Trouble, TroubleBegan, TroubleOver
from carpool.engine.keyring import REFUSAL_TTL_S, Keyring, LaneRefusals
from carpool.planners.forecast import Forecast
from carpool.planners.policy import RoutingPolicy
from carpool.stores import open_store

OUTCOME = Outcome(OutcomeKind.SUCCEEDED, 200, b"{}", 0.0, Lane.BATCH)

# ---------------------------------------------------------------- waiters


async def test_everyone_who_waits_for_a_ticket_is_woken() -> None:
    waiters = Waiters()
    first, second, other = waiters.add(1), waiters.add(1), waiters.add(2)
    assert len(waiters) == 2
    waiters.resolve(Reply(1, OUTCOME))
    assert first.result() == second.result() == Reply(1, OUTCOME)
    assert not other.done()
    assert 1 not in waiters
    waiters.resolve(Reply(1, OUTCOME))  # nobody is left: nothing happens
    other.cancel()


async def test_a_cancelled_waiter_does_not_stop_the_others() -> None:
    waiters = Waiters()
    gone, stays = waiters.add(1), waiters.add(1)
    gone.cancel()
    waiters.resolve(Reply(1, OUTCOME))
    assert stays.result().ticket == 1


async def test_dropping_tells_whether_somebody_is_left() -> None:
    waiters = Waiters()
    first, second = waiters.add(1), waiters.add(1)
    assert not waiters.drop(1, first)
    assert not waiters.drop(1, first)
    assert waiters.drop(1, second)
    assert waiters.drop(1, second)
    assert len(waiters) == 0


async def test_at_the_end_all_are_told() -> None:
    waiters = Waiters()
    waiting = [waiters.add(ticket) for ticket in range(3)]
    waiting[0].cancel()
    waiters.fail_all(lambda ticket: Closed(f"Closed before {ticket}."))
    assert [str(future.exception()) for future in waiting[1:]] == ["Closed before 1.", "Closed before 2."]
    assert len(waiters) == 0


# ---------------------------------------------------------------- identifiers, and writes that must succeed


class Turned:
    """A clock that is turned by hand; sleeping turns it too."""

    def __init__(self, time: float) -> None:
        self.time = time

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += seconds


def _context(clock: Clock, seed: int = 0, hooks: tuple[Any, ...] = (), store: Any = None) -> EngineContext:
    return EngineContext(
        store=store,
        clock=clock,
        policy=RoutingPolicy(),
        forecast=Forecast(),
        prices=PriceBook(),
        keyring=Keyring(b"p" * 32),
        upstreams={},
        event_hooks=EventHooks(hooks),
        rng=random.Random(seed),
        name="engine-test",
    )


async def test_tickets_rise_strictly_whatever_the_clock_does() -> None:
    clock = Turned(1_790_000_000.0)
    desk = _context(clock)
    tickets = []
    for step in (0.0, 0.0, 0.001, -60.0, 0.0, 120.0, -3600.0):
        clock.time += step
        tickets += [desk.new_ticket() for _ in range(200)]
    assert all(earlier < later for earlier, later in pairwise(tickets))
    assert all(ticket_number(ticket_text(ticket)) == ticket for ticket in tickets)


@pytest.mark.parametrize("year", [2026, 2027, 2050, 2090])
async def test_tickets_stay_inside_63_bits(year: int) -> None:
    desk = _context(Turned((year - 1970) * 31_556_952.0 + 86_400))
    assert 0 < desk.new_ticket() < 1 << 63


async def test_two_processes_at_the_same_moment_do_not_collide() -> None:
    clock = Turned(1_790_000_000.0)
    tickets = {_context(clock, seed).new_ticket() for seed in range(200)}
    assert len(tickets) == 200


async def test_nonces_differ() -> None:
    desk = _context(Turned(1_790_000_000.0))
    nonces = {desk.new_nonce() for _ in range(1000)}
    assert len(nonces) == 1000
    assert {len(nonce) for nonce in nonces} == {10}


async def test_a_write_that_must_not_be_forgotten_is_repeated() -> None:
    told: list[Any] = []
    clock = Turned(1_790_000_000.0)
    desk = _context(clock, hooks=(told.append,))
    tries = 0

    async def write() -> str:
        nonlocal tries
        tries += 1
        if tries < 4:
            raise (StoreLocked("Somebody holds it.") if tries % 2 else StoreUnwritable("The disk is full."))
        return "written"

    assert await desk.retry_write("writing", write) == "written"
    assert [type(event) for event in told] == [*([Trouble, TroubleBegan] * 3), TroubleOver]
    assert (told[-1].doing, told[-1].since, told[-1].tries) == ("writing", 1_790_000_000.0, 3)
    assert clock.time > 1_790_000_000.0

    async def is_permanent() -> None:
        raise StoreError("The disk is gone.")

    with pytest.raises(StoreError):
        await desk.retry_write("writing", is_permanent)


async def test_a_refusal_of_the_batch_road_is_believed_for_a_while() -> None:
    clock = Turned(1_790_000_000.0)
    desk = _context(clock, store=await open_store(None))
    await desk.learned.refused(Lane.BATCH, "c", "", "No batches here.")
    await desk.learned.refused(Lane.BATCH, "d", "m", "Not this one.")
    assert desk.learned.why_not(Lane.BATCH, "c", "m") == "this credential can't batch: No batches here."
    assert desk.learned.why_not(Lane.BATCH, "d", "m") == "the model m can't batch: Not this one."
    assert desk.learned.why_not(Lane.BATCH, "d", "another") is None
    assert desk.learned.why_not(Lane.BATCH, "another", "m") is None
    assert desk.learned.why_not(Lane.FLEX, "c", "m") is None
    again = LaneRefusals(desk.store, clock, desk.keyring)
    await again.recall()
    assert again.why_not(Lane.BATCH, "d", "m") == "the model m can't batch: Not this one."
    clock.time += REFUSAL_TTL_S + 1
    assert desk.learned.why_not(Lane.BATCH, "c", "m") is None
    await desk.store.aclose()
