"""The SQLite store and its file: versions, locks, damage, secrets. Every trouble is a sentence."""

# Here blocking is the point: files are prepared and looked at between two steps of the store.
# ruff: noqa: ASYNC220, ASYNC240

from __future__ import annotations

import asyncio
import dataclasses
import os
import sqlite3
import stat
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from carpool.core.errors import (
    ConfigError,
    StoreCorrupt,
    StoreError,
    StoreLocked,
    StoreTooNew,
    StoreUnwritable,
    WrongSecret,
)
from carpool.core.lifecycle import BatchState, TicketState
from carpool.core.model import EntryKind, Lane, Outcome, OutcomeKind, Settlement
from carpool.stores import SqliteStore, open_store, peek
from carpool.stores.operations.session import migrations
from carpool.stores.secret import load_secret, secret_file
from carpool.stores.sqlite import opening
from tests.support import ROOT
from tests.support.stores import (
    CRED,
    LEASE,
    ME,
    OTHER,
    T0,
    admission,
    admit,
    admit_one,
    attempt,
    board,
    entry,
    outcome,
    settlement,
)

SECRET = b"a secret of the test"


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "carpool.db")


async def made(path: str) -> None:
    store = await SqliteStore.open(path, secret=SECRET)
    await store.aclose()


# ---------------------------------------------------------------- coming back


async def test_what_was_kept_is_there_after_a_restart(path: str) -> None:
    store = await SqliteStore.open(path)
    batch = await board(store, [1, 2, 3], state=BatchState.OPEN)
    await store.settle([Settlement(1, outcome())], T0)
    pepper = store.pepper
    await store.aclose()
    again = await SqliteStore.open(path)
    assert again.durable
    assert again.pepper == pepper
    assert (await again.outcome(1, CRED)).outcome == outcome()
    assert await again.unmentioned(batch.id, 0, 10) == [1, 2, 3]
    assert {view.ticket: view.state for view in await again.views([1, 2, 3])} == dict.fromkeys(
        (2, 3), TicketState.BOARDED
    )
    assert (await again.counts())["tickets.settled"] == 1
    await again.aclose()


async def test_a_restart_takes_over_at_once_even_under_the_same_name(path: str) -> None:
    store = await SqliteStore.open(path)
    await store.join(ME, T0, LEASE)
    submitting = await board(store, [1, 2])
    await store.start_sending(attempt(1), ME, T0)
    await admit(store, 3)
    await store.aclose()
    again = await SqliteStore.open(path)
    await again.join(ME, T0 + 1, LEASE)
    assert await again.take_over(ME, [CRED], T0 + 1) == 1
    taken = await again.batch(submitting.id)
    assert taken is not None
    assert (taken.state, taken.owner) == (BatchState.UNKNOWN, ME)
    states = {view.ticket: (view.state, view.awaited) for view in await again.views([1, 2, 3])}
    assert states == {
        1: (TicketState.BOARDED, False),
        2: (TicketState.BOARDED, False),
        3: (TicketState.QUEUED, False),
    }
    assert (await admit_one(again, admission(4, fingerprint=3 * 7919, awaiter=OTHER))).ticket == 3
    await again.aclose()


async def test_after_a_restart_nobody_is_behind_what_travels_even_under_the_same_name(path: str) -> None:
    store = await SqliteStore.open(path)
    await store.join(ME, T0, LEASE)
    await admit(store, 1, lane=Lane.NOW)
    await store.start_sending(attempt(1), ME, T0)
    await store.aclose()
    again = await SqliteStore.open(path)
    await again.join(ME, T0 + 1, LEASE)
    assert await again.start_sending(attempt(1, 2), OTHER, T0 + 1)
    await again.aclose()


async def test_a_store_in_memory_keeps_nothing() -> None:
    store = await SqliteStore.open(None)
    assert not store.durable
    await store.aclose()


# ---------------------------------------------------------------- URLs


async def test_urls_name_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in (tmp_path / "a.db", str(tmp_path / "b.db"), f"sqlite:///{tmp_path}/c.db", "sqlite:///d%20e.db"):
        store = await open_store(url)
        assert store.durable
        await store.aclose()
    assert {file.name for file in tmp_path.glob("*.db")} == {"a.db", "b.db", "c.db", "d e.db"}
    memory = await open_store(None)
    assert not memory.durable
    await memory.aclose()


