"""Outcomes of other engines whose hint was lost are found by polling, often at first and then more rarely."""

from __future__ import annotations

import math

from carpool.core.model import Lane, Outcome, OutcomeKind, Settled
from carpool.engine.cluster.outcomes import QUICK_POLL_S, SLOW_POLL_S, TICKETS_PER_POLL, OutcomePoller
from carpool.engine.context import EngineContext
from tests.support.engine_context import START, engine_context

OUTCOME = Outcome(OutcomeKind.SUCCEEDED, 200, b"{}", START, Lane.BATCH)


def poller() -> tuple[OutcomePoller, EngineContext, list[list[int]], list[Settled]]:
    """The poller, its context, the tickets of each poll, and what the next one finds."""
    context, _ = engine_context()
    polls: list[list[int]] = []
    found: list[Settled] = []

    async def outcomes(tickets: list[int]) -> list[Settled]:
        polls.append(list(tickets))
        return [settled for settled in found if settled.ticket in tickets]

    context.store.outcomes = outcomes
    return OutcomePoller(context), context, polls, found


async def test_nothing_is_polled_while_nobody_waits() -> None:
    poll, _, polls, _ = poller()
    assert await poll.step(START) == math.inf
    assert polls == []


async def test_a_client_whose_hint_was_lost_gets_its_outcome() -> None:
    poll, context, _, found = poller()
    waiter = context.waiters.add(7)
    found.append(Settled(7, OUTCOME, None))
    await poll.step(START)
    assert waiter.result().outcome == OUTCOME
    assert 7 not in context.waiters


async def test_polls_that_find_nothing_come_more_and_more_rarely_until_a_client_comes() -> None:
    poll, context, polls, _ = poller()
    context.waiters.add(1)
    now, pauses = START, []
    for _ in range(7):
        at = await poll.step(now)
        pauses.append(at - now)
        now = at
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (2 * QUICK_POLL_S, SLOW_POLL_S)
    assert await poll.step(now - 1.0) == now  # not due yet
    assert len(polls) == 7
    context.waiters.add(2)
    assert await poll.step(now - SLOW_POLL_S + QUICK_POLL_S) - (now - SLOW_POLL_S + QUICK_POLL_S) <= 2 * QUICK_POLL_S
    assert len(polls) == 8


async def test_lost_hints_are_polled_for_at_once() -> None:
    poll, context, polls, _ = poller()
    context.waiters.add(1)
    for _ in range(2):
        await poll.step(START)
        poll.poll_now()
    assert len(polls) == 2


async def test_many_who_wait_take_turns() -> None:
    poll, context, polls, _ = poller()
    for ticket in range(2 * TICKETS_PER_POLL + 5):
        context.waiters.add(ticket)
    now = START
    for _ in range(4):
        now = await poll.step(now)
    assert [len(tickets) for tickets in polls] == [TICKETS_PER_POLL, TICKETS_PER_POLL, 5, TICKETS_PER_POLL]
    assert polls[3] == polls[0]
