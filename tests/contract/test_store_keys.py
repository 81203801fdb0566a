"""Virtual keys in a store, and what each credential may be told of it."""

from __future__ import annotations

from msgspec.structs import replace

from carpool.core.keys import Profile, VirtualKey, new_key, revoked, rotated
from carpool.core.lifecycle import BatchState, TicketState
from carpool.core.model import Lane
from carpool.core.ports import Store
from tests.support.stores import CRED, STRANGER, T0, admission, admit_one, board, entry, settlement

PROFILE = Profile(60.0, Lane.BATCH, 3600.0, True, (Lane.NOW, Lane.BATCH), {"team": "cï"}, True)


def key(store: Store, name: str = "ci", at: float = T0) -> VirtualKey:
    made, _ = new_key(store.pepper, name, "anthropic", "KEY", at, owner="p", profile=PROFILE, expires_at=T0 + 900)
    return made


async def all_of(store: Store) -> list[VirtualKey]:
    found = await store.keys()
    assert found is not None
    return found[1]


async def test_keys_come_back_as_they_were_written_oldest_first(store: Store) -> None:
    two, one = key(store, "two", T0 + 1), key(store, "one")
    await store.write_keys([two, one])
    assert await all_of(store) == [one, two]


async def test_nothing_is_read_again_until_a_key_changes(store: Store) -> None:
    first = await store.keys()
    assert first is not None
    assert first[1] == []
    assert await store.keys(first[0]) is None
    one = key(store)
    await store.write_keys([one])
    second = await store.keys(first[0])
    assert second is not None
    assert second[0] != first[0]
    await store.used_keys({one.digest: T0 + 5})
    assert await store.keys(second[0]) is None
    await store.write_keys(revoked([one], "ci", T0 + 1))
    assert await store.keys(second[0]) is not None


async def test_a_change_keeps_the_last_use(store: Store) -> None:
    one = key(store)
    await store.write_keys([one])
    await store.used_keys({one.digest: T0 + 50, "unknown": T0})
    await store.used_keys({one.digest: T0 + 40})
    [ended] = revoked([one], "ci", T0 + 60)
    await store.write_keys([ended])
    assert await all_of(store) == [replace(ended, last_used=T0 + 50)]


async def test_a_rotation_is_one_change(store: Store) -> None:
    one = key(store)
    await store.write_keys([one])
    changed, _ = rotated([one], "ci", T0 + 1, 60, store.pepper)
    await store.write_keys(changed)
    assert {found.digest: found.ends_at for found in await all_of(store)} == {
        changed[0].digest: T0 + 61,
        changed[1].digest: None,
    }


# ---------------------------------------------------------------- each its own


async def test_one_credential_is_shown_its_own_calls_only(store: Store) -> None:
    await admit_one(store, admission(1))
    await admit_one(store, admission(2, credential=STRANGER))
    await admit_one(store, admission(3, lane=Lane.NOW))
    rows = await store.listed_calls(None, None, 10, [CRED])
    assert [row.ticket for row in rows] == [3, 1]
    assert [row.ticket for row in await store.listed_calls(3, None, 10, [CRED])] == [1]
    assert [row.ticket for row in await store.listed_calls(None, TicketState.QUEUED, 10, [CRED])] == [1]
    assert [row.ticket for row in await store.listed_calls(None, None, 10, [CRED, STRANGER])] == [3, 2, 1]
    assert [row.ticket for row in await store.listed_calls(None, None, 1, [CRED])] == [3]
    assert await store.listed_calls(None, None, 10, []) == []
    assert await store.listed_calls(None, None, 10, ["unheard of"]) == []


async def test_a_ticket_of_another_is_as_if_it_were_not_there(store: Store) -> None:
    await admit_one(store, admission(1))
    assert await store.listed_call(1, [STRANGER]) is None
    assert await store.listed_call(1, []) is None
    assert await store.listed_call(2, [CRED]) is None
    row = await store.listed_call(1, [STRANGER, CRED])
    assert row is not None
    assert row.credential == CRED


async def test_one_credential_is_shown_its_own_batches_only(store: Store) -> None:
    batch = await board(store, [1], state=BatchState.OPEN)
    assert [one.id for one in await store.listed_batches(None, None, 10, [CRED])] == [batch.id]
    assert [one.id for one in await store.listed_batches(None, BatchState.OPEN, 10, [CRED, STRANGER])] == [batch.id]
    assert await store.listed_batches(None, None, 10, [STRANGER]) == []
    assert await store.listed_batches(None, None, 10, []) == []


async def test_sums_are_told_apart_and_together(store: Store) -> None:
    batch = await board(store, [1], state=BatchState.OPEN)
    await store.settle([settlement(1, batch.id)], T0 + 60)
    await store.record(entry(2, -1, credential=STRANGER, paid=None, would=None))
    await store.record(entry(2, -1, credential=STRANGER, paid=7, would=7))
    await store.record(entry(3, -1, credential=STRANGER, paid=None, would=None))
    await store.record(entry(4, -1, paid=1, would=1))
    mine, theirs = await store.totals([CRED]), await store.totals([STRANGER])
    assert [(row.lane, row.purchases, row.unknown, row.paid) for row in mine] == [
        (Lane.BATCH, 1, 0, 50),
        (Lane.NOW, 1, 0, 1),
    ]
    assert [(row.lane, row.purchases, row.unknown, row.paid) for row in theirs] == [(Lane.NOW, 2, 1, 7)]
    assert [(row.lane, row.purchases, row.unknown, row.paid) for row in await store.totals()] == [
        (Lane.BATCH, 1, 0, 50),
        (Lane.NOW, 3, 1, 8),
    ]
    assert await store.totals([]) == await store.totals(["unheard of"]) == []