@pytest.mark.parametrize(
    "url", ["postgresql://host/db?schema=No", "redis://host", "sqlite://host.db", "", "sqlite:///"]
)
async def test_other_urls_are_refused_in_a_sentence(url: str) -> None:
    with pytest.raises(ConfigError, match=r"\w+ .*[.]$"):
        await open_store(url)


# ---------------------------------------------------------------- versions


OF_VERSION_1 = f"""
INSERT INTO credentials VALUES (1, 'c');
INSERT INTO pools VALUES (1, 1, 'anthropic', 'anthropic', '/v1/messages', '[]', '', 's', 'patient');
INSERT INTO calls (id, pool, credential, state, lane, batch, arrived, rescue_at, bytes, fingerprint, stream,
  max_output_tokens, model, reason, settled_at)
VALUES (1, 1, 1, 'settled', 'batch', 7, {T0}, 9e999, 6, 11, 0, 5, 'a-model', 'it can wait', {T0}),
  (2, 1, 1, 'queued', 'batch', NULL, {T0}, 9e999, 6, 12, 0, 5, 'a-model', 'it can wait', NULL);
INSERT INTO bodies VALUES (2, CAST('body 2' AS BLOB));
INSERT INTO outcomes
VALUES (1, 7, 'succeeded', 200, {T0}, 'batch', 'why not', '[]', 'msgbatch_1', CAST('answer 1' AS BLOB));
INSERT INTO entries VALUES (1, 7, {T0}, 'batch', 'purchase', 'anthropic', 1, 'a-model', NULL, 50, 100, '', NULL);
INSERT INTO tallies VALUES ('tickets.settled', 1);
"""


async def test_a_store_of_every_earlier_version_is_brought_up_to_date(path: str) -> None:
    steps = migrations()
    assert list(steps) == list(range(1, len(steps) + 1))
    connection = sqlite3.connect(path)
    connection.executescript(f"BEGIN; {steps[1]}; COMMIT")
    connection.execute(f"PRAGMA application_id = {opening.APPLICATION_ID}")
    connection.execute("PRAGMA user_version = 1")
    connection.executescript(OF_VERSION_1)
    connection.close()
    store = await SqliteStore.open(path)
    assert [(one.ticket, one.outcome) for one in await store.outcomes([1, 2])] == [
        (1, Outcome(OutcomeKind.SUCCEEDED, 200, b"answer 1", T0, Lane.BATCH, "why not", batch="msgbatch_1"))
    ]
    sendable_call = await store.sendable_call(2)
    assert sendable_call is not None
    assert (sendable_call.body, sendable_call.model, sendable_call.reason) == (b"body 2", "a-model", "it can wait")
    assert [(line.ticket, line.purchase, line.paid) for line in await store.entries(1)] == [(1, 7, 50)]
    assert (await admit_one(store, admission(3))).fresh
    counts = await store.counts()
    assert (counts["tickets.queued"], counts["tickets.settled"]) == (2, 1)
    await store.aclose()


