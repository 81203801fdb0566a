"""What every store promises about settling and the ledger: one outcome per call, one line per purchase."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from carpool.core.lifecycle import BatchState, TicketState
from carpool.core.model import EntryKind, Lane, Settlement, Totals, Usage
from carpool.core.ports import Store
from tests.support.stores import (
    CRED,
    ME,
    STRANGER,
    T0,
    admission,
    admit,
    admit_one,
    attempt,
    board,
    counted,
    entry,
    outcome,
    settlement,
)

RESCUE, DUPLICATE, PURCHASE = EntryKind.RESCUE, EntryKind.DUPLICATE, EntryKind.PURCHASE


async def kinds(store: Store, ticket: int) -> dict[int, tuple[EntryKind, int | None, int | None]]:
    return {line.purchase: (line.kind, line.paid, line.would_have_paid) for line in await store.entries(ticket)}


# ---------------------------------------------------------------- outcomes


async def test_the_first_outcome_stays(store: Store) -> None:
    batch = await board(store, [1, 2], state=BatchState.OPEN)
    assert await store.settle([settlement(1, batch.id, "first")], T0) == [True]
    assert await store.settle([settlement(1, batch.id, "second"), settlement(2, batch.id)], T0) == [False, True]
    assert (await store.outcome(1, CRED)).outcome == outcome("first")
    assert await kinds(store, 1) == {batch.id: (PURCHASE, 50, 100)}
    assert await counted(store, "tickets.settled") == 2


async def test_within_one_call_the_first_stays_too(store: Store) -> None:
    batch = await board(store, [1], state=BatchState.OPEN)
    twice = [settlement(1, batch.id, "first"), settlement(1, batch.id, "second"), settlement(1, 77, "third")]
    assert await store.settle(twice, T0) == [True, False, False]
    assert (await store.outcome(1, CRED)).outcome == outcome("first")
    assert await kinds(store, 1) == {batch.id: (PURCHASE, 50, 100), 77: (DUPLICATE, 50, None)}


@pytest.mark.parametrize("state", [TicketState.QUEUED, TicketState.BOARDED, TicketState.SENDING])
async def test_every_open_call_can_be_settled(store: Store, state: TicketState) -> None:
    if state is TicketState.BOARDED:
        await board(store, [1])
    else:
        await admit(store, 1, lane=Lane.NOW if state is TicketState.SENDING else Lane.BATCH)
    assert await store.settle([Settlement(1, outcome())], T0) == [True]
    assert await store.views([1]) == []
    assert await store.due([CRED], T0 + 10_000, 10) == []
    assert await store.pools([CRED]) == []


async def test_nothing_at_all_may_be_settled(store: Store) -> None:
    assert await store.settle([], T0) == []
    assert await store.settle([Settlement(99, outcome())], T0) == [False]


async def test_a_rescue_that_is_quicker_than_its_batch(store: Store) -> None:
    batch = await board(store, [1], state=BatchState.OPEN)
    await store.start_sending(attempt(1, kind=RESCUE), ME, T0)
    assert await store.settle([settlement(1, -1, "rescued", kind=RESCUE, paid=100)], T0) == [True]
    assert await store.settle([settlement(1, batch.id, "late")], T0) == [False]
    assert (await store.outcome(1, CRED)).outcome == outcome("rescued", Lane.NOW)
    assert await kinds(store, 1) == {-1: (RESCUE, 100, 100), batch.id: (DUPLICATE, 50, None)}


async def test_an_outcome_comes_with_the_line_of_the_purchase_that_brought_it(store: Store) -> None:
    """Whoever delivers it tells what it cost, and none of the other purchases."""
    await admit(store, 9, key="k")
    batch = await board(store, [1, 2, 3], state=BatchState.OPEN)
    await store.start_sending(attempt(1, kind=RESCUE), ME, T0)
    rescued = settlement(1, -1, "rescued", kind=RESCUE, paid=100, tags={"team": "ci"})
    await store.settle([rescued, settlement(1, batch.id, "late"), settlement(2, batch.id)], T0)
    await store.settle([Settlement(3, outcome("free")), settlement(9, batch.id, "kept")], T0)
    found = {one.ticket: one for one in await store.outcomes([1, 2, 3, 9])}
    assert found[1].entry == rescued.entry
    assert found[2].entry == settlement(2, batch.id).entry
    assert found[3].entry is None
    assert await store.outcome(1, CRED) == found[1]
    again = await admit_one(store, admission(10, key="k", fingerprint=9 * 7919))
    assert (again.outcome, again.entry) == (found[9].outcome, found[9].entry)
    assert again.entry is not None


async def test_a_batch_that_is_quicker_than_the_rescue(store: Store) -> None:
    batch = await board(store, [1], state=BatchState.OPEN)
    await store.start_sending(attempt(1, kind=RESCUE), ME, T0)
    assert await store.settle([settlement(1, batch.id, "batch")], T0) == [True]
    assert await store.settle([settlement(1, -1, "late", kind=RESCUE, paid=100)], T0) == [False]
    assert await kinds(store, 1) == {-1: (RESCUE, 100, None), batch.id: (PURCHASE, 50, 100)}


async def test_what_settles_a_cancelled_call_is_a_duplicate(store: Store) -> None:
    await admit(store, 1)
    await store.cancel(1, outcome("cancelled"))
    assert await store.settle([settlement(1, 5)], T0) == [False]
    assert await kinds(store, 1) == {5: (DUPLICATE, 50, None)}


async def test_a_purchase_for_a_call_that_is_no_longer_kept_is_a_duplicate(store: Store) -> None:
    assert await store.settle([settlement(99, 5)], T0) == [False]
    assert await kinds(store, 99) == {5: (DUPLICATE, 50, None)}


# ---------------------------------------------------------------- requeues


async def test_a_requeue_returns_the_call_to_its_pool(store: Store) -> None:
    batch = await board(store, [1, 2], state=BatchState.ENDED)
    line = entry(1, batch.id, paid=0, would=0)
    assert await store.settle([Settlement(1, entry=line, requeue=Lane.BATCH, reason="expired")], T0) == [False]
    [view] = await store.views([1])
    assert (view.state, view.requeues) == (TicketState.QUEUED, 1)
    [waiting] = await store.pools([CRED])
    assert waiting.count == 1
    assert await store.unmentioned(batch.id, 0, 10) == [2]
    assert (await store.open_calls(batch.id)).count == 1
    sendable_call = await store.sendable_call(1)
    assert sendable_call is not None
    assert sendable_call.requeues == 1
    assert await kinds(store, 1) == {batch.id: (PURCHASE, 0, 0)}


@pytest.mark.parametrize(("lane", "reason"), [(Lane.BATCH, "why it waits for a batch"), (Lane.NOW, "expired")])
async def test_a_requeued_call_has_the_reason_of_its_lane(store: Store, lane: Lane, reason: str) -> None:
    await admit(store, 1, reason="why it waits for a batch")
    batch = await board(store, [], state=BatchState.ENDED)
    line = entry(1, batch.id, paid=0, would=0)
    await store.settle([Settlement(1, entry=line, requeue=lane, reason="expired")], T0)
    [row] = await store.listed_calls(None, None, 1)
    assert (row.state, row.lane, row.reason) == (TicketState.QUEUED, lane, reason)


async def test_a_requeue_on_now_is_due_at_once(store: Store) -> None:
    await board(store, [1], state=BatchState.ENDED)
    await store.settle([Settlement(1, requeue=Lane.NOW, reason="late")], T0 + 3.000001)
    [due] = await store.due([CRED], T0 + 3.000001, 10)
    assert (due.state, due.lane, due.batch) == (TicketState.QUEUED, Lane.NOW, None)


async def test_a_requeue_leaves_what_travels_travelling_without_its_batch(store: Store) -> None:
    batch = await board(store, [1], state=BatchState.ENDED)
    await store.start_sending(attempt(1, kind=RESCUE), ME, T0)
    await store.settle([Settlement(1, requeue=Lane.BATCH)], T0)
    [view] = await store.views([1])
    assert view.state is TicketState.SENDING
    assert not await store.stop_sending(1)
    assert (await store.open_calls(batch.id)).count == 0


async def test_a_settled_call_is_not_requeued(store: Store) -> None:
    await admit(store, 1)
    await store.settle([Settlement(1, outcome()), Settlement(1, requeue=Lane.NOW)], T0)
    await store.settle([Settlement(1, requeue=Lane.BATCH)], T0)
    assert await store.views([1]) == []


async def test_requeued_and_settled_in_one_call(store: Store) -> None:
    await board(store, [1], state=BatchState.ENDED)
    both = [Settlement(1, requeue=Lane.BATCH), Settlement(1, outcome())]
    assert await store.settle(both, T0) == [False, True]
    assert await store.views([1]) == []
    assert await store.pools([CRED]) == []


async def test_a_batch_that_the_call_has_left_does_not_pull_it_out_of_another(store: Store) -> None:
    first = await board(store, [1], state=BatchState.UNKNOWN)
    await store.release(first.id, BatchState.ABANDONED, Lane.BATCH, T0, "no proof")
    second = await board(store, [], nonce="second")
    late = entry(1, first.id, paid=0, would=0)
    await store.settle([Settlement(1, entry=late, requeue=Lane.BATCH)], T0)
    assert await store.unmentioned(second.id, 0, 10) == [1]
    assert [view.state for view in await store.views([1])] == [TicketState.BOARDED]


# ---------------------------------------------------------------- ledger


async def test_a_new_entry_is_inserted_as_it_is(store: Store) -> None:
    batch = await board(store, [1], state=BatchState.OPEN)
    usage = Usage(1, 2, 3, 4, 5, 6, "eu", "fast")
    line = replace(entry(1, batch.id, tags={"team": "ci"}), usage=usage)
    await store.settle([Settlement(1, outcome(), line)], T0)
    assert await store.entries(1) == [line]


async def test_an_unknown_entry_is_completed_and_a_complete_one_stays(store: Store) -> None:
    await admit(store, 1, lane=Lane.NOW)
    await store.start_sending(attempt(1), ME, T0)
    assert await kinds(store, 1) == {-1: (PURCHASE, None, None)}
    await store.settle([settlement(1, -1, paid=70)], T0)
    assert await kinds(store, 1) == {-1: (PURCHASE, 70, 100)}
    await store.settle([settlement(1, -1, paid=80)], T0)
    await store.record(entry(1, -1, paid=90))
    assert await kinds(store, 1) == {-1: (PURCHASE, 70, 100)}


async def test_an_entry_that_stays_unknown_is_no_duplicate_of_itself(store: Store) -> None:
    """A model without a price is unknown for ever; collecting its batch again must not change the books."""
    batch = await board(store, [1], state=BatchState.OPEN)
    for _ in range(2):
        await store.settle([settlement(1, batch.id, paid=None, would=None)], T0)
    assert await kinds(store, 1) == {batch.id: (PURCHASE, None, None)}


async def test_an_entry_without_tags_takes_the_calls(store: Store) -> None:
    await admit(store, 1, 2, lane=Lane.NOW, tags={"team": "ci"})
    await store.settle([settlement(1, -1), settlement(2, -1, tags={"team": "own"})], T0)
    assert [(await store.entries(ticket))[0].tags for ticket in (1, 2)] == [{"team": "ci"}, {"team": "own"}]


async def test_completing_by_record_keeps_the_tags(store: Store) -> None:
    await admit(store, 1, lane=Lane.NOW, tags={"team": "ci"})
    await store.start_sending(attempt(1), ME, T0)
    await store.record(entry(1, -1, paid=0, would=0))
    [line] = await store.entries(1)
    assert (line.tags, line.paid) == ({"team": "ci"}, 0)
    assert await store.views([1])  # recording settles nothing


async def test_an_attempt_takes_nothing_from_what_was_said_of_it(store: Store) -> None:
    """Of an answer that broke off the usage is known and the price is not. What a crash left may come once more."""
    broken = replace(entry(7, -1, paid=None, would=None), usage=Usage(10, 1))
    await store.record(replace(broken, usage=None))
    await store.record(broken)
    await store.record(replace(broken, usage=None))
    assert await store.entries(7) == [broken]
    await store.record(entry(7, -1, paid=70))
    assert [line.paid for line in await store.entries(7)] == [70]


async def test_purchases_are_shown_to_who_bought_them(store: Store) -> None:
    mine, foreign = entry(7, -1, paid=None), entry(8, -1, credential=STRANGER)
    await store.attempt(mine)
    await store.record(foreign)
    assert await store.entries(7, [CRED]) == await store.entries(7, [STRANGER, CRED]) == [mine]
    assert await store.entries(8, [STRANGER]) == [foreign]
    for ticket, asking in [(7, [STRANGER]), (8, [CRED]), (7, []), (8, ["nobody"]), (9, [CRED])]:
        assert await store.entries(ticket, asking) == []
    await admit(store, 1, lane=Lane.NOW)
    await store.start_sending(attempt(1), ME, T0)
    assert await store.entries(1, [STRANGER]) == []
    assert len(await store.entries(1, [CRED])) == 1


async def test_record_writes_calls_that_have_no_ticket(store: Store) -> None:
    line = entry(7, -1, credential=STRANGER)
    await store.record(line)
    await store.record(line)
    assert await store.entries(7) == [line]
    assert await store.attempts(7) == 1


async def test_totals_follow_the_entries(store: Store) -> None:
    assert await store.totals() == []
    batch = await board(store, [1, 2], state=BatchState.OPEN)
    await store.start_sending(attempt(1, kind=RESCUE), ME, T0)
    now = Totals(Lane.NOW, RESCUE, 1, 1, 0, 0)
    assert await store.totals() == [now]
    await store.settle([settlement(1, -1, kind=RESCUE, paid=100), settlement(2, batch.id, paid=None)], T0)
    await store.settle([settlement(1, batch.id, paid=50), settlement(2, batch.id, paid=51)], T0)
    totals = {(one.lane, one.kind): one for one in await store.totals()}
    assert totals == {
        (Lane.NOW, RESCUE): Totals(Lane.NOW, RESCUE, 1, 0, 100, 100),
        (Lane.BATCH, DUPLICATE): Totals(Lane.BATCH, DUPLICATE, 1, 0, 50, 0),
        (Lane.BATCH, PURCHASE): Totals(Lane.BATCH, PURCHASE, 1, 0, 51, 100),
    }


async def test_totals_outlive_the_calls(store: Store) -> None:
    await admit(store, 1)
    await store.settle([settlement(1, -1)], T0)
    await store.delivered([1], T0)
    before = await store.totals()
    assert await store.retain(T0 + 1, T0, 10) == 1
    assert await store.totals() == before


# ---------------------------------------------------------------- tidying


async def test_a_tidied_batch_keeps_the_bodies_of_its_open_calls(store: Store) -> None:
    batch = await board(store, [1, 2, 3, 4])
    await store.settle([settlement(ticket, batch.id) for ticket in (1, 3)], T0)
    after: int | None = -1
    steps = []
    while (after := await store.tidy(batch.id, after, 1)) is not None:
        steps.append(after)
    assert steps == [1, 3]
    assert [(await store.sendable_call(ticket)) is not None for ticket in (1, 2, 3, 4)] == [False, True, False, True]
    for ticket in (2, 4):
        sendable_call = await store.sendable_call(ticket)
        assert sendable_call is not None
        assert sendable_call.body == f"body {ticket}".encode()
