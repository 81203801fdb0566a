"""What every store promises about batches: intents, moves, leases and takeovers."""

from __future__ import annotations

import pytest

from carpool.core.errors import IllegalMove, Misuse
from carpool.core.lifecycle import BATCH_MOVES, UNFINISHED, BatchState, TicketState
from carpool.core.model import EntryKind, Intent, Lane, OpenCalls, Settlement
from carpool.core.ports import Store
from tests.support.stores import (
    CRED,
    LEASE,
    ME,
    OTHER,
    ROADS,
    STRANGER,
    T0,
    admission,
    admit,
    admit_one,
    attempt,
    board,
    counted,
    outcome,
    pool,
    settlement,
)

UNBOUNDED = 10**12


async def the_pool(store: Store, credential: str = CRED) -> int:
    [view] = await store.pools([credential])
    return view.pool


async def bodies(store: Store, batch: int) -> dict[int, bytes]:
    return dict([line async for chunk in store.lines(batch) for line in chunk])


# ---------------------------------------------------------------- intents


async def test_an_intent_claims_the_most_pressing_calls_first(store: Store) -> None:
    await admit(store, 1, rescue_at=None, arrived=T0)
    await admit(store, 2, rescue_at=T0 + 50, arrived=T0 + 3)
    await admit(store, 3, rescue_at=T0 + 50, arrived=T0 + 2)
    await admit(store, 4, rescue_at=T0 + 40, arrived=T0 + 9)
    number = await the_pool(store)
    claimed = []
    for count in (1, 1, 5):
        batch = await store.intend(Intent(number, f"n{count}", count, UNBOUNDED, ME, T0 + 10))
        assert batch is not None
        claimed.append(sorted(await bodies(store, batch.id)))
    assert claimed == [[4], [3], [1, 2]]
    assert await store.intend(Intent(number, "n", 5, UNBOUNDED, ME, T0)) is None


async def test_an_intent_is_a_batch_about_to_be_sent(store: Store) -> None:
    await admit(store, 1, body=b"123")
    await admit(store, 2, body=b"4567")
    await admit(store, 3, lane=Lane.NOW)
    batch = await store.intend(Intent(await the_pool(store), "nonce", 10, UNBOUNDED, ME, T0 + 10))
    assert batch is not None
    assert (batch.state, batch.owner, batch.nonce, batch.key) == (BatchState.SUBMITTING, ME, "nonce", pool())
    assert (batch.count, batch.bytes, batch.intended_at) == (2, 7, T0 + 10)
    assert (batch.sent_at, batch.provider_id, batch.abandoned, batch.note) == (None, None, False, "")
    assert await store.batch(batch.id) == batch
    assert await store.batches(ME) == [batch]
    assert await store.pools([CRED]) == []
    assert await bodies(store, batch.id) == {1: b"123", 2: b"4567"}
    assert await counted(store, "tickets.boarded") == 2


@pytest.mark.parametrize(("limit", "claimed"), [(2, 1), (3, 1), (5, 1), (6, 2), (8, 2), (9, 3)])
async def test_an_intent_keeps_to_its_bytes_but_takes_at_least_one(store: Store, limit: int, claimed: int) -> None:
    for ticket in (1, 2, 3):
        await admit(store, ticket, body=b"xyz", arrived=T0 + ticket)
    batch = await store.intend(Intent(await the_pool(store), "n", 10, limit, ME, T0))
    assert batch is not None
    assert (batch.count, batch.bytes) == (claimed, 3 * claimed)


async def test_an_intent_leaves_out_what_is_awaited_and_due(store: Store) -> None:
    await admit(store, 1, rescue_at=T0 + 10)
    await admit(store, 2, rescue_at=T0 + 10, awaiter=None)  # nobody rescues it
    await admit(store, 3, rescue_at=T0 + 10.001)
    await admit(store, 4, rescue_at=T0 - 5)
    number = await the_pool(store)
    for count, claimed in ((1, {2}), (9, {3})):
        batch = await store.intend(Intent(number, "n", count, UNBOUNDED, ME, T0 + 10))
        assert batch is not None
        assert batch.count == 1
        assert set(await bodies(store, batch.id)) == claimed
    assert await store.intend(Intent(number, "n", 9, UNBOUNDED, ME, T0 + 10)) is None
    assert len(await store.batches(ME)) == 2  # an intent of nothing leaves no row
    assert [due.ticket for due in await store.due([CRED], T0 + 10, 10)] == [4, 1]
    await admit(store, 5, rescue_at=T0 + 10, awaiter=None)
    batch = await store.intend(Intent(number, "n", 9, UNBOUNDED, ME, T0 + 10))
    assert batch is not None
    assert set(await bodies(store, batch.id)) == {5}


