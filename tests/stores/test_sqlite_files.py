"""The SQLite store and its file: versions, locks, damage, secrets. Every trouble is a sentence."""

# Here blocking is the point: files are prepared and looked at between two steps of the store.
# ruff: noqa: ASYNC220, ASYNC240

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from stores import CRED, LEASE, ME, OTHER, T0, admission, admit, attempt, board, outcome

from carpool.errors import (
    ConfigError,
    StoreCorrupt,
    StoreError,
    StoreLocked,
    StoreTooNew,
    StoreUnwritable,
    WrongSecret,
)
from carpool.lifecycle import BatchState, TicketState
from carpool.model import Settlement
from carpool.stores import SqliteStore, _opening, load_secret, open_store
from carpool.stores._statements import migrations

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
    assert await again.outcome(1, CRED) == outcome()
    assert sorted(await again.open_tickets(batch.id, 10)) == [2, 3]
    assert (await again.counts())["tickets.settled"] == 1
    await again.aclose()


async def test_a_restart_takes_over_at_once_even_under_the_same_name(path: str) -> None:
    store = await SqliteStore.open(path)
    await store.join(ME, T0, LEASE)
    submitting = await board(store, [1, 2])
    await store.start_sending(attempt(1))
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
    assert (await again.admit(admission(4, fingerprint=3 * 7919, awaiter=OTHER))).ticket == 3
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


@pytest.mark.parametrize("url", ["postgresql://host/db", "redis://host", "sqlite://host.db", "", "sqlite:///"])
async def test_other_urls_are_refused_in_a_sentence(url: str) -> None:
    with pytest.raises(ConfigError, match=r"\w+ .*[.]$"):
        await open_store(url)


# ---------------------------------------------------------------- versions


async def test_a_store_of_every_earlier_version_is_brought_up_to_date(path: str) -> None:
    steps = migrations()
    assert list(steps) == list(range(1, len(steps) + 1))
    connection = sqlite3.connect(path)
    connection.executescript(steps[1])
    connection.execute(f"PRAGMA application_id = {_opening.APPLICATION_ID}")
    connection.execute("PRAGMA user_version = 1")
    connection.close()
    store = await SqliteStore.open(path)
    assert (await store.admit(admission(1))).fresh
    await store.aclose()


async def test_a_broken_migration_changes_nothing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    await made(path)
    later = migrations() | {2: "CREATE TABLE more (id INTEGER);\nCREATE TABLE calls (id INTEGER);\n"}
    monkeypatch.setattr(_opening, "migrations", lambda: later)
    with pytest.raises(StoreError):
        await SqliteStore.open(path)
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (1,)
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


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
async def test_a_directory_that_can_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreUnwritable, match="permissions"):
        await SqliteStore.open(str(tmp_path / "carpool.db"))
    tmp_path.chmod(0o700)


async def test_a_full_disk_fails_the_callers_and_nothing_else(path: str) -> None:
    store = await SqliteStore.open(path)
    await admit(store, 1)
    connection = store._session.connection
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreUnwritable, match="disk is full"):
        await store.admit(admission(2, body=b"x" * 1_000_000))
    connection.execute("PRAGMA max_page_count = 1000000")
    assert (await store.admit(admission(2, body=b"x" * 1_000_000, credential="new"))).fresh
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
        await store.admit(admission(1))
    foreign.execute("COMMIT")
    foreign.close()
    assert (await store.admit(admission(1))).fresh
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


# ---------------------------------------------------------------- secrets


async def test_a_wrong_secret_is_refused(path: str) -> None:
    await made(path)
    with pytest.raises(WrongSecret, match="CARPOOL_SECRET"):
        await SqliteStore.open(path)  # takes the one beside the file, which is new
    await made(path)


def test_the_secret_comes_from_the_environment_first(path: str) -> None:
    assert load_secret(path, {"CARPOOL_SECRET": "x" * 20}) == b"x" * 20
    assert not Path(f"{path}.secret").exists()
    with pytest.raises(ConfigError, match="too short"):
        load_secret(path, {"CARPOOL_SECRET": "x"})


def test_the_secret_beside_the_file_is_made_once(path: str, tmp_path: Path) -> None:
    first = load_secret(path, {})
    assert load_secret(path, {}) == first
    assert len(bytes.fromhex(first.decode())) == 32
    assert stat.S_IMODE(Path(f"{path}.secret").stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["carpool.db.secret"]


def test_a_secret_in_memory_is_new_each_time() -> None:
    assert load_secret(None, {}) != load_secret(None, {})


def test_a_damaged_secret_is_no_secret(path: str) -> None:
    Path(f"{path}.secret").write_text("")
    with pytest.raises(WrongSecret, match="damaged"):
        load_secret(path, {})
