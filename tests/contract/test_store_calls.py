"""What every store promises about calls, from admission to retention."""

from __future__ import annotations

import asyncio

import pytest

from carpool.core.errors import Closed, KeyConflict, StoreError
from carpool.core.lifecycle import BatchState, TicketState
from carpool.core.model import Intent, Lane, SendableCall, Settled, Settlement, TicketView
from carpool.core.ports import Store
from tests.support.stores import (
    CRED,
    LEASE,
    ME,
    OTHER,
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
    pool,
    settlement,
)

# ---------------------------------------------------------------- admission


async def test_a_fresh_call_waits_in_its_pool_or_is_on_its_way(store: Store) -> None:
    waiting = await admit_one(store, admission(1))
    going = await admit_one(store, admission(2, lane=Lane.NOW))
    assert (waiting.ticket, waiting.fresh, waiting.state, waiting.lane) == (1, True, TicketState.QUEUED, Lane.BATCH)
    assert (going.fresh, going.state, going.lane) == (True, TicketState.SENDING, Lane.NOW)
    assert waiting.deadline == T0 + 900
    assert waiting.outcome is None


async def test_a_known_key_is_the_same_call_with_the_newcomers_deadline(store: Store) -> None:
    await admit_one(store, admission(1, key="k", fingerprint=5))
    again = await admit_one(
        store, admission(2, key="k", fingerprint=5, deadline=T0 + 99, rescue_at=T0 + 9, awaiter=OTHER, reason="again")
    )
    assert (again.ticket, again.fresh, again.deadline) == (1, False, T0 + 99)
    [due] = await store.due([CRED], T0 + 9, 10)
    assert (due.ticket, due.rescue_at, due.deadline) == (1, T0 + 9, T0 + 99)
    sendable_call = await store.sendable_call(1)
    assert sendable_call is not None
    assert sendable_call.reason == "again"
    assert await counted(store, "tickets.queued") == 1


async def test_a_known_key_gives_its_outcome_even_after_delivery(store: Store) -> None:
    await admit_one(store, admission(1, key="k", fingerprint=5))
    await store.settle([Settlement(1, outcome())], T0)
    await store.delivered([1], T0)
    again = await admit_one(store, admission(2, key="k", fingerprint=5, deadline=T0 + 5, arrived=T0 + 10_000))
    assert (again.ticket, again.state, again.outcome) == (1, TicketState.SETTLED, outcome())
    assert again.deadline == T0 + 900  # a settled call keeps its own


async def test_another_call_under_a_known_key_is_a_conflict(store: Store) -> None:
    await admit_one(store, admission(1, key="k", fingerprint=5))
    with pytest.raises(KeyConflict):
        await admit_one(store, admission(2, key="k", fingerprint=6))
    assert await counted(store, "tickets.queued") == 1


async def test_keys_of_different_credentials_are_different_keys(store: Store) -> None:
    await admit_one(store, admission(1, key="k", fingerprint=5))
    other = await admit_one(store, admission(2, key="k", fingerprint=6, credential=STRANGER))
    assert other.fresh


async def test_equal_calls_from_live_connections_are_never_joined(store: Store) -> None:
    await admit_one(store, admission(1, fingerprint=5))
    assert (await admit_one(store, admission(2, fingerprint=5))).fresh


async def test_a_call_whose_client_is_gone_is_adopted_once_the_oldest_first(store: Store) -> None:
    await admit(store, 1, fingerprint=5, arrived=T0 + 2)
    await admit(store, 2, fingerprint=5, arrived=T0 + 1)
    await store.await_ticket(1, None)
    await store.await_ticket(2, None)
    first = await admit_one(store, admission(3, fingerprint=5, deadline=None, rescue_at=None))
    second = await admit_one(store, admission(4, fingerprint=5))
    third = await admit_one(store, admission(5, fingerprint=5))
    assert [one.ticket for one in (first, second, third)] == [2, 1, 5]
    assert (first.fresh, first.deadline, third.fresh) == (False, None, True)