async def test_lines_come_in_chunks_in_a_stable_order(store: Store) -> None:
    tickets = list(range(1, 5001))
    await admit(store, *reversed(tickets))
    batch = await store.intend(Intent(await the_pool(store), "n", 5000, UNBOUNDED, ME, T0))
    assert batch is not None
    chunks = [chunk async for chunk in store.lines(batch.id)]
    assert len(chunks) > 1
    assert [ticket for chunk in chunks for ticket, _ in chunk] == tickets
    assert [chunk async for chunk in store.lines(99)] == []


async def test_large_lines_come_in_small_chunks(store: Store) -> None:
    await admit(store, 1, 2, 3, body=b"x" * 3_000_000)
    batch = await store.intend(Intent(await the_pool(store), "n", 5000, UNBOUNDED, ME, T0))
    assert batch is not None
    assert [len(chunk) async for chunk in store.lines(batch.id)] == [1, 1, 1]


async def test_lines_stay_whole_while_the_batch_is_sent(store: Store) -> None:
    """A rescue that is settled meanwhile must not shorten a body whose length was promised."""
    batch = await board(store, [1, 2])
    await store.start_sending(attempt(1), ME, T0)
    await store.settle([Settlement(1, outcome())], T0)
    assert set(await bodies(store, batch.id)) == {1, 2}


# ---------------------------------------------------------------- moves


@pytest.mark.parametrize("source", list(BatchState))
async def test_batches_move_as_the_table_says_and_no_other_way(store: Store, source: BatchState) -> None:
    batch = await board(store, [1], state=source)
    for target in BatchState:
        if target not in BATCH_MOVES[source]:
            with pytest.raises(IllegalMove):
                await store.move(batch.id, target, note="no")
            with pytest.raises(IllegalMove):
                await store.release(batch.id, target, Lane.NOW, T0, "no")
    assert await store.batch(batch.id) == batch
    assert await counted(store, "tickets.boarded") == 1
    for target in sorted(BATCH_MOVES[source])[:1]:
        assert (await store.move(batch.id, target)).state is target


async def test_a_move_sets_the_named_fields(store: Store) -> None:
    batch = await board(store, [1])
    moved = await store.move(
        batch.id,
        BatchState.OPEN,
        sent_at=T0 + 1,
        resolved_at=T0 + 2,
        provider_id="msgbatch_1",
        expires_at=T0 + 3,
        clock_offset=-0.25,
    )
    assert (moved.sent_at, moved.resolved_at, moved.provider_id) == (T0 + 1, T0 + 2, "msgbatch_1")
    assert (moved.expires_at, moved.clock_offset) == (T0 + 3, -0.25)
    await store.annotate(batch.id, abandoned=True, note="seen", ended_at=T0 + 4)
    noted = await store.batch(batch.id)
    assert noted is not None
    assert (noted.state, noted.abandoned, noted.note, noted.ended_at) == (BatchState.OPEN, True, "seen", T0 + 4)
    assert noted.provider_id == "msgbatch_1"


async def test_other_fields_and_other_batches_are_refused(store: Store) -> None:
    batch = await board(store, [1])
    with pytest.raises(Misuse):
        await store.annotate(batch.id, owner="me")
    with pytest.raises(Misuse):
        await store.move(batch.id, BatchState.OPEN, state="void")
    with pytest.raises(IllegalMove):
        await store.move(99, BatchState.OPEN)
    with pytest.raises(IllegalMove):
        await store.annotate(99, note="x")
    assert await store.batch(batch.id) == batch
    assert await store.batch(99) is None


