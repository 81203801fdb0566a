"""Encryption at rest: nothing of what calls and answers say can be read in the store's files."""

from __future__ import annotations

import builtins
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from carpool.core.errors import ConfigError, StoreCorrupt, WrongSecret
from carpool.core.lifecycle import BatchState
from carpool.core.model import (
    Admission,
    Entry,
    EntryKind,
    Intent,
    Lane,
    Outcome,
    OutcomeKind,
    PoolKey,
    Settled,
    Settlement,
)
from carpool.stores import SqliteStore, encryption, peek
from carpool.stores.operations.session import PlainContents
from tests.support.stores import CRED, ME, T0, admission, admit_one, attempt, pool

SECRET = b"a secret of the test, long enough"
BODY, ANSWER = b'{"messages": "the plan of the vault"}', b'{"content": "dig behind the bakery"}'
QUOTED, TOLD, KEY, HEADER = "vault.0: not a string", "the bakery objects", "key-of-the-vault", "bearer-of-the-vault"
SAID = (b"vault", b"bakery")


async def opened(path: Path, *, encrypt: bool = True, secret: bytes = SECRET) -> SqliteStore:
    return await SqliteStore.open(str(path), secret=secret, encrypt=encrypt)


def told() -> Outcome:
    headers = (("request-id", "of-the-bakery"),)
    return Outcome(OutcomeKind.SUCCEEDED, 200, ANSWER, T0 + 60, Lane.BATCH, TOLD, headers, "msgbatch_1")


def arriving(ticket: int) -> Admission:
    made = admission(ticket, body=BODY, key=f"{KEY}-{ticket}", reason=QUOTED)
    key = pool()
    spoken = PoolKey(key.provider, key.dialect, CRED, key.endpoint, (("x-other-auth", HEADER),), "", "s", "1h")
    return Admission(made.call, spoken, made.lane, made.rescue_at, made.awaiter, made.reason)


async def fill(store: SqliteStore) -> None:
    """Calls in every state, an answer, a note, a memory and a ledger line that quote."""
    await store.join(ME, T0, 300)
    for ticket in (1, 2):
        await admit_one(store, arriving(ticket))
    [view] = await store.pools([CRED])
    batch = await store.intend(Intent(view.pool, "nonce", 1, 10**9, ME, T0))
    assert batch is not None
    await store.move(batch.id, BatchState.OPEN, provider_id="msgbatch_1", note=QUOTED)
    entry = Entry(1, batch.id, T0, Lane.BATCH, EntryKind.PURCHASE, "anthropic", CRED, "m", None, 5, 9, QUOTED)
    await store.settle([Settlement(1, told(), entry)], T0 + 60)
    await store.remember("cannot_batch", "account", QUOTED, T0)
    await admit_one(store, arriving(3))
    await store.attempt(attempt(9))


def on_disk(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if not file.name.endswith(".secret")}


async def test_nothing_that_was_said_is_in_any_file(tmp_path: Path) -> None:
    store = await opened(tmp_path / "carpool.db")
    await fill(store)
    while_open = on_disk(tmp_path)
    await store.aclose()
    assert {"carpool.db", "carpool.db-wal"} <= while_open.keys()
    for name, content in [*while_open.items(), *on_disk(tmp_path).items()]:
        assert not [word for word in SAID if word in content], name


async def test_without_encryption_it_would_be_found(tmp_path: Path) -> None:
    """Or the test above could not fail."""
    store = await opened(tmp_path / "carpool.db", encrypt=False)
    await fill(store)
    content = b"".join(on_disk(tmp_path).values())
    await store.aclose()
    for text in (BODY, ANSWER, QUOTED.encode(), TOLD.encode(), KEY.encode(), HEADER.encode(), b"of-the-bakery"):
        assert text in content


async def check(store: SqliteStore) -> None:
    [settled] = await store.outcomes([1])
    assert (settled.ticket, settled.outcome) == (1, told())
    assert (await store.outcome(1, CRED)).outcome == told()
    sendable_call = await store.sendable_call(2)
    assert sendable_call is not None
    assert (sendable_call.body, sendable_call.model, sendable_call.reason) == (BODY, "m", QUOTED)
    assert sendable_call.key.headers == (("x-other-auth", HEADER),)
    row = await store.listed_call(3)
    assert row is not None
    assert (row.model, row.reason) == ("m", QUOTED)
    [batch] = await store.listed_batches(None, None, 9)
    assert batch.note == QUOTED
    assert [line.reason for line in await store.entries(1)] == [QUOTED]
    assert await store.recall("cannot_batch") == {"account": QUOTED}
    assert not (await admit_one(store, arriving(3))).fresh  # known by its key
    returned = await admit_one(store, arriving(1))
    assert returned.outcome == told()