async def test_only_the_same_credential_adopts(store: Store) -> None:
    await admit(store, 1, fingerprint=5, awaiter=None)
    assert (await admit_one(store, admission(2, fingerprint=5, credential=STRANGER))).fresh


async def test_an_undelivered_outcome_is_adopted(store: Store) -> None:
    await admit(store, 1, fingerprint=5)
    await store.settle([Settlement(1, outcome())], T0)
    assert (await admit_one(store, admission(2, fingerprint=5))).fresh  # somebody still awaits it
    await store.await_ticket(1, None)
    adopted = await admit_one(store, admission(3, fingerprint=5))
    assert (adopted.ticket, adopted.outcome) == (1, outcome())
    assert (await admit_one(store, admission(4, fingerprint=5))).fresh


async def test_an_outcome_stays_adoptable_as_often_as_its_client_leaves_without_it(store: Store) -> None:
    await admit(store, 1, fingerprint=5)
    await store.settle([Settlement(1, outcome())], T0)
    for ticket in (2, 3, 4):
        await store.stop_awaiting(1, ME)
        adopted = await admit_one(store, admission(ticket, fingerprint=5))
        assert (adopted.ticket, adopted.outcome) == (1, outcome())
    await store.delivered([1], T0)
    await store.stop_awaiting(1, ME)
    assert (await admit_one(store, admission(5, fingerprint=5))).fresh


async def test_who_lost_its_client_does_not_take_the_ticket_from_another_engine(store: Store) -> None:
    """Its client may have come back elsewhere before this engine found out that it was gone here."""
    await admit(store, 1, fingerprint=5, awaiter=None)
    await admit_one(store, admission(2, fingerprint=5, awaiter=OTHER))
    await store.stop_awaiting(1, ME)
    assert (await admit_one(store, admission(3, fingerprint=5))).fresh
    await store.stop_awaiting(1, OTHER)
    assert (await admit_one(store, admission(4, fingerprint=5))).ticket == 1


@pytest.mark.parametrize(("retry", "later", "given"), [(True, 59.0, True), (True, 61.0, False), (False, 1.0, False)])
async def test_a_delivered_outcome_is_given_again_to_a_marked_retry_within_a_minute(
    store: Store, retry: bool, later: float, given: bool
) -> None:
    await admit(store, 1, fingerprint=5)
    await store.settle([Settlement(1, outcome())], T0)
    await store.delivered([1], T0)
    again = await admit_one(store, admission(2, fingerprint=5, retry=retry, arrived=T0 + later))
    assert (again.ticket == 1) is given
    assert (again.outcome == outcome()) is given


async def test_an_adopted_call_that_was_due_stays_due(store: Store) -> None:
    batch = await board(store, [1])
    await store.release(batch.id, BatchState.REFUSED, Lane.NOW, T0 + 7, "refused")
    await store.await_ticket(1, None)
    await admit_one(store, admission(2, fingerprint=7919, lane=Lane.NOW, rescue_at=None))
    assert [due.ticket for due in await store.due([CRED], T0 + 7, 10)] == [1]


async def test_any_64_bit_fingerprint_will_do(store: Store) -> None:
    await admit(store, 1, fingerprint=2**64 - 1, awaiter=None)
    assert (await admit_one(store, admission(2, fingerprint=2**64 - 1))).ticket == 1


async def test_a_ticket_number_used_twice_is_a_store_error_for_its_caller_only(store: Store) -> None:
    await admit(store, 1)
    results = await asyncio.gather(
        *(admit_one(store, admission(ticket)) for ticket in (2, 1, 3)), return_exceptions=True
    )
    assert isinstance(results[1], StoreError)
    assert await counted(store, "tickets.queued") == 3


async def test_what_is_admitted_comes_back_as_it_was(store: Store) -> None:
    body = b'{"text": "\xc3\xa9\\u0000"}'
    await admit(store, 1, body=body, reason="why", model="claude")
    assert await store.sendable_call(1) == SendableCall(1, pool(model="claude"), body, "claude", 0, "why")
    assert await store.sendable_call(99) is None
    await store.settle([Settlement(1, outcome())], T0)
    assert await store.sendable_call(1) is None