async def test_release_returns_the_boarded_and_lets_the_sending_travel(store: Store) -> None:
    batch = await board(store, [1, 2, 3, 4])
    await store.start_sending(attempt(1), ME, T0)
    await store.settle([Settlement(4, outcome())], T0)
    assert await store.release(batch.id, BatchState.REFUSED, Lane.BATCH, T0 + 9, "refused") == 2
    states = {view.ticket: (view.state, view.requeues) for view in await store.views([1, 2, 3])}
    assert states == {1: (TicketState.SENDING, 0), 2: (TicketState.QUEUED, 0), 3: (TicketState.QUEUED, 0)}
    [view] = await store.pools([CRED])
    assert view.count == 2
    sendable = await store.sendable_call(2)
    assert sendable is not None
    assert sendable.reason == "cheapest"  # the reason for the lane, which is still the same
    assert not await store.stop_sending(1)  # it has no batch any more
    assert (await store.open_calls(batch.id)).count == 0


@pytest.mark.parametrize(
    ("source", "target", "requeues"),
    [
        (BatchState.SUBMITTING, BatchState.REFUSED, 0),
        (BatchState.UNKNOWN, BatchState.ABANDONED, 1),
        (BatchState.OPEN, BatchState.LOST, 1),
    ],
)
async def test_a_release_counts_as_a_requeue_unless_the_batch_was_refused(
    store: Store, source: BatchState, target: BatchState, requeues: int
) -> None:
    batch = await board(store, [1], state=source)
    assert await store.release(batch.id, target, Lane.BATCH, T0, "again") == 1
    [view] = await store.views([1])
    assert (view.state, view.requeues) == (TicketState.QUEUED, requeues)


async def test_release_on_now_makes_due_at_once(store: Store) -> None:
    batch = await board(store, [1, 2])
    await store.release(batch.id, BatchState.REFUSED, Lane.NOW, T0 + 9, "can't batch")
    assert [(due.ticket, due.rescue_at, due.lane) for due in await store.due([CRED], T0 + 9, 10)] == [
        (1, T0 + 9, Lane.NOW),
        (2, T0 + 9, Lane.NOW),
    ]
    assert await store.pools([CRED]) == []
    sendable = await store.sendable_call(1)
    assert sendable is not None
    assert sendable.reason == "can't batch"


async def test_unfinished_batches_of_an_engine_come_oldest_first(store: Store) -> None:
    first = await board(store, [1], nonce="a")
    second = await board(store, [2], nonce="b")
    await board(store, [3], nonce="c", state=BatchState.COLLECTED)
    await board(store, [4], nonce="d", owner=OTHER)
    assert [batch.id for batch in await store.batches(ME)] == [first.id, second.id]


async def test_open_calls(store: Store) -> None:
    await admit(store, 1, rescue_at=T0 + 50)
    await admit(store, 2, rescue_at=None)
    await admit(store, 3, rescue_at=T0 + 90, awaiter=None)
    await admit(store, 4, rescue_at=T0 + 70)
    await admit(store, 5, rescue_at=T0 + 80)
    batch = await board(store, [])
    await store.start_sending(attempt(4), ME, T0)
    await store.settle([Settlement(5, outcome())], T0)
    assert await store.open_calls(batch.id) == OpenCalls(4, 2, T0 + 70)
    assert await store.open_calls(99) == OpenCalls(0, 0, None)
    boarded = [view.ticket for view in await store.views(range(1, 6)) if view.state is TicketState.BOARDED]
    assert boarded == [1, 2, 3]


async def test_unmentioned_are_the_tickets_without_a_line_of_this_purchase_settled_or_not(store: Store) -> None:
    batch = await board(store, [6, 5, 4, 3, 2, 1], state=BatchState.OPEN)
    await admit(store, 7)
    await store.start_sending(attempt(2, kind=EntryKind.RESCUE), ME, T0)
    await store.start_sending(attempt(3, kind=EntryKind.RESCUE), ME, T0)
    await store.settle([settlement(3, -1), Settlement(4, outcome()), settlement(5, batch.id)], T0)
    await store.settle([settlement(6, batch.id, paid=None)], T0)
    assert await store.unmentioned(batch.id, 0, 10) == [1, 2, 3, 4]  # lines of other purchases don't count
    assert await store.unmentioned(99, 0, 10) == []