@pytest.mark.parametrize("later", [True, False])
@pytest.mark.parametrize("first", [True, False])
async def test_a_store_may_hold_both_kinds(tmp_path: Path, first: bool, later: bool) -> None:
    store = await opened(tmp_path / "carpool.db", encrypt=first)
    await fill(store)
    await store.aclose()
    store = await opened(tmp_path / "carpool.db", encrypt=later)
    try:
        await check(store)
        fresh = arriving(5)
        await admit_one(store, fresh)
        sendable_call = await store.sendable_call(5)
        assert sendable_call is not None
        assert sendable_call.body == BODY
    finally:
        await store.aclose()


async def test_a_wrong_secret_refuses_to_start(tmp_path: Path) -> None:
    await (await opened(tmp_path / "carpool.db")).aclose()
    with pytest.raises(WrongSecret):
        await opened(tmp_path / "carpool.db", secret=b"another secret, also long")


async def test_an_answer_cant_be_moved_to_another_call(tmp_path: Path) -> None:
    store = await opened(tmp_path / "carpool.db")
    await fill(store)
    await store.aclose()
    connection = sqlite3.connect(tmp_path / "carpool.db")
    connection.execute("UPDATE bodies SET body = (SELECT body FROM bodies WHERE ticket = 3) WHERE ticket = 2")
    connection.commit()
    connection.close()
    store = await opened(tmp_path / "carpool.db")
    with pytest.raises(StoreCorrupt, match="was changed"):
        await store.sendable_call(2)
    await store.aclose()


async def test_equal_bodies_look_different_and_no_two_stores_share_a_key(tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        store = await opened(tmp_path / name)
        await admit_one(store, arriving(1))
        await admit_one(store, arriving(2))
        await store.aclose()
        connection = sqlite3.connect(tmp_path / name)
        found += [row[0] for row in connection.execute("SELECT body FROM bodies")]
        found += [row[0] for row in connection.execute("SELECT text FROM words WHERE text LIKE '%' LIMIT 1")]
        connection.close()
    assert len(set(found)) == len(found) == 6


@pytest.mark.parametrize("encrypt", [True, False])
@pytest.mark.parametrize("start", [b"\0", b"\0\0", b"\0\1", b"\0\2", b"\0\1" + bytes(40), b""])
async def test_bodies_that_look_like_sealed_ones_stay_what_they_are(start: bytes, encrypt: bool) -> None:
    store = await SqliteStore.open(None, threaded=False, encrypt=encrypt)
    body, text = start + b"x", start.decode().replace("\0", "\1") + "x"
    await admit_one(store, admission(1, body=body, model=text, reason=text, key="k" + text))
    sendable_call = await store.sendable_call(1)
    assert sendable_call is not None
    assert (sendable_call.body, sendable_call.model, sendable_call.reason) == (body, text, text)
    outcome = Outcome(OutcomeKind.SUCCEEDED, 200, body, T0, Lane.NOW, text)
    await store.settle([Settlement(1, outcome)], T0)
    assert await store.outcomes([1]) == [Settled(1, outcome)]
    assert not (await admit_one(store, admission(2, fingerprint=7919, body=body, key="k" + text))).fresh
    await store.aclose()


async def test_stats_need_no_secret(tmp_path: Path) -> None:
    store = await opened(tmp_path / "carpool.db")
    await fill(store)
    totals, counts = await peek(tmp_path / "carpool.db")
    assert sum(row.paid for row in totals) == 5
    assert counts["tickets.settled"] == 1
    await store.aclose()


async def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *more: Any) -> Any:
        if name.startswith("cryptography"):
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match=r"needs the package cryptography: pip install cryptography"):
        await opened(tmp_path / "carpool.db")
    await (await opened(tmp_path / "plain.db", encrypt=False)).aclose()  # who does not ask for it does not need it


def test_the_key_is_made_as_the_standard_says() -> None:
    """RFC 5869, test case 1: the first block."""
    drawn = encryption._derived(b"\x0b" * 22, bytes(range(13)), bytes(range(0xF0, 0xFA)))
    assert drawn.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"


def test_what_nobody_can_open_is_said_in_a_sentence() -> None:
    with pytest.raises(StoreCorrupt, match="encrypted"):
        PlainContents().bytes_out(1, b"\0\1sealed elsewhere")
    with pytest.raises(StoreCorrupt, match="encrypted"):
        PlainContents().text_out("\1ssealed elsewhere")