async def test_views_leave_out_what_is_settled_or_unknown(store: Store) -> None:
    await admit(store, 1, 2, 3)
    await admit(store, 4, awaiter=None, rescue_at=None, deadline=None)
    await store.settle([Settlement(2, outcome())], T0)
    await store.start_sending(attempt(3), ME, T0)
    views = {view.ticket: view for view in await store.views([1, 2, 3, 4, 99])}
    assert views == {
        1: TicketView(1, TicketState.QUEUED, 0, T0 + 600, T0 + 900, True),
        3: TicketView(3, TicketState.SENDING, 0, T0 + 600, T0 + 900, True),
        4: TicketView(4, TicketState.QUEUED, 0, None, None, False),
    }


# ---------------------------------------------------------------- outcomes


async def test_an_outcome_is_shown_to_its_own_credential_only(store: Store) -> None:
    await admit(store, 1)
    assert await store.outcome(1, CRED) is None
    await store.settle([Settlement(1, outcome())], T0)
    assert (await store.outcome(1, CRED)).outcome == outcome()
    assert await store.outcome(1, STRANGER) is None


async def test_only_a_queued_call_can_be_cancelled(store: Store) -> None:
    await admit(store, 1)
    await board(store, [2])
    await admit(store, 3)
    await store.start_sending(attempt(3), ME, T0)
    await admit(store, 4)
    assert [await store.cancel(ticket, outcome("cancelled")) for ticket in (1, 2, 3, 4, 4, 99)] == [
        *(False, False, False, True, False, False)  # 1 went aboard with 2
    ]
    assert (await store.outcome(4, CRED)).outcome == outcome("cancelled")
    assert await counted(store, "tickets.settled") == 1


async def test_a_cancelled_call_is_adopted_by_nobody(store: Store) -> None:
    await admit(store, 1, fingerprint=5, awaiter=None)
    await store.cancel(1, outcome("cancelled"))
    assert (await admit_one(store, admission(2, fingerprint=5, retry=True))).fresh


@pytest.mark.parametrize("retry", [True, False])
async def test_a_cancelled_call_is_adopted_by_nobody_when_its_client_leaves_afterwards(
    store: Store, retry: bool
) -> None:
    await admit(store, 1, fingerprint=5)
    await store.cancel(1, outcome("cancelled"))
    await store.await_ticket(1, None)
    assert (await admit_one(store, admission(2, fingerprint=5, retry=retry))).fresh
    assert (await store.outcome(1, CRED)).outcome == outcome("cancelled")
    assert await store.retain(T0 + 61, T0, 10) == 1  # and it is kept no longer than the delivered


async def test_the_outcomes_of_those_that_are_settled(store: Store) -> None:
    await admit(store, 1, 2, 3, 4)
    await admit(store, 5, credential=STRANGER)
    await store.settle([Settlement(2, outcome("two")), Settlement(5, outcome("five"))], T0)
    await store.cancel(3, outcome("cancelled"))
    await store.settle([Settlement(4, outcome("four"))], T0)
    found = await store.outcomes([1, 2, 3, 5, 99])
    assert sorted(found, key=lambda one: one.ticket) == [
        Settled(2, outcome("two")),
        Settled(3, outcome("cancelled")),
        Settled(5, outcome("five")),
    ]
    assert await store.outcomes([]) == []


# ---------------------------------------------------------------- pools and dues


async def test_pools_sum_up_what_waits_for_a_batch(store: Store) -> None:
    await admit(store, 1, arrived=T0 + 1, rescue_at=T0 + 50, body=b"123")
    await admit(store, 2, arrived=T0 + 3, rescue_at=None, body=b"45")
    await admit(store, 3, model="other", rescue_at=None)
    await admit(store, 4, lane=Lane.NOW)
    await admit(store, 5, credential=STRANGER)
    views = {view.key.model: view for view in await store.pools([CRED])}
    assert set(views) == {"m", "other"}
    view = views["m"]
    assert (view.count, view.bytes, view.oldest, view.newest, view.earliest_rescue) == (2, 5, T0 + 1, T0 + 3, T0 + 50)
    assert view.key == pool()
    assert views["other"].earliest_rescue is None
    assert len(await store.pools([CRED, STRANGER])) == 3
    assert await store.pools([]) == []