async def test_a_line_that_another_batch_wrote_is_no_line_of_this_one(store: Store) -> None:
    first = await board(store, [1], state=BatchState.UNKNOWN)
    await store.release(first.id, BatchState.ABANDONED, Lane.BATCH, T0, "no proof")
    second = await board(store, [], nonce="second", state=BatchState.OPEN)
    await store.settle([settlement(1, first.id)], T0)
    assert await store.unmentioned(first.id, 0, 10) == []  # it has left that one
    assert await store.unmentioned(second.id, 0, 10) == [1]


async def test_unmentioned_go_on_after_a_cursor_in_rising_order(store: Store) -> None:
    batch = await board(store, [9, 2, 7, 4, 5])
    other = await board(store, [1, 3, 6, 8], nonce="other")
    assert [await store.unmentioned(batch.id, after, 2) for after in (0, 4, 7, 9)] == [[2, 4], [5, 7], [9], []]
    assert await store.unmentioned(batch.id, 4, 10) == [5, 7, 9]
    assert await store.unmentioned(batch.id, 0, 0) == []
    assert await store.unmentioned(other.id, 0, 10) == [1, 3, 6, 8]


async def test_suspects(store: Store) -> None:
    batch = await board(store, [1], state=BatchState.UNKNOWN)
    await board(store, [2])
    await store.suspect(batch.id, "p-1", "watched")
    await store.suspect(batch.id, "p-2", "watched")
    await store.suspect(batch.id, "p-2", "stranger")
    assert await store.suspects(batch.id) == {"p-1": "watched", "p-2": "stranger"}
    assert await store.known_provider_ids(CRED) == set()  # a stranger to one batch may be another's
    await store.move(batch.id, BatchState.OPEN, provider_id="p-1")
    assert await store.known_provider_ids(CRED) == {"p-1"}
    assert await store.known_provider_ids(STRANGER) == set()


async def test_who_was_ruled_out_for_one_batch_may_turn_out_to_be_another(store: Store) -> None:
    first = await board(store, [1], nonce="first", state=BatchState.UNKNOWN)
    second = await board(store, [2], nonce="second", state=BatchState.UNKNOWN)
    await store.suspect(first.id, "p-2", "stranger")
    assert await store.known_provider_ids(CRED) == set()
    assert await store.suspects(second.id) == {}
    await store.move(second.id, BatchState.OPEN, provider_id="p-2")
    assert await store.known_provider_ids(CRED) == {"p-2"}
    for state in (BatchState.ENDED, BatchState.COLLECTED):
        await store.move(second.id, state)
    assert await store.known_provider_ids(CRED) == {"p-2"}  # finished ones are ours too
    assert await store.suspects(first.id) == {"p-2": "stranger"}


# ---------------------------------------------------------------- leases


async def test_a_batch_that_was_never_sent_is_taken_over_as_such(store: Store) -> None:
    await store.join(ME, T0, LEASE)
    await admit(store, 1)
    [view] = await store.pools([CRED])
    batch = await store.intend(Intent(view.pool, "nonce", 9, 10**6, ME, T0, unsent=True))
    assert batch is not None
    assert batch.unsent
    later = T0 + LEASE + 1
    assert await store.take_over(OTHER, [CRED], later) == 1
    row = await store.batch(batch.id)
    assert row is not None
    assert (row.owner, row.state, row.unsent, row.resolved_at) == (OTHER, BatchState.SUBMITTING, True, None)


async def test_a_batch_that_may_have_been_sent_is_in_doubt(store: Store) -> None:
    await store.join(ME, T0, LEASE)
    await admit(store, 1)
    [view] = await store.pools([CRED])
    batch = await store.intend(Intent(view.pool, "nonce", 9, 10**6, ME, T0, unsent=True))
    assert batch is not None
    assert await store.depart(batch.id, ME, T0 + 2, T0 + 1)
    assert await store.take_over(OTHER, [CRED], T0 + LEASE + 1) == 1
    row = await store.batch(batch.id)
    assert row is not None
    assert (row.state, row.sent_at, row.unsent) == (BatchState.UNKNOWN, T0 + 1, False)


