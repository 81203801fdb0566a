"""The small parts of the engine, each alone."""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import fields
from itertools import pairwise
from typing import Any

import pytest

from carpool.core.errors import Closed, StoreError, StoreLocked, StoreUnwritable
from carpool.core.model import Entry, EntryKind, Lane, Outcome, OutcomeKind, ticket_number, ticket_text
from carpool.core.ports import Clock
from carpool.core.prices import PriceBook
from carpool.engine.context import BELIEVED_S, BackgroundTasks, EngineContext, Keyring, LaneRefusals, Reply, Waiters
from carpool.engine.events import EventHooks, Stats, Trouble, TroubleBegan, TroubleOver
from carpool.planners.forecast import Forecast
from carpool.planners.policy import RoutingPolicy
from carpool.stores import open_store
from tests.support.fleets import soon

OUTCOME = Outcome(OutcomeKind.SUCCEEDED, 200, b"{}", 0.0, Lane.BATCH)

# ---------------------------------------------------------------- keyring

SECRET = (("x-api-key", "sk-very-secret"),)


def test_a_credential_tells_nothing_of_its_secret() -> None:
    ring = Keyring(b"pepper" * 6)
    assert ring.known("anthropic", "https://api.test", SECRET) is None
    assert ring.add("anthropic", "https://api.test", [SECRET])
    credential = ring.known("anthropic", "https://api.test", SECRET)
    assert credential is not None
    assert "secret" not in credential
    assert "sk-" not in credential
    assert len(credential) == 32
    assert int(credential, 16) >= 0
    assert ring.secret(credential) == SECRET
    for shown in (repr(ring), str(ring), f"{ring}"):
        assert "secret" not in shown
        assert credential not in shown


def test_equal_secrets_are_one_credential_and_the_order_of_headers_is_nothing() -> None:
    ring = Keyring(b"pepper" * 6)
    both = (("x-api-key", "a"), ("authorization", "Bearer b"))
    first = ring.name("anthropic", "https://api.test", both)
    assert ring.add("anthropic", "https://api.test", [both])
    assert not ring.add("anthropic", "https://api.test", [both[::-1]])
    assert list(ring) == [first]
    assert first in ring
    assert "another" not in ring


def test_place_provider_and_pepper_make_other_credentials() -> None:
    ring, other = Keyring(b"pepper" * 6), Keyring(b"salted" * 6)
    names = {
        ring.name("anthropic", "https://api.test", SECRET),
        ring.name("anthropic", "https://api.elsewhere", SECRET),
        ring.name("openai", "https://api.test", SECRET),
        ring.name("anthropic", "https://api.test", (("authorization", "sk-very-secret"),)),
        other.name("anthropic", "https://api.test", SECRET),
    }
    assert len(names) == 5


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


# ---------------------------------------------------------------- crew


async def test_a_task_that_fails_is_heard_of(caplog: pytest.LogCaptureFixture) -> None:
    background = BackgroundTasks()

    async def fail() -> None:
        raise ValueError("out of ideas")

    task = background.spawn(fail(), "thinker")
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert background.failures == 1
    assert not background.busy
    assert "The task thinker failed: ValueError at " in caplog.text  # where, but not its words: they may quote anything
    assert "out of ideas" not in caplog.text


async def test_a_borrowed_task_gives_its_failure_to_who_awaits_it(caplog: pytest.LogCaptureFixture) -> None:
    background = BackgroundTasks()

    async def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError):
        await background.lend(fail(), "lent")
    assert background.failures == 0
    assert caplog.text == ""


async def test_rest_waits_for_what_ends_and_cancels_the_rest() -> None:
    background = BackgroundTasks()
    done = asyncio.Event()

    async def finish() -> None:
        await asyncio.sleep(0)
        done.set()

    background.spawn(finish(), "short")
    endless = background.spawn(asyncio.Event().wait(), "endless")
    await soon(background.rest(timeout=0.05), 2)
    assert done.is_set()
    assert endless.cancelled()
    assert not background.busy
    assert background.failures == 0
    await soon(background.rest(timeout=60), 1)  # nothing to wait for


# ---------------------------------------------------------------- stats


def _entry(**more: Any) -> Entry:
    standard: dict[str, Any] = {
        "ticket": 1,
        "purchase": 1,
        "at": 0.0,
        "lane": Lane.BATCH,
        "kind": EntryKind.PURCHASE,
        "provider": "anthropic",
        "credential": "c",
        "model": "m",
        "paid": 100,
        "would_have_paid": 200,
    }
    return Entry(**{**standard, **more})


def test_money_is_counted_once_with_its_answer() -> None:
    stats = Stats()
    stats.count(_entry(), used=True)
    assert (stats.paid, stats.would_have_paid, stats.saved) == (100, 200, 100)
    stats.count(_entry(), used=False)  # the batch's copy of a call that was rescued
    assert (stats.paid, stats.would_have_paid, stats.duplicates) == (200, 200, 1)
    stats.count(_entry(lane=Lane.NOW, kind=EntryKind.RESCUE, paid=200), used=False)
    assert (stats.paid, stats.duplicates, stats.saved) == (400, 1, -200)
    assert (stats.paid_usd, stats.would_have_paid_usd, stats.saved_usd) == (4e-7, 2e-7, -2e-7)


def test_the_unknown_is_not_free() -> None:
    stats = Stats()
    stats.count(_entry(paid=None, would_have_paid=None), used=True)
    assert (stats.unknown_purchases, stats.paid, stats.would_have_paid) == (1, 0, 0)
    stats.count(_entry(paid=0, would_have_paid=0), used=True)  # refused: known to be free
    assert stats.unknown_purchases == 1


def test_metrics_name_every_counter() -> None:
    stats = Stats(sync_calls=2, batched_calls=3)
    assert set(stats.metrics("x")) == {f"x.{field.name}" for field in fields(Stats)}
    together = stats.metrics("x", split=False)
    assert together["x.calls"] == 5
    assert not {"x.sync_calls", "x.batched_calls"} & set(together)


# ---------------------------------------------------------------- desk


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

    assert await desk.insist("writing", write) == "written"
    assert [type(event) for event in told] == [*([Trouble, TroubleBegan] * 3), TroubleOver]
    assert (told[-1].doing, told[-1].since, told[-1].tries) == ("writing", 1_790_000_000.0, 3)
    assert clock.time > 1_790_000_000.0

    async def is_permanent() -> None:
        raise StoreError("The disk is gone.")

    with pytest.raises(StoreError):
        await desk.insist("writing", is_permanent)


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
    clock.time += BELIEVED_S + 1
    assert desk.learned.why_not(Lane.BATCH, "c", "m") is None
    await desk.store.aclose()


# ---------------------------------------------------------------- bulletin


def test_a_hook_that_fails_stops_neither_the_next_nor_the_teller(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Any] = []

    def broken(event: Any) -> None:
        raise RuntimeError("no")

    event_hooks = EventHooks((broken,))
    event_hooks.add(heard.append)
    with caplog.at_level(logging.WARNING, "carpool"):
        event_hooks.tell(Trouble(0.0, "testing", "nothing"))
    assert len(heard) == 1
    assert "A hook failed on Trouble: RuntimeError at " in caplog.text