async def test_due_are_the_awaited_and_those_on_now_earliest_first(store: Store) -> None:
    await admit(store, 1, rescue_at=T0 + 30)
    await admit(store, 2, rescue_at=T0 + 20)
    await admit(store, 3, rescue_at=T0 + 10, awaiter=None)
    await admit(store, 4, rescue_at=None)
    await admit(store, 5, rescue_at=T0 + 10, credential=STRANGER)
    assert [due.ticket for due in await store.due([CRED], T0 + 30, 10)] == [2, 1]
    assert [due.ticket for due in await store.due([CRED], T0 + 25, 10)] == [2]
    assert [due.ticket for due in await store.due([STRANGER, CRED], T0 + 30, 2)] == [5, 2]
    assert await store.next_due([CRED]) == T0 + 20
    assert await store.next_due([CRED, STRANGER]) == T0 + 10
    assert await store.next_due([]) is None


async def test_boarded_calls_are_due_and_sending_ones_are_not(store: Store) -> None:
    batch = await board(store, [1, 2])
    await store.start_sending(attempt(1), ME, T0)
    [due] = await store.due([CRED], T0 + 600, 10)
    assert (due.ticket, due.state, due.batch, due.lane) == (2, TicketState.BOARDED, batch.id, Lane.BATCH)
    await store.await_ticket(2, None)
    assert await store.due([CRED], T0 + 600, 10) == []
    assert await store.next_due([CRED]) is None


async def test_unawaited_calls_on_now_are_due(store: Store) -> None:
    batch = await board(store, [1])
    await store.await_ticket(1, None)
    await store.release(batch.id, BatchState.REFUSED, Lane.NOW, T0 + 7, "refused")
    [due] = await store.due([CRED], T0 + 7, 10)
    assert (due.lane, due.state, due.batch) == (Lane.NOW, TicketState.QUEUED, None)


# ---------------------------------------------------------------- sending


async def test_an_attempt_stands_in_the_ledger_before_it_is_made(store: Store) -> None:
    await admit(store, 1, lane=Lane.NOW, tags={"team": "ci"})
    assert await store.attempts(1) == 0
    assert await store.start_sending(attempt(1), ME, T0)
    assert await store.attempts(1) == 1
    [line] = await store.entries(1)
    assert (line.paid, line.purchase, line.tags) == (None, -1, {"team": "ci"})


async def test_starting_the_same_attempt_twice_writes_it_once(store: Store) -> None:
    await admit(store, 1)
    assert await store.start_sending(attempt(1), ME, T0)
    assert await store.start_sending(attempt(1), ME, T0)
    assert await store.attempts(1) == 1
    assert await store.start_sending(attempt(1, 2), ME, T0)
    assert await store.attempts(1) == 2
    assert await counted(store, "tickets.sending") == 1


async def test_what_is_settled_or_unknown_is_not_sent(store: Store) -> None:
    await admit(store, 1)
    await store.settle([Settlement(1, outcome())], T0)
    assert not await store.start_sending(attempt(1), ME, T0)
    assert not await store.start_sending(attempt(99), ME, T0)
    assert await store.entries(1) == await store.entries(99) == []


async def test_what_another_engine_sends_under_a_lease_is_left_to_it(store: Store) -> None:
    await store.join(OTHER, T0, LEASE)
    await admit(store, 1)
    assert await store.start_sending(attempt(1), ME, T0)
    before = await store.entries(1)
    for now in (T0, T0 + LEASE):  # the last moment of the lease is within it
        assert not await store.start_sending(attempt(1, 2), OTHER, now)
        assert not await store.start_sending(attempt(1), OTHER, now)
    assert await store.entries(1) == before
    assert await store.attempts(1) == 1
    assert await store.start_sending(attempt(1, 2), ME, T0)  # it is in charge, and may try again
    assert await store.attempts(1) == 2