async def test_a_create_departs_only_while_its_batch_is_its_owners(store: Store) -> None:
    """Whoever was taken for dead and wakes must not make a batch doubtful that another engine knows to be unsent."""
    await store.join(ME, T0, LEASE)
    await admit(store, 1)
    [view] = await store.pools([CRED])
    batch = await store.intend(Intent(view.pool, "nonce", 9, 10**6, ME, T0, unsent=True))
    assert batch is not None
    assert not await store.depart(batch.id, OTHER, T0 + 2, T0 + 1)
    assert not await store.depart(batch.id, ME, T0 + LEASE + 1, T0 + 1)
    later = T0 + LEASE + 1
    await store.join(OTHER, later, LEASE)
    assert await store.take_over(OTHER, [CRED], later) == 1
    await store.join(ME, later, LEASE)
    assert not await store.depart(batch.id, ME, later + 2, later)
    row = await store.batch(batch.id)
    assert row is not None
    assert (row.owner, row.unsent, row.sent_at) == (OTHER, True, None)


async def test_a_batch_is_mine_while_it_is_submitting_and_my_lease_lasts(store: Store) -> None:
    batch = await board(store, [1])
    assert await store.still_mine(batch.id, ME, T0 + LEASE)
    assert not await store.still_mine(batch.id, ME, T0 + LEASE + 1)
    assert not await store.still_mine(batch.id, OTHER, T0)
    await store.join(ME, T0 + 100, LEASE)
    assert await store.still_mine(batch.id, ME, T0 + LEASE + 1)
    await store.move(batch.id, BatchState.OPEN)
    assert not await store.still_mine(batch.id, ME, T0)


async def test_without_a_lease_nothing_is_mine(store: Store) -> None:
    batch = await board(store, [1])
    await store.leave(ME)
    assert not await store.still_mine(batch.id, ME, T0)


@pytest.mark.parametrize("state", list(BatchState))
async def test_unfinished_batches_of_the_dead_are_taken_over(store: Store, state: BatchState) -> None:
    batch = await board(store, [1], state=state)
    later = T0 + LEASE + 1
    await store.join(OTHER, later, LEASE)
    assert await store.take_over(OTHER, [CRED], later) == (state in UNFINISHED)
    after = await store.batch(batch.id)
    assert after is not None
    expected = BatchState.UNKNOWN if state is BatchState.SUBMITTING else state
    assert after.state is expected
    assert after.owner == (OTHER if state in UNFINISHED else ME)
    assert not await store.still_mine(batch.id, ME, later)


async def test_the_living_are_left_alone(store: Store) -> None:
    batch = await board(store, [1])
    await store.start_sending(attempt(1), ME, T0)
    await store.join(OTHER, T0 + 1, LEASE)
    assert await store.take_over(OTHER, [CRED], T0 + 1) == 0
    assert await store.batch(batch.id) == batch
    [view] = await store.views([1])
    assert (view.state, view.awaited) == (TicketState.SENDING, True)


async def test_only_batches_of_these_credentials_are_taken(store: Store) -> None:
    batch = await board(store, [1])
    await store.leave(ME)
    assert await store.take_over(OTHER, [STRANGER], T0) == 0
    assert await store.take_over(OTHER, [], T0) == 0
    assert await store.batch(batch.id) == batch
    assert await store.take_over(OTHER, [CRED, STRANGER], T0) == 1


@pytest.mark.parametrize("state", list(BatchState))
async def test_a_rescue_of_the_dead_returns_to_its_batch_or_to_the_queue(store: Store, state: BatchState) -> None:
    batch = await board(store, [1, 2], state=state)
    await store.start_sending(attempt(1), ME, T0)
    await store.leave(ME)
    await store.take_over(OTHER, [CRED], T0)
    views = {view.ticket: view for view in await store.views([1, 2])}
    expected = TicketState.BOARDED if state in UNFINISHED else TicketState.QUEUED
    assert views[1].state is expected
    assert views[2].state is TicketState.BOARDED
    assert not views[1].awaited
    assert not views[2].awaited
    assert await store.due([CRED], T0 + 10_000, 10) == []
    assert (await store.open_calls(batch.id)).count == (2 if state in UNFINISHED else 1)


