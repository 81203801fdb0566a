"""The cabinet of keys: opened beside a store that is in use, and by many at once."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest

from carpool.core.errors import ConfigError, StoreCorrupt, StoreError, StoreLocked, StoreTooNew, WrongSecret
from carpool.core.keys import VirtualKey, check_free, new_key
from carpool.stores import KeyAdmin, SqliteStore, open_keys
from carpool.stores.operations.session import migrations
from carpool.stores.sqlite import opening

NOW = 1_800_000_000.0


def put(cabinet: KeyAdmin, name: str) -> VirtualKey:
    key, _ = new_key(cabinet.pepper, name, "anthropic", "KEY", NOW)

    def decide(standing: list[VirtualKey]) -> list[VirtualKey]:
        check_free(standing, name, NOW)
        return [key]

    cabinet.change(decide)
    return key


async def test_a_running_store_hears_of_a_key_that_another_process_adds(tmp_path: Path) -> None:
    path = str(tmp_path / "carpool.db")
    store = await SqliteStore.open(path)
    first = await store.keys()
    assert first is not None
    with open_keys(path) as cabinet:
        key = put(cabinet, "ci")
    second = await store.keys(first[0])
    assert second is not None
    assert second[1] == [key]
    await store.used_keys({key.digest: NOW})
    with open_keys(path) as cabinet:
        assert [one.last_used for one in cabinet.stored()] == [NOW]
    await store.aclose()


def test_a_store_is_made_only_where_that_is_asked_for(tmp_path: Path) -> None:
    path = str(tmp_path / "carpool.db")
    with pytest.raises(StoreError, match="There is no store at"), open_keys(path):
        pass
    assert not (tmp_path / "carpool.db").exists()
    with open_keys(path, make=True) as cabinet:
        put(cabinet, "ci")
    with open_keys(path) as cabinet:
        assert [key.name for key in cabinet.stored()] == ["ci"]
    assert (tmp_path / "carpool.db").stat().st_mode & 0o777 == 0o600


def test_what_is_refused_changes_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "carpool.db")
    with open_keys(path, make=True) as cabinet:
        put(cabinet, "ci")
        with pytest.raises(ConfigError, match="There is a key ci already"):
            put(cabinet, "ci")
        put(cabinet, "other")
        assert sorted(key.name for key in cabinet.stored()) == ["ci", "other"]


def test_of_many_who_want_one_name_one_gets_it(tmp_path: Path) -> None:
    path = str(tmp_path / "carpool.db")
    with open_keys(path, make=True):
        pass
    got, refused, start = [], [], threading.Barrier(8)

    def want() -> None:
        with open_keys(path) as cabinet:
            start.wait()
            try:
                got.append(put(cabinet, "ci"))
            except ConfigError as error:
                refused.append(error)

    threads = [threading.Thread(target=want) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(refused)) == (1, 7)


async def test_an_older_store_in_use_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "carpool.db")
    store = await SqliteStore.open(path)
    newest = max(migrations())
    later = migrations() | {newest + 1: "CREATE TABLE more (id INTEGER);\n"}
    monkeypatch.setattr(opening, "migrations", lambda: later)
    monkeypatch.setattr("carpool.stores.sqlite.opening.migrations", lambda: later)
    with pytest.raises(StoreLocked, match="in use by process"), open_keys(path):
        pass
    await store.aclose()
    with open_keys(path) as cabinet:  # free again, it is brought up to date
        assert cabinet.stored() == []
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (newest + 1,)
    connection.close()


def test_odd_files_and_wrong_secrets_are_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "carpool.db")
    with pytest.raises(ConfigError, match="in memory"), open_keys(None):
        pass
    with open_keys(path, make=True):
        pass
    monkeypatch.setenv("CARPOOL_SECRET", "another secret altogether")
    with pytest.raises(WrongSecret), open_keys(path):
        pass
    monkeypatch.delenv("CARPOOL_SECRET")
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(StoreTooNew), open_keys(path):
        pass
    (tmp_path / "diary").write_text("Dear diary")
    with pytest.raises(StoreCorrupt), open_keys(str(tmp_path / "diary")):
        pass
