"""The record of calls is read beside the process that writes it, from either database, and without the secret."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from sqlite3 import connect

import pytest
from msgspec.structs import replace

from carpool.core.errors import ConfigError, StoreError
from carpool.core.lifecycle import BatchState
from carpool.core.model import RecordedPurchase, TimedBatch
from carpool.core.ports import Store
from carpool.stores import open_record, open_store
from tests.contract.test_store_shapes import recorded, shape
from tests.support.postgres import schema_url
from tests.support.stores import CRED, LEASE, ME, T0, board, entry


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return str(tmp_path / "carpool.db") if request.param == "sqlite" else schema_url()


async def opened(url: str, **options: object) -> Store:
    store = await open_store(url, **options)  # type: ignore[arg-type]
    await store.join(ME, T0, LEASE)
    return store


def pages(url: str, since: float = 0.0) -> list[list[RecordedPurchase]]:
    with open_record(url) as record:
        return list(record.pages(since))


async def test_what_the_store_itself_would_say(url: str) -> None:
    store = await opened(url)
    for ticket in range(1, 601):
        await store.record(entry(ticket, -1, at=T0 + 1, tags={"team": "a"}))
    await store.record_shapes([shape(ticket, arrived=T0 + ticket) for ticket in range(1, 601)])
    found = pages(url, T0 + 300)  # while the store is open
    assert len(found) > 1
    assert [one for page in found for one in page] == await recorded(store, T0 + 300)
    await store.aclose()
    assert pages(url, T0 + 300) == found


async def test_how_long_batches_took(url: str) -> None:
    store = await opened(url)
    for number, (ended, note) in enumerate([(100.0, ""), (40.0, "cancelled"), (None, "")]):
        batch = await board(store, [10 * number + 1, 10 * number + 2], nonce=f"n{number}", state=BatchState.OPEN)
        await store.annotate(batch.id, resolved_at=T0 + 10, note=note)
        if ended is not None:
            await store.move(batch.id, BatchState.ENDED, ended_at=T0 + 10 + ended)
    with open_record(url) as record:
        assert record.timed_batches(T0) == [
            TimedBatch("anthropic", CRED, "m", 2, 100.0, whole=True),
            TimedBatch("anthropic", CRED, "m", 2, 40.0, whole=False),
        ]
        assert record.timed_batches(T0 + 1000) == []
    await store.aclose()


async def test_an_encrypted_store_is_read_without_its_secret(url: str) -> None:
    pytest.importorskip("cryptography")
    store = await opened(url, secret=b"s" * 32, encrypt=True)
    bought = replace(entry(7, -1, at=T0 + 1), reason="private")
    await store.record(bought)
    await store.record_shapes([shape(7)])
    await store.aclose()
    [[found]] = pages(url)
    assert "private" not in found.entry.reason
    assert replace(found.entry, reason="private") == bought


async def test_no_store_and_an_old_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="in memory"):
        open_record(":memory:")
    path = tmp_path / "carpool.db"
    with pytest.raises(StoreError, match="There is no store"):
        pages(str(path))
    await (await open_store(path)).aclose()
    with closing(connect(path)) as connection:
        connection.execute("PRAGMA user_version = 5")
    with pytest.raises(StoreError, match="an older carpool"):
        pages(str(path))