async def test_calls_on_now_of_the_dead_stay_where_they_are(store: Store) -> None:
    await admit(store, 1, lane=Lane.NOW)
    await store.start_sending(attempt(1), ME, T0)
    await store.leave(ME)
    await store.take_over(OTHER, [CRED], T0)
    [view] = await store.views([1])
    assert (view.state, view.awaited) == (TicketState.SENDING, False)
    again = await admit_one(store, admission(2, fingerprint=7919, lane=Lane.NOW, awaiter=OTHER))
    assert (again.ticket, again.state) == (1, TicketState.SENDING)
    assert await store.start_sending(attempt(1, 2), OTHER, T0)


async def test_nobody_is_behind_the_calls_on_now_of_the_dead_even_when_they_return(store: Store) -> None:
    await admit(store, 1, lane=Lane.NOW)
    await store.start_sending(attempt(1), ME, T0)
    later = T0 + LEASE + 1
    await store.join(OTHER, later, LEASE)
    await store.take_over(OTHER, [CRED], later)
    await store.join(ME, later, LEASE)
    assert await store.start_sending(attempt(1, 2), OTHER, later)
    assert not await store.start_sending(attempt(1, 3), ME, later)


async def test_what_a_living_engine_sends_is_left_to_it_whoever_awaited_it(store: Store) -> None:
    await store.join(OTHER, T0, LEASE)
    await board(store, [1], owner=OTHER)
    await store.start_sending(attempt(1), ME, T0)
    await store.leave(OTHER)
    await store.take_over(ME, [CRED], T0)
    [view] = await store.views([1])
    assert (view.state, view.awaited) == (TicketState.SENDING, False)


async def test_what_a_dead_engine_sent_returns_though_a_living_one_awaits_it(store: Store) -> None:
    await store.join(OTHER, T0, LEASE)
    await board(store, [1])
    await store.start_sending(attempt(1), OTHER, T0)
    await store.leave(OTHER)
    await store.take_over(ME, [CRED], T0)
    [view] = await store.views([1])
    assert (view.state, view.awaited) == (TicketState.BOARDED, True)


async def test_calls_of_the_dead_can_be_adopted_settled_or_not(store: Store) -> None:
    await admit(store, 1, 2)
    await store.settle([Settlement(2, outcome())], T0)
    await store.leave(ME)
    assert (await admit_one(store, admission(3, fingerprint=7919))).fresh  # not before somebody took over
    await store.take_over(OTHER, [], T0)
    assert (await admit_one(store, admission(4, fingerprint=7919))).ticket == 1
    assert (await admit_one(store, admission(5, fingerprint=2 * 7919))).outcome == outcome()


async def test_every_state_has_a_road() -> None:
    assert set(ROADS) == set(BatchState)


async def test_a_batch_that_another_has_taken_over_is_not_moved(store: Store) -> None:
    """Who stood still goes on with what it had in its hands, while the other brings the same batch home."""
    batch = await board(store, [1, 2], state=BatchState.ENDED)
    await store.join(OTHER, T0 + LEASE, 2 * LEASE)
    assert await store.take_over(OTHER, [CRED], T0 + LEASE + 1) == 1
    with pytest.raises(IllegalMove):
        await store.move(batch.id, BatchState.COLLECTED, owner=ME, note="done")
    standing = await store.batch(batch.id)
    assert standing is not None
    assert (standing.state, standing.owner, standing.note) == (BatchState.ENDED, OTHER, "")
    assert (await store.move(batch.id, BatchState.COLLECTED, owner=OTHER)).state is BatchState.COLLECTED


async def test_a_batch_that_another_has_taken_over_is_not_released(store: Store) -> None:
    batch = await board(store, [1, 2], state=BatchState.UNKNOWN)
    await store.join(OTHER, T0 + LEASE, 2 * LEASE)
    assert await store.take_over(OTHER, [CRED], T0 + LEASE + 1) == 1
    with pytest.raises(IllegalMove):
        await store.release(batch.id, BatchState.ABANDONED, Lane.BATCH, T0, "given up", owner=ME)
    standing = await store.batch(batch.id)
    assert standing is not None
    assert (standing.state, standing.owner) == (BatchState.UNKNOWN, OTHER)
    assert await counted(store, "tickets.boarded") == 2
    assert await store.release(batch.id, BatchState.ABANDONED, Lane.BATCH, T0, "given up", owner=OTHER) == 2
