"""What people see of a store: calls and batches, newest first."""

from __future__ import annotations

from carpool.core.lifecycle import BatchState, TicketState
from carpool.core.model import Lane, OutcomeKind
from carpool.core.ports import Store
from tests.support.stores import CRED, STRANGER, T0, admission, admit, admit_one, attempt, board, settlement


async def test_calls_come_newest_first_and_page_by_page(store: Store) -> None:
    await admit(store, *range(1, 8))
    first = await store.listed_calls(None, None, 3)
    assert [row.ticket for row in first] == [7, 6, 5]
    rest = await store.listed_calls(first[-1].ticket, None, 100)
    assert [row.ticket for row in rest] == [4, 3, 2, 1]
    assert await store.listed_calls(1, None, 100) == []


async def test_calls_are_listed_by_state(store: Store) -> None:
    batch = await board(store, [1, 2, 3], state=BatchState.OPEN)
    await admit(store, 4, 5)
    await admit_one(store, admission(6, lane=Lane.NOW))
    await store.settle([settlement(2, batch.id)], T0 + 60)

    async def tickets(state: TicketState, before: int | None = None) -> list[int]:
        return [row.ticket for row in await store.listed_calls(before, state, 100)]

    assert await tickets(TicketState.QUEUED) == [5, 4]
    assert await tickets(TicketState.BOARDED) == [3, 1]
    assert await tickets(TicketState.BOARDED, 3) == [1]
    assert await tickets(TicketState.SENDING) == [6]
    assert await tickets(TicketState.SETTLED) == [2]


async def test_a_row_says_everything_but_what_was_said(store: Store) -> None:
    batch = await board(store, [1], state=BatchState.SUBMITTING)
    await store.move(batch.id, BatchState.OPEN, provider_id="msgbatch_1")
    await store.settle([settlement(1, batch.id)], T0 + 60)
    await store.delivered([1], T0 + 61)
    row = await store.listed_call(1)
    assert row is not None
    assert (row.provider, row.credential, row.endpoint, row.model) == ("anthropic", CRED, "/v1/messages", "m")
    assert (row.state, row.lane, row.batch) == (TicketState.SETTLED, Lane.BATCH, "msgbatch_1")
    assert (row.arrived, row.deadline, row.settled_at, row.delivered_at) == (T0, T0 + 900, T0 + 60, T0 + 61)
    assert (row.kind, row.status, row.paid, row.would_have_paid) == (OutcomeKind.SUCCEEDED, 200, 50, 100)
    assert (row.awaited, row.bytes, row.reason, row.tags) == (False, len("body 1"), "cheapest", {})


async def test_an_open_row_has_no_outcome(store: Store) -> None:
    await admit_one(store, admission(1, tags={"team": "ci"}, deadline=None))
    row = await store.listed_call(1)
    assert row is not None
    assert (row.kind, row.status, row.paid, row.settled_at, row.deadline, row.batch) == (None,) * 6
    assert row.awaited
    assert row.tags == {"team": "ci"}


async def test_a_purchase_of_unknown_price_is_not_free(store: Store) -> None:
    await admit_one(store, admission(1, lane=Lane.NOW))
    assert await store.start_sending(attempt(1), "engine-1", T0)
    row = await store.listed_call(1)
    assert row is not None
    assert row.paid is None


async def test_an_unknown_ticket_is_nobody(store: Store) -> None:
    assert await store.listed_call(1) is None


async def test_batches_come_newest_first_finished_ones_too(store: Store) -> None:
    first = await board(store, [1], nonce="a", state=BatchState.COLLECTED)
    second = await board(store, [2, 3], nonce="b", state=BatchState.OPEN)
    assert [batch.id for batch in await store.listed_batches(None, None, 10)] == [second.id, first.id]
    assert await store.listed_batches(None, BatchState.OPEN, 10) == [second]
    assert [batch.id for batch in await store.listed_batches(second.id, None, 10)] == [first.id]
    assert len(await store.listed_batches(None, None, 1)) == 1


async def test_every_credential_is_listed_under_its_own_name(store: Store) -> None:
    await admit_one(store, admission(1))
    await admit_one(store, admission(2, credential=STRANGER))
    assert [row.credential for row in await store.listed_calls(None, None, 10)] == [STRANGER, CRED]