@pytest.mark.parametrize("end", ["lapse", "leave"])
async def test_a_sender_without_a_lease_is_replaced(store: Store, end: str) -> None:
    await admit(store, 1)
    await store.start_sending(attempt(1), ME, T0)
    if end == "leave":
        await store.leave(ME)
    now = T0 if end == "leave" else T0 + LEASE + 1
    await store.join(OTHER, now, LEASE)
    assert await store.start_sending(attempt(1, 2), OTHER, now)
    await store.join(ME, now, LEASE)
    assert not await store.start_sending(attempt(1, 3), ME, now)  # now the other one is in charge
    assert await store.attempts(1) == 2
    assert await counted(store, "tickets.sending") == 1


async def test_a_fresh_call_on_now_has_no_sender_yet(store: Store) -> None:
    await store.join(OTHER, T0, LEASE)
    await admit(store, 1, lane=Lane.NOW)
    assert await store.start_sending(attempt(1), OTHER, T0)
    assert not await store.start_sending(attempt(1, 2), ME, T0)


async def test_nobody_is_in_charge_of_what_is_sent_no_more(store: Store) -> None:
    await store.join(OTHER, T0, LEASE)
    await board(store, [1])
    await store.start_sending(attempt(1), ME, T0)
    await store.stop_sending(1)
    assert await store.start_sending(attempt(1, 2), OTHER, T0)
    assert not await store.start_sending(attempt(1, 3), ME, T0)


async def test_an_attempt_stands_as_unknown_whatever_its_entry_says(store: Store) -> None:
    await admit(store, 1)
    await store.start_sending(entry(1, -1, paid=7), ME, T0)
    assert [line.paid for line in await store.entries(1)] == [None]


async def test_starting_a_completed_attempt_again_leaves_its_line(store: Store) -> None:
    await admit(store, 1)
    await store.start_sending(attempt(1), ME, T0)
    await store.record(entry(1, -1, paid=7))
    before = await store.entries(1)
    assert await store.start_sending(attempt(1), ME, T0)
    assert await store.entries(1) == before


async def test_a_rescue_without_an_answer_returns_to_its_batch(store: Store) -> None:
    batch = await board(store, [1, 2])
    await store.start_sending(attempt(1), ME, T0)
    assert await store.stop_sending(1)
    [view] = await store.views([1])
    assert (view.state, view.rescue_at) == (TicketState.BOARDED, T0 + 900)  # its deadline: then the wait is over
    assert (await store.open_calls(batch.id)).count == 2
    assert not await store.stop_sending(1)  # it is not on its way any more


async def test_a_rescue_without_an_answer_and_without_a_deadline_waits_for_ever(store: Store) -> None:
    await admit(store, 1, deadline=None)
    await board(store, [])
    await store.start_sending(attempt(1), ME, T0)
    assert await store.stop_sending(1)
    [view] = await store.views([1])
    assert (view.state, view.rescue_at) == (TicketState.BOARDED, None)
    assert await store.next_due([CRED]) is None


async def test_without_an_unfinished_batch_there_is_nowhere_to_return_to(store: Store) -> None:
    await admit(store, 1, lane=Lane.NOW)
    assert not await store.stop_sending(1)
    batch = await board(store, [2])
    await store.start_sending(attempt(2), ME, T0)
    await store.move(batch.id, BatchState.REFUSED)
    assert not await store.stop_sending(2)
    assert not await store.stop_sending(99)
    assert await counted(store, "tickets.sending") == 2


# ---------------------------------------------------------------- retention