OF_VERSION_2 = f"""
INSERT INTO credentials VALUES (1, 'c'), (2, 'd');
INSERT INTO words VALUES (1, 'a-model'), (2, 'it can wait');
INSERT INTO pools VALUES (1, 1, 'anthropic', 'anthropic', '/v1/messages', '[["a","b"]]', '', 's', 'patient');
INSERT INTO calls (id, pool, credential, state, lane, batch, arrived, rescue_at, bytes, fingerprint, key, stream,
  max_output_tokens, model, reason, outcome, settled_at)
VALUES (1, 1, 1, 'settled', 'batch', 7, {T0}, 9e999, 6, 11, 'mine', 0, 5, 1, 2, 4, {T0}),
  (2, 1, 1, 'queued', 'batch', NULL, {T0}, 9e999, 6, 12, NULL, 0, 5, 1, 2, NULL, NULL);
INSERT INTO bodies VALUES (2, CAST('body 2' AS BLOB));
INSERT INTO outcomes
VALUES (4, 1, 7, 'succeeded', 200, {T0}, 'batch', 'why not', '[]', 'msgbatch_1', CAST('answer 1' AS BLOB));
INSERT INTO batches (id, pool, credential, nonce, state, owner, count, bytes, intended_at, provider_id, note)
VALUES (7, 1, 1, 'n', 'open', '', 1, 6, {T0}, 'msgbatch_1', 'a note');
INSERT INTO entries VALUES (1, 7, {T0}, 'batch', 'purchase', 'anthropic', 1, 'a-model', NULL, 50, 100, 'why', NULL),
  (8, -1, {T0}, 'now', 'purchase', 'anthropic', 2, 'a-model', NULL, 30, 30, '', NULL),
  (9, -1, {T0}, 'now', 'purchase', 'anthropic', 2, 'a-model', NULL, NULL, NULL, '', NULL),
  (9, -2, {T0}, 'now', 'rescue', 'anthropic', 2, 'a-model', NULL, 4, 4, '', NULL);
INSERT INTO totals VALUES ('batch', 'purchase', 1, 0, 50, 100), ('now', 'purchase', 2, 1, 30, 30),
  ('now', 'rescue', 1, 0, 4, 4);
INSERT INTO tallies VALUES ('tickets.settled', 1);
INSERT INTO memos VALUES ('cannot_batch', 'c', 'why', {T0});
"""


@pytest.mark.parametrize("encrypt", [False, True])
async def test_a_store_of_version_2_keeps_everything(path: str, encrypt: bool) -> None:
    steps = migrations()
    connection = sqlite3.connect(path)
    connection.executescript(f"BEGIN; {steps[1]}; {steps[2]}; COMMIT")
    connection.execute(f"PRAGMA application_id = {opening.APPLICATION_ID}")
    connection.execute("PRAGMA user_version = 2")
    connection.executescript(OF_VERSION_2)
    connection.close()
    before = [
        (Lane.BATCH, EntryKind.PURCHASE, 1, 0, 50, 100),
        (Lane.NOW, EntryKind.PURCHASE, 2, 1, 30, 30),
        (Lane.NOW, EntryKind.RESCUE, 1, 0, 4, 4),
    ]
    store = await SqliteStore.open(path, encrypt=encrypt)
    assert [dataclasses.astuple(row) for row in await store.totals()] == before
    assert [dataclasses.astuple(row) for row in await store.totals(["c"])] == before[:1]
    assert [dataclasses.astuple(row) for row in await store.totals(["d"])] == before[1:]
    answer = Outcome(OutcomeKind.SUCCEEDED, 200, b"answer 1", T0, Lane.BATCH, "why not", batch="msgbatch_1")
    assert [(one.ticket, one.outcome) for one in await store.outcomes([1])] == [(1, answer)]
    sendable_call = await store.sendable_call(2)
    assert sendable_call is not None
    assert (sendable_call.body, sendable_call.model, sendable_call.reason) == (b"body 2", "a-model", "it can wait")
    assert sendable_call.key.headers == (("a", "b"),)
    [batch] = await store.listed_batches(None, None, 9, ["c"])
    assert (batch.provider_id, batch.note) == ("msgbatch_1", "a note")
    assert [line.reason for line in await store.entries(1)] == ["why"]
    assert await store.recall("cannot_batch") == {"c": "why"}
    assert await store.keys() == (0, [])
    returned = await admit_one(store, admission(3, credential="c", key="mine", fingerprint=11))
    assert (returned.fresh, returned.ticket, returned.outcome) == (False, 1, answer)
    await store.record(entry(9, -1, credential="d", paid=6, would=6))  # one that stood as unknown is completed
    assert [(row.unknown, row.paid) for row in await store.totals(["d"])] == [(0, 36), (0, 4)]
    await store.aclose()


async def test_a_broken_migration_changes_nothing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    await made(path)
    newest = max(migrations())
    later = migrations() | {newest + 1: "CREATE TABLE more (id INTEGER);\nCREATE TABLE calls (id INTEGER);\n"}
    monkeypatch.setattr(opening, "migrations", lambda: later)
    with pytest.raises(StoreError):
        await SqliteStore.open(path)
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (newest,)
    assert connection.execute("SELECT count(*) FROM sqlite_schema WHERE name = 'more'").fetchone() == (0,)
    connection.close()


