"""What every store promises about the record of calls: bounded, in order, and joined with the ledger."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from carpool.core.lifecycle import BatchState
from carpool.core.model import CallShape, Prefixes, RecordedPurchase, Usage
from carpool.core.ports import Store
from tests.support.stores import CRED, ME, STRANGER, T0, admit, attempt, board, entry, settlement

PREFIXES = Prefixes(2**63 - 1, 100, None, 0, 12, 3000)


def shape(ticket: int, *, arrived: float = T0, seconds: float | None = 2.5) -> CallShape:
    return CallShape(ticket, arrived, "claude-code/subagent", True, False, T0 + 600, 100, 4000, PREFIXES, seconds)


async def recorded(store: Store, since: float = 0.0, credentials: list[str] | None = None) -> list[RecordedPurchase]:
    found: list[RecordedPurchase] = []
    page = await store.shapes(since, 0, credentials)
    while page is not None:
        found += page[1]
        page = await store.shapes(since, page[0], credentials)
    return found


async def buy(store: Store, *tickets: int, credential: str = CRED) -> None:
    for ticket in tickets:
        await store.record(entry(ticket, -1, at=T0 + 1, credential=credential, tags={"team": "a"}))


async def test_an_empty_record(store: Store) -> None:
    assert await store.shapes(0.0, 0) is None
    await store.record_shapes([])
    assert await store.shapes(0.0, 0) is None


async def test_a_call_on_now_comes_with_its_purchase(store: Store) -> None:
    bought = replace(entry(7, -1, at=T0 + 1, tags={"team": "a"}), usage=Usage(5, 6, 7, 8, 9))
    await store.record(bought)
    await store.record_shapes([shape(7)])
    assert await recorded(store) == [RecordedPurchase(shape(7), bought, T0 + 3.5)]


async def test_what_the_dialect_could_not_tell_stays_unknown(store: Store) -> None:
    unknown = replace(shape(7, seconds=None), prefixes=None, deadline=None)
    await buy(store, 7)
    await store.record_shapes([unknown])
    [found] = await recorded(store)
    assert (found.call, found.answered) == (unknown, None)


async def test_a_call_that_nothing_was_bought_for_is_left_out(store: Store) -> None:
    await store.record_shapes([shape(7)])
    assert await recorded(store) == []
    await buy(store, 7)  # it may only have been late
    assert [found.call for found in await recorded(store)] == [shape(7)]


async def test_a_batch_and_its_rescue_are_two_purchases_of_one_call(store: Store) -> None:
    await store.record_shapes([shape(1, seconds=None)])
    batch = await board(store, [1], state=BatchState.OPEN)
    await store.start_sending(attempt(1, at=T0 + 10), ME, T0 + 10)
    await store.settle([settlement(1, -1, at=T0 + 10)], T0 + 60)
    late = settlement(1, batch.id, at=T0 + 90)
    await store.settle([replace(late, entry=replace(late.entry, usage=Usage(1)))], T0 + 90)
    rescue, batched = sorted(await recorded(store), key=lambda one: one.entry.purchase)
    assert (rescue.entry.purchase, rescue.answered) == (-1, T0 + 60)  # when its outcome was there
    assert (batched.entry.purchase, batched.answered) == (batch.id, T0 + 90)
    assert rescue.call == batched.call == shape(1, seconds=None)


async def test_what_was_given_back_was_not_answered(store: Store) -> None:
    await admit(store, 1)
    await store.record_shapes([shape(1, seconds=None)])
    await store.record(entry(1, 5, paid=0, would=0))
    assert [found.answered for found in await recorded(store)] == [None]


async def test_only_what_came_since_then(store: Store) -> None:
    await buy(store, 1, 2, 3)
    await store.record_shapes([shape(1, arrived=T0), shape(2, arrived=T0 + 50)])
    await store.record_shapes([shape(3, arrived=T0 + 40)])
    assert [found.call.ticket for found in await recorded(store, T0 + 40)] == [2, 3]
    assert await recorded(store, T0 + 51) == []


async def test_each_credential_its_own(store: Store) -> None:
    await buy(store, 1)
    await buy(store, 2, credential=STRANGER)
    await store.record_shapes([shape(1), shape(2)])
    assert [found.call.ticket for found in await recorded(store, 0.0, [CRED])] == [1]
    assert [found.call.ticket for found in await recorded(store, 0.0, [STRANGER, "nobody"])] == [2]
    assert await recorded(store, 0.0, []) == []


async def test_many_calls_come_in_pages_and_in_order(store: Store) -> None:
    tickets = list(range(1, 601))
    await store.record_shapes([shape(ticket) for ticket in tickets])
    await buy(store, *tickets[::100])
    first = await store.shapes(0.0, 0)
    assert first is not None
    assert [found.call.ticket for found in first[1]] == [1, 101, 201]
    assert [found.call.ticket for found in await recorded(store)] == tickets[::100]


@pytest.mark.parametrize(("before", "left"), [(T0, [1, 2, 3]), (T0 + 15, [2, 3]), (T0 + 100, [])])
async def test_old_calls_are_removed(store: Store, before: float, left: list[int]) -> None:
    await buy(store, 1, 2, 3)
    for ticket in (1, 2, 3):
        await store.record_shapes([shape(ticket, arrived=T0 + 10 * ticket)])
    assert (await store.prune_shapes(before, 1000) > 0) is (len(left) < 3)
    assert await store.prune_shapes(before, 1000) == 0
    assert [found.call.ticket for found in await recorded(store)] == left


@pytest.mark.parametrize(("most", "left"), [(3, [1, 2, 3]), (2, [2, 3]), (0, [])])
async def test_the_oldest_go_where_there_are_too_many(store: Store, most: int, left: list[int]) -> None:
    await buy(store, 1, 2, 3)
    for ticket in (1, 2, 3):
        await store.record_shapes([shape(ticket)])
    while await store.prune_shapes(0.0, most) > 0:
        pass
    assert [found.call.ticket for found in await recorded(store)] == left