async def test_retention_takes_the_delivered_and_the_very_old(store: Store) -> None:
    await admit(store, *range(1, 7), lane=Lane.NOW)
    await store.settle([settlement(1, -1), settlement(2, -1)], T0)
    await store.settle([settlement(3, -1)], T0 + 100)
    await store.settle([settlement(4, -1)], T0 - 1000)
    await store.delivered([1], T0)
    await store.delivered([3], T0 + 100)
    removed = await store.retain(T0 + 50, T0 - 500, 100)
    assert removed == 2  # 1: delivered and old; 4: nobody ever fetched it
    assert await store.outcome(1, CRED) is await store.outcome(4, CRED) is None
    assert await store.outcome(2, CRED) is not None
    assert await store.outcome(3, CRED) is not None
    assert len(await store.views([5, 6])) == 2
    assert len(await store.entries(1)) == len(await store.entries(4)) == 1
    assert await counted(store, "tickets.settled") == 2
    assert (await admit_one(store, admission(1, fingerprint=1))).fresh  # the number is free, nothing is left behind


async def test_retention_goes_in_small_steps(store: Store) -> None:
    await admit(store, *range(1, 6))
    await store.settle([Settlement(ticket, outcome()) for ticket in range(1, 6)], T0)
    await store.delivered([1, 2, 3], T0)
    assert [await store.retain(T0 + 1, T0 + 1, 2) for _ in range(4)] == [2, 2, 1, 0]


async def test_retention_frees_the_key(store: Store) -> None:
    await admit(store, 1, key="k", fingerprint=5)
    await store.settle([Settlement(1, outcome())], T0)
    await store.delivered([1], T0)
    await store.retain(T0 + 1, T0, 10)
    assert (await admit_one(store, admission(2, key="k", fingerprint=6))).fresh


async def test_retention_spares_calls_of_unfinished_batches(store: Store) -> None:
    batch = await board(store, [1], state=BatchState.OPEN)
    await store.settle([settlement(1, -1)], T0)
    await store.delivered([1], T0)
    assert await store.retain(T0 + 1, T0 + 1, 10) == 0
    await store.move(batch.id, BatchState.ENDED)
    await store.move(batch.id, BatchState.COLLECTED)
    assert await store.retain(T0 + 1, T0 + 1, 10) == 1
    assert await store.batch(batch.id) is not None


# ---------------------------------------------------------------- books of another kind, and the end


async def test_memory(store: Store) -> None:
    await store.remember("kind", "a", "1", T0)
    await store.remember("kind", "a", "2", T0)
    await store.remember("kind", "b", "3", T0)
    await store.remember("other", "a", "4", T0)
    assert await store.recall("kind") == {"a": "2", "b": "3"}
    assert await store.recall("none") == {}


async def test_counts(store: Store) -> None:
    await board(store, [1, 2], state=BatchState.OPEN)
    await admit(store, 3)
    await admit(store, 4, lane=Lane.NOW)
    await store.settle([Settlement(1, outcome())], T0)
    counts = await store.counts()
    assert {name: counts[f"tickets.{name}"] for name in TicketState} == {
        TicketState.QUEUED: 1,
        TicketState.BOARDED: 1,
        TicketState.SENDING: 1,
        TicketState.SETTLED: 1,
    }
    assert counts["batches.open"] == 1


async def test_bought_counts_what_was_ever_bought(store: Store) -> None:
    batch = await board(store, [1])
    assert await counted(store, "batches.bought") == 0
    await store.move(batch.id, BatchState.OPEN, provider_id="msgbatch_1")
    await store.move(batch.id, BatchState.LOST)
    assert await counted(store, "batches.bought") == 1


async def test_a_closed_store_says_so_and_closes_twice(store: Store) -> None:
    pending = [asyncio.ensure_future(admit_one(store, admission(ticket))) for ticket in range(1, 20)]
    await asyncio.sleep(0)
    await asyncio.gather(store.aclose(), store.aclose())
    assert all([(await one).fresh for one in pending])
    with pytest.raises(Closed):
        await store.counts()
    with pytest.raises(Closed):
        await store.intend(Intent(1, "n", 1, 1, ME, T0))
    await store.aclose()