async def test_a_newer_store_is_refused(path: str) -> None:
    await made(path)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(StoreTooNew, match="Upgrade carpool"):
        await SqliteStore.open(path)


# ---------------------------------------------------------------- what is no store


async def test_a_file_that_is_no_database(path: str) -> None:
    Path(path).write_bytes(b"Dear diary, today I was mistaken for a database.")
    with pytest.raises(StoreCorrupt, match="no SQLite file"):
        await SqliteStore.open(path)
    assert Path(path).read_bytes().startswith(b"Dear diary")


async def test_a_strangers_database(path: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE recipes (name TEXT)")
    connection.close()
    with pytest.raises(StoreCorrupt, match="another program"):
        await SqliteStore.open(path)


async def test_damage_is_named(path: str) -> None:
    store = await SqliteStore.open(path)
    await admit(store, *range(1, 200), body=b"x" * 3000)
    await store.aclose()
    content = bytearray(Path(path).read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    Path(path).write_bytes(content)
    with pytest.raises(StoreCorrupt, match="damaged"):
        await SqliteStore.open(path)


async def test_a_truncated_file_is_named(path: str) -> None:
    await made(path)
    Path(path).write_bytes(Path(path).read_bytes()[:5000])
    with pytest.raises(StoreCorrupt):
        await SqliteStore.open(path)


# ---------------------------------------------------------------- where it can't be written


async def test_places_where_no_store_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnwritable, match="is a directory"):
        await SqliteStore.open(str(tmp_path))
    with pytest.raises(StoreUnwritable, match="does not exist"):
        await SqliteStore.open(str(tmp_path / "nowhere" / "carpool.db"))
    with pytest.raises(StoreUnwritable, match="does not exist"):
        await SqliteStore.open(str(tmp_path / "file" / "carpool.db"))
    for name in ("x" * 300, "nul\0"):
        with pytest.raises(StoreUnwritable, match="can't be a file"):
            await SqliteStore.open(str(tmp_path / name))


def test_a_directory_that_can_not_be_written() -> None:
    """In a child that is nobody, since root may write everywhere."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o555)
        child = os.fork()
        if child == 0:
            os._exit(_refused_without_rights(str(Path(place) / "carpool.db")))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _refused_without_rights(path: str) -> int:
    try:
        if os.geteuid() == 0:
            os.setuid(65534)
        asyncio.run(SqliteStore.open(path, threaded=False))
    except StoreUnwritable as error:
        return 0 if "permissions" in str(error) else 2
    except BaseException:  # noqa: BLE001  whatever it is, the parent must hear of it
        return 3
    return 1


async def test_a_full_disk_fails_the_callers_and_nothing_else(path: str) -> None:
    store = await SqliteStore.open(path)
    await admit(store, 1)
    connection = store._session.connection
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreUnwritable, match="disk is full"):
        await admit_one(store, admission(2, body=b"x" * 1_000_000))
    connection.execute("PRAGMA max_page_count = 1000000")
    assert (await admit_one(store, admission(2, body=b"x" * 1_000_000, credential="new"))).fresh
    assert (await store.counts())["tickets.queued"] == 2
    await store.aclose()


async def test_the_files_are_private(path: str, tmp_path: Path) -> None:
    store = await SqliteStore.open(path)
    await admit(store, 1)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    assert set(modes) >= {"carpool.db", "carpool.db-wal", "carpool.db.lock", "carpool.db.secret"}
    assert set(modes.values()) == {0o600}
    await store.aclose()


# ---------------------------------------------------------------- locks

HOLDER = """
import asyncio, sys
from carpool.stores import SqliteStore
async def main():
    store = await SqliteStore.open(sys.argv[1])
    print("open", flush=True)
    sys.stdin.readline()
asyncio.run(main())
"""


async def test_a_second_process_is_kept_out_until_the_first_is_dead(path: str) -> None:
    command = [sys.executable, "-c", HOLDER, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        with pytest.raises(StoreLocked, match=f"process {holder.pid}"):
            await SqliteStore.open(path)
        holder.kill()
    store = await SqliteStore.open(path)
    await store.aclose()


async def test_a_second_store_in_the_same_process_is_kept_out_too(path: str, tmp_path: Path) -> None:
    store = await SqliteStore.open(path)
    (tmp_path / "alias.db").symlink_to(path)
    for name in (path, str(tmp_path / "alias.db")):
        with pytest.raises(StoreLocked, match=str(os.getpid())):
            await SqliteStore.open(name)
    await store.aclose()


async def test_a_foreign_lock_fails_in_bounded_time_and_passes(path: str) -> None:
    store = await SqliteStore.open(path)
    store._session.connection.execute("PRAGMA busy_timeout = 50")
    foreign = sqlite3.connect(path, isolation_level=None)
    foreign.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreLocked, match="Another program"):
        await admit_one(store, admission(1))
    foreign.execute("COMMIT")
    foreign.close()
    assert (await admit_one(store, admission(1))).fresh
    await store.aclose()


async def test_a_failed_opening_lets_go_of_the_lock(path: str) -> None:
    await made(path)
    with pytest.raises(WrongSecret):
        await SqliteStore.open(path, secret=b"another")
    store = await SqliteStore.open(path, secret=SECRET)
    await store.aclose()


async def test_an_opening_that_is_cancelled_lets_go_of_the_lock(path: str) -> None:
    opening = asyncio.ensure_future(SqliteStore.open(path))
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    while True:
        try:
            store = await SqliteStore.open(path)
        except StoreLocked:  # the other thread is not done yet
            await asyncio.sleep(0.01)
        else:
            break
    await store.aclose()


def test_a_store_that_is_created_meanwhile_is_not_taken_for_another_programs(path: str) -> None:
    class Watched(sqlite3.Connection):
        def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
            cursor = super().execute(sql, *parameters)
            if sql == "PRAGMA application_id":
                opening.migrate(creating, path)
            return cursor

    with closing(opening.connect(path)) as creating, closing(sqlite3.connect(path, factory=Watched)) as reading:
        reading.isolation_level = None
        assert opening.version_of(reading, path) == 0
        assert opening.version_of(reading, path) == max(migrations())


# ---------------------------------------------------------------- looking in from outside

WORKER = """
import asyncio, sys
from tests.support.stores import *
async def main():
    store = await SqliteStore.open(sys.argv[1])
    await admit(store, 1, 2, 3)
    await store.settle([settlement(1, -1)], T0)
    print("open", flush=True)
    sys.stdin.readline()
    await store.settle([settlement(2, -1)], T0)
    print("settled", flush=True)
    sys.stdin.readline()
asyncio.run(main())
"""


async def seen(path: str) -> tuple[int, int, int]:
    """How many were bought, how many wait, how many are settled, as seen from outside."""
    totals, counts = await peek(path)
    return sum(one.purchases for one in totals), counts["tickets.queued"], counts["tickets.settled"]


async def test_a_peek_sees_what_another_process_does_and_does_not_disturb_it(path: str) -> None:
    command = [sys.executable, "-c", WORKER, path]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"open\n"
        with pytest.raises(StoreLocked):
            await SqliteStore.open(path)
        assert await seen(path) == (1, 2, 1)
        worker.stdin.write(b"\n")
        worker.stdin.flush()
        assert worker.stdout.readline() == b"settled\n"
        assert await seen(path) == (2, 1, 2)
        worker.kill()
    assert await seen(path) == (2, 1, 2)  # what it left in its log is seen too
    store = await SqliteStore.open(path)
    assert (await store.counts())["tickets.settled"] == 2
    await store.aclose()


async def test_a_peek_while_a_write_is_under_way_sees_what_was_committed(path: str) -> None:
    store = await SqliteStore.open(path)
    await admit(store, 1)
    foreign = sqlite3.connect(path, isolation_level=None)
    foreign.execute("BEGIN IMMEDIATE")
    foreign.execute("DELETE FROM calls")
    assert await seen(path) == (0, 1, 0)
    foreign.execute("ROLLBACK")
    foreign.close()
    assert (await admit_one(store, admission(2))).fresh  # and nobody holds anything
    await store.aclose()


async def test_a_peek_says_what_the_store_itself_would_say(path: str) -> None:
    store = await SqliteStore.open(path)
    await board(store, [1, 2], state=BatchState.OPEN)
    await store.settle([settlement(1, 1), settlement(2, -1)], T0)
    assert await peek(path) == (await store.totals(), await store.counts())
    before = {name: Path(path).with_name(name).stat().st_mtime_ns for name in ("carpool.db", "carpool.db.lock")}
    await peek(f"sqlite:///{path}")
    await peek(Path(path))
    after = {name: Path(path).with_name(name).stat().st_mtime_ns for name in before}
    assert after == before
    await store.aclose()


async def test_a_peek_at_a_closed_store_under_an_odd_name(tmp_path: Path) -> None:
    path = str(tmp_path / "a ?#%41&mode=rw.db")
    store = await SqliteStore.open(path, secret=SECRET)
    await admit(store, 1)
    await store.aclose()
    assert await seen(path) == (0, 1, 0)
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}


async def test_a_peek_makes_nothing_where_nothing_is(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    for name in ("missing.db", "directory", "nowhere/carpool.db", "x" * 300, "nul\0"):
        with pytest.raises(StoreError, match="no store at"):
            await peek(tmp_path / name)
    for memory in (":memory:", "sqlite:///:memory:"):
        with pytest.raises(ConfigError, match="memory"):
            await peek(memory)
    assert [file.name for file in tmp_path.iterdir()] == ["directory"]


async def test_a_peek_at_a_file_in_which_nothing_is_yet(path: str) -> None:
    Path(path).write_bytes(b"")
    assert await peek(path) == ([], {})
    assert Path(path).read_bytes() == b""


async def test_a_peek_at_what_is_no_store(path: str) -> None:
    Path(path).write_bytes(b"Dear diary, today I was mistaken for a database." * 100)
    with pytest.raises(StoreCorrupt, match="damaged"):
        await peek(path)
    Path(path).unlink()
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE recipes (name TEXT)")
    connection.close()
    with pytest.raises(StoreCorrupt, match="another program"):
        await peek(path)


@pytest.mark.parametrize("damage", ["overwritten", "truncated"])
async def test_a_peek_at_a_damaged_store(path: str, damage: str) -> None:
    await made(path)
    content = Path(path).read_bytes()
    rest = b"\xff" * (len(content) - 4096) if damage == "overwritten" else b""
    Path(path).write_bytes(content[:4096] + rest)
    with pytest.raises(StoreCorrupt, match="damaged"):
        await peek(path)


async def test_a_peek_at_a_newer_store(path: str) -> None:
    await made(path)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(StoreTooNew, match="Upgrade carpool"):
        await peek(path)


async def test_a_peek_at_an_older_store_does_not_migrate_it(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    await made(path)
    newest = max(migrations())
    later = migrations() | {newest + 1: "CREATE TABLE more (id INTEGER);\n"}
    monkeypatch.setattr(opening, "migrations", lambda: later)
    with pytest.raises(StoreError):
        await peek(path)
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (newest,)
    assert connection.execute("SELECT count(*) FROM sqlite_schema WHERE name = 'more'").fetchone() == (0,)
    connection.close()


# ---------------------------------------------------------------- secrets


async def test_a_wrong_secret_is_refused(path: str) -> None:
    await made(path)
    with pytest.raises(WrongSecret, match="CARPOOL_SECRET"):
        await SqliteStore.open(path)  # takes the one beside the file, which is new
    await made(path)


def test_the_secret_comes_from_the_environment_first(path: str) -> None:
    assert load_secret(secret_file(path), {"CARPOOL_SECRET": "x" * 20}) == b"x" * 20
    assert not Path(f"{path}.secret").exists()
    with pytest.raises(ConfigError, match="too short"):
        load_secret(secret_file(path), {"CARPOOL_SECRET": "x"})


def test_the_secret_beside_the_file_is_made_once(path: str, tmp_path: Path) -> None:
    first = load_secret(secret_file(path), {})
    assert load_secret(secret_file(path), {}) == first
    assert len(bytes.fromhex(first.decode())) == 32
    assert stat.S_IMODE(Path(f"{path}.secret").stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["carpool.db.secret"]


def test_a_secret_in_memory_is_new_each_time() -> None:
    assert load_secret(None, {}) != load_secret(None, {})


def test_a_damaged_secret_is_no_secret(path: str) -> None:
    Path(f"{path}.secret").write_text("")
    with pytest.raises(WrongSecret, match="damaged"):
        load_secret(secret_file(path), {})
